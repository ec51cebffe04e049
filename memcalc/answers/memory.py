"""``memory``: memory per GPU at every pipeline stage, and whether it fits."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from memcalc import symbols
from memcalc.analysis import fill as filling
from memcalc.analysis.device import Phase, StageMemory, device
from memcalc.analysis.headroom import VERDICTS, Headroom, headroom
from memcalc.analysis.parts import CERTAINTIES, GROUPS, Part
from memcalc.answers.memory_notes import ranges, setting_notes
from memcalc.answers.notes import loss_note, notes, recomputation, whole_setting
from memcalc.answers.warnings import of_gpu
from memcalc.config import Config
from memcalc.config.gpus import budget as size_of
from memcalc.config.gpus import gpu, is_gpu, smallest
from memcalc.config.run import UNBALANCED
from memcalc.errors import UsageError
from memcalc.report import Column, Report, scales
from memcalc.units import format_flops, in_scale

BESIDE = "not allocated"  # the group of what a GPU needs beyond the allocated bytes
APPENDIX_C = "Korthikanti et al. 2022, appendix C"
MOST_SHOWN = 64  # stages in one line
OPTIMIZER = "optimizer states"
MOST_OVER = 8  # stages that a failure names
# How soon a narrow table leaves a group's column out: see Column.detail.
DETAIL = {**dict.fromkeys(GROUPS, 2), "logits": 3, "buffers": 3}
STAGES: tuple[Column, ...] = (
    Column("stage", "count", least=0),
    Column("layers", "count", detail=4, least=0),
    Column("in_flight", "count", detail=4, least=0),
    *(Column(f"{group}_bytes", "bytes", detail=DETAIL[group]) for group in GROUPS),
    Column("peak_phase", "text", detail=4),
    Column("peak_bytes", "bytes"),
    Column("reserved_estimated_bytes", "bytes", detail=1, optional=True),
    Column(
        "capacity_bytes",
        "bytes",
        detail=5,
        optional=True,
        description="The budget, or what a process gets of the GPU's memory.",
    ),
    Column(
        "verdict",
        "text",
        detail=5,
        optional=True,
        choices=tuple(VERDICTS),
        description="The verdict fits also counts reserved memory, CUDA context and NCCL; null "
        "without a GPU.",
    ),
    Column(
        "fits",
        "text",
        detail=1,
        optional=True,
        definition="flag",
        description="Whether the verdict is fits.",
    ),
)
PARTS: tuple[Column, ...] = (
    Column("stage", "count", least=0),
    Column("phase", "text", detail=True),
    Column("part", "text"),
    Column("group", "text", detail=True, choices=(*GROUPS, BESIDE)),
    Column(
        "bytes",
        "bytes",
        least=-math.inf,
        description="Negative where the row subtracts memory that another part counts but has "
        "already freed.",
    ),
    Column("certainty", "text", choices=tuple(CERTAINTIES)),
    Column("source", "text", detail=True),
)


class Room(NamedTuple):
    """The memory that a run may use.

    Attributes:
        name: The GPU, or the size as it was written.
        bytes: Its bytes.
    """

    name: str
    bytes: int


def memory(
    config: Config,
    budget: str | None = None,
    explain: bool = False,
    fill: bool = False,
    margin: str | None = None,
) -> Report:
    """Memory per GPU at every pipeline stage, by kind, and whether it fits.

    The peak is the most that PyTorch's allocator has handed out at any time of a step: the largest
    phase, never a sum of peaks. What the GPU needs beyond that (reserved memory, CUDA context,
    NCCL) is estimated beside it, and the verdict includes it.

    Args:
        config: The model, its parallelism and its run.
        budget: A size with its unit, or a GPU, instead of the run's GPU: a stage that does not fit
            into it is a failure.
        explain: Whether the rows are the parts of each peak, with their certainty and source.
        fill: Whether recomputation is skipped for as many micro-batches in flight as fit
            (Korthikanti et al. 2022, appendix C).
        margin: What to leave free beyond the allocated bytes, a size or a percentage of them,
            instead of the estimate.

    Raises:
        ConfigError: The budget is neither a size nor a GPU; the stages cannot be counted; or they
            have fewer ranks than the experts need.
        UsageError: There is nothing to fill, or no memory to fill; or the margin is no size.

    >>> from memcalc.config import load
    >>> report = memory(load("22b", sp=True, recompute="selective"))
    >>> report.records()[0]["verdict"], report.answer[:16]
    ('fits', 'fits a100-80gb (')
    """
    config = config.padded
    config.parallel.experts_fit()
    room = _limit(budget) or _capacity(config)
    beyond = headroom(config, margin)
    held = device(config)
    lines = [*notes(config, "exact"), *loss_note(config), *setting_notes(config, explain)]
    if budget is not None and is_gpu(budget):
        run = replace(config.run, gpu=budget)  # refuses fp8 where the GPU has none
        lines += (f"warning: {line}" for line in of_gpu(gpu(budget), run.precision))
    peaks = _under_imbalance(config, held)
    if fill:
        held, more = _filled(config, held, room_of(config, budget), beyond)
        lines += more
    if explain:
        columns, rows = PARTS, _parts(config, held, peaks, beyond)
    else:
        columns, rows = STAGES, _stages(held, room, beyond, headroom(config))
    size = _in_unit_of(columns, rows)
    if not fill:  # which leaves less room for an uneven router
        lines += _experts_note(peaks, size)
    lines.append(_phase_note(held))
    if explain:
        lines += [f"{name}: {what}" for name, what in CERTAINTIES.items()]
    verdict = room and beyond.verdict(_worst(held).peak.bytes, room.bytes)
    return Report(
        "memory",
        f"Memory per GPU{' at each stage' if config.parallel.pp > 1 else ''} of "
        f"{whole_setting(config)}, {recomputation(config)}",
        columns,
        rows,
        symbols.values(config),
        tuple(dict.fromkeys(lines)),
        tuple(_over(held, room, beyond, size)) if room and budget is not None else (),
        _verdict(held, room, beyond, size) if room else _smallest(config, held, beyond, size),
        None if verdict is None else verdict == "fits",
    )


def room_of(config: Config, budget: str | None) -> Room:
    """The memory to fill: the budget, or else the run's GPU.

    Raises:
        ConfigError: The budget is neither a size nor a GPU.
        UsageError: There is neither.
    """
    room = _limit(budget) or _capacity(config)
    if room is None:
        raise UsageError("--fill needs a GPU (--gpu) or a size (--budget)")
    return room


def _limit(budget: str | None) -> Room | None:
    if budget is None:
        return None
    return Room(gpu(budget).name if is_gpu(budget) else budget, size_of(budget))


def _capacity(config: Config) -> Room | None:
    if config.run.gpu is None:
        return None
    found = gpu(config.run.gpu)
    return Room(found.name, found.usable_bytes)


def _worst(held: Sequence[StageMemory]) -> StageMemory:
    """The stage with the largest peak. The estimate beyond it has the same rule on all stages."""
    return max(held, key=lambda stage: stage.peak.bytes)


def _in_unit_of(columns: Sequence[Column], rows: Sequence[Sequence[Any]]) -> Callable[[int], str]:
    """How a sentence beside a table writes bytes: in the table's unit."""
    scale = scales(columns, rows)["bytes"]
    return lambda value: in_scale(value, scale)


