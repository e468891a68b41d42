"""What uhrc-full declares."""

UHRC_API = (1, 0)
