"""A derived form as a report: every tensor with its bytes, and their sum."""

from collections.abc import Mapping, Sequence

from memcalc.report import Column, Report
from memcalc.validation.derivation import BUFFER, Derived, Kept, total


def report(derived: Derived, sizes: Mapping[str, int]) -> Report:
    """A module's form, evaluated at sizes."""
    return forms("a module keeps", {"": derived.tensors}, sizes, how(derived))


def how(derived: Derived) -> tuple[str, ...]:
    """How a form was found, and where it holds."""
    held = f"; it holds for {', '.join(derived.guards)}" if derived.guards else ""
    return (f"found: {derived.method}{held}", *derived.notes)


def forms(
    title: str,
    parts: Mapping[str, Sequence[Kept]],
    sizes: Mapping[str, int],
    about: Sequence[str],
) -> Report:
    """The tensors of each part and their sum, evaluated at sizes."""
    rows = []
    buffers = [each for tensors in parts.values() for each in tensors if each.kind == BUFFER]
    for name, tensors in parts.items():
        mine = [each for each in tensors if each.kind != BUFFER]
        rows += [
            (name, each.tensor, each.module, each.op, each.formula, int(each.formula.value(sizes)))
            for each in mine
        ]
        whole = total(mine)
        rows.append((name, "total", "", "", whole, int(whole.value(sizes))))
    there = (f"kept besides, and there anyway: {_listed(buffers)}",) if buffers else ()
    return Report(
        "derive",
        f"What {title}",
        (
            Column("layer_kind", "text", detail=len(parts) == 1),
            Column("tensor", "text"),
            Column("module", "text"),
            Column("op", "text", detail=True),
            Column("formula", "formula"),
            Column("bytes", "bytes"),
        ),
        tuple(rows),
        dict(sizes),
        (*about, *there),
    )


def _listed(buffers: Sequence[Kept]) -> str:
    return ", ".join(f"{each.name} ({each.formula} bytes)" for each in buffers)
