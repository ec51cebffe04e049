"""Formulas: a graph's total over symbols, as a sympy expression in the paper's form.

Nothing here parses text or states a formula: a formula is the sum of what a block saves when it
runs on symbols.
"""

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any

import sympy
from sympy.printing.numpy import NumPyPrinter
from sympy.printing.pycode import PythonCodePrinter

from memcalc import symbols
from memcalc.analysis import activations
from memcalc.analysis.layers import layer_entries
from memcalc.config import Config

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

CHUNK = 2**14  # elements: every intermediate of a chunk stays in cache

_PRINTED_ORDER = "arsbhkdqlouygfLvntpmcex"  # the paper writes sbh and 5as/h


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

    @property
    def letters(self) -> set[str]:
        """The letters in it."""
        return {letter.name for letter in self.expression.free_symbols}

    @cached_property
    def _shape(self) -> tuple[Any, list[Any], Any, list[Any]]:
        """The expression as ``factor * (terms) / divisor + rest``.

        The factor is sbh if some term has an h, as the paper writes it, else sb.
        """
        one = sympy.Integer(1)
        terms = sympy.Add.make_args(sympy.expand(self.expression))
        s, b, h = (symbols.symbol(letter) for letter in "sbh")
        inside = [term for term in terms if _power(term, s) >= 1 and _power(term, b) >= 1]
        if len(inside) < 2:
            return one, [], one, _ordered(terms)
        shared = s * b * h if any(_power(term, h) >= 1 for term in inside) else s * b
        bracket = [term / shared for term in inside]
        divisor = one
        for letter in sorted(bracket[0].free_symbols - {h}, key=str):
            if all(_power(term, letter) <= -1 for term in bracket):
                divisor *= letter
        rest = [term for term in terms if term not in inside]
        return shared, _ordered([term * divisor for term in bracket]), divisor, _ordered(rest)

    def __str__(self) -> str:
        factor, terms, divisor, rest = self._shape
        parts = [sympy.sstr(term) for term in rest]
        if terms:
            over = sympy.sstr(divisor) if divisor.is_Symbol else f"({sympy.sstr(divisor)})"
            whole = f"{sympy.sstr(factor)}*({_sum([sympy.sstr(term) for term in terms])})"
            parts.insert(0, whole if divisor == 1 else f"{whole}/{over}")
        return _sum(parts)

    def __repr__(self) -> str:
        return f"Formula({self})"

    def __eq__(self, other: object) -> bool:
        """Whether two formulas are equal once they are multiplied out."""
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
            inner = _sum([_latex(term) for term in terms])
            parts.insert(0, rf"{_latex(factor / divisor)}\left({inner}\right)")
        return _sum(parts)

    def python(self, name: str = "kept_bytes") -> str:
        """The formula as the source of a Python function of its letters, in whole numbers.

        >>> s, b, h, t = (symbols.symbol(letter) for letter in "sbht")
        >>> print(Formula(34*s*b*h/t).python())
        def kept_bytes(b: int, h: int, s: int, t: int) -> int:
            return (34*b*h*s)//(t)
        """
        above, below = sympy.fraction(sympy.together(self.expression))
        code = sympy.sstr(above) if below == 1 else f"({sympy.sstr(above)})//({sympy.sstr(below)})"
        if self.expression.atoms(sympy.floor, sympy.ceiling, sympy.Max):
            code = _WholePrinter().doprint(above / below)
        arguments = ", ".join(f"{x}: int" for x in sorted(map(str, self.expression.free_symbols)))
        return f"def {name}({arguments}) -> int:\n    return {code}"

    def _repr_latex_(self) -> str:
        return f"$\\displaystyle {self.latex()}$"

    def value(self, values: Mapping[str, int | Fraction]) -> int | Fraction:
        """The exact value where the letters have these values.

        Raises:
            KeyError: A letter of the formula has no value.
            TypeError: A value is not exact.
            ZeroDivisionError: The formula divides by a letter that is 0.
        """
        free = self.expression.free_symbols
        result = self.expression.subs({x: _rational(x.name, values[x.name]) for x in free})
        if not result.is_Rational:
            raise ZeroDivisionError(f"{self} has no value where {dict(values)}")
        exact = Fraction(int(result.p), int(result.q))
        return exact.numerator if exact.denominator == 1 else exact

    def evaluate(self, **arrays: "ArrayLike") -> "NDArray[np.float64]":
        """The formula over numpy arrays, one per letter, which broadcast.

        It runs in float64, in chunks. Each of its few operations rounds once, so that results for
        real sizes are within 4 units in the last place.

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


class _Printer(NumPyPrinter):  # type: ignore[misc] # sympy is untyped
    """numpy code in which Max mixes scalars and arrays."""

    def __init__(self, settings: dict[str, Any] | None = None) -> None:
        # lambdify passes these only to its own printers
        super().__init__({"fully_qualified_modules": False, "inline": True, **(settings or {})})

    def _print_Max(self, expr: Any) -> str:  # noqa: N802 - sympy's dispatch by class name
        first, *others = (self._print(arg) for arg in expr.args)
        code: str = first
        for other in others:
            code = f"maximum({code}, {other})"
        return code


class _WholePrinter(PythonCodePrinter):  # type: ignore[misc] # sympy is untyped
    """Python code in whole numbers; only quotients of two of them are rounded."""

    def __init__(self) -> None:
        super().__init__({"fully_qualified_modules": False})

    def _print_floor(self, expr: Any) -> str:
        above, below = sympy.fraction(sympy.together(expr.args[0]))
        return f"(({self._print(above)})//({self._print(below)}))"

    def _print_ceiling(self, expr: Any) -> str:
        above, below = sympy.fraction(sympy.together(expr.args[0]))
        return f"(-(-({self._print(above)})//({self._print(below)})))"

    def _print_Max(self, expr: Any) -> str:  # noqa: N802 - sympy's dispatch by class name
        return f"max({', '.join(self._print(arg) for arg in expr.args)})"


class Plain(Formula):
    """A formula in other letters, written as sympy writes it."""

    def __str__(self) -> str:
        return str(sympy.sstr(self.expression))

    def latex(self) -> str:
        """The formula in LaTeX."""
        return str(sympy.latex(self.expression))


def layer_formula(
    config: Config,
    accounting: str = "paper",
    sizes: Mapping[str, Any] | None = None,
    kind: str | None = None,
) -> Formula:
    """The activation memory of one layer on one rank, in bytes, as a formula.

    Args:
        config: The model, its parallelism and its run, whose sizes become letters.
        accounting: ``paper`` or ``exact``.
        sizes: The value of each letter, instead of ``symbols.symbolic(config)``.
        kind: The kind of layer, as ``memcalc.blocks.layer.kinds`` names them; by default the
            most frequent one.

    >>> from memcalc.config import load
    >>> layer_formula(load("175b", sp=True, recompute="selective"))
    Formula(34*b*h*s/t)
    """
    sizes = symbols.symbolic(config) if sizes is None else sizes
    return Formula(activations.total(layer_entries(config, accounting, sizes, kind)))


def _ordered(terms: Sequence[Any]) -> list[Any]:
    return sorted(terms, key=lambda term: (len(term.free_symbols), sympy.sstr(term)))


def _rational(letter: str, value: Any) -> Any:
    if not isinstance(value, int | Fraction):
        raise TypeError(f"{letter} must be an int or a Fraction, not {value!r}")
    return sympy.Rational(value.numerator, value.denominator)


def _sum(terms: list[str]) -> str:
    """Terms with the signs between them."""
    return " + ".join(terms).replace("+ -", "- ")


def _power(term: Any, letter: Any) -> Any:
    return term.as_powers_dict().get(letter, 0)


def _latex(term: Any) -> str:
    """A product of powers in the order in which the paper writes its letters."""
    number, product = term.as_coeff_Mul()
    if number < 0:
        return f"-{_latex(-term)}"
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
