"""``recompute``: what each policy saves in one layer, and the FLOPs that it adds."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from memcalc import symbols
from memcalc.analysis import activations
from memcalc.analysis import fill as filling
from memcalc.analysis import flops as count
from memcalc.analysis.activations import NOTHING
from memcalc.analysis.device import device
from memcalc.analysis.headroom import headroom
from memcalc.analysis.stages import chunks
from memcalc.answers.memory import Room, room_of
from memcalc.answers.notes import attention_kernels, flash_note, loss_note, notes, setting
from memcalc.blocks.layer import kinds, layer_graph
from memcalc.config import Config
from memcalc.config.recompute import MEGATRON_MODULES, POLICIES, REGIONS, Policy
from memcalc.graph.graph import Graph
from memcalc.report import Column, Report, scales
from memcalc.units import in_scale

COLUMNS = (
    Column("layer_kind", "text", detail=True),
    Column("policy", "text"),
    Column("kept_bytes", "bytes"),
    Column("saved_bytes", "bytes", least=-math.inf),
    Column("extra_flops", "flops"),
    Column("saved_bytes_per_extra_flop", "ratio", optional=True),
)


def recompute(
    config: Config,
    accounting: str = "paper",
    budget: str | None = None,
    fill: bool = False,
    margin: str | None = None,
) -> Report:
    """One row per policy for one layer: bytes kept and saved per rank, FLOPs over all ranks.

    The run's own set of regions has a row if it is not one of the policies. A policy has a second
    row with early stop, PyTorch's default, if that recomputes less: recomputation ends at the last
    tensor that backward needs. The last row is what a flash kernel's own backward recomputes.

    Args:
        config: The model, its parallelism and its run.
        accounting: ``paper`` or ``exact``.
        budget: The memory to fill, a size or a GPU; by default the run's GPU.
        fill: Whether one row per pipeline stage is added, with as many of its micro-batches in
            flight not recomputed as fit.
        margin: With ``fill``: what to leave free beyond the allocated bytes, a size or a percentage
            of them, instead of the estimate.

    Raises:
        UsageError: There is no such accounting; or nothing to fill, or no memory to fill it into;
            or the margin is no size.

    >>> from memcalc.config import load
    >>> report = recompute(load("175b"))
    >>> s, b, h = 2048, 1, 12288
    >>> report.records()[1]["extra_flops"] == 4 * b * s**2 * h
    True
    """
    rows = [row for kind in kinds(config) for row in _rows(config, kind, accounting)]
    policies = len(rows)
    lines: list[str] = []
    if fill:
        room = room_of(config, budget)
        lines.append(
            f"rows of stages: means per layer over the micro-batches; as many micro-batches as fit "
            f"in {room.name} are not recomputed (Korthikanti et al. 2022, appendix C)"
        )
        rows += _filled(config, accounting, room, margin)
    report = Report(
        "recompute",
        f"Recomputation in one layer of {setting(config)}",
        COLUMNS,
        tuple(rows),
        symbols.values(config),
        (
            *dict.fromkeys((*notes(config, accounting), *flash_note(config))),
            *loss_note(config),
            "bytes are per rank; FLOPs, also of the last column, are of GEMMs, per micro-batch, "
            "over all ranks",
            "early stop: recomputation ends at the last tensor that backward needs "
            "(torch.utils.checkpoint's default)",
            *_dropped_note(rows),
            *_flash_backward_note(config),
            *lines,
        ),
    )
    return replace(report, answer=_best(report, policies, len(kinds(config)) > 1))


def _best(report: Report, policies: int, several: bool) -> str:
    """The policy that saves most bytes per recomputed FLOP, and the best one that adds no FLOPs.

    Both in words and in the table's units.

    Args:
        report: The report, whose first rows are the policies.
        policies: How many they are.
        several: Whether there are several kinds of layers.
    """
    rows = report.rows[:policies]
    unit = scales(report.columns, report.rows)

    def saving(row: tuple[Any, ...]) -> str:
        kind, _, kept, saved, *_ = row
        per = f"per {kind} layer" if several else "per layer"
        whole = in_scale(kept + saved, unit["bytes"])
        return f"saves {in_scale(saved, unit['bytes'])} of {whole} {per}"

    best = max(rows, key=lambda row: row[-1] or 0)
    line = "no policy with extra FLOPs saves bytes here"
    if best[-1]:
        line = (
            f"most bytes saved per extra FLOP: {best[1]}; it {saving(best)} for "
            f"{in_scale(best[4], unit['flops'])}"
        )
    free = [row for row in rows if row[3] and not row[4] and row[1] != "offload"]
    if free:
        most = max(free, key=lambda row: row[3])
        line += f"; without extra FLOPs {most[1]} {saving(most)}"
    return line


def _filled(
    config: Config, accounting: str, room: Room, margin: str | None
) -> Iterator[tuple[Any, ...]]:
    """One row per stage and kind of layer: the means over its micro-batches."""
    config = config.padded
    most = headroom(config, margin).allocatable(room.bytes)
    for memory in device(config):
        kept = filling.fill(config, memory.stage, most - memory.peak.bytes)
        policy = f"stage {memory.stage}: {kept.whole} of {kept.window} not recomputed"
        for kind in dict.fromkeys(kind for c in chunks(config, memory.stage) for kind in c):
            graph = layer_graph(config, kind=kind)
            whole, some = (
                activations.total(activations.counted(activations.kept(graph, each), accounting))
                for each in (NOTHING, config.run.policy)
            )
            saved = (whole - some) * (kept.window - kept.whole) // kept.window
            extra = round(count.recomputed(graph, config.run.policy) * (1 - kept.share))
            yield _row(kind, policy, whole - saved, saved, extra)


def _rows(config: Config, kind: str, accounting: str) -> list[tuple[Any, ...]]:
    """The rows of one kind of layer; early stop and flash backward come last."""
    graph = layer_graph(config, kind=kind)
    whole = activations.total(activations.counted(activations.kept(graph), accounting))
    rows, early = [], []
    for policy, recomputed in _policies(config, graph).items():
        entries = activations.counted(activations.kept(graph, recomputed), accounting)
        size = activations.total(entries)
        extra = count.recomputed(graph, recomputed)
        rows.append(_row(kind, policy, size, whole - size, extra))
        stopped = count.recomputed(graph, recomputed, early_stop=True)
        if stopped != extra and policy in POLICIES:
            early.append(_row(kind, f"{policy}, early stop", size, whole - size, stopped))
    again = count.flash_backward(graph)
    own = [_row(kind, "flash backward", whole, 0, again)] if again else []
    return rows + early + own


def _dropped_note(rows: list[tuple[Any, ...]]) -> tuple[str, ...]:
    """How much more Megatron's modules save than the regions with similar names."""
    there = {row[1] for row in rows}
    names = [name for name, each in MEGATRON_MODULES.items() if each.dropped and name in there]
    if not names:
        return ()
    return (
        f"{', '.join(names)}: Megatron's modules, which free and recompute the output too; regions "
        "keep their output",
    )


def _flash_backward_note(config: Config) -> tuple[str, ...]:
    if not attention_kernels(config):
        return ()
    return (
        "flash backward (no policy): FLOPs that a flash kernel's backward always spends on "
        "recomputing scores; PyTorch's FLOP counter includes them, the other rows here do not",
    )


def _policies(config: Config, graph: Graph) -> dict[str, Policy]:
    """The named policies, the layer's regions one by one, and the run's own set."""
    there = {r.name for op in graph.ops for r in op.regions if r.alone}
    policies = dict(POLICIES)
    for name in REGIONS:
        one = Policy(frozenset({name}))
        if name in there and one not in policies.values():
            policies[name] = one
    for name, policy in MEGATRON_MODULES.items():
        if policy.dropped & there:
            policies[name] = policy
    if config.run.policy not in policies.values():
        policies[",".join(config.run.recompute)] = config.run.policy
    return policies


def _row(kind: str, policy: str, size: int, saved: int, extra: int) -> tuple[Any, ...]:
    return kind, policy, size, saved, extra, saved / extra if extra else None
