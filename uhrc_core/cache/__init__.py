"""The prefix cache: the unified tree, what components answer it, and the life of a request."""
