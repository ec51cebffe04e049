"""Tests such as ``[ a = b ]``: true, false, or None where the result is unknown."""

import re
from collections.abc import Callable

from memcalc.config.readers.shell.lexer import MAX_NESTED
from memcalc.config.readers.shell.marks import opened


def both(one: bool | None, other: bool | None) -> bool | None:
    """Whether both results are true."""
    if one is False or other is False:
        return False
    return None if one is None or other is None else True


def negated(one: bool | None) -> bool | None:
    """The opposite result."""
    return None if one is None else not one


def test(words: list[str]) -> bool | None:
    """The result of ``[ ... ]``, or None where it is unknown.

    >>> test(["[", "fp8", "=", "bf16", "]"]), test(["[", "-f", "x", "]"])
    (False, None)
    """
    words = words[1:-1] if words[-1] in ("]", "]]") else words[1:] if words[0] == "test" else []
    opposite = False
    while words[:1] == ["!"] and len(words) <= MAX_NESTED:
        words, opposite = words[1:], not opposite
    result = _compared(words)
    return negated(result) if opposite else result


def _compared(words: list[str]) -> bool | None:
    if any(opened(word) for word in words):
        return None
    match words:
        case ["-z", word]:
            return word == ""
        case ["-n", word] | [word]:
            return word != ""
        case [one, "=" | "==", other]:
            return one == other
        case [one, "!=", other]:
            return one != other
        case [one, sign, other] if sign in _COMPARISONS and _number(one) and _number(other):
            return _COMPARISONS[sign](int(one), int(other))
    return None


_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda one, other: one == other,
    "-ne": lambda one, other: one != other,
    "-lt": lambda one, other: one < other,
    "-le": lambda one, other: one <= other,
    "-gt": lambda one, other: one > other,
    "-ge": lambda one, other: one >= other,
}


def _number(text: str) -> bool:
    return re.fullmatch(r"-?[0-9]{1,18}", text) is not None
