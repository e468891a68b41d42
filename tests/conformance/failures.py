"""Runs a suite of the kit as pytest would, and keeps what it says."""

from __future__ import annotations


def failures(suite):
    """The message of every check of the suite that fails, one check after the other."""
    for name in dir(suite):
        if name.startswith("test_"):
            try:
                getattr(suite(), name)()
            except Exception as error:
                yield str(error)


def check_named(suite, fault):
    """Some check must fail with a message that holds ``fault``."""
    messages = []
    for message in failures(suite):
        if fault in message:
            return
        messages.append(message[:300])
    raise AssertionError("\n---\n".join([f"nothing said {fault!r}, but:", *messages]))
