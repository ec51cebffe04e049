"""A GPU at every pipeline stage: what it holds in each phase of a step, and where the peak is.

A phase is a moment of an iteration, with a list of named parts, each with its source. The peak is
the largest phase, never a sum of peaks.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from memcalc.analysis import activations, buffers, gradients, segments, stages, timeline, walk
from memcalc.analysis.allocator import SOURCE as ALLOCATOR
from memcalc.analysis.layers import layer_bytes, layer_waiting
from memcalc.analysis.optimizer_step import temporary
from memcalc.analysis.parts import Part
from memcalc.analysis.rank import Rank
from memcalc.analysis.schedule import BACKWARD_INPUTS, BACKWARD_WEIGHTS, FORWARD
from memcalc.analysis.stages import Held, layer_sizes, recomputing_nothing
from memcalc.analysis.states import GRADIENTS, buckets, states, unsplit_states
from memcalc.analysis.walk import Moment
from memcalc.blocks.embedding import embedding_graph
from memcalc.blocks.head import head_graph
from memcalc.blocks.layer import layer_graph
from memcalc.config import Config
from memcalc.config.recompute import Policy
from memcalc.frameworks.record import READ

LEDGER = "the ledger: `memcalc ledger`"
ROUNDED = "rounding and unsplit remainders of allocator blocks"
# The phases of a micro-batch's passes, in their order.
EMBEDDING_BACKWARD = "embedding backward"
MOMENTS = ("forward", "loss", "head backward", "backward", EMBEDDING_BACKWARD)


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
        return _total(self.parts)


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
    there = [*states(rank), *buffers.lasting(rank)]
    gradients_ = [part for part in there if part.group == GRADIENTS]
    in_backward = gradients.in_backward(config)
    if in_backward:
        there = [part for part in there if part.group != GRADIENTS]
    if config.run.implementation.maker.known_order:
        there += unsplit_states(rank)
    early = gradients_ if in_backward and gradients.before_backward(config) else []
    worst: dict[str, tuple[Held, list[Part]]] = {}
    for (phase, chunk), of_pass in stages.passes(config, stage, "exact").items():
        for name, parts in _moments(rank, phase, chunk, of_pass):
            if name not in worst or _total(parts) > _total(worst[name][1]):
                worst[name] = of_pass, parts
    phases = []
    for name in (name for name in MOMENTS if name in worst):
        of_pass, parts = worst[name]
        # once the layers are done, so are the blocks that were not split for them
        blocks = () if name == EMBEDDING_BACKWARD else _unsplit_activations(rank, of_pass)
        every = [*there, *early, *parts, *blocks]
        phases.append(Phase(name, [part for part in every if part.bytes]))
    made = gradients_ if in_backward else []
    step = [*there, *made, *buckets(rank, "step")]
    kept_ = made if config.run.keep_gradients else []
    over = [*there, *kept_, *buckets(rank, "step"), *buffers.between_steps(rank)]
    phases += [Phase("optimizer step", [*step, *temporary(rank)]), Phase("between steps", over)]
    if replayed := timeline.replay(config):
        rests = Part(ROUNDED, replayed.allocated - replayed.requested, "buffers", READ, ALLOCATOR)
        most = max(phases, key=lambda phase: phase.bytes)
        phases[phases.index(most)] = most._replace(parts=[*most.parts, rests])
    return StageMemory(stage, len(rank.layers), held.microbatches, phases)


def _moments(rank: Rank, phase: str, chunk: int, held: Held) -> Iterator[tuple[str, list[Part]]]:
    """What a stage holds beside its lasting parts during a pass of one of its model chunks.

    The embedding's gradient comes when the layers of its chunk are done.

    Args:
        rank: The rank.
        phase: The pass: a phase of ``memcalc.analysis.schedule``.
        chunk: The chunk.
        held: What micro-batches in flight hold, this one among them.

    Yields:
        A word of ``MOMENTS``, and the parts at the worst time of it.
    """
    config, names = rank.config, rank.chunks[chunk]
    last = rank.places[chunk] == config.parallel.chunks - 1
    way = "forward" if phase == FORWARD else "backward"
    around = [*buckets(rank, way), *buffers.in_a_pass(rank, way)]
    if phase == FORWARD:
        if names:
            nothing = [0] * len(names)
            without, parts = _worst_layer(config, names, _forward, nothing, nothing, nothing)
            yield "forward", [*_in_flight(config, held, without), *around, *parts]
        if last:
            parts = _of_end("head", "logits", walk.forward(head_graph(config)))
            yield "loss", [*_in_flight(config, held), *around, *parts]
    elif phase == BACKWARD_WEIGHTS:
        yield "backward", [*_in_flight(config, held), *around]
    else:
        yield from _backward_moments(rank, phase, chunk, held, around)


def _backward_moments(
    rank: Rank, phase: str, chunk: int, held: Held, around: Sequence[Part]
) -> Iterator[tuple[str, list[Part]]]:
    """The same of a backward pass; ``around`` is what is there besides."""
    config, names = rank.config, rank.chunks[chunk]
    place, maker = rank.places[chunk], config.run.implementation.maker
    keeps = _keeps(config)
    if place == config.parallel.chunks - 1:
        gathers = not maker.global_buffer
        moment = walk.backward(head_graph(config), own=_own(config), gathers=gathers, keeps=keeps)
        parts = _of_end("head", "logits", moment)
        yield "head backward", [*_in_flight(config, held), *around, *parts]
    done = gradients.made(rank, gradients.made_so_far(rank, chunk)) if keeps else 0
    tied = [gradients.waiting(gradients.of_tied_head(rank) if _own(config) else 0)]
    if names:
        again, late = _together(config, names), [0] * len(names)
        if phase == BACKWARD_INPUTS:
            late = [layer_waiting(config, kind) for kind in names]
        made = [gradients.made(rank, [kind]) if keeps else 0 for kind in names]
        without, parts = _worst_layer(config, names, _backward, again, late, made)
        so_far = gradients.part("gradients of the head and of later chunks", done)
        parts = [*around, *parts, so_far, *tied]
        yield "backward", [*_in_flight(config, held, without), *parts]
    if place == 0:
        graph = embedding_graph(config)
        # the gradient of a table is never fused into its buffer
        moment = walk.backward(graph, own=config.run.activation_bytes, keeps=keeps)
        of_one = activations.total(activations.kept(graph))
        saved = stages.chunk_bytes(config, names, "exact")
        others = replace(held, layers=held.layers - saved, embedding=held.embedding - of_one)
        if tied[0].bytes > moment.working:  # both gradients of the table and their sum
            moment = Moment(
                "the sum of a tied table's gradients", moment.kept, tied[0].bytes, moment.weight
            )
        done += gradients.made(rank, names) if keeps else 0
        so_far = gradients.part("gradients of all layers and the head", done)
        parts = [*around, *_of_end("embedding", "activations", moment), so_far, *tied]
        yield EMBEDDING_BACKWARD, [*_in_flight(config, others), *parts]


def _worst_layer(
    config: Config,
    names: Sequence[str],
    walked: Callable[[Config, str, Policy], Moment],
    again: Sequence[int],
    late: Sequence[int],
    made: Sequence[int],
) -> tuple[int, list[Part]]:
    """The layer of a chunk at which a pass through it holds most.

    Args:
        config: The model, its parallelism and its run.
        names: The kinds of the chunk's layers, in order.
        walked: The moment of a layer of a kind under a policy.
        again: For each layer, what is recomputed with it.
        late: For each layer, what stays after its pass for a later one.
        made: For each layer, the gradients that stay after its pass.

    Returns:
        What the layers after it save, which is not there yet, or no longer; and what it holds
        beside its saved tensors, with the layers that are recomputed in the same block.
    """
    sizes = layer_sizes(config, names, "exact")
    after, most, worst, grown = 0, None, (0, list[Part]()), 0
    for number in reversed(range(len(names))):
        moment = walked(config, names[number], _policy(config, number))
        beside = moment.bytes - sizes[number] + again[number] - after + grown
        if most is None or beside > most:
            parts = _of_layer(moment, sizes[number], again[number])
            most = beside
            worst = after, [*parts, gradients.part("gradients of later layers", grown)]
        after += sizes[number] - late[number]
        grown += made[number]
    return worst


@lru_cache(256)
def _forward(config: Config, kind: str, policy: Policy) -> Moment:
    """The moment of a layer's forward pass that holds most."""
    return walk.forward(layer_graph(config, kind=kind), policy)


