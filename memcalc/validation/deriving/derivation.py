"""Derive the formula of the bytes that a module saves for backward.

The module runs forward on PyTorch's fake tensors, whose sizes are sympy expressions. ``measure``
finds the storages that autograd saves, and the sum of their sizes is the formula. If PyTorch checks
a condition on a size on the way, that condition becomes a guard of the formula. If PyTorch fixes a
size, or the module does not run on symbols, the module is measured at several sizes instead, and
the formula is interpolated exactly (``memcalc.validation.deriving.interpolation``).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils._sympy import functions as torch_sympy

from memcalc import symbols as letters
from memcalc.errors import MemcalcError, UsageError
from memcalc.formulas import Formula
from memcalc.progress import doing
from memcalc.validation.deriving.arguments import arguments, places_of, plain_module
from memcalc.validation.deriving.derived import (
    ACTIVATION,
    BUFFER,
    INPUT,
    Derived,
    Kept,
    all_sizes,
    total,
    worded,
)
from memcalc.validation.deriving.interpolation import interpolated, sizes_text
from memcalc.validation.measuring.measure import Stored
from memcalc.validation.measuring.valueless import (
    Build,
    StoppedError,
    Subject,
    ValuelessRun,
    like,
    operation,
    quiet,
    without_values,
)

DEVICES = ("cuda", "cpu")
MOST_SIZES = 8  # symbols of one derivation
EAGERLY = "derived in eager mode: torch.compile's partitioner may save other tensors"


class DeriveError(MemcalcError):
    """A module does not run, or no formula was found for what it saves."""


class ElsewhereError(DeriveError):
    """A formula does not hold at the given sizes."""


def derive(
    module: nn.Module,
    inputs: Any,
    symbols: Mapping[str, Any],
    device: str = "cuda",
    at: Mapping[str, int] | None = None,
) -> Derived:
    """The formula of the bytes that a module saves for backward, in sizes of its inputs.

    The module's forward pass runs on tensors without values: nothing is computed and no memory is
    allocated. Its parameters do not change.

    Args:
        module: Any module, in training mode (``train()``) if its dropouts count.
        inputs: Example inputs: a tensor, a sequence of arguments, or a mapping of keyword
            arguments. Set ``requires_grad`` on an input that needs a gradient.
        symbols: For each letter its size in the example, which names every axis of that size; or
            its axes, as one pair (index of the tensor, axis) or several.
        device: The device whose kernels to count: ``cuda``, with stand-ins for its fused kernels,
            or ``cpu``.
        at: Other sizes at which the formula must hold; it is checked by a measurement there.

    Raises:
        UsageError: No axis of the inputs has a letter's size, or one axis has two letters, or the
            module is scripted or lazy.
        DeriveError: The module does not run on tensors without values, or no formula in these
            letters was found. An ``ElsewhereError``: the formula does not hold at ``at``.

    >>> import torch
    >>> mlp = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
    >>> x = torch.randn(2, 5, 8)
    >>> derived = derive(mlp, x, symbols={"b": 2, "s": 5})
    >>> derived.formula
    Formula(288*b*s)
    >>> [(each.module, each.op, str(each.formula)) for each in derived.tensors]
    [('', 'input', '32*b*s'), ('0', 'addmm', '128*b*s'), ('1', 'gelu', '128*b*s')]
    """
    plain = plain_module(module)
    given, spec = tree_flatten(arguments(inputs))
    places = places_of(given, symbols)
    example = {
        letter: given[number].shape[axis]
        for number, axes in places.items()
        for axis, letter in axes.items()
    }
    stands = "meta" if device == "cuda" else "cpu"

    def build(sizes: Mapping[str, Any]) -> tuple[nn.Module, Sequence[Any], Mapping[str, Any]]:
        leaves = [
            like(each, stands, sizes, places.get(number, {})) if isinstance(each, Tensor) else each
            for number, each in enumerate(given)
        ]
        arguments, keywords = tree_unflatten(leaves, spec)
        return plain, arguments, keywords

    ordered = {letter: example[letter] for letter in symbols}
    derived = derive_from(build, ordered, device, stands, at=at)
    told = () if plain is module else (EAGERLY,)
    return replace(derived, notes=(*derived.notes, *told))


def derive_from(
    build: Build,
    sizes: Mapping[str, int],
    device: str = "cuda",
    stands: str | None = None,
    written: Mapping[str, Any] | None = None,
    at: Mapping[str, int] | None = None,
) -> Derived:
    """The formula of a module that is built anew for each choice of sizes.

    Args:
        build: Makes the module, its arguments and its keyword arguments from the size of each
            letter, an int or a symbol. It is called once per run of the module.
        sizes: An example of the sizes, each at least 2.
        device: As in ``derive``.
        stands: The device of the stand-ins for the module's parameters and buffers; None if the
            module is built without values already.
        written: Expressions to write in the formula for some letters.
        at: As in ``derive``; not together with ``written``.

    Raises:
        UsageError: A size is 1, which cannot be told from a constant, or the device is unknown.
        DeriveError: As in ``derive``.
    """
    if device not in DEVICES:
        raise UsageError(f"device {device!r} is unknown; choose from {', '.join(DEVICES)}")
    if not 0 < len(sizes) <= MOST_SIZES:
        raise UsageError(
            f"name 1 to {MOST_SIZES} sizes of the inputs (--symbols s=64,b=2), not {len(sizes)}"
        )
    for letter, size in sizes.items():
        if size < 2:
            raise UsageError(f"{letter} is {size} in the inputs, and must be at least 2")
    subject = Subject(build, sizes, device, stands)
    elsewhere = all_sizes(sizes, at) if at else None
    try:
        derived = _symbolic(subject)
    except StoppedError as error:
        derived = _interpolated(subject, str(error))
    if elsewhere:
        _hold(subject, derived, elsewhere)
    return derived if written is None else _rewritten(derived, written)


def kept_bytes(
    build: Build, sizes: Mapping[str, int], device: str = "cuda", stands: str | None = None
) -> int:
    """The measured bytes that a module saves at given sizes; the arguments are ``derive_from``'s.

    Raises:
        DeriveError: The module does not run on tensors without values.
    """
    return _measured(Subject(build, sizes, device, stands), sizes)


def _measured(subject: "Subject", sizes: Mapping[str, int]) -> int:
    try:
        stored = subject.at(sizes).stored
    except StoppedError as error:
        why = f"the module cannot be measured at {sizes_text(sizes)}: {error}"
        raise DeriveError(why) from error
    return sum(each.bytes for each in stored if _kind(each) != BUFFER)


def _hold(subject: "Subject", derived: Derived, at: Mapping[str, int]) -> None:
    """Check a formula by a measurement at sizes.

    Raises:
        ElsewhereError: They differ.
    """
    kept, given = _measured(subject, at), int(derived.formula.value(at))
    if kept != given:
        held = f" and holds for {', '.join(derived.guards)}" if derived.guards else ""
        raise ElsewhereError(
            f"at {sizes_text(at)} the module saves {kept:,} bytes, but the formula, which was "
            f"found at {sizes_text(derived.sizes)}{held}, gives {given:,} bytes; use inputs closer "
            "to the first sizes"
        )


# --- symbolic sizes ------------------------------------------------------------------------------


def _symbolic(subject: Subject) -> Derived:
    """The formula from one run on symbols.

    Raises:
        StoppedError: The run stopped, or fixed a size.
    """
    sizes = subject.sizes
    env = ShapeEnv(duck_shape=False)
    with quiet(), without_values(env):
        given = {letter: _symbol(env, letter, size) for letter, size in sizes.items()}
        names = {given[letter].node.expr: _whole(letter) for letter in sizes}
        run = subject.on(given)
    for letter, symbol in zip(sizes, names, strict=True):
        if symbol in env.replacements:
            raise StoppedError(f"PyTorch fixes {letter} at {env.replacements[symbol]}")
    for guard in env.guards:
        if isinstance(guard.expr, sympy.Eq):
            decided = worded(_as_letters(guard.expr, names))
            raise StoppedError(f"PyTorch's tracing adds the guard {decided}")
    conditions = [sympy.simplify(_named(each.expr, names)) for each in env.guards]
    told = [_as_letters(each, {}) for each in conditions if each not in (True, sympy.true)]
    tensors = tuple(
        _kept(each, Formula(_expression(each, names)), _shape(each.shape, names))
        for each in run.stored
    )
    # PyTorch's symbols are 2 or more; where no guard excludes 1, the formula is checked there
    least = [
        x >= 2
        for letter, x in ((letter, letters.symbol(letter)) for letter in sizes)
        if not any(each.subs(x, 1) is sympy.false for each in told)
        and not _holds_at_one(subject, tensors, letter)
    ]
    met = tuple(dict.fromkeys([*least, *told]))
    return Derived(tensors, dict(sizes), "symbolic", met, run.told)


def _holds_at_one(subject: Subject, tensors: Sequence[Kept], letter: str) -> bool:
    """Whether a formula holds where a size is 1."""
    sizes = {**subject.sizes, letter: 1}
    try:
        return _measured(subject, sizes) == total(tensors).value(sizes)
    except DeriveError:
        return False


def _symbol(env: ShapeEnv, letter: str, size: int) -> Any:
    source = ConstantSource(letter)
    made = env.create_symbol(size, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    return env.create_symintnode(made, hint=size, source=source)


def _expression(each: Stored, names: Mapping[Any, Any]) -> Any:
    if each.size is None:
        return sympy.Integer(each.bytes)
    return sympy.expand(_as_letters(each.size, names))


def _whole(letter: str) -> Any:
    """A letter as a positive integer of sympy."""
    return sympy.Symbol(letter, integer=True, positive=True)


def _as_letters(expression: Any, names: Mapping[Any, Any]) -> Any:
    """An expression of PyTorch's symbols in the letters of the formula."""
    named = _named(expression, names)
    return named.xreplace({x: letters.symbol(x.name) for x in named.free_symbols})


