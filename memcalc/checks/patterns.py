"""Rows chosen by their ids."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from memcalc.errors import UsageError


def chosen(ids: Iterable[str], patterns: str | Sequence[str]) -> set[str]:
    """The ids that contain a pattern, or match it as a shell pattern; all without patterns.

    Raises:
        UsageError: A pattern is not text.

    >>> sorted(chosen(["table5/22b/mfu", "table5/1t/mfu", "table4/full"], "table5/*/mfu"))
    ['table5/1t/mfu', 'table5/22b/mfu']
    >>> chosen(["table5/22b/mfu", "table4/full"], ["full", "nope"])
    {'table4/full'}
    """
    words = _words(patterns)
    return {
        each for each in ids if not words or any(w in each or fnmatchcase(each, w) for w in words)
    }


def listed(patterns: str | Sequence[str]) -> str:
    """Patterns as a message names them.

    >>> listed(["a", "b"])
    "'a' or 'b'"
    """
    return " or ".join(repr(each[:40]) for each in _words(patterns)[:3])


def _words(patterns: str | Sequence[str]) -> Sequence[str]:
    words = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    if not all(isinstance(each, str) for each in words):
        raise UsageError("each pattern must be text")
    return words
