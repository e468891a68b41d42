"""The commands the engine adds to ``uhrc``. jax is imported when one of them runs."""
