"""``python -m uhrc_core`` is the ``uhrc`` command."""

from uhrc_core.cli import main

main()
