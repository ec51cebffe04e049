"""``ledger``: what one layer keeps for backward, tensor by tensor."""

import re
from typing import Any

from memcalc import symbols
from memcalc.analysis import activations
from memcalc.answers.notes import notes, recomputation, setting
from memcalc.blocks.layer import kinds, layer_graph
from memcalc.config import Config
from memcalc.graph.graph import Tensor
from memcalc.report import Column, Report, with_detail
from memcalc.units import counted, format_bytes

COLUMNS = (
    Column("layer_kind", "text"),
    Column("tensor", "text"),
    Column("op", "text"),
    Column("shape", "text"),
    Column("split", "text", detail=1),
    Column("bytes", "bytes"),
    Column("dropped_by", "text", title="not saved under"),
    Column("reason", "text", detail=2),
    Column("source", "text", detail=3),
)


def ledger(config: Config, accounting: str = "paper") -> Report:
    """Each tensor that one layer saves for backward on one rank, under the config's own choices.

    Args:
        config: The model, its parallelism and its run.
        accounting: ``paper`` or ``exact``.

    Raises:
        UsageError: There is no such accounting.

    >>> from memcalc.config import load
    >>> report = ledger(load("22b", recompute="full"))
    >>> report.column("tensor"), report.column("bytes")
    (['layer_input'], [100663296])
    """
    found = {kind: _rows(config, kind, accounting) for kind in kinds(config)}
    letters = {letter for rows in found.values() for row in rows for letter in _letters(row[3])}
    return Report(
        "ledger",
        f"Tensors that one layer saves for backward per GPU: {setting(config)}, "
        f"{recomputation(config)}",
        with_detail(COLUMNS, layer_kind=len(found) == 1),
        tuple(row for rows in found.values() for row in rows),
        symbols.values(config),
        (*notes(config, accounting), *symbols.legend(letters)),
        answer="; ".join(_answer(kind, rows, len(found)) for kind, rows in found.items()),
    )


def _rows(config: Config, kind: str, accounting: str) -> list[tuple[Any, ...]]:
    graph = layer_graph(config, kind=kind)
    entries = activations.counted(activations.kept(graph, config.run.policy), accounting)
    dropped_by = activations.drops(graph)
    return [
        (
            kind,
            entry.tensor.name,
            ", ".join(entry.ops),
            entry.tensor.shape,
            _split(entry.tensor, config),
            entry.tensor.bytes,
            ", ".join(dropped_by(entry.tensor)),
            entry.reason,
            entry.source,
        )
        for entry in entries
    ]


def _letters(shape: str) -> str:
    """The letters of a shape; routed copies of tokens are several in one word.

    >>> _letters("32*ceil(s/32) b Max(1, k/t) out"), _letters("rsb h")
    ('sbkt', 'rsbh')
    """
    words = re.findall("[A-Za-z]+", shape)
    return "".join(word for word in words if len(word) == 1 or word.startswith("rsb"))


def _answer(kind: str, rows: list[tuple[Any, ...]], kinds_: int) -> str:
    """What one layer of a kind keeps, and its largest tensor."""
    size = format_bytes(sum(row[5] for row in rows))
    tensors = counted(len(rows), "tensor")
    line = f"{size} per {kind + ' ' if kinds_ > 1 else ''}layer per GPU in {tensors}"
    if len(rows) > 1:
        largest = max(rows, key=lambda row: int(row[5]))
        line += f" (largest: {largest[1]}, {format_bytes(largest[5])})"
    return line


def _split(tensor: Tensor, config: Config) -> str:
    """What shards a tensor; ``replicated`` where several ranks hold the same, all or in part."""
    if any(axis.shown.startswith("Max") for axis in tensor.axes):
        return "tensor, replicated"
    return tensor.split or ("replicated" if config.parallel.tp > 1 else "none")
