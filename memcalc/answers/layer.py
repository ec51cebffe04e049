"""``layer``: the activation memory of one layer under each technique, as the paper's table 2."""

from collections.abc import Iterator
from typing import NamedTuple

from memcalc import symbols
from memcalc.analysis import activations
from memcalc.analysis.recompute import POLICIES
from memcalc.answers.notes import flash_note, notes, setting
from memcalc.blocks.layer import KIND, layer_graph
from memcalc.config import Config
from memcalc.formulas import layer_formula
from memcalc.graph.graph import Graph
from memcalc.report import Column, Report

PARTS = ("norm", "attention", "core attention", "mlp")


class Technique(NamedTuple):
    """A row of the paper's table 2."""

    name: str
    tensor_parallel: bool
    sequence_parallel: bool
    policy: str


TECHNIQUES = (
    Technique("none", False, False, "none"),
    Technique("tensor", True, False, "none"),
    Technique("tensor+sequence", True, True, "none"),
    Technique("tensor+selective", True, False, "selective"),
    Technique("tensor+sequence+selective", True, True, "selective"),
    Technique("full", True, False, "full"),
)


def layer(config: Config, accounting: str = "paper") -> Report:
    """Bytes that one layer keeps for backward on one rank, under each technique.

    The techniques are the report's rows, so the config's own sequence parallelism and
    recomputation do not matter here. ``full`` keeps the layer's input whole on every rank, as the
    paper counts it.

    Args:
        config: The model and its run; the tensor-parallel size is taken from it.
        accounting: ``paper`` or ``exact``.

    Raises:
        ConfigError: The tensor-parallel size does not divide the sequence.

    >>> from memcalc.config import load
    >>> report = layer(load("175b"))
    >>> [bytes // 2**20 for bytes in report.column("bytes")]
    [2736, 552, 342, 312, 102, 48]
    """
    kept = {
        technique.name: activations.total(activations.counted(entries, accounting))
        for technique, _, entries in by_technique(config)
    }
    rows = [
        (
            KIND,
            technique.name,
            layer_formula(
                config,
                accounting,
                [technique.policy],
                tensor_parallel=technique.tensor_parallel,
                sequence_parallel=technique.sequence_parallel,
            ),
            kept[technique.name],
            100 * kept[technique.name] / kept["tensor"],
        )
        for technique in TECHNIQUES
    ]
    lines = (*notes(config, accounting), *flash_note(config))
    if config.parallel.tp == 1:
        lines += ("tensor parallel 1: the rows with tensor parallelism equal those without",)
    return Report(
        "layer",
        f"Activation memory of one layer of {setting(config.with_parallel(sp=False))}",
        (
            Column("layer_kind", "text", detail=True),
            Column("technique", "text"),
            Column("formula", "formula"),
            Column("bytes", "bytes"),
            Column("percent_of_tensor", "percent"),
        ),
        tuple(rows),
        symbols.values(config),
        lines,
    )


def parts(config: Config, accounting: str = "paper") -> Report:
    """The same bytes by the part of the layer that keeps them: what ``plot techniques`` stacks.

    >>> from memcalc.config import load
    >>> parts(load("22b")).records()[1]
    {'technique': 'none', 'part': 'attention', 'bytes': 553648128}
    """
    rows = []
    for technique, graph, entries in by_technique(config):
        sizes = dict.fromkeys(PARTS, 0)
        dropped_by = activations.drops(graph)
        for entry in activations.counted(entries, accounting):
            core = "selective" in dropped_by(entry.tensor)
            sizes["core attention" if core else entry.regions[1]] += entry.tensor.bytes
        rows += [(technique.name, part, size) for part, size in sizes.items()]
    return Report(
        "plot",
        f"Activation memory of one layer of {setting(config.with_parallel(sp=False))}",
        (Column("technique", "text"), Column("part", "text"), Column("bytes", "bytes")),
        tuple(rows),
        symbols.values(config),
        notes(config, accounting),
    )


def by_technique(
    config: Config,
) -> Iterator[tuple[Technique, Graph, list[activations.Entry]]]:
    """Each technique with its graph and the tensors that are kept under it."""
    for technique in TECHNIQUES:
        tp = config.parallel.tp if technique.tensor_parallel else 1
        graph = layer_graph(config.with_parallel(tp=tp, sp=technique.sequence_parallel))
        yield technique, graph, activations.kept(graph, POLICIES[technique.policy])
