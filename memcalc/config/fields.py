"""Checks of single values, with messages that name the value and the rule."""

from collections.abc import Iterable
from typing import Any

from memcalc.errors import ConfigError, nearest


def whole(name: str, value: Any, most: int) -> None:
    """Refuse what is not a whole number from 1 to ``most``.

    >>> whole("heads", 0, 100)
    Traceback (most recent call last):
        ...
    memcalc.errors.ConfigError: heads must be a whole number from 1 to 100, not 0
    """
    if type(value) is not int or not 1 <= value <= most:
        raise ConfigError(f"{name} must be a whole number from 1 to {most}, not {_shown(value)}")


def probability(name: str, value: Any) -> None:
    """Refuse what is not a number from 0 up to, but not including, 1."""
    if type(value) not in (int, float) or not 0 <= value < 1:
        raise ConfigError(f"{name} must be a number from 0 to less than 1, not {_shown(value)}")


def flag(name: str, value: Any) -> None:
    """Refuse what is neither True nor False."""
    if type(value) is not bool:
        raise ConfigError(f"{name} must be true or false, not {_shown(value)}")


def text(name: str, value: Any) -> None:
    """Refuse what is not a short text on one line."""
    if type(value) is not str or len(value) > 1000 or not value.isprintable():
        raise ConfigError(f"{name} must be one line of text, not {_shown(value)}")


def word(name: str, value: Any, choices: Iterable[str]) -> None:
    """Refuse what is not one of the choices.

    >>> word("norm", "rmsnrom", ["layernorm", "rmsnorm"])
    Traceback (most recent call last):
        ...
    memcalc.errors.ConfigError: norm 'rmsnrom' is unknown; did you mean 'rmsnorm'?
    """
    choices = list(choices)
    if value not in choices:
        hint = nearest(value if isinstance(value, str) else "", choices)
        raise ConfigError(f"{name} {_shown(value)} is unknown; {hint}")


def divides(divisor: tuple[str, int], number: tuple[str, int]) -> None:
    """Refuse a degree that does not divide the axis that it splits.

    >>> divides(("tensor parallel", 3), ("heads", 64))
    Traceback (most recent call last):
        ...
    memcalc.errors.ConfigError: tensor parallel 3 does not divide heads 64
    """
    if number[1] % divisor[1]:
        raise ConfigError(f"{divisor[0]} {divisor[1]} does not divide {number[0]} {number[1]}")


def _shown(value: Any) -> str:
    """A value as a message shows it: never more than a few words."""
    if isinstance(value, int) and abs(value) >= 10**20:
        return "a number of more than 20 digits"
    shown = repr(value)
    return shown if len(shown) <= 40 else f"{shown[:37]}..."
