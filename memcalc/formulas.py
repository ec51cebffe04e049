"""Symbols in, sympy out: the formula that a graph's total is, in the paper's shape.

Nothing here parses text, and no formula is typed here: a formula is what running a block on
symbols sums up to.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any

import sympy
from sympy.printing.numpy import NumPyPrinter

from memcalc import symbols
from memcalc.analysis import activations
from memcalc.analysis.recompute import regions
from memcalc.blocks.layer import layer_graph
from memcalc.config import Config

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

CHUNK = 2**14  # elements: every intermediate of a chunk stays in cache

_PRINTED_ORDER = "asbhkdfLvtpm"  # the paper writes sbh and 5as/h


class Formula:
    """An expression in the letters of ``memcalc.symbols``, shown as the paper shows it.

    Attributes:
        expression: The sympy expression.

    >>> s, b, h, a, t = (symbols.symbol(letter) for letter in "sbhat")
    >>> formula = Formula(10*s*b*h + 24*s*b*h/t + 5*a*b*s**2/t)
    >>> print(formula)
    b*h*s*(10 + 24/t + 5*a*s/(h*t))
    >>> formula.value({"s": 2048, "b": 1, "h": 12288, "a": 96, "t": 8})
    578813952
    """

    def __init__(self, expression: Any) -> None:
        self.expression = sympy.sympify(expression)

    @cached_property
    def _shape(self) -> tuple[Any, list[Any], Any, list[Any]]:
        """The expression as ``factor * (terms) / divisor + rest``."""
        terms = sympy.Add.make_args(sympy.expand(self.expression))
        one = sympy.Integer(1)
        if len(terms) == 1:
            return one, [], one, list(terms)
        s, b, h = (symbols.symbol(letter) for letter in "sbh")
        tokens = [term for term in terms if not (term / (s * b)).has(1 / s, 1 / b)]
        rest = [term for term in terms if term not in tokens]
        if len(tokens) < 2:
            return one, [], one, _ordered(terms)
        bracket = [term / (s * b * h) for term in tokens]
        divisor = one
        for letter in bracket[0].free_symbols - {h}:
            if all(term.as_powers_dict().get(letter, 0) <= -1 for term in bracket):
                divisor *= letter
        return s * b * h, _ordered([term * divisor for term in bracket]), divisor, _ordered(rest)

    def __str__(self) -> str:
        factor, terms, divisor, rest = self._shape
        parts = [sympy.sstr(term) for term in rest]
        if terms:
            inner = " + ".join(sympy.sstr(term) for term in terms)
            over = "" if divisor == 1 else f"/{sympy.sstr(divisor)}"
            parts.insert(0, f"{sympy.sstr(factor)}*({inner}){over}")
        return " + ".join(parts)

    def __repr__(self) -> str:
        return f"Formula({self})"

    def __eq__(self, other: object) -> bool:
        """Whether two formulas are the same function, however they are written."""
        if not isinstance(other, Formula):
            return NotImplemented
        return bool(sympy.expand(self.expression - other.expression) == 0)

    def __hash__(self) -> int:
        return hash(sympy.expand(self.expression))

    def latex(self) -> str:
        r"""The formula in LaTeX.

        >>> s, b, h, t = (symbols.symbol(letter) for letter in "sbht")
        >>> print(Formula(34*s*b*h/t).latex())
        \frac{34sbh}{t}
        """
        factor, terms, divisor, rest = self._shape
        parts = [_latex(term) for term in rest]
        if terms:
            inner = " + ".join(_latex(term) for term in terms)
            parts.insert(0, rf"{_latex(factor / divisor)}\left({inner}\right)")
        return " + ".join(parts)

    def _repr_latex_(self) -> str:
        return f"$\\displaystyle {self.latex()}$"

    def value(self, values: Mapping[str, int]) -> int | Fraction:
        """The exact value where the letters have these values.

        Raises:
            KeyError: A letter of the formula has no value.
        """
        free = self.expression.free_symbols
        result = self.expression.subs({x: sympy.Integer(values[x.name]) for x in free})
        exact = Fraction(int(result.p), int(result.q))
        return exact.numerator if exact.denominator == 1 else exact

    def evaluate(self, **arrays: "ArrayLike") -> "NDArray[np.float64]":
        """The formula over numpy arrays, one a letter, broadcast against one another.

        It runs in float64, a chunk at a time, and is within 4 ulp of the exact value where the
        inputs are whole numbers below 2^53.

        Raises:
            KeyError: A letter of the formula has no array.

        >>> s, h = symbols.symbol("s"), symbols.symbol("h")
        >>> Formula(2*s*h).evaluate(s=[1024, 2048], h=4096).tolist()
        [8388608.0, 16777216.0]
        """
        import numpy as np

        letters, function = self._compiled
        if not letters:
            return np.asarray(function(), dtype=np.float64)
        inputs = [np.asarray(arrays[letter], dtype=np.float64) for letter in letters]
        nditer: Any = np.nditer  # its stubs know no output that it allocates itself
        chunks = nditer(
            [*inputs, None],
            flags=["external_loop", "buffered", "zerosize_ok"],
            op_flags=[["readonly"]] * len(inputs) + [["writeonly", "allocate"]],
            op_dtypes=[np.float64] * (len(inputs) + 1),
            buffersize=CHUNK,
            order="C",
        )
        with chunks:
            for *values, out in chunks:
                out[...] = function(*values)
            result: NDArray[np.float64] = chunks.operands[-1]
        return result

    @cached_property
    def _compiled(self) -> tuple[list[str], Callable[..., Any]]:
        free = sorted(self.expression.free_symbols, key=lambda x: x.name)
        factor, terms, divisor, rest = self._shape
        shaped = factor * sympy.Add(*terms, evaluate=False) / divisor if terms else 0
        expression = sympy.Add(shaped, *rest, evaluate=False) if rest else shaped
        return [x.name for x in free], sympy.lambdify(free, expression, printer=_Printer)


class _Printer(NumPyPrinter):  # type: ignore[misc]
    """numpy code in which Max takes scalars and arrays together."""

    def __init__(self, settings: dict[str, Any] | None = None) -> None:
        # lambdify passes these only to the printers that it makes itself
        super().__init__({"fully_qualified_modules": False, "inline": True, **(settings or {})})

    def _print_Max(self, expr: Any) -> str:  # noqa: N802 - sympy's dispatch by class name
        first, *others = (self._print(arg) for arg in expr.args)
        code: str = first
        for other in others:
            code = f"maximum({code}, {other})"
        return code


def layer_formula(
    config: Config,
    accounting: str = "paper",
    words: Sequence[str] | None = None,
    *,
    tensor_parallel: bool | None = None,
    sequence_parallel: bool | None = None,
) -> Formula:
    """The activation memory of one layer, in bytes, as a formula.

    Args:
        config: The model and its run; sizes become letters.
        accounting: ``paper`` or ``exact``.
        words: The recomputation, instead of the run's.
        tensor_parallel: Whether t is a letter, or 1; by default, what the config's t is.
        sequence_parallel: Whether the sequence is split too; by default, as in the config.

    >>> from memcalc.config import load
    >>> layer_formula(load("175b", sp=True, recompute="selective"))
    Formula(34*b*h*s/t)
    """
    kept = layer_entries(config, accounting, words, tensor_parallel, sequence_parallel)
    return Formula(activations.total(kept))


def layer_entries(
    config: Config,
    accounting: str = "paper",
    words: Sequence[str] | None = None,
    tensor_parallel: bool | None = None,
    sequence_parallel: bool | None = None,
) -> list[activations.Entry]:
    """The kept tensors of one layer, over letters; the arguments are ``layer_formula``'s."""
    sizes = dict(symbols.symbolic(config.model))
    if not (config.parallel.tp > 1 if tensor_parallel is None else tensor_parallel):
        sizes["t"] = 1
    if sequence_parallel is not None:
        parallel = replace(config.parallel, sp=sequence_parallel)
        config = replace(config, parallel=parallel)
    recomputed = regions(config.run.recompute if words is None else words)
    return activations.counted(activations.kept(layer_graph(config, sizes), recomputed), accounting)


