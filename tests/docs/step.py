"""The table and the figure of docs/step.md, from the timeline."""

import hashlib
import io
from collections.abc import Hashable
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from memcalc.analysis.rank import EMBEDDING, HEAD
from memcalc.analysis.timeline import PASS
from memcalc.config import load
from memcalc.figures import backend
from memcalc.units import MIB

DOCS = Path(__file__).parents[2] / "docs"
PAGE, FIGURE = DOCS / "step.md", DOCS / "step.png"
BEGIN, END = "<!-- tests/docs/refresh.py writes this table -->\n", "<!-- end of the table -->\n"
MODEL = "gpt2"
RUN = {"implementation": "transformers-sdpa", "main_grads": "bf16"}
RUN |= {"main_params": "none", "moments": "bf16"}
HEADS = ("phase", "operation", "names", "allocates", "frees", "most", "after")
MOST_NAMED = 4  # storages of a row
LEAST = 2**16  # bytes of a row, and of a storage that is named
DPI = 120


class Row(NamedTuple):
    """What a few events in order do.

    Attributes:
        phase: The phase.
        where: The layer, or the end of the model; None beside them.
        op: The operation, or nothing for those of several layers.
        points: The events.
    """

    phase: str
    where: Hashable
    op: str
    points: list


def page() -> str:
    """What docs/step.md has to be."""
    before, rest = PAGE.read_text().split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


def table() -> str:
    """The events of an iteration, a row per operation; of later layers, a row."""
    found = rows()
    most = max(highest(row) for row in found)
    lines = ["| " + " | ".join(HEADS) + " |", "|---|---|---|--:|--:|--:|--:|"]
    for row in found:
        events = [point.event for point in row.points]
        born = [event for event in events if event.bytes > 0]
        total = sum(event.bytes for event in born)
        freed = total - sum(event.bytes for event in events)
        if total + freed < LEAST:
            continue
        peak = f"**{highest(row) / MIB:,.2f}**" if highest(row) == most else None
        cells = (
            row.phase,
            operation(row),
            names(born) if row.op else "",
            mib(total),
            mib(freed),
            peak or mib(highest(row)),
            mib(row.points[-1].allocated),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def rows() -> list[Row]:
    """The rows of the table: the first layer of a pass by its operations, the others as one row."""
    from memcalc.figures import step

    found: list[Row] = []
    for phase, of_phase in groupby(step.points(load(MODEL, **RUN).padded), lambda p: p.phase):
        where: Hashable = None
        first: Hashable = None
        for op, group in groupby(of_phase, lambda p: p.event.op):
            points = list(group)
            born = [point.event for point in points if point.event.bytes > 0]
            where = step.graph_of(born[0]) if born else where
            if isinstance(where, int) and first is None:
                first = where
            if not isinstance(where, int) or where == first:
                found.append(Row(phase, where, op, points))
            elif found[-1].op:
                found.append(Row(phase, where, "", points))
            else:
                found[-1].points.extend(points)
    return found


def highest(row: Row) -> int:
    """The most bytes that are allocated in a row."""
    return max(point.allocated for point in row.points)


def operation(row: Row) -> str:
    """Where a row is, and what runs."""
    if not row.op:
        return "the other layers"
    names = {EMBEDDING: "embedding", HEAD: "head", None: ""}
    where = "" if row.op == PASS else names.get(row.where, f"layer {row.where}")
    return f"{where}: `{row.op}`" if where else f"`{row.op}`"


def names(born: list) -> str:
    """The storages that are allocated, or their number."""
    found = []
    for event in born:
        if event.bytes < LEAST:
            continue
        what = event.storage[1]
        parts = what if isinstance(what, tuple) else (what,)
        found.append(" ".join(str(getattr(part, "name", part)) for part in parts))
    if len(found) > MOST_NAMED:
        return f"{len(found)} tensors"
    return ", ".join(found).replace("_", " ")


def mib(size: int) -> str:
    """Bytes in MiB; nothing for none."""
    return f"{size / MIB:,.2f}" if size else ""


def description() -> str:
    """The numbers of the figure: all its texts, and a hash of its points."""
    backend.load()
    from memcalc.figures import step

    (curve, answer), title = step.numbers(load(MODEL, **RUN), None)
    sizes = [(p.place, p.phase, p.sizes, p.reserved) for p in curve.points]
    return f"{title}. {answer}. {hashlib.sha256(repr(sizes).encode()).hexdigest()}"


def written() -> str:
    """The numbers of the committed figure."""
    from PIL import Image

    if not FIGURE.exists():
        return ""
    with Image.open(FIGURE) as image:
        return str(image.info.get("Description"))


def figure() -> bytes:
    """The figure as a PNG, with its numbers as its description."""
    backend.load()
    from memcalc.figures import plot

    out = io.BytesIO()
    metadata = {"Software": None, "Description": description()}
    plot("step", load(MODEL, **RUN)).savefig(out, format="png", dpi=DPI, metadata=metadata)
    return out.getvalue()
