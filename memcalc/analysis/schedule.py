"""Pipeline schedules: the order in which a stage works.

A schedule is a generator of steps, in the order in which the framework runs them.

Zero-bubble schedules split each backward pass in two: first the gradients of a chunk's inputs, for
which the previous stage waits, later those of its weights, for which no stage waits (Qi et al.
2023, arXiv 2401.10241, section 2).
"""

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from memcalc.config import Parallel
from memcalc.errors import ConfigError
from memcalc.lazy import resolve

FORWARD = "forward"
BACKWARD = "backward"  # both halves at once
BACKWARD_INPUTS = "inputs"
BACKWARD_WEIGHTS = "weights"

# The most passes over all stages that are walked: enough for 128 interleaved stages of 16 chunks,
# or for 1,024 stages of 1F1B. Real pipelines need far fewer, and more would take seconds.
MOST_PASSES = 2**21
MOST_DRAWN = 2**18  # in a timeline, which holds all passes at once
MOST_FILLED = 2**18  # with --fill, which walks all passes for each number that it tries

MOST_ROUNDS = 4  # of micro-batches, in a timeline


class Step(NamedTuple):
    """One pass of one micro-batch through one model chunk of a stage."""

    phase: str
    microbatch: int
    chunk: int = 0


def places(parallel: Parallel, stage: int) -> list[int]:
    """The positions of a stage's chunks in the pipeline, counted from the embedding's.

    Megatron-core assigns chunks to the stages in turn. ZB-V goes down the stages and up again.
    DualPipe gives a rank the chunk of its own stage and that of the opposite one, so that every
    chunk is on two ranks.

    >>> places(Parallel(pp=4, vpp=2), 1), places(Parallel(pp=4, schedule="zb-v"), 1)
    ([1, 5], [1, 6])
    >>> places(Parallel(pp=4, schedule="dualpipe"), 1)
    [1, 2]
    """
    if parallel.scheduling.chunks == 2:
        return [stage, parallel.chunks - 1 - stage]
    return [chunk * parallel.pp + stage for chunk in range(parallel.vpp)]


def gpipe(stage: int, stages: int, microbatches: int) -> Iterator[Step]:
    """GPipe (Huang et al. 2019, figure 2c): all forward, then all backward, last micro-batch first.

    >>> shown(gpipe(0, 2, 3))
    'f0 f1 f2 b2 b1 b0'
    """
    yield from (Step(FORWARD, i) for i in range(microbatches))
    yield from (Step(BACKWARD, i) for i in reversed(range(microbatches)))


def one_f_one_b(stage: int, stages: int, microbatches: int) -> Iterator[Step]:
    """1F1B (Narayanan et al. 2021, figure 4): warm-up forwards, then forward and backward in turn.

    >>> shown(one_f_one_b(0, 2, 3))
    'f0 f1 b0 f2 b1 b2'
    """
    return _in_turns(stages - stage - 1, microbatches, 1, microbatches)


def interleaved(
    stage: int, stages: int, microbatches: int, chunks: int, group: int | None = None
) -> Iterator[Step]:
    """Interleaved 1F1B: groups of micro-batches run through each of several chunks in turn.

    Narayanan et al. 2021, section 2.2. The warm-up is that of Megatron-core
    (pipeline_parallel/schedules.py): ``2(p - S - 1) + (m - 1)g`` passes on stage S, counted from 0,
    with g micro-batches per group: p, unless more are asked for. (Versions before 2024 run all
    forward passes as warm-up where there are exactly p micro-batches.)

    >>> shown(interleaved(1, 2, 2, 2))
    'f0 f1 f0.1 b0.1 f1.1 b1.1 b0 b1'
    """
    group = group or stages
    warmup = 2 * (stages - stage - 1) + (chunks - 1) * group
    return _in_turns(warmup, microbatches, chunks, group)


def zb_h1(stage: int, stages: int, microbatches: int) -> Iterator[Step]:
    """ZB-H1 (Qi et al. 2023, figure 3): 1F1B's forwards; weight gradients S micro-batches late.

    >>> shown(zb_h1(1, 2, 3))
    'f0 i0 f1 i1 w0 f2 i2 w1 w2'
    """
    return _late_weights(stages - stage - 1, stage, microbatches)


