"""Checks of single values, with messages that name the value and the rule."""

import operator
import re
from collections.abc import Iterable
from dataclasses import fields as dataclass_fields
from numbers import Integral, Rational, Real
from typing import Any

from memcalc.config.assumption import Assumption
from memcalc.errors import ConfigError, nearest


def whole(name: str, value: Any, most: int) -> None:
    """Refuse what is not a whole number from 1 to ``most``.

    >>> whole("heads", 0, 100)
    Traceback (most recent call last):
        ...
    memcalc.errors.ConfigError: heads must be a whole number from 1 to 100, not 0
    """
    if type(value) is not int or not 1 <= value <= most:
        raise ConfigError(f"{name} must be a whole number from 1 to {most}, not {shown(value)}")


def plain(value: Any) -> Any:
    """Convert a number of another library, such as numpy, to Python's own; leave all else as it is.

    >>> from numpy import bool_, float32, int64
    >>> plain(int64(2)), plain(float32(0.5)), plain("2"), plain(bool_(True))
    (2, 0.5, '2', True)
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return value.item()
    if isinstance(value, Integral):
        return operator.index(value)
    return float(value) if isinstance(value, Real) and not isinstance(value, Rational) else value


def settle(record: Any) -> None:
    """Store the numbers of a frozen dataclass as Python's own."""
    for field in dataclass_fields(record):
        value = getattr(record, field.name)
        if type(value) is not type(settled := plain(value)):
            object.__setattr__(record, field.name, settled)


def instance(name: str, value: Any, kind: type) -> None:
    """Refuse what is not of a class.

    >>> instance("model", "22b", dict)
    Traceback (most recent call last):
        ...
    memcalc.errors.ConfigError: model must be a dict, not '22b'
    """
    if not isinstance(value, kind):
        raise ConfigError(f"{name} must be a {kind.__name__}, not {shown(value)}")


def positive(name: str, value: Any) -> None:
    """Refuse what is not a number above 0 and under a billion."""
    if type(value) not in (int, float) or not 0 < value < 1e9:
        raise ConfigError(f"{name} must be a number above 0 and under 1e9, not {shown(value)}")


def between(name: str, value: Any, least: float, most: float) -> None:
    """Refuse what is not a number from ``least`` to ``most``.

    >>> between("density", 0, 1e-6, 1)
    Traceback (most recent call last):
        ...
    memcalc.errors.ConfigError: density must be a number from 1e-06 to 1, not 0
    """
    if type(value) not in (int, float) or not least <= value <= most:
        raise ConfigError(f"{name} must be a number from {least:g} to {most:g}, not {shown(value)}")


def probability(name: str, value: Any) -> None:
    """Refuse what is not a number from 0 up to, but not including, 1."""
    if type(value) not in (int, float) or not 0 <= value < 1:
        raise ConfigError(f"{name} must be a number from 0 to less than 1, not {shown(value)}")


def pattern(name: str, value: Any, layers: int) -> tuple[int, ...]:
    """A 0 or 1 per layer, from a list or from a text such as ``[0]*3+[1]*58``.

    >>> pattern("moe_layers", "[0]*1+[1]*3", 4)
    (0, 1, 1, 1)
    >>> pattern("window_layers", "([0, 1]*2)", 4)
    (0, 1, 0, 1)
    >>> pattern("moe_layers", "([0]*1+[1]*1)*2", 4)
    (0, 1, 0, 1)
    """
    found: Any = _repeated(value) if isinstance(value, str) and len(value) <= 1000 else value
    listed = isinstance(found, (list, tuple))
    if not listed or not all(type(each) is int and each in (0, 1) for each in found):
        raise ConfigError(
            f"{name} must be a list with a 0 or 1 per layer, or a pattern such as '[0]*3+[1]*58', "
            f"not {shown(value)}"
        )
    if len(found) != layers:
        raise ConfigError(f"{name} has {len(found)} entries for {layers} layers")
    return tuple(found)


def _repeated(text: str) -> list[int] | None:
    """The list of a text such as ``[0]*3+[1]*58``, without evaluating it; None for other texts."""
    text = "".join(text.split())
    whole = re.fullmatch(r"\(([^()]*)\)(?:\*([0-9]{1,6}))?", text)
    text, again = (whole[1], int(whole[2] or 1)) if whole else (text, 1)
    found: list[int] = []
    for term in text.split("+"):
        match = re.fullmatch(r"\[([01](?:,[01])*)\](?:\*([0-9]{1,6}))?", term)
        if match is None:
            return None
        times = int(match[2] or 1)
        digits = [int(digit) for digit in match[1].split(",")]
        if times * len(digits) + len(found) > 100_000:
            return None
        found += digits * times
    return found * again if again * len(found) <= 100_000 else None


def flag(name: str, value: Any) -> None:
    """Refuse what is neither True nor False."""
    if type(value) is not bool:
        raise ConfigError(f"{name} must be true or false, not {shown(value)}")


def text(name: str, value: Any) -> None:
    """Refuse what is not one line of at most 1000 characters."""
    if type(value) is not str or len(value) > 1000 or not value.isprintable():
        raise ConfigError(f"{name} must be one line of text, not {shown(value)}")


def printable(text: str, instead: str = "?") -> str:
    r"""A text with something printable instead of every character that is not.

    >>> printable("a\x1b[31m.json")
    'a?[31m.json'
    """
    return "".join(each if each.isprintable() else instead for each in text)


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
        raise ConfigError(f"{name} {shown(value)} is unknown; {hint}")


def divides(divisor: tuple[str, int], number: tuple[str, int]) -> None:
    """Refuse a size that does not divide the axis that it shards.

    >>> divides(("--tp", 3), ("heads", 64))
    Traceback (most recent call last):
        ...
    memcalc.errors.ConfigError: --tp 3 must divide heads 64
    >>> divides(("--micro-batch-size x --dp", 4), ("--global-batch-size", 6))
    Traceback (most recent call last):
        ...
    memcalc.errors.ConfigError: --micro-batch-size x --dp = 4 must divide --global-batch-size 6
    """
    if number[1] % divisor[1]:
        raise ConfigError(f"{_sized(*divisor)} must divide {_sized(*number)}")


def _sized(name: str, size: int) -> str:
    """A size after its name, or after the product that it is: ``--tp 3``, ``--tp x --dp = 6``."""
    return f"{name} = {size}" if " " in name else f"{name} {size}"


def padded(size: int, multiple: int, tp: int, assumed: list[Assumption]) -> int:
    """A vocabulary size, padded to a multiple per tensor-parallel rank, as in Megatron-LM.

    >>> padded(50257, 128, 8, [])
    51200
    """
    each = multiple * tp
    if each < 1:
        raise ConfigError(f"the vocabulary must be padded to a multiple of at least 1, not {each}")
    found = -(-size // each) * each
    if found != size:
        why = f"{size} padded to a multiple of {each}"
        assumed.append(Assumption("padded_vocab_size", found, why))
    return found


def shown(value: Any) -> str:
    """A value as a message shows it: never more than a few words."""
    if isinstance(value, int) and abs(value) >= 10**20:
        return "a number of more than 20 digits"
    try:
        shown = repr(value)
    except ValueError:  # a number in it has thousands of digits
        return f"a {type(value).__name__}"
    return shown if len(shown) <= 40 else f"{shown[:37]}..."
