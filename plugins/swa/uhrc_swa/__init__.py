"""Sliding-window attention for UHRC; `uhrc_swa.plugin` declares it."""
