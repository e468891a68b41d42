"""Linear-recurrent attention for UHRC. Registers nothing yet."""