@lru_cache(256)
def _backward(config: Config, kind: str, policy: Policy) -> Moment:
    """The moment of a layer's backward pass that holds most."""
    kernels, graph = config.run.implementation, layer_graph(config, kind=kind)
    gathers = kernels.transformer_engine or not kernels.maker.global_buffer
    reentrant = kernels.maker.reentrant
    splits = config.parallel.scheduling.splits_backward
    own, keeps = _own(config), _keeps(config)
    return walk.backward(graph, policy, own, gathers, reentrant, splits, keeps)


def _own(config: Config) -> int:
    """Bytes per element of a weight gradient that is not fused into its buffer, or 0."""
    in_buckets = config.parallel.sharding.reduce_buffer  # counted there, unsharded
    return 0 if buffers.fuses_gradients(config) or in_buckets else config.run.activation_bytes


def _keeps(config: Config) -> bool:
    """Whether the gradients that a backward pass makes are there for the first time, and stay."""
    return gradients.in_backward(config) and not gradients.before_backward(config)


def _total(parts: Iterable[Part]) -> int:
    return sum(part.bytes for part in parts)


def _in_flight(config: Config, held: Held, without: int = 0) -> list[Part]:
    """What micro-batches in flight keep, without the head of the one that is walked.

    ``without`` is what its layers keep that are not there at the moment.
    """
    head = 0
    if held.head:
        of_one = activations.total(activations.kept(head_graph(config)))
        head = max(0, held.head - of_one)
    return [
        Part("layers' activations", held.layers - without, "activations", "exact", LEDGER),
        Part("embedding's activations", held.embedding, "activations", "exact", LEDGER),
        Part("other output heads: saved for backward", head, "logits", "exact", LEDGER),
    ]


