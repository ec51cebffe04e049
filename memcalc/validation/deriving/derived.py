"""A derived formula: what a module saves for backward, and when that holds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import sympy

from memcalc import symbols as letters
from memcalc.errors import UsageError
from memcalc.formulas import Formula
from memcalc.lazy import resolve
from memcalc.report import Report
from memcalc.validation.deriving.interpolation import sizes_text

ACTIVATION, INPUT, BUFFER = "activation", "input", "buffer"
_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


class Kept(NamedTuple):
    """A storage that a module saves for backward.

    Attributes:
        module: The path of the module that made it; empty for an input.
        op: The operation that made it, or ``input`` or ``buffer``.
        shape: The shape of a saved tensor: ints and sympy expressions.
        dtype: Its dtype.
        formula: Its bytes.
        saved_by: The modules that save it.
        kind: ``activation``, ``input`` or ``buffer``. Buffers are not counted.
        name: The name of the module or of the buffer.
    """

    module: str
    op: str
    shape: tuple[Any, ...]
    dtype: str
    formula: Formula
    saved_by: tuple[str, ...]
    kind: str
    name: str

    @property
    def tensor(self) -> str:
        """Its shape and dtype, as text."""
        shape = " ".join(f"({size})" if " " in str(size) else str(size) for size in self.shape)
        return f"{shape} {_SHORT.get(self.dtype, self.dtype)}".strip()


@dataclass(frozen=True, repr=False)
class Derived:
    """The formula of the bytes that a module saves for backward.

    Attributes:
        tensors: The storages that it saves, in the order in which they were made.
        sizes: The letters, with their sizes in the example.
        method: How the formula was found: ``symbolic``, or ``interpolated`` with its degrees and
            the number of further sizes that confirmed it.
        conditions: When the formula holds: sympy relations or text.
        notes: What the module printed, and why symbols were not possible.

    >>> import torch
    >>> from memcalc.validation.deriving.derivation import derive
    >>> linear = torch.nn.Linear(8, 16)
    >>> derived = derive(linear, torch.randn(5, 8), symbols={"n": 5})
    >>> print(derived.python())
    def kept_bytes(n: int) -> int:
        return 32*n
    >>> derived.value(n=1000)
    32000
    """

    tensors: tuple[Kept, ...]
    sizes: Mapping[str, int]
    method: str
    conditions: tuple[Any, ...]
    notes: tuple[str, ...] = ()

    @property
    def guards(self) -> tuple[str, ...]:
        """When the formula holds, as text."""
        return tuple(map(worded, self.conditions))

    @cached_property
    def formula(self) -> Formula:
        """The bytes of all that is saved, without buffers."""
        return total(self.tensors)

    def value(self, **sizes: int) -> int:
        """The bytes at given sizes; other letters have their sizes in the example.

        Raises:
            UsageError: There is no such letter, or the formula does not hold at these sizes.
        """
        found = all_sizes(self.sizes, sizes)
        at = {letters.symbol(letter): size for letter, size in found.items()}
        for each in self.conditions:
            if isinstance(each, sympy.Basic) and each.subs(at) is sympy.false:
                raise UsageError(
                    f"the formula does not hold at {sizes_text(found)}; it holds for {worded(each)}"
                )
        return int(self.formula.value(found))

    def latex(self) -> str:
        """The formula in LaTeX."""
        return self.formula.latex()

    def python(self, name: str = "kept_bytes") -> str:
        """The formula as a Python function of its letters, in integers."""
        return self.formula.python(name)

    def report(self, **sizes: int) -> Report:
        """Every tensor with its bytes, as a table, at sizes as in ``value``."""
        self.value(**sizes)
        made: Report = resolve("memcalc.validation.deriving.forms:report")(
            self, {**self.sizes, **sizes}
        )
        return made

    def __repr__(self) -> str:
        return f"Derived({self.formula})"

    def _repr_latex_(self) -> str:
        return self.formula._repr_latex_()


def total(tensors: Sequence[Kept]) -> Formula:
    """The sum of what is saved, without buffers."""
    return Formula(sum(each.formula.expression for each in tensors if each.kind != BUFFER))


def all_sizes(sizes: Mapping[str, int], others: Mapping[str, int]) -> dict[str, int]:
    """Sizes, some of them replaced by others.

    Raises:
        UsageError: There is no such letter.
    """
    unknown = others.keys() - sizes.keys()
    if unknown:
        raise UsageError(f"no symbol {min(unknown)}; choose from {', '.join(sizes)}")
    return {**sizes, **others}


def worded(condition: Any) -> str:
    """A condition as text.

    >>> n = sympy.Symbol("n")
    >>> worded(sympy.And(sympy.Ne(n, 3), n >= 2)), worded(sympy.Mod(n, 8) <= 0)
    ('n >= 2 and n != 3', 'n % 8 == 0')
    """
    if isinstance(condition, sympy.And):
        return " and ".join(map(worded, condition.args))
    if isinstance(condition, sympy.Rel) and isinstance(condition.lhs, sympy.Mod):
        rest = "==" if condition.subs(condition.lhs, 0) is sympy.true else "!="
        if condition.rhs == 0:
            return f"{' % '.join(map(str, condition.lhs.args))} {rest} 0"
    if isinstance(condition, sympy.Eq | sympy.Ne):
        return f"{condition.lhs} {condition.rel_op} {condition.rhs}"
    return str(condition)
