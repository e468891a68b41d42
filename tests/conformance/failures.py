"""Runs a suite of the kit as pytest would, and keeps what it says."""

from __future__ import annotations


def failures(suite):
    """The message of every check of the suite that fails."""
    messages = []
    for name in dir(suite):
        if name.startswith("test_"):
            try:
                getattr(suite(), name)()
            except AssertionError as error:
                messages.append(str(error))
    return messages
