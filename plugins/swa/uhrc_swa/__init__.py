"""Sliding-window attention for UHRC. Registers nothing yet."""
