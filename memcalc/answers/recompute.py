"""``recompute``: what each policy keeps of one layer, and what it costs."""

from collections.abc import Iterator
from typing import Any

from memcalc import symbols
from memcalc.analysis import activations
from memcalc.analysis import fill as filling
from memcalc.analysis import flops as count
from memcalc.analysis.activations import NOTHING
from memcalc.analysis.device import device
from memcalc.analysis.stages import chunks
from memcalc.answers.memory import Room, room_of
from memcalc.answers.notes import attention_kernels, flash_note, notes, setting
from memcalc.blocks.layer import kinds, layer_graph
from memcalc.config import Config
from memcalc.config.recompute import MEGATRON_MODULES, POLICIES, REGIONS, Policy
from memcalc.graph.graph import Graph
from memcalc.report import Column, Report


def recompute(
    config: Config, accounting: str = "paper", budget: str | None = None, fill: bool = False
) -> Report:
    """Each policy for one layer: bytes kept and saved on one rank, FLOPs over all ranks.

    A row is added for the run's own set of regions where it is not among the policies, and one for
    each policy of which PyTorch's checkpoint, as it is unless told otherwise, makes less again: it
    stops once the last tensor that backward needs is there. The last is what a flash kernel's own
    backward makes again.

    Args:
        config: The model, its parallelism and its run.
        accounting: ``paper`` or ``exact``.
        budget: The memory to fill, a size or a GPU; by default the run's GPU.
        fill: Whether a row is added for each pipeline stage, with as many of its micro-batches
            kept whole as its free memory holds.

    Raises:
        UsageError: There is no such accounting; or nothing to fill, or no memory to fill it into.

    >>> from memcalc.config import load
    >>> report = recompute(load("175b"))
    >>> s, b, h = 2048, 1, 12288
    >>> report.records()[1]["extra_flops"] == 4 * b * s**2 * h
    True
    """
    rows = [row for kind in kinds(config) for row in _rows(config, kind, accounting)]
    lines: list[str] = []
    if fill:
        room = room_of(config, budget)
        lines.append(
            f"of stages: a layer's mean over their micro-batches, where as many are kept whole as "
            f"{room.name} holds (Korthikanti et al. 2022, appendix C)"
        )
        rows += _filled(config, accounting, room)
    return Report(
        "recompute",
        f"Recomputation in one layer of {setting(config)}",
        (
            Column("layer_kind", "text", detail=True),
            Column("policy", "text"),
            Column("kept_bytes", "bytes"),
            Column("saved_bytes", "bytes"),
            Column("extra_flops", "flops"),
            Column("saved_bytes_per_extra_flop", "ratio"),
        ),
        tuple(rows),
        symbols.values(config),
        (
            *notes(config, accounting),
            *flash_note(config),
            "bytes are one rank's; FLOPs are one micro-batch's over all ranks",
            "early stop: torch.utils.checkpoint's default, which leaves out what it needs no more",
            *_flash_backward_note(config),
            *lines,
        ),
    )


def _filled(config: Config, accounting: str, room: Room) -> Iterator[tuple[Any, ...]]:
    """A row for each stage and kind of its layers: the means over its micro-batches."""
    config = config.padded
    for memory in device(config):
        kept = filling.fill(config, memory.stage, room.bytes - memory.peak.bytes)
        policy = f"stage {memory.stage}: {kept.whole} of {kept.window} whole"
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
    """The rows of one kind of layer; those of early stop, and of flash kernels, come last."""
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


def _flash_backward_note(config: Config) -> tuple[str, ...]:
    if not attention_kernels(config):
        return ()
    return (
        "flash backward: the scores that the kernel's own backward makes again under every policy; "
        "PyTorch's counter counts them, and no other row here has them",
    )


def _policies(config: Config, graph: Graph) -> dict[str, Policy]:
    """Policies with names, single regions that the layer has, and the run's own."""
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
