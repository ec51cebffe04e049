"""Exact interpolation: rational polynomials through given values at given sizes."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise, product
from math import prod
from typing import Any, NamedTuple

import sympy

from memcalc import symbols

DEGREES = 4  # the highest degree per letter
FURTHER = 4  # sizes beyond those used, at which a polynomial is confirmed


class Interpolated(NamedTuple):
    """Polynomials through measured values.

    Attributes:
        expressions: One sympy expression per value.
        method: Their degrees, and the number of further sizes that confirmed them.
    """

    expressions: tuple[Any, ...]
    method: str


def interpolated(
    values: Callable[[Mapping[str, int]], Sequence[int]], sizes: Mapping[str, int]
) -> Interpolated:
    """The polynomials through what is measured at multiples of sizes.

    The degree in each letter is the lowest that fits. The polynomials are then confirmed at sizes
    that were not used to find them.

    Args:
        values: Measures at the size of each letter; returns the same number of values every time.
        sizes: The size of each letter, whose multiples are measured.

    Raises:
        ValueError: No polynomial of degree ``DEGREES`` or less fits.

    >>> found = interpolated(lambda at: [3 * at["s"] ** 2 * at["b"] + 5], {"s": 4, "b": 2})
    >>> found.expressions
    (3*b*s**2 + 5,)
    >>> found.method
    'interpolated (degree 2 in s, 1 in b; confirmed at 4 further sizes)'
    """
    known: dict[tuple[int, ...], list[int]] = {}

    def measured(multiples: tuple[int, ...]) -> list[int]:
        if multiples not in known:
            at = {x: n * size for (x, size), n in zip(sizes.items(), multiples, strict=True)}
            known[multiples] = list(values(at))
        return known[multiples]

    degrees = {letter: _degree(measured, list(sizes), letter) for letter in sizes}
    grid = list(product(*(range(1, degree + 2) for degree in degrees.values())))
    powers = list(product(*(range(degree + 1) for degree in degrees.values())))
    matrix = sympy.Matrix(
        [
            [prod(n**power for n, power in zip(at, each, strict=True)) for each in powers]
            for at in grid
        ]
    )
    found = matrix.LUsolve(sympy.Matrix([measured(at) for at in grid]))
    scaled = [symbols.symbol(letter) / size for letter, size in sizes.items()]
    terms = [prod(x**power for x, power in zip(scaled, each, strict=True)) for each in powers]
    expressions = tuple(
        sympy.expand(sum(found[i, j] * term for i, term in enumerate(terms)))
        for j in range(found.cols)
    )
    _confirm(measured, degrees, sizes, expressions)
    said = ", ".join(f"{degree} in {letter}" for letter, degree in degrees.items())
    return Interpolated(
        expressions, f"interpolated (degree {said}; confirmed at {FURTHER} further sizes)"
    )


def _degree(
    measured: Callable[[tuple[int, ...]], list[int]], letters: list[str], letter: str
) -> int:
    """The lowest degree in one letter with the others fixed, at which further differences are 0."""
    for degree in range(DEGREES + 1):
        row = [
            measured(tuple(n if each == letter else 1 for each in letters))
            for n in range(1, degree + 3)
        ]
        while len(row) > 1:
            row = [[b - a for a, b in zip(*pair, strict=True)] for pair in pairwise(row)]
        if not any(row[0]):
            return degree
    raise ValueError(f"its bytes are not a polynomial of degree {DEGREES} or less in {letter}")


def _confirm(
    measured: Callable[[tuple[int, ...]], list[int]],
    degrees: Mapping[str, int],
    sizes: Mapping[str, int],
    expressions: Sequence[Any],
) -> None:
    """Check the polynomials at sizes beyond those that they were found at."""
    for further in range(FURTHER):
        at = tuple(
            degree + 2 + (further + i) % FURTHER for i, degree in enumerate(degrees.values())
        )
        there = {letter: n * size for (letter, size), n in zip(sizes.items(), at, strict=True)}
        values = {symbols.symbol(letter): size for letter, size in there.items()}
        if [each.subs(values) for each in expressions] != measured(at):
            raise ValueError(
                f"its bytes do not follow the interpolated polynomial at {sizes_text(there)}"
            )


def sizes_text(sizes: Mapping[str, int]) -> str:
    """Sizes as text.

    >>> sizes_text({"s": 64, "b": 3})
    's = 64, b = 3'
    """
    return ", ".join(f"{letter} = {size}" for letter, size in sizes.items())
