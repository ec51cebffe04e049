"""The errors of memcalc: one base, and every subclass is a builtin error too."""

from collections.abc import Iterable
from difflib import get_close_matches


class MemcalcError(Exception):
    """The base of every error that memcalc raises for something its user did."""


class ConfigError(MemcalcError, ValueError):
    """A model, a parallelism or a run that cannot be: the message says what, where and why."""


class InputError(MemcalcError, ValueError):
    """A file that cannot be read as what it should be."""


class OutputError(MemcalcError, OSError):
    """A file that cannot be written."""


class UsageError(MemcalcError, ValueError):
    """A question that makes no sense as it was asked."""


def nearest(word: str, choices: Iterable[str]) -> str:
    """A sentence that leads from a mistyped word to the valid ones.

    >>> nearest("175", ["22b", "175b", "530b"])
    "did you mean '175b'?"
    >>> nearest("zzz", ["none", "full"])
    "choose from 'full', 'none'"
    """
    choices = sorted(choices)
    close = get_close_matches(word.lower(), choices, n=3, cutoff=0.6)
    if close:
        return f"did you mean {' or '.join(repr(c) for c in close)}?"
    return f"choose from {', '.join(repr(c) for c in choices)}"
