"""Axes of tensors, and how a mesh of ranks splits them.

A size may be an int, a Fraction or a sympy expression; nothing here asks which, except where an
int must divide. An axis is written with its degrees always, and a degree of 1 makes them vanish.
"""

from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import Any, NamedTuple, TypeAlias

from memcalc.errors import ConfigError
from memcalc.lazy import load

Size: TypeAlias = Any  # int, Fraction or sympy expression

TENSOR = "tensor"
SEQUENCE = "sequence"


class Axis(NamedTuple):
    """One axis of a tensor.

    Attributes:
        letter: How the axis is printed, as in ``s/t``.
        size: The size over all ranks.
        local: The size on one rank.
        split: What splits it: ``tensor``, ``sequence`` or nothing.
        copied: Whether ranks beyond its size get a copy, as key and value heads are.
    """

    letter: str
    size: Size
    local: Size
    split: str = ""
    copied: bool = False

    @classmethod
    def whole(cls, letter: str, size: Size) -> "Axis":
        """An axis that every rank holds whole."""
        return cls(letter, size, size)

    @classmethod
    def heads(cls, letter: str, size: Size) -> "Axis":
        """Heads of which each rank has at least one, a copy if they are fewer than the ranks."""
        return cls(letter, size, size, copied=True)

    def times(self, factor: int) -> "Axis":
        """An axis of so many times the size, as a packed output has.

        >>> Axis.whole("f", 8).times(2)
        Axis(letter='2f', size=16, local=16, split='', copied=False)
        """
        return Axis(f"{factor}{self.letter}", factor * self.size, factor * self.local, self.split)


@dataclass(frozen=True, slots=True)
class Mesh:
    """The ranks that share one layer.

    Attributes:
        t: The tensor-parallel size.
        sequence_parallel: Whether the tensor-parallel ranks split the sequence between the
            tensor-parallel regions.
    """

    t: Size = 1
    sequence_parallel: bool = False

    def tensor(self, axis: Axis) -> Axis:
        """The axis split over the tensor-parallel ranks.

        An axis of heads fewer than the ranks is not: each rank then has a copy of one head.

        >>> Mesh(t=8).tensor(Axis.whole("a", 64))
        Axis(letter='a/t', size=64, local=8, split='tensor', copied=False)
        >>> Mesh(t=8).tensor(Axis.heads("k", 2))
        Axis(letter='Max(1, k/t)', size=2, local=1, split='tensor', copied=True)
        """
        if axis.copied and self.t != 1:
            letter = f"Max(1, {axis.letter}/t)"
            if not (type(axis.size) is int and type(self.t) is int):
                return axis._replace(
                    letter=letter, local=_at_least_one(axis.size / self.t), split=TENSOR
                )
            if axis.size < self.t:
                divide(self.t, axis.size, "tensor parallel")
                return axis._replace(letter=letter, local=1, split=TENSOR)
        return self._split(axis, TENSOR)

    def sequence(self, axis: Axis) -> Axis:
        """The axis as it is outside the tensor-parallel regions."""
        return self._split(axis, SEQUENCE) if self.sequence_parallel else axis

    def _split(self, axis: Axis, split: str) -> Axis:
        if self.t == 1:
            return axis
        local = divide(axis.local, self.t, axis.letter)
        return axis._replace(letter=f"{axis.letter}/t", local=local, split=split)


def divide(size: Size, degree: Size, name: str) -> Size:
    """A size over a degree: exact, and refused where an int is not divisible.

    >>> divide(12, 5, "heads")
    Traceback (most recent call last):
        ...
    memcalc.errors.ConfigError: heads: 12 is not divisible by 5
    """
    if type(size) is int and type(degree) is int:
        quotient, rest = divmod(size, degree)
        if rest:
            raise ConfigError(f"{name}: {size} is not divisible by {degree}")
        return quotient
    if isinstance(size, int) and isinstance(degree, int | Fraction):
        return Fraction(size) / degree
    return size / degree


def _at_least_one(size: Size) -> Size:
    if isinstance(size, int | Fraction):
        return max(Fraction(1), size)
    return load("sympy:Max")(1, size)  # a symbolic size has loaded sympy already


def elements(axes: tuple[Axis, ...]) -> Size:
    """How many elements a tensor has over all ranks, each counted once."""
    return prod(axis.size for axis in axes)