def _unsplit_activations(rank: Rank, held: Held) -> Iterator[Part]:
    """Bytes of unsplit blocks beside the layers' activations, in Megatron-core's order of work."""
    config = rank.config
    known = config.run.implementation.maker.known_order
    if not known or config.run.environment.expandable_segments:
        return
    layers = [
        (rank.graphs[kind], _policy(config, place), flying)
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


def _policy(config: Config, number: int) -> Policy:
    """The policy of a chunk's layer, counted from 0; the block method recomputes only the first."""
    run = config.run
    some = run.recompute_layers if run.recompute_method == "block" else None
    return run.policy if some is None or number < some else activations.NOTHING


def _together(config: Config, names: Sequence[str]) -> list[int]:
    """For each layer, what earlier layers of its recomputed block hold.

    The input of the first, from which the block is recomputed, is not included.
    """
    number = config.run.recompute_layers or 1
    if config.run.recompute_method == "block" or number == 1:
        return [0] * len(names)
    everything = recomputing_nothing(config)
    kept = layer_sizes(config, names, "exact")
    until = [0, *accumulate(layer_bytes(everything, "exact", kind) for kind in names)]
    starts = [i - i % number for i in range(len(names))]
    return [until[i] - until[j] - (kept[j] if j < i else 0) for i, j in enumerate(starts)]


def _of_end(name: str, group: str, moment: Moment) -> list[Part]:
    """What the embedding or the head holds at a moment, with the tensors that it saves."""
    return [
        Part(f"{name}: saved for backward", moment.kept, group, "exact", LEDGER),
        Part(
            f"{name}: temporary tensors of operation {moment.op}",
            moment.working,
            group,
            "exact",
            LEDGER,
        ),
        Part(f"{name}: weight gradient", moment.weight, "gradients", "exact", LEDGER),
    ]


def _of_layer(moment: Moment, kept: int, again: int) -> list[Part]:
    """What a layer holds at a moment beside its saved tensors, which are counted in flight."""
    label = f"layer: temporary tensors of operation {moment.op}"
    more = moment.kept + moment.working - kept
    return [
        Part("other layers of the same checkpoint", again, "activations", "exact", LEDGER),
        Part(label, more, "activations", "framework-dependent", LEDGER),
        Part("layer: weight gradient", moment.weight, "gradients", "exact", LEDGER),
    ]