def _ordered(terms: Sequence[Any]) -> list[Any]:
    return sorted(terms, key=lambda term: (len(term.free_symbols), sympy.sstr(term)))


def _latex(term: Any) -> str:
    """A product of powers in the order in which the paper writes its letters."""
    number, product = term.as_coeff_Mul()
    above = [str(number.p)] if number.p != 1 else []
    below = [str(number.q)] if number.q != 1 else []
    powers = product.as_powers_dict().items() if product != 1 else ()
    for base, exponent in sorted(powers, key=lambda power: _rank(power[0])):
        written = _base_latex(base)
        size = abs(exponent)
        (above if exponent > 0 else below).append(
            written if size == 1 else f"{written}^{{{sympy.latex(size)}}}"
        )
    numerator = "".join(above) or "1"
    return rf"\frac{{{numerator}}}{{{''.join(below)}}}" if below else numerator


def _rank(base: Any) -> int:
    return _PRINTED_ORDER.find(base.name) if base.is_Symbol else len(_PRINTED_ORDER)


def _base_latex(base: Any) -> str:
    if isinstance(base, sympy.Max):
        return rf"\max\left({', '.join(_latex(arg) for arg in base.args)}\right)"
    return base.name if base.is_Symbol else rf"\left({sympy.latex(base)}\right)"
