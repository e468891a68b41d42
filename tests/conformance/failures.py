"""Runs a suite of the kit as pytest would, and keeps what it says."""

from __future__ import annotations


def checks(suite):
    """The names of the suite's checks in the order in which pytest runs them."""
    kinds = reversed(suite.__mro__)
    return list(dict.fromkeys(name for kind in kinds for name in vars(kind) if name[:5] == "test_"))


def failures(suite):
    """The message of every check of the suite that fails, one check after the other."""
    for name in checks(suite):
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


def check_named_first(suite, fault):
    """The first check that fails must hold the parts of ``fault``, which ``...`` sets apart."""
    first = rest = next(failures(suite), "nothing failed")
    for part in fault.split("..."):
        _, found, rest = rest.partition(part)
        assert found, f"the first failure is {first!r}, without {part!r}"
