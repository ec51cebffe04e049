"""The moments of a stage's passes: what it holds beside its lasting parts while layers run.

A pass has a few moments, each with the worst of its times: the layers of a chunk forward, the loss,
the head backward, the layers backward, the embedding backward.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate

from memcalc.analysis import activations, buffers, gradients, stages, walk
from memcalc.analysis.layers import layer_bytes, layer_waiting
from memcalc.analysis.parts import Part
from memcalc.analysis.rank import Rank
from memcalc.analysis.schedule import BACKWARD_INPUTS, BACKWARD_WEIGHTS, FORWARD
from memcalc.analysis.stages import Held, layer_sizes, recomputing_nothing
from memcalc.analysis.states import buckets, in_root, root_parts
from memcalc.analysis.walk import Moment
from memcalc.blocks.embedding import embedding_graph
from memcalc.blocks.head import head_graph
from memcalc.blocks.layer import layer_graph
from memcalc.config import Config
from memcalc.config.recompute import Policy

LEDGER = "the ledger: `memcalc ledger`"
EMBEDDING_BACKWARD, ROOT_REDUCTION = "embedding backward", "root reduction"
MOMENTS = (
    *("forward", "loss", "head backward", "backward", EMBEDDING_BACKWARD, ROOT_REDUCTION),
)  # in their order

Named = tuple[str, list[Part]]


def moments(rank: Rank, phase: str, chunk: int, held: Held) -> Iterator[Named]:
    """What a stage holds beside its lasting parts during a pass of one of its model chunks.

    Args:
        rank: The rank.
        phase: The pass: a phase of ``memcalc.analysis.schedule``.
        chunk: The chunk.
        held: What micro-batches in flight hold, this one among them.

    Yields:
        A word of ``MOMENTS``, and the parts at the worst time of it.
    """
    config, names = rank.config, rank.chunks[chunk]
    if phase == FORWARD:
        if names:
            nothing = [0] * len(names)
            without, parts = _worst_layer(config, names, _forward, nothing, nothing, nothing)
            around = _around(rank, "forward", "forward")
            yield "forward", [*_in_flight(config, held, without), *around, *parts]
        if rank.places[chunk] == config.parallel.chunks - 1:
            parts = _of_end("head", "logits", walk.forward(head_graph(config)))
            around = _around(rank, "forward", "loss")
            yield "loss", [*_in_flight(config, held), *around, *parts]
    elif phase == BACKWARD_WEIGHTS:
        yield "backward", [*_in_flight(config, held), *_around(rank, "backward", "backward")]
    else:
        yield from _backward_moments(rank, phase, chunk, held)


def _backward_moments(rank: Rank, phase: str, chunk: int, held: Held) -> Iterator[Named]:
    """The same of a backward pass, with the gradients that are there for the first time."""
    config, names, place = rank.config, rank.chunks[chunk], rank.places[chunk]
    first, own = _first(config), _own(config)
    if place == config.parallel.chunks - 1:
        gathers = not config.run.implementation.maker.global_buffer
        moment = walk.backward(
            head_graph(config),
            own=own,
            gathers=gathers,
            keeps=_keeps(config),
            frozen=config.run.frozen,
        )
        parts = _of_end("head", "logits", moment)
        around = _around(rank, "backward", "head backward")
        yield "head backward", [*_in_flight(config, held), *around, *parts]
    tied = gradients.waiting(gradients.of_tied_head(rank) if own else 0)
    root = gradients.unsharded_head(rank) if in_root(config) else 0
    waits = [tied, gradients.part("the root's gradients, unsharded", root)]
    if place == config.parallel.chunks - 1:
        waits.append(_returned(config))
    done = gradients.made(rank, gradients.made_so_far(rank, chunk)) if first else 0
    if names:
        again, late = _together(config, names), [0] * len(names)
        if phase == BACKWARD_INPUTS:
            late = [layer_waiting(config, kind) for kind in names]
        of_kind = {kind: gradients.made(rank, [kind]) if first else 0 for kind in set(names)}
        made = [of_kind[kind] for kind in names]
        without, parts = _worst_layer(config, names, _backward, again, late, made)
        so_far = gradients.part("gradients of the head and of later chunks", done)
        around = [*_around(rank, "backward", "backward"), so_far, *waits]
        yield "backward", [*_in_flight(config, held, without), *around, *parts]
    if place == 0:
        done += gradients.made(rank, names) if first else 0
        so_far = gradients.part(gradients.SO_FAR, done)
        yield from _at_the_end(rank, names, held, [so_far, *waits])


def _returned(config: Config) -> Part:
    """The logits that the caller refers to until backward is over."""
    size = sum(save.tensor.bytes for save, _ in head_graph(config).returned)
    return Part("logits held by the training loop", size, "logits", "framework-dependent", LEDGER)


def _at_the_end(
    rank: Rank, names: Sequence[str], held: Held, made: Sequence[Part]
) -> Iterator[Named]:
    """The end of a backward pass, with the gradients that the layers and the head have made."""
    config, graph = rank.config, embedding_graph(rank.config)
    # the gradient of a table is never fused into its buffer
    moment = walk.backward(
        graph, own=config.run.activation_bytes, keeps=_keeps(config), frozen=config.run.frozen
    )
    of_one = activations.total(activations.kept(graph))
    saved = stages.chunk_bytes(config, names, "exact")
    others = replace(held, layers=held.layers - saved, embedding=held.embedding - of_one)
    (tied,) = (part.bytes for part in made if part.name == gradients.TIED_HEAD)
    if tied > moment.working:
        name = "the sum of a tied table's gradients"  # beside both
        moment = Moment(name, moment.kept, tied, moment.weight)
    parts = [*_around(rank, "backward", EMBEDDING_BACKWARD), *made]
    parts += _of_end("embedding", "activations", moment)
    yield EMBEDDING_BACKWARD, [*_in_flight(config, others), *parts]
    if in_root(config):
        size = rank.root_trained * config.run.activation_bytes
        parts = [part for part in made if part.name == gradients.SO_FAR]
        parts.append(gradients.part("the root's gradients, unsharded", size))
        parts += root_parts(rank, ROOT_REDUCTION)
        yield ROOT_REDUCTION, [*_in_flight(config, others), *parts]


def _around(rank: Rank, way: str, moment: str) -> list[Part]:
    """What sharding and the pipeline hold at a moment of a forward or backward pass."""
    sharding = root_parts(rank, moment) if in_root(rank.config) else buckets(rank, way)
    at = "end" if moment in (EMBEDDING_BACKWARD, ROOT_REDUCTION) else way
    return [*sharding, *buffers.in_a_pass(rank, at)]


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
    moments_: dict[tuple[str, bool], Moment] = {}  # of layers that are alike
    run = config.run
    some = run.recompute_layers if run.recompute_method == "block" else None
    for number in reversed(range(len(names))):
        alike = names[number], some is None or number < some
        if alike not in moments_:
            moments_[alike] = walked(config, names[number], policy_of(config, number))
        moment = moments_[alike]
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
    frozen = config.run.frozen
    return walk.backward(graph, policy, own, gathers, reentrant, splits, keeps, frozen)


def _own(config: Config) -> int:
    """Bytes per element of a weight gradient that is not fused into its buffer, or 0."""
    in_buckets = config.parallel.sharding.reduce_buffer and not in_root(config)  # counted there
    return 0 if buffers.fuses_gradients(config) or in_buckets else config.run.activation_bytes


def _keeps(config: Config) -> bool:
    """Whether the gradients that a layer's backward makes stay until it is done, or longer."""
    return _first(config) or in_root(config)


def _first(config: Config) -> bool:
    """Whether gradients are there for the first time, and so not before backward."""
    return gradients.in_backward(config) and not gradients.before_backward(config)


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


def policy_of(config: Config, number: int) -> Policy:
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
