"""``memory``: a GPU at every pipeline stage, part by part at its peak, and whether that fits."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from memcalc import symbols
from memcalc.analysis import fill as filling
from memcalc.analysis.buffers import unknown
from memcalc.analysis.device import Phase, StageMemory, device
from memcalc.analysis.headroom import headroom, on_driver, reserved
from memcalc.analysis.parts import CERTAINTIES, GROUPS, Part
from memcalc.analysis.schedule import SPLIT_BACKWARD
from memcalc.analysis.states import copies, recipe
from memcalc.answers.notes import batch_note, notes, recomputation, setting
from memcalc.config import Config
from memcalc.config.gpus import budget as size_of
from memcalc.config.gpus import gpu, is_gpu
from memcalc.config.parallel import SHARDERS, ZERO
from memcalc.config.pipeline import SCHEDULES
from memcalc.config.run import UNBALANCED
from memcalc.errors import UsageError
from memcalc.report import Column, Report
from memcalc.units import format_bytes, format_flops

BESIDE = "not allocated"  # the group of what is estimated beside the peak
APPENDIX_C = "Korthikanti et al. 2022, appendix C"
MOST_SHOWN = 64  # stages in one line


class Room(NamedTuple):
    """What there is room for.

    Attributes:
        name: The GPU, or the size as it was written.
        bytes: Its bytes.
    """

    name: str
    bytes: int


def memory(
    config: Config, budget: str | None = None, explain: bool = False, fill: bool = False
) -> Report:
    """What a rank of each stage holds at its peak, by kinds of parts.

    The peak is what the allocator has given out at the worst moment of a step: the largest phase,
    never a sum of peaks. What it has reserved, and what the driver reports, are estimated beside
    it.

    Args:
        config: The model, its parallelism and its run; ``fits`` is about its GPU.
        budget: A size with its unit, or a GPU: a stage whose peak is above it is a failure.
        explain: Whether the rows are the parts themselves, with how sure each is.
        fill: Whether as many micro-batches keep all activations as the free memory of each stage
            holds (Korthikanti et al. 2022, appendix C), up to the budget, or else the GPU.

    Raises:
        ConfigError: The budget is neither a size nor a GPU; or the stages cannot be counted.
        UsageError: There is nothing to fill, or no memory to fill it into.

    >>> from memcalc.config import load
    >>> report = memory(load("22b", sp=True, recompute="selective"))
    >>> report.records()[0]["fits"]
    True
    """
    config = config.padded
    limit, capacity = _limit(budget), _capacity(config)
    held = device(config)
    lines = [*notes(config, "exact"), *_setting_notes(config)]
    peaks = _under_imbalance(config, held)
    lines += _experts_note(peaks)
    if fill:
        held, more = _filled(config, held, room_of(config, budget))
        lines += more
    lines.append(_phase_note(held))
    lines += _beside_note(config, held)
    if explain:
        lines += [f"{name}: {what}" for name, what in CERTAINTIES.items()]
    lines += _fit_notes(config, held, [room for room in (capacity, limit) if room is not None])
    body = _parts(config, held, peaks) if explain else _stages(config, held, capacity)
    return Report(
        "memory",
        f"Memory of a GPU at each stage of {setting(config)}, {recomputation(config)}",
        *body,
        symbols.values(config),
        tuple(lines),
        tuple(_over(held, limit)) if limit is not None else (),
    )


def room_of(config: Config, budget: str | None) -> Room:
    """The memory to fill: the budget, or else the run's GPU.

    Raises:
        ConfigError: The budget is neither a size nor a GPU.
        UsageError: There is neither.
    """
    room = _limit(budget) or _capacity(config)
    if room is None:
        raise UsageError("filling the free memory needs a GPU (--gpu) or a size (--budget)")
    return room


def _limit(budget: str | None) -> Room | None:
    return None if budget is None else Room(budget, size_of(budget))


def _capacity(config: Config) -> Room | None:
    if config.run.gpu is None:
        return None
    found = gpu(config.run.gpu)
    return Room(found.name, found.memory_bytes)


def _stages(
    config: Config, held: Sequence[StageMemory], capacity: Room | None
) -> tuple[tuple[Column, ...], tuple[tuple[Any, ...], ...]]:
    """A row a stage: its parts at its peak, by their groups."""
    columns = (
        Column("stage", "count"),
        Column("layers", "count", detail=True),
        Column("in_flight", "count", detail=True),
        *(Column(f"{group}_bytes", "bytes") for group in GROUPS),
        Column("peak_phase", "text", detail=True),
        Column("peak_bytes", "bytes"),
        Column("reserved_estimated_bytes", "bytes", detail=True),
        Column("capacity_bytes", "bytes", detail=True),
        Column("fits", "text", detail=True),
    )
    room = capacity.bytes if capacity else None
    rows = tuple(
        (
            each.stage,
            each.layers,
            sum(each.in_flight.values()),
            *by_group(each.peak).values(),
            each.peak.name,
            each.peak.bytes,
            reserved(each),
            room,
            None if room is None else each.peak.bytes <= room,
        )
        for each in held
    )
    return columns, rows


def _parts(
    config: Config, held: Sequence[StageMemory], peaks: Mapping[float, Sequence[int]]
) -> tuple[tuple[Column, ...], tuple[tuple[Any, ...], ...]]:
    """A row a part of each stage's peak, with its certainty and its source."""
    columns = (
        Column("stage", "count"),
        Column("phase", "text", detail=True),
        Column("part", "text"),
        Column("group", "text", detail=True),
        Column("bytes", "bytes"),
        Column("certainty", "text"),
        Column("source", "text", detail=True),
    )
    rows = tuple(
        (each.stage, each.peak.name, part.name, part.group, part.bytes, part.certainty, part.source)
        for each in held
        for part in (*each.peak.parts, *_beside(config, each, peaks))
    )
    return columns, rows