def _named(expression: Any, names: Mapping[Any, Any]) -> Any:
    """An expression of PyTorch's symbols and functions in sympy's."""
    plain = expression.xreplace(names)
    for theirs, ours in _FUNCTIONS.items():
        plain = plain.replace(theirs, ours)
    return plain


_FUNCTIONS: dict[Any, Any] = {
    torch_sympy.IntTrueDiv: lambda a, b: a / b,
    torch_sympy.CleanDiv: lambda a, b: a / b,
    torch_sympy.FloorDiv: lambda a, b: sympy.floor(a / b),
    torch_sympy.PowByNatural: lambda a, b: a**b,
    torch_sympy.CeilToInt: sympy.ceiling,
    torch_sympy.FloorToInt: sympy.floor,
    torch_sympy.PythonMod: sympy.Mod,
    torch_sympy.Mod: sympy.Mod,
    torch_sympy.Max: sympy.Max,
    torch_sympy.Min: sympy.Min,
}


def _shape(shape: Sequence[Any], names: Mapping[Any, Any]) -> tuple[Any, ...]:
    return tuple(
        _as_letters(each.node.expr, names) if isinstance(each, torch.SymInt) else each
        for each in shape
    )


# --- several sizes -------------------------------------------------------------------------------


def _interpolated(subject: Subject, reason: str) -> Derived:
    """The formula from runs at several sizes.

    One formula per tensor, or per operation of a module if sizes change the number of tensors.

    Raises:
        DeriveError: A run stops, or the bytes are not a polynomial.
    """
    sizes = subject.sizes
    runs: dict[tuple[int, ...], ValuelessRun] = {}

    def run(at: Mapping[str, int]) -> ValuelessRun:
        key = tuple(at.values())
        if key not in runs:
            doing(f"measuring at {sizes_text(at)} (run {len(runs) + 1})")
            runs[key] = subject.at(at)
        return runs[key]

    try:
        first = run(sizes)
        for alike in (list, _by_operation):
            rows = alike(first.stored)
            try:
                found = interpolated(_bytes_of(rows, alike, run), sizes)
                break
            except _OtherTensorsError as error:
                other = error
        else:
            raise DeriveError(f"the module cannot be derived: {other}")
    except (StoppedError, ValueError) as error:
        raise DeriveError(f"the module cannot be derived: {error}") from error
    tensors = tuple(
        _kept(each, Formula(expression), each.shape)
        for each, expression in zip(rows, found.expressions, strict=True)
    )
    return Derived(
        tensors,
        dict(sizes),
        found.method,
        (f"multiples of {sizes_text(sizes)}",),
        (f"not symbolic: {reason}", *first.told),
    )


