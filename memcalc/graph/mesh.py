"""Axes of tensors, and how a mesh of ranks shards them.

A size may be an int, a Fraction or a sympy expression. Nothing here asks which, except that an int
must be divisible by its number of ranks. Axes are sharded even by a parallel size of 1, which
changes nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import Any, NamedTuple, TypeAlias

from memcalc.errors import ConfigError
from memcalc.lazy import resolve
from memcalc.symbols import in_words

Size: TypeAlias = Any  # int, Fraction or sympy expression

TENSOR = "tensor"
SEQUENCE = "sequence"
CONTEXT = "context"
EXPERT = "expert"


class Split(NamedTuple):
    """What shards an axis: a kind of parallelism, its letter, and the number of ranks."""

    kind: str
    letter: str
    degree: Size


class Axis(NamedTuple):
    """One axis of a tensor.

    Attributes:
        letter: Its letter.
        size: The size over all ranks.
        local: The size on one rank.
        splits: What shards it, in order.
        copied: Whether ranks beyond its size get a copy, as for key and value heads.
    """

    letter: str
    size: Size
    local: Size
    splits: tuple[Split, ...] = ()
    copied: bool = False

    @classmethod
    def whole(cls, letter: str, size: Size) -> "Axis":
        """An axis that is replicated on every rank."""
        return cls(letter, size, size)

    @classmethod
    def heads(cls, letter: str, size: Size) -> "Axis":
        """Heads of which each rank has at least one: a copy if there are fewer heads than ranks."""
        return cls(letter, size, size, copied=True)

    def times(self, factor: int) -> "Axis":
        """The axis with a multiple of its size, as for a packed output.

        >>> Axis.whole("f", 8).times(2).shown
        '2f'
        """
        return self._replace(
            letter=f"{factor}{self.letter}", size=factor * self.size, local=factor * self.local
        )

    def tiles(self, tile: int) -> "Axis":
        """The axis rounded up to whole tiles, as kernels pad it; itself if it is whole already.

        >>> Axis.whole("s", 64).tiles(32).shown, Axis.whole("s", 65).tiles(32).local
        ('s', 96)
        """
        local = _rounded_up(self.local, tile)
        if local == self.local:
            return self
        letter = f"{tile}*ceil({self.letter}/{tile})"
        return self._replace(letter=letter, size=_rounded_up(self.size, tile), local=local)

    @property
    def shown(self) -> str:
        """The axis in letters, as in ``s/t``, or ``Max(1, k/t)`` if ranks may hold copies."""
        text = "/".join((self.letter, *(split.letter for split in self.splits)))
        if (
            self.copied
            and self.splits
            and prod(s.degree for s in self.splits) != (self.size / self.local)
        ):
            return f"Max(1, {text})"
        return text


@dataclass(frozen=True, slots=True)
class Mesh:
    """The ranks that share one layer.

    Attributes:
        t: The tensor-parallel size.
        sequence_parallel: Whether tensor-parallel ranks shard the sequence between the
            tensor-parallel regions.
        c: The context-parallel size: ranks that shard the sequence everywhere.
        e: The expert-parallel size.
        x: The tensor-parallel size of the experts.
    """

    t: Size = 1
    sequence_parallel: bool = False
    c: Size = 1
    e: Size = 1
    x: Size = 1

    @classmethod
    def of(cls, sizes: Mapping[str, Size], sequence_parallel: bool) -> "Mesh":
        """The mesh of sizes by letter; a missing letter is 1."""
        degrees = {letter: sizes.get(letter, 1) for letter in "tcex"}
        return cls(sequence_parallel=sequence_parallel, **degrees)

    def tensor(self, axis: Axis) -> Axis:
        """The axis sharded over the tensor-parallel ranks.

        With fewer heads than ranks, each rank has a copy of one head instead.

        >>> Mesh(t=8).tensor(Axis.whole("a", 64)).local
        8
        >>> copied = Mesh(t=8).tensor(Axis.heads("k", 2))
        >>> copied.local, copied.shown
        (1, 'Max(1, k/t)')
        """
        return _split(axis, Split(TENSOR, "t", self.t))

    def context(self, axis: Axis) -> Axis:
        """The sequence, sharded over context-parallel ranks."""
        return _split(axis, Split(CONTEXT, "c", self.c))

    def experts(self, axis: Axis) -> Axis:
        """The experts, sharded over expert-parallel ranks."""
        return _split(axis, Split(EXPERT, "e", self.e))

    def expert_tensor(self, axis: Axis) -> Axis:
        """An axis of an expert, sharded over the experts' tensor-parallel ranks."""
        return _split(axis, Split(TENSOR, "x", self.x))

    def sequence(self, axis: Axis) -> Axis:
        """The axis outside the tensor-parallel regions."""
        return _split(axis, Split(SEQUENCE, "t", self.t)) if self.sequence_parallel else axis

    def gathered(self, axis: Axis) -> Axis:
        """The axis inside the tensor-parallel regions: the inverse of ``sequence``.

        >>> mesh, s = Mesh(t=8, sequence_parallel=True), Axis.whole("s", 64)
        >>> mesh.gathered(mesh.sequence(s)) == s
        True
        """
        for split in axis.splits:
            if split.kind == SEQUENCE:
                others = tuple(other for other in axis.splits if other is not split)
                return axis._replace(local=axis.local * split.degree, splits=others)
        return axis


def divide(size: Size, degree: Size, name: str) -> Size:
    """A size over a number of ranks. An int must be divisible.

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
    return size / degree


def elements(axes: tuple[Axis, ...]) -> Size:
    """The elements of a tensor over all ranks, each counted once."""
    return prod(axis.size for axis in axes)


def _split(axis: Axis, split: Split) -> Axis:
    degree = split.degree
    if degree == 1:
        return axis
    splits = (*axis.splits, split)
    if axis.copied:
        if type(axis.local) is not int or type(degree) is not int:
            return axis._replace(local=_at_least_one(axis.local / degree), splits=splits)
        if axis.local < degree:
            divide(degree, axis.local, in_words(axis.letter))
            return axis._replace(local=1, splits=splits)
    return axis._replace(local=divide(axis.local, degree, in_words(axis.letter)), splits=splits)


def _rounded_up(size: Size, tile: int) -> Size:
    if isinstance(size, int | Fraction):
        return -(-size // tile) * tile
    return tile * resolve("sympy:ceiling")(size / tile)


def _at_least_one(size: Size) -> Size:
    if isinstance(size, Fraction):
        return max(Fraction(1), size)
    return resolve("sympy:Max")(1, size)  # a symbolic size has loaded sympy already
