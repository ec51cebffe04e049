"""A GPU at every pipeline stage: what it holds in each phase of a step, and where the peak is.

A phase is a moment of an iteration, with a list of named parts, each with its source. The peak is
the largest phase, never a sum of peaks.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from memcalc.analysis import buffers, gradients, segments, stages, timeline
from memcalc.analysis.allocator import SOURCE as ALLOCATOR
from memcalc.analysis.moments import EMBEDDING_BACKWARD, MOMENTS, ROOT_REDUCTION, moments, policy_of
from memcalc.analysis.optimizer_step import counters, temporary
from memcalc.analysis.parts import Part, total
from memcalc.analysis.rank import Rank
from memcalc.analysis.stages import Held
from memcalc.analysis.states import GRADIENTS, buckets, states, unsplit_states
from memcalc.config import Config
from memcalc.frameworks.record import READ

ROUNDED = "rounding and unsplit remainders of allocator blocks"


class Phase(NamedTuple):
    """A moment of a step, with what a GPU holds then.

    Attributes:
        name: The moment.
        parts: What is held.
    """

    name: str
    parts: Sequence[Part]

    @property
    def bytes(self) -> int:
        """All of it."""
        return total(self.parts)


class StageMemory(NamedTuple):
    """What one rank of a pipeline stage holds.

    Attributes:
        stage: The stage, counted from 0.
        layers: Its transformer layers.
        in_flight: Micro-batches of each of its chunks when it holds most activations.
        phases: The moments of a step, in their order; the last is between steps.
    """

    stage: int
    layers: int
    in_flight: dict[int, int]
    phases: Sequence[Phase]

    @property
    def peak(self) -> Phase:
        """The phase that holds most."""
        return max(self.phases, key=lambda phase: phase.bytes)

    @property
    def steady(self) -> Phase:
        """What stays between steps."""
        return self.phases[-1]


def device(config: Config) -> list[StageMemory]:
    """What a rank of each stage holds, phase by phase.

    Raises:
        ConfigError: The vocabulary is unknown, or the schedule cannot run the micro-batches.

    >>> from memcalc.config import load
    >>> first, *_, last = device(load("22b", tp=8, pp=4, global_batch_size=16))
    >>> first.in_flight, last.in_flight
    ({0: 4}, {0: 1})
    """
    return list(_device(config))


@lru_cache(2)  # a figure and its title ask for the same
def _device(config: Config) -> tuple[StageMemory, ...]:
    return tuple(stage_memory(config, stage) for stage in range(config.parallel.pp))


def stage_memory(config: Config, stage: int) -> StageMemory:
    """What a rank of one stage holds, phase by phase; the stage is counted from 0."""
    rank = Rank(config, stage)
    held = stages.stage(config, stage, "exact")
    there = [*states(rank), *counters(rank), *buffers.lasting(rank)]
    gradients_ = [part for part in there if part.group == GRADIENTS]
    in_backward = gradients.in_backward(config)
    if in_backward:
        there = [part for part in there if part.group != GRADIENTS]
    if config.run.implementation.maker.known_order:
        there += unsplit_states(rank)
    early = gradients_ if in_backward and gradients.before_backward(config) else []
    worst: dict[str, tuple[Held, list[Part]]] = {}
    for (phase, chunk), of_pass in stages.passes(config, stage, "exact").items():
        for name, parts in moments(rank, phase, chunk, of_pass):
            if name not in worst or total(parts) > total(worst[name][1]):
                worst[name] = of_pass, parts
    phases = []
    for name in (name for name in MOMENTS if name in worst):
        of_pass, parts = worst[name]
        # once the layers are done, so are the blocks that were not split for them
        done = name in (EMBEDDING_BACKWARD, ROOT_REDUCTION)
        blocks = () if done else _unsplit_activations(rank, of_pass)
        every = [*there, *early, *parts, *blocks]
        phases.append(Phase(name, [part for part in every if part.bytes]))
    made = gradients_ if in_backward else []
    there += buffers.of_batch(rank)
    step = [*there, *made, *buckets(rank, "step")]
    kept_ = made if config.run.keep_gradients else []
    over = [*there, *kept_, *buckets(rank, "step"), *buffers.between_steps(rank)]
    phases += [Phase("optimizer step", [*step, *temporary(rank)]), Phase("between steps", over)]
    if replayed := timeline.replay(config):
        rests = Part(ROUNDED, replayed.allocated - replayed.requested, "buffers", READ, ALLOCATOR)
        most = max(phases, key=lambda phase: phase.bytes)
        phases[phases.index(most)] = most._replace(parts=[*most.parts, rests])
    return StageMemory(stage, len(rank.layers), held.microbatches, phases)


def _unsplit_activations(rank: Rank, held: Held) -> Iterator[Part]:
    """Bytes of unsplit blocks beside the layers' activations, in Megatron-core's order of work."""
    config = rank.config
    known = config.run.implementation.maker.known_order
    if not known or config.run.environment.expandable_segments:
        return
    layers = [
        (rank.graphs[kind], policy_of(config, place), flying)
        for number, names in enumerate(rank.chunks)
        if (flying := held.microbatches.get(number, 0))
        for place, kind in enumerate(names)
    ]
    kernels = config.run.implementation
    copies = bool(kernels.fused_attention) and (kernels.batch_first or config.parallel.cp > 1)
    size, all_walked = segments.unsplit_passes(layers, copies)
    certainty = READ if all_walked else "estimated"
    yield Part(
        "unsplit remainders of allocator blocks: activations",
        size,
        "buffers",
        certainty,
        segments.SOURCE,
    )
