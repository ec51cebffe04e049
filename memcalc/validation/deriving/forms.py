"""A derived formula as a report: every tensor with its bytes, and the total."""

from collections.abc import Mapping, Sequence

from memcalc.formulas import Formula
from memcalc.report import Column, Report, with_detail
from memcalc.units import format_bytes
from memcalc.validation.deriving.derived import BUFFER, Derived, Kept, total
from memcalc.validation.deriving.interpolation import sizes_text

COLUMNS = (
    Column("layer_kind", "text"),
    Column("tensor", "text"),
    Column("module", "text"),
    Column("op", "text", detail=True),
    Column("formula", "formula"),
    Column("bytes", "bytes"),
)


def report(derived: Derived, sizes: Mapping[str, int]) -> Report:
    """A module's formula, evaluated at sizes."""
    return forms("a module", {"": derived.tensors}, sizes, how(derived))


def how(derived: Derived) -> tuple[str, ...]:
    """How a formula was found, and where it holds."""
    held = f"; the formula holds for {', '.join(derived.guards)}" if derived.guards else ""
    return (f"method: {derived.method}{held}", *derived.notes)


def forms(
    title: str,
    parts: Mapping[str, Sequence[Kept]],
    sizes: Mapping[str, int],
    about: Sequence[str],
) -> Report:
    """The tensors of each part and their total, evaluated at sizes."""
    rows, totals = [], {}
    buffers = [each for tensors in parts.values() for each in tensors if each.kind == BUFFER]
    for name, tensors in parts.items():
        mine = [each for each in tensors if each.kind != BUFFER]
        rows += [
            (name, each.tensor, each.module, each.op, each.formula, int(each.formula.value(sizes)))
            for each in mine
        ]
        whole = total(mine)
        totals[name] = whole, int(whole.value(sizes))
        rows.append((name, "total", "", "", *totals[name]))
    there = (f"not counted: buffers of the module, {_listed(buffers)}",) if buffers else ()
    return Report(
        "derive",
        f"Saved for backward by {title}",
        with_detail(COLUMNS, layer_kind=len(parts) == 1),
        tuple(rows),
        dict(sizes),
        (*about, *there),
        answer=_answer(totals, sizes),
    )


def _answer(totals: Mapping[str, tuple[Formula, int]], sizes: Mapping[str, int]) -> str:
    """The formula of the only part, or the bytes of each."""
    if len(totals) == 1:
        ((formula, number),) = totals.values()
        return f"bytes saved for backward: {formula} = {format_bytes(number)}"
    parts = ", ".join(f"{name} {format_bytes(number)}" for name, (_, number) in totals.items())
    return (
        "saved for backward by one layer of each kind, and outside the layers, at "
        f"{sizes_text(sizes)}: {parts}"
    )


def _listed(buffers: Sequence[Kept]) -> str:
    return ", ".join(f"{each.name} ({each.formula} bytes)" for each in buffers)
