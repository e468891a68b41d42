"""Unified Hybrid Radix Cache: one prefix cache for full, window and recurrent attention."""
