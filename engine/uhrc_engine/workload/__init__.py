"""Conversations run through an engine: the main job, and what the chat command stands on."""