class _OtherTensorsError(Exception):
    """At other sizes the module saves other tensors."""


def _by_operation(stored: Sequence[Stored]) -> list[Stored]:
    """What each operation of each module makes, summed up as one storage without a shape."""
    together: dict[Any, Stored] = {}
    for each in stored:
        key = _who(each)
        before = together.get(key)
        more = before.bytes if before else 0
        together[key] = replace(each, bytes=each.bytes + more, shape=("all",))
    return list(together.values())


def _bytes_of(
    rows: Sequence[Stored],
    alike: Callable[[Sequence[Stored]], list[Stored]],
    run: Callable[[Mapping[str, int]], ValuelessRun],
) -> Callable[[Mapping[str, int]], list[int]]:
    """From sizes to the bytes of the storages of ``rows``; it refuses other storages."""

    def measured(at: Mapping[str, int]) -> list[int]:
        stored = alike(run(at).stored)
        if [_who(each) for each in stored] != [_who(each) for each in rows]:
            raise _OtherTensorsError("it saves other tensors at other sizes")
        return [each.bytes for each in stored]

    return measured


def _who(each: Stored) -> tuple[str, str, str]:
    return each.path, each.op, each.made_by


# --- what is saved -------------------------------------------------------------------------------


def _kept(each: Stored, formula: Formula, shape: tuple[Any, ...]) -> Kept:
    kind = _kind(each)
    op = operation(each.op) if each.op else kind
    return Kept(each.path, op, shape, each.dtype, formula, each.saved_by, kind, each.made_by)


def _kind(each: Stored) -> str:
    return ACTIVATION if each.op else BUFFER if each.made_by else INPUT


def _rewritten(derived: Derived, written: Mapping[str, Any]) -> Derived:
    """A formula with some letters replaced by expressions."""
    new = {letters.symbol(letter): expression for letter, expression in written.items()}

    def again(expression: Any) -> Any:
        if isinstance(expression, str | int):
            return expression
        return sympy.expand(expression.subs(new, simultaneous=True))

    return replace(
        derived,
        tensors=tuple(
            each._replace(
                formula=Formula(again(each.formula.expression)),
                shape=tuple(again(size) for size in each.shape),
            )
            for each in derived.tensors
        ),
        conditions=tuple(again(each) for each in derived.conditions),
    )