def _verdict(
    held: Sequence[StageMemory], room: Room, beyond: Headroom, size: Callable[[int], str]
) -> str:
    """The first line, for a GPU or a budget: whether the run fits, and by how much."""
    worst = _worst(held)
    peak = worst.peak.bytes
    needed, verdict = beyond.needed(peak), beyond.verdict(peak, room.bytes)
    gpu_ = f"{room.name} ({size(room.bytes)})"
    at = f"stage {worst.stage}, {worst.peak.name}"
    needs = f"at the peak ({at}), which needs {size(needed)}: {_sum(beyond, peak, size)}"
    if verdict == "fits":
        return f"fits {gpu_}: {size(room.bytes - needed)} stay free {needs}"
    short = f"does not fit {gpu_}: {size(needed - room.bytes)} short {needs}"
    stages = sum(beyond.verdict(each.peak.bytes, room.bytes) != "fits" for each in held)
    do_not = "does not" if stages == 1 else "do not"
    several = f"; {stages} of {len(held)} stages {do_not} fit" if len(held) > 1 else ""
    if verdict == "allocated_only":
        return f"{short}; allocated bytes alone would fit{several}"
    group, largest = max(by_group(worst.peak).items(), key=lambda item: item[1])
    name = OPTIMIZER if group == "optimizer" else group
    return f"{short}; largest part: {name}, {size(largest)}{several}"


