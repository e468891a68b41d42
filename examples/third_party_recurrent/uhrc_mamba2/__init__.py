"""Mamba-2 for UHRC: a recurrent backend, and the model families Bamba and GraniteMoeHybrid."""