def zb_h2(stage: int, stages: int, microbatches: int) -> Iterator[Step]:
    """ZB-H2 (same figure): twice as many forwards first; weight gradients 2S late.

    >>> shown(zb_h2(0, 2, 3))
    'f0 f1 f2 i0 w0 i1 w1 i2 w2'
    """
    return _late_weights(2 * (stages - stage - 1), 2 * stage, microbatches)


def zb_v(stage: int, stages: int, microbatches: int) -> Iterator[Step]:
    """ZB-V (Qi et al. 2023, section 6): two chunks, down the stages and up again.

    Too few micro-batches to fill the pipeline run in the order of a full pipeline, without the
    micro-batches that are missing, as in PyTorch (distributed/pipelining/schedules.py,
    ``ScheduleZBVZeroBubble``).

    >>> shown(zb_v(1, 2, 3))
    'f0 f0.1 f1 f1.1 i0.1 w0.1 f2 i0 w0 f2.1 i1.1 w1.1 i1 i2.1 i2 w1 w2.1 w2'
    """
    there = (step for step in _zb_v(stage, stages, max(microbatches, 2 * stages - 1)))
    return (step for step in there if step.microbatch < microbatches)


def _zb_v(stage: int, stages: int, microbatches: int) -> Iterator[Step]:
    take = _numbered()
    after = stages - stage
    for _ in range(2 * after - 1):
        yield take(FORWARD, 0)
    for _ in range(stage):
        yield take(FORWARD, 1)
        yield take(FORWARD, 0)
    for _ in range(after):
        yield from (take(phase, 1) for phase in (FORWARD, BACKWARD_INPUTS, BACKWARD_WEIGHTS))
    started = 2 * after - 1 + stage  # of the first chunk; of the second, as many as stages
    for i in range(microbatches - stages):
        for chunk in (0, 1):
            if chunk or started + i < microbatches:
                yield take(FORWARD, chunk)
            yield take(BACKWARD_INPUTS, chunk)
            yield take(BACKWARD_WEIGHTS, chunk)
    for _ in range(stage):
        yield take(BACKWARD_INPUTS, 0)
        yield take(BACKWARD_INPUTS, 1)
    for _ in range(after):
        yield take(BACKWARD_INPUTS, 0)
        yield take(BACKWARD_WEIGHTS, 0)
    for chunk in (1, 0):
        yield from (take(BACKWARD_WEIGHTS, chunk) for _ in range(stage))