def _sum(beyond: Headroom, peak: int, size: Callable[[int], str]) -> str:
    """What the bytes that a GPU needs at a peak consist of."""
    parts = [f"{size(part.bytes)} {part.name}" for part in beyond.parts(peak)]
    return " + ".join((f"{size(peak)} allocated", *parts))


def _smallest(
    config: Config, held: Sequence[StageMemory], beyond: Headroom, size: Callable[[int], str]
) -> str:
    """The first line where no GPU is named: the peak, and the smallest GPU that holds it."""
    worst = _worst(held)
    peak = worst.peak.bytes
    line = (
        f"peak of {size(peak)} allocated (stage {worst.stage}, {worst.peak.name}), "
        f"{size(beyond.needed(peak))} with {beyond.name}: "
    )
    needed = beyond.needed(peak)
    while found := smallest(needed, config.run.precision):
        on_it = _worst(device(config.on_gpu(found.name))).peak.bytes  # with its workspaces
        if beyond.needed(on_it) <= found.usable_bytes:
            fits = f"{found.name} ({size(found.usable_bytes)})"
            return f"{line}the smallest NVIDIA GPU with {config.run.precision} that fits is {fits}"
        needed = found.usable_bytes + 1
    return f"{line}no NVIDIA GPU of the catalog with {config.run.precision} holds that"


def _over(
    held: Sequence[StageMemory], limit: Room, beyond: Headroom, size: Callable[[int], str]
) -> Iterator[str]:
    """A line for each of the first stages that do not fit into the budget."""
    over = [each for each in held if beyond.verdict(each.peak.bytes, limit.bytes) != "fits"]
    for each in over[:MOST_OVER]:
        peak = each.peak.bytes
        needed = beyond.needed(peak)
        yield (
            f"stage {each.stage} needs {size(needed)} ({size(peak)} allocated at its peak, "
            f"{each.peak.name}), {size(needed - limit.bytes)} more than the budget {limit.name}"
        )
    if len(over) > MOST_OVER:
        yield f"{len(over) - MOST_OVER} more stages do not fit"


def _stages(
    held: Sequence[StageMemory], room: Room | None, beyond: Headroom, estimate: Headroom
) -> tuple[tuple[Any, ...], ...]:
    """One row per stage: the parts of its peak by group, and its verdict."""
    rows = []
    for each in held:
        peak = each.peak.bytes
        verdict = room and beyond.verdict(peak, room.bytes)
        rows.append(
            (
                each.stage,
                each.layers,
                sum(each.in_flight.values()),
                *by_group(each.peak).values(),
                each.peak.name,
                peak,
                estimate.allocator(peak),
                room and room.bytes,
                verdict,
                verdict and verdict == "fits",
            )
        )
    return tuple(rows)


def _parts(
    config: Config,
    held: Sequence[StageMemory],
    peaks: Mapping[float, Sequence[int]],
    beyond: Headroom,
) -> tuple[tuple[Any, ...], ...]:
    """One row per part of each stage's peak, with its certainty and its source."""
    return tuple(
        (each.stage, each.peak.name, part.name, part.group, part.bytes, part.certainty, part.source)
        for each in held
        for part in (*each.peak.parts, *_beside(config, each, peaks, beyond))
    )