def _beside(
    config: Config, memory: StageMemory, peaks: Mapping[float, Sequence[int]]
) -> Iterator[Part]:
    """What is in use beside the peak, or would be: in no group of what is allocated."""
    for part in headroom(config, memory):
        yield part._replace(group=BESIDE)
    for imbalance, sizes in peaks.items():
        if imbalance > config.run.imbalance:
            more = sizes[memory.stage] - peaks[config.run.imbalance][memory.stage]
            name = f"experts: more at an imbalance of {imbalance:g}"
            yield Part(name, more, BESIDE, "estimated", "no router is balanced: --imbalance")


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
    config: Config, held: Sequence[StageMemory], room: Room
) -> tuple[list[StageMemory], list[str]]:
    """The stages with as many micro-batches whole as there is room for, and a line about them."""
    found, lines, saved, again = [], [], 0, 0
    for each in held:
        kept = filling.fill(config, each.stage, room.bytes - each.peak.bytes)
        part = Part("micro-batches kept whole", kept.bytes, "activations", "exact", APPENDIX_C)
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
        f"kept whole up to {room.name}, of the passes in flight, stage by stage: "
        f"{' '.join(lines[:MOST_SHOWN])}{more}; of {format_flops(again)} to recompute in an "
        f"iteration, {share} % are saved",
    ]


def _in_a_pass(phase: Phase) -> bool:
    return any(part.group == "activations" for part in phase.parts)


def _setting_notes(config: Config) -> Iterator[str]:
    """The schedule and the recipe, in words."""
    parallel, run = config.parallel, config.run
    if parallel.pp > 1:
        yield f"schedule: {parallel.order} ({SCHEDULES[parallel.order]}), for {batch_note(config)}"
        yield "in flight: micro-batches between forward and backward, of all of a rank's chunks"
    if parallel.order in SPLIT_BACKWARD:
        yield (
            "gradients of weights come late: until then a product's input and the gradient of its "
            "output are counted, as shards where they were gathered; never measured"
        )
    yield f"{_of_a_parameter(config)}; {_split(config)}"
    if run.optimizer == "muon":
        yield "not counted: what muon's step works with, a few copies of one matrix at a time"
    if left_out := unknown(config):
        names = " and ".join(left_out)
        why = "depend on the GPU model: pass --gpu"
        if run.gpu is not None:
            why = "are known for NVIDIA GPUs only, as are the CUDA context and NCCL"
        yield f"not counted: workspaces of {names}, which {why}"
    tied = [stage for stage in range(parallel.pp) if any(copies(config, stage))]
    if tied:
        yield f"the embedding's table stands on {_ranges(tied)} too"
    ranks = parallel.tp * parallel.cp * parallel.dp
    if config.model.experts and parallel.ep * parallel.expert_tp > ranks:
        yield (
            f"the ranks of a stage, {ranks}, are fewer than its experts are spread over, "
            f"{parallel.ep * parallel.expert_tp}: give --dp, over which states may be split"
        )


