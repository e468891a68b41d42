"""HiCache hooks for UHRC that record and move nothing. Registers nothing yet."""