def _beside(
    config: Config,
    memory: StageMemory,
    peaks: Mapping[float, Sequence[int]],
    beyond: Headroom,
) -> Iterator[Part]:
    """What the GPU needs beyond the peak, or would need: in no group of allocated parts."""
    for part in beyond.parts(memory.peak.bytes):
        yield part._replace(group=BESIDE)
    for imbalance, sizes in peaks.items():
        if imbalance > config.run.imbalance:
            more = sizes[memory.stage] - peaks[config.run.imbalance][memory.stage]
            name = f"not in the peak: experts with --imbalance {imbalance:g}"
            yield Part(name, more, BESIDE, "estimated", "routers are uneven: --imbalance")


def by_group(phase: Phase) -> dict[str, int]:
    """The bytes of a phase by the groups of its parts, in their order.

    >>> by_group(Phase("step", [Part("master weights", 4, "optimizer", "exact", "")]))["optimizer"]
    4
    """
    sizes = dict.fromkeys(GROUPS, 0)
    for part in phase.parts:
        sizes[part.group] += part.bytes
    return sizes


def _filled(
    config: Config, held: Sequence[StageMemory], room: Room, beyond: Headroom
) -> tuple[list[StageMemory], list[str]]:
    """The stages with as many micro-batches not recomputed as fit, and a note about them."""
    found, lines, saved, again = [], [], 0, 0
    most = beyond.allocatable(room.bytes)
    for each in held:
        kept = filling.fill(config, each.stage, most - each.peak.bytes)
        part = Part("micro-batches not recomputed", kept.bytes, "activations", "exact", APPENDIX_C)
        phases = [
            phase._replace(parts=(*phase.parts, part))
            if part.bytes and _in_a_pass(phase)
            else phase
            for phase in each.phases
        ]
        found.append(each._replace(phases=phases))
        lines.append(f"{kept.whole}/{kept.window}")
        saved, again = saved + kept.saved, again + kept.recomputed
    share = f"{100 * saved / again:.1f}" if again else "0"
    more = " ..." if len(lines) > MOST_SHOWN else ""
    return found, [
        f"micro-batches in flight that are not recomputed, per stage: "
        f"{' '.join(lines[:MOST_SHOWN])}{more}; this saves {share} % of the "
        f"{format_flops(again)} recomputed per iteration",
    ]


def _in_a_pass(phase: Phase) -> bool:
    return any(part.group == "activations" for part in phase.parts)


def _under_imbalance(config: Config, held: Sequence[StageMemory]) -> dict[float, tuple[int, ...]]:
    """The stages' peaks under a balanced router, and where the busiest expert rank gets more."""
    if config.model.experts is None or config.parallel.ep == 1:
        return {}
    found = {config.run.imbalance: tuple(stage.peak.bytes for stage in held)}
    for imbalance in (1, UNBALANCED):
        if imbalance not in found:
            run = replace(config.run, imbalance=imbalance)
            found[imbalance] = tuple(s.peak.bytes for s in device(replace(config, run=run)))
    return dict(sorted(found.items()))


def _experts_note(
    peaks: Mapping[float, Sequence[int]], size: Callable[[int], str]
) -> Iterator[str]:
    """The peak under a balanced and under an uneven router."""
    shown = ", ".join(
        f"{size(max(sizes))} (stage {sizes.index(max(sizes))}) with --imbalance {x:g}"
        for x, sizes in peaks.items()
    )
    if shown:
        yield (
            f"largest peak of all stages, allocated: {shown}; measured peaks of MoE runs grew over "
            "the first steps, as they do when routing becomes less balanced"
        )


def _phase_note(held: Sequence[StageMemory]) -> str:
    """The phase of each stage's peak."""
    stages: dict[str, list[int]] = {}
    for each in held:
        stages.setdefault(each.peak.name, []).append(each.stage)
    return "peaks: " + ", ".join(f"{name} on {ranges(numbers)}" for name, numbers in stages.items())