def dualpipe(stage: int, stages: int, microbatches: int) -> Iterator[Step]:
    """DualPipe (DeepSeek-V3, arXiv 2412.19437, section 3.2.1): micro-batches enter at both ends.

    The first half of them goes down the stages, through the first chunk of each rank; the second
    half goes up, through the second chunks. The eight parts are those of deepseek-ai/DualPipe
    (dualpipe.py, ``step``). A forward that overlaps with a backward comes first here, since both
    are in flight then.

    >>> shown(dualpipe(0, 2, 4))
    'f0 f2.1 f1 b2.1 f3.1 b0 b3.1 i1 w1'

    There must be an even number of micro-batches, at least two per stage: ``Config`` checks it.
    """
    half, near = microbatches // 2, min(stage, stages - 1 - stage)
    far = stages // 2 - near - 1
    up = int(stage >= stages // 2)  # the chunk of micro-batches from the nearer end
    numbered = _numbered()

    def take(phase: str, way: int) -> Step:
        step = numbered(phase, way ^ up)
        return step._replace(microbatch=step.microbatch + half * step.chunk)

    for _ in range(2 * far):
        yield take(FORWARD, 0)
    for _ in range(near + 1):
        yield take(FORWARD, 0)
        yield take(FORWARD, 1)
    for _ in range(far):
        yield from (take(phase, 1) for phase in (BACKWARD_INPUTS, BACKWARD_WEIGHTS, FORWARD))
    for _ in range(half - stages + near + 1):
        for way in (0, 1):
            yield take(FORWARD, way)
            yield take(BACKWARD, 1 - way)
    for _ in range(far):
        yield take(BACKWARD, 1)
        yield take(FORWARD, 1)
        yield take(BACKWARD, 0)
    late: list[Step] = []
    split = 2 * ((near + 1) // 2) + (1 - near % 2)  # the first of the last backwards that is split
    for i in range(2 * (near + 1)):
        step = take(BACKWARD, 1 - i % 2)
        if i < split:
            yield step
        else:
            yield step._replace(phase=BACKWARD_INPUTS)
            late.append(step._replace(phase=BACKWARD_WEIGHTS))
    for _ in range(far):
        yield late.pop(0)
        step = take(BACKWARD, 0)
        yield step._replace(phase=BACKWARD_INPUTS)
        late.append(step._replace(phase=BACKWARD_WEIGHTS))
    yield from late


def order(
    parallel: Parallel, stage: int, microbatches: int, most: int = MOST_PASSES
) -> Iterator[Step]:
    """The order of work of a stage, by the schedule of the pipeline.

    A full pipeline repeats itself, so only the micro-batches are walked that change the most that a
    stage holds.

    Raises:
        ConfigError: The schedule cannot run so many micro-batches, or there are more than ``most``
            passes to walk over all stages.

    >>> shown(order(Parallel(pp=2, vpp=2), 1, 2)) == shown(interleaved(1, 2, 2, 2))
    True
    """
    walked = _walked(parallel, microbatches, parallel.scheduling.rounds)
    if (number := passes(parallel, walked)) > most:
        raise _too_long(parallel, number, most)
    return _order(parallel, stage, walked)


def passes(parallel: Parallel, microbatches: int) -> int:
    """The passes of so many micro-batches over all stages.

    >>> passes(Parallel(pp=4, vpp=2), 8)
    128
    """
    if parallel.scheduling.walks_full:
        microbatches = max(microbatches, 2 * parallel.pp - 1)
    return (3 if parallel.scheduling.splits_backward else 2) * parallel.chunks * microbatches


def _too_long(parallel: Parallel, number: int, most: int) -> ConfigError:
    return ConfigError(
        f"schedule {parallel.order} over {parallel.pp} stages ({parallel.chunks} model chunks) has "
        f"{number} forward and backward passes to simulate, more than {most}: use a smaller --pp, "
        "--vpp, --microbatch-group-size or --global-batch-size"
    )


def _walked(parallel: Parallel, microbatches: int, rounds: int | None) -> int:
    """How many of the micro-batches are walked: at most those of some rounds."""
    if rounds is None:
        return microbatches
    if parallel.interleaves:
        return min(microbatches, rounds * parallel.group + microbatches % parallel.group)
    return min(microbatches, rounds * parallel.pp * parallel.copies)


def _order(parallel: Parallel, stage: int, microbatches: int) -> Iterator[Step]:
    """The order of a stage for exactly so many micro-batches."""
    further = (parallel.vpp, parallel.group) if parallel.interleaves else ()
    steps: Callable[..., Iterator[Step]] = resolve(parallel.scheduling.order)
    return steps(stage, parallel.pp, microbatches, *further)


def kept_whole(steps: Iterable[Step], whole: int, window: int, chunks: int) -> Iterator[Step]:
    """The same order, with some passes that keep all activations and are not recomputed.

    Of every ``window`` consecutive forwards of a stage, the first ``whole`` keep all activations.
    Their chunks are numbered from ``chunks`` on. (Korthikanti et al. 2022, appendix C;
    Megatron-core, pipeline_parallel/schedules.py:
    num_microbatches_with_partial_activation_checkpoints.)

    >>> shown(kept_whole(one_f_one_b(0, 2, 4), whole=1, window=2, chunks=1))
    'f0.1 f1 b0.1 f2.1 b1 f3 b2.1 b3'
    """
    keeps: dict[tuple[int, int], int] = {}
    for phase, microbatch, chunk in steps:
        key = (microbatch, chunk)
        if phase == FORWARD:
            keeps[key] = chunks if len(keeps) % window < whole else 0
        yield Step(phase, microbatch, chunk + keeps[key])


class Timed(NamedTuple):
    """A step with its start and end, in units of a forward pass."""

    step: Step
    start: int
    end: int


def timeline(parallel: Parallel, microbatches: int) -> list[list[Timed]]:
    """When each stage runs each step. A forward pass and each half of a backward pass take 1.

    A step starts when the stage is free and has its input from the previous or next stage.

    >>> [timed.start for timed in timeline(Parallel(pp=2), 2)[1]]
    [1, 2, 4, 5]
    """
    walked = _drawn(parallel, microbatches)
    orders = [list(_order(parallel, stage, walked)) for stage in range(parallel.pp)]
    at = [places(parallel, stage) for stage in range(parallel.pp)]
    ends: dict[tuple[str, int, int], int] = {}
    found: list[list[Timed]] = [[] for _ in orders]
    waiting = list(range(parallel.pp))
    while waiting:
        moved = []
        for stage in waiting:
            steps, done = orders[stage], found[stage]
            while len(done) < len(steps):
                step = steps[len(done)]
                place = at[stage][step.chunk]
                needed = [ends.get(key) for key in _needs(step, place, parallel.chunks)]
                if None in needed:
                    break
                free = done[-1].end if done else 0
                start = max([free, *(end for end in needed if end is not None)])
                done.append(Timed(step, start, start + (2 if step.phase == BACKWARD else 1)))
                key = BACKWARD if step.phase == BACKWARD_INPUTS else step.phase
                ends[key, step.microbatch, place] = done[-1].end
                moved.append(stage)
        if not moved:
            raise ConfigError(
                f"schedule {parallel.order} deadlocks with {microbatches} micro-batches over "
                f"{parallel.pp} stages: pass another --global-batch-size"
            )
        waiting = [stage for stage in waiting if len(found[stage]) < len(orders[stage])]
    return found


def shown(steps: Iterable[Step]) -> str:
    """An order in short: f, b, i (input gradients) or w (weight gradients), micro-batch, chunk."""
    return " ".join(
        f"{phase[0]}{microbatch}" + (f".{chunk}" if chunk else "")
        for phase, microbatch, chunk in steps
    )


def _needs(step: Step, place: int, chunks: int) -> Iterator[tuple[str, int, int]]:
    """The passes that must end before a step can start; ``place`` is its chunk's position."""
    i = step.microbatch
    if step.phase == FORWARD:
        if place > 0:
            yield FORWARD, i, place - 1
    elif step.phase == BACKWARD_WEIGHTS:
        yield BACKWARD, i, place
    elif place + 1 < chunks:
        yield BACKWARD, i, place + 1
    else:
        yield FORWARD, i, place


def _drawn(parallel: Parallel, microbatches: int) -> int:
    """How many micro-batches a timeline shows: fewer rounds of a long pipeline, at least one."""
    for rounds in range(MOST_ROUNDS, 0, -1):
        walked = _walked(parallel, microbatches, parallel.scheduling.rounds and rounds)
        if (number := passes(parallel, walked)) <= MOST_DRAWN:
            return walked
    raise _too_long(parallel, number, MOST_DRAWN)


def _in_turns(warmup: int, microbatches: int, chunks: int, group: int) -> Iterator[Step]:
    """``warmup`` forwards, then one forward and one backward in turn, then the other backwards."""
    forwards = _passes(FORWARD, microbatches, range(chunks), group)
    backwards = _passes(BACKWARD, microbatches, range(chunks)[::-1], group)
    pairs = zip(forwards[warmup:], backwards, strict=False)
    rest = backwards[max(0, len(forwards) - warmup) :]
    return chain(forwards[:warmup], chain.from_iterable(pairs), rest)


@lru_cache(2)  # the same for all stages, which differ only in their warm-up
def _passes(phase: str, microbatches: int, chunks: range, group: int) -> tuple[Step, ...]:
    """The passes of a phase: a group of micro-batches runs through one chunk after another."""
    firsts = range(0, microbatches, group)
    return tuple(
        Step(phase, i, chunk)
        for first in firsts
        for chunk in chunks
        for i in range(first, min(first + group, microbatches))
    )


def _late_weights(warmup: int, late: int, microbatches: int) -> Iterator[Step]:
    """1F1B after ``warmup`` forwards, with weight gradients ``late`` micro-batches late."""
    for step in one_f_one_b(0, warmup + 1, microbatches):
        if step.phase == FORWARD:
            yield step
            continue
        yield step._replace(phase=BACKWARD_INPUTS)
        if step.microbatch >= late:
            yield Step(BACKWARD_WEIGHTS, step.microbatch - late)
    for i in range(max(0, microbatches - late), microbatches):
        yield Step(BACKWARD_WEIGHTS, i)


def _numbered() -> Callable[[str, int], Step]:
    """A function that returns the next micro-batch's step of a phase and chunk."""
    taken: dict[tuple[str, int], int] = {}

    def take(phase: str, chunk: int) -> Step:
        key = (BACKWARD if phase == BACKWARD_INPUTS else phase, chunk)
        taken[key] = taken.get(key, -1) + 1
        return Step(phase, taken[key], chunk)

    return take
