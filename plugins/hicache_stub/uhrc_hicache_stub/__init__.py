"""HiCache hooks for UHRC that record what they are told and move nothing."""
