"""``ledger``: what one layer keeps for backward, tensor by tensor."""

from memcalc import symbols
from memcalc.analysis import activations
from memcalc.answers.notes import notes, recomputation, setting
from memcalc.blocks.layer import KIND, layer_graph
from memcalc.config import Config
from memcalc.graph.graph import Tensor
from memcalc.report import Column, Report
from memcalc.units import format_bytes


def ledger(config: Config, accounting: str = "paper") -> Report:
    """Each tensor that one layer keeps on one rank, under the config's own choices.

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
    graph = layer_graph(config)
    entries = activations.counted(activations.kept(graph, config.run.policy), accounting)
    dropped_by = activations.drops(graph)
    size = activations.total(entries)
    return Report(
        "ledger",
        f"What one layer of {setting(config)} keeps, {recomputation(config)}: "
        f"{format_bytes(size)} in {len(entries)} tensor{'s' if len(entries) > 1 else ''}",
        (
            Column("layer_kind", "text", detail=True),
            Column("tensor", "text"),
            Column("op", "text"),
            Column("shape", "text"),
            Column("split", "text", detail=True),
            Column("bytes", "bytes"),
            Column("dropped_by", "text"),
            Column("reason", "text", detail=True),
            Column("source", "text", detail=True),
        ),
        tuple(
            (
                KIND,
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
        ),
        symbols.values(config),
        notes(config, accounting),
    )


def _split(tensor: Tensor, config: Config) -> str:
    """What splits a tensor; ``replicated`` where several ranks hold the same, all or in part."""
    if any(axis.shown.startswith("Max") for axis in tensor.axes):
        return "tensor, replicated"
    return tensor.split or ("replicated" if config.parallel.tp > 1 else "none")