def _of_a_parameter(config: Config) -> str:
    """Bytes that a parameter takes, before anything is split."""
    run, each = config.run, recipe(config.run)
    weight, optimizer = each.weight, each.optimizer
    if config.parallel.sharder == "fsdp2":  # the weight is the optimizer's own copy
        weight, optimizer = each.master or each.weight, each.optimizer - each.master
    linears = ""
    if run.precision == "fp8":
        own, copies_ = (1, 1) if run.fp8_params else (2, 2)
        own = weight if config.parallel.sharder == "fsdp2" else own
        linears = f" (of linears' weights {own}, and {copies_} of fp8 copies)"
    return (
        f"a parameter takes {weight} bytes{linears}, its gradient {each.gradient}, "
        f"{run.optimizer} {optimizer}"
    )


def _split(config: Config) -> str:
    """What data-parallel ranks split, and who does it; one rank has nobody to split it with."""
    parallel, experts = config.parallel, config.model.experts
    what = ZERO[parallel.zero]
    if parallel.zero == 0:
        return f"data-parallel ranks split {what}"
    who = SHARDERS[parallel.sharder]
    if parallel.replicas == 1 and not (experts and parallel.expert_replicas > 1):
        return (
            f"nothing is split: there is one data-parallel rank (--dp); several would split {what} "
            f"({who})"
        )
    copies_ = f", in {parallel.shard_copies} copies" if parallel.shard_copies > 1 else ""
    return f"data-parallel ranks split {what} ({who}){copies_}"


def _under_imbalance(config: Config, held: Sequence[StageMemory]) -> dict[float, tuple[int, ...]]:
    """The stages' peaks where experts receive even shares, and where the busiest does not."""
    if config.model.experts is None:
        return {}
    found = {config.run.imbalance: tuple(stage.peak.bytes for stage in held)}
    for imbalance in (1, UNBALANCED):
        if imbalance not in found:
            run = replace(config.run, imbalance=imbalance)
            found[imbalance] = tuple(s.peak.bytes for s in device(replace(config, run=run)))
    return dict(sorted(found.items()))


def _experts_note(peaks: Mapping[float, Sequence[int]]) -> Iterator[str]:
    """The highest of these peaks."""
    shown = ", ".join(
        f"{format_bytes(max(sizes))} (stage {sizes.index(max(sizes))}) at an imbalance of {x:g}"
        for x, sizes in peaks.items()
    )
    if shown:
        yield (
            f"highest peak: {shown}; a router is uneven at first, so that measured peaks grow over "
            "the first steps"
        )


def _phase_note(held: Sequence[StageMemory]) -> str:
    """At which moment each stage holds most."""
    stages: dict[str, list[int]] = {}
    for each in held:
        stages.setdefault(each.peak.name, []).append(each.stage)
    return "peaks: " + ", ".join(
        f"{name} on {_ranges(numbers)}" for name, numbers in stages.items()
    )


def _ranges(numbers: Sequence[int]) -> str:
    """Stages in words.

    >>> _ranges([0, 1, 2, 5]), _ranges([3])
    ('stages 0-2, 5', 'stage 3')
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f"stage{'s' if len(numbers) > 1 else ''} {words}"


def _beside_note(config: Config, held: Sequence[StageMemory]) -> Iterator[str]:
    """What is estimated beside the allocated bytes, at the highest peak."""
    worst = max(held, key=lambda stage: stage.peak.bytes)
    yield (
        f"allocated at the highest peak: {format_bytes(worst.peak.bytes)}; estimated: "
        f"{format_bytes(reserved(worst))} reserved, {format_bytes(on_driver(config, worst))} on "
        "nvidia-smi"
    )


def _fit_notes(config: Config, held: Sequence[StageMemory], rooms: Sequence[Room]) -> Iterator[str]:
    """Whether the stages fit, and by how much."""
    worst = max(held, key=lambda stage: stage.peak.bytes)
    for room in rooms:
        free = room.bytes - worst.peak.bytes
        stage = f"stage {worst.stage}, {worst.peak.name}"
        if free >= 0:
            line = f"fits {room.name}: {format_bytes(free)} are free at the highest peak ({stage})"
            if is_gpu(room.name) and on_driver(config, worst) > room.bytes:
                line += "; by allocated bytes alone: with what is estimated beside them it does not"
            yield line
        else:
            short = sum(each.peak.bytes > room.bytes for each in held)
            yield (
                f"does not fit {room.name}: the highest peak ({stage}) is {format_bytes(-free)} "
                f"more; {short} of {len(held)} stages do not fit"
            )


def _over(held: Sequence[StageMemory], limit: Room) -> Iterator[str]:
    """A line for each stage whose peak is above the budget."""
    for each in held:
        if each.peak.bytes > limit.bytes:
            yield (
                f"stage {each.stage} allocates {format_bytes(each.peak.bytes)} ({each.peak.name}), "
                f"{format_bytes(each.peak.bytes - limit.bytes)} above the budget {limit.name}"
            )
