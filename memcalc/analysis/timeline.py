"""A step as one program: the births and deaths of a rank's storages, in their order.

The events of a layer's pass are walked once (``memcalc.analysis.walk``) and repeated for each layer
and micro-batch, with storages of their own. Replayed through PyTorch's caching allocator, they give
what it allocates and reserves.

Covered is a rank whose framework makes gradients in backward and shards nothing; see ``covers``.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

from memcalc.analysis import buffers, gradients, walk
from memcalc.analysis.allocator import Allocator, AllocatorConf, Block
from memcalc.analysis.moments import policy_of
from memcalc.analysis.optimizer_step import counters, form, temporary
from memcalc.analysis.parts import Part
from memcalc.analysis.rank import EMBEDDING, HEAD, Rank
from memcalc.analysis.schedule import FORWARD, Step, one_f_one_b
from memcalc.analysis.states import AVERAGE, buckets, recipe, states
from memcalc.analysis.walk import WEIGHT, Event
from memcalc.blocks.embedding import embedding_graph
from memcalc.blocks.head import head_graph
from memcalc.blocks.layer import layer_graph
from memcalc.config import Config
from memcalc.config.recompute import POLICIES, Policy
from memcalc.graph.graph import Graph, Tensor
from memcalc.graph.ops.ends import EMBEDDING as LOOKUP

ITERATIONS = 2  # the first makes the optimizer's states, the second is like all later ones
MOST_EVENTS = 2**20  # that are replayed
STATES, STEP, PASS = "optimizer states", "step", "pass"  # kinds of events beside those of walks
NOTHING = POLICIES["none"]


class Span(NamedTuple):
    """The events of one graph's pass.

    Attributes:
        events: The events.
        takes: The storage that the pass before hands over, or None.
        leaves: The storage that it hands on to the next, or None.
    """

    events: tuple[Event, ...]
    takes: Hashable = None
    leaves: Hashable = None


class Replay(NamedTuple):
    """The most bytes of PyTorch's allocator in the last iteration that is replayed.

    Attributes:
        requested: What was asked of it: the peak of the events themselves.
        allocated: What it has given out: rounded, and with the rests of blocks that are not split.
        reserved: What it holds from the driver.
    """

    requested: int
    allocated: int
    reserved: int


def covers(config: Config) -> bool:
    """Whether the order of a step's allocations is known well enough to replay it.

    >>> from memcalc.config import load
    >>> covers(load("llama-3.2-1b", implementation="transformers-sdpa", main_grads="bf16"))
    True
    >>> covers(load("llama-3.2-1b"))
    False
    """
    run, parallel = config.run, config.parallel
    sharded = parallel.zero > 0 or parallel.pp * parallel.tp * parallel.cp > 1
    together = run.recompute_method != "block" and (run.recompute_layers or 1) > 1
    beyond = run.frozen or run.precision == "fp8" or together
    return gradients.in_backward(config) and not sharded and not beyond


@lru_cache(64)
def replay(config: Config) -> Replay | None:
    """Two iterations through the caching allocator; None if their order is not known, or too long.

    >>> from memcalc.config import load
    >>> settings = {"main_grads": "bf16", "main_params": "none", "moments": "bf16"}
    >>> run = {"seq_length": 2048, "implementation": "transformers-sdpa", **settings}
    >>> found = replay(load("llama-3.2-1b", **run))
    >>> found.requested <= found.allocated < found.reserved
    True
    """
    if not covers(config):
        return None
    allocator = allocator_of(config)
    for number, _ in enumerate(played(config, allocator)):
        if number > MOST_EVENTS:
            return None
    return Replay(allocator.most_requested, allocator.most_allocated, allocator.most_reserved)


def allocator_of(config: Config) -> Allocator:
    """A caching allocator with the run's settings, on a GPU of unlimited memory."""
    expandable = config.run.environment.expandable_segments
    return Allocator(AllocatorConf(expandable_segments=expandable))


def played(config: Config, allocator: Allocator) -> Iterator[Event]:
    """The events of ``events``, each when the allocator has carried it out."""
    blocks: dict[Hashable, Block] = {}
    for event in events(Rank(config, 0)):
        if event.storage is None:
            if event.op == LAST_ITERATION:
                allocator.reset_peaks()
        elif event.bytes > 0:
            blocks[event.storage] = allocator.malloc(event.bytes)
        else:
            allocator.free(blocks.pop(event.storage))
        yield event


LAST_ITERATION = "the last iteration begins"
PHASES = ("forward", "backward", "step", "zero_grad")  # of an iteration


def events(rank: Rank) -> Iterator[Event]:
    """The births and deaths of a rank's storages: its set-up and two iterations."""
    yield from setup(rank)
    for number in range(ITERATIONS):
        if number == ITERATIONS - 1:
            yield Event(LAST_ITERATION, None, PASS, 0)
        yield from iteration(rank, number == 0)


def setup(rank: Rank) -> Iterator[Event]:
    """Weights and lasting buffers."""
    each = recipe(rank.config.run)
    for number, size in enumerate(_tensors(rank)):
        yield Event("weights", ("weight", number), "weights", each.weight * size)
    further = [part for part in states(rank) if part.name == AVERAGE]
    for part in (*further, *buffers.lasting(rank)):
        yield Event("buffers", part.name, part.group, part.bytes)


def iteration(rank: Rank, first: bool) -> Iterator[Event]:
    """The passes of all micro-batches, the optimizer's step, and the gradients' end."""
    config = rank.config
    made: dict[Hashable, Event] = {}
    batch = [Event(STEP, part.name, "buffers", part.bytes) for part in buffers.of_batch(rank)]
    if not first:
        yield from (event._replace(bytes=-event.bytes) for event in batch)
    passes = _Passes(rank, first)
    # the second micro-batch adds to the gradients of the first, and others are like the second
    for step in one_f_one_b(rank.stage, 1, min(config.microbatches, 2)):
        keeps = step.microbatch == 0 and not (config.run.keep_gradients and not first)
        yield _begins("forward" if step.phase == FORWARD else "backward")
        around, until_end = _around(rank, step), _around(rank, step, "end")
        yield from around
        for event in passes.run(step, keeps):
            if around != until_end and passes.at_the_end(event):
                yield from (e._replace(bytes=-e.bytes) for e in around if e not in until_end)
                around = until_end
            if event.kind == WEIGHT and event.bytes > 0 and keeps:
                made[event.storage] = event
            elif event.kind == WEIGHT:
                made.pop(event.storage, None)
            yield event
        yield from (event._replace(bytes=-event.bytes) for event in around)
    yield _begins("step")
    yield from batch
    if first:
        yield from _states(rank)
    yield from _at_once(buckets(rank, "step"), STEP)
    yield from _temporary(rank)
    yield _begins("zero_grad")
    if not config.run.keep_gradients:
        for event in made.values():
            yield event._replace(op="zero_grad", bytes=-event.bytes)


def _is_tokens(storage: Hashable) -> bool:
    """Whether a storage is that of token ids, int64."""
    return isinstance(storage, Tensor) and storage.dtype_bytes == 8


def _begins(phase: str) -> Event:
    """A mark between events: a phase begins."""
    return Event(phase, None, PASS, 0)


def _around(rank: Rank, step: Step, at: str = "backward") -> list[Event]:
    """What the framework holds while a pass runs; ``at``: backward, or its end."""
    parts = buffers.in_a_pass(rank, "forward" if step.phase == FORWARD else at)
    return [Event(PASS, (PASS, part.name), PASS, part.bytes) for part in parts]


def _states(rank: Rank) -> Iterator[Event]:
    """The optimizer's states, as its first step makes them: weight by weight."""
    parts = (each for each in (*states(rank), *counters(rank)) if each.group == "optimizer")
    for part in parts:
        yield from _spread(rank, part, STATES)


def _spread(rank: Rank, part: Part, kind: str) -> Iterator[Event]:
    """A part as a storage per weight, in proportion to the weights."""
    total, before, done = rank.parameters.total(), 0, 0
    for number, size in enumerate(_tensors(rank)):
        done += size
        until = part.bytes * done // total
        if until > before:
            yield Event(STEP, (part.name, number), kind, until - before)
        before = until


def _tensors(rank: Rank) -> Iterator[int]:
    """The elements of each weight; all experts of a layer are one tensor, for grouped GEMMs."""
    return (size * alike for _, size, alike in rank.weights())


def _temporary(rank: Rank) -> Iterator[Event]:
    """What the optimizer's step holds while it runs: a list of a tensor per weight, if foreach."""
    if form(rank.config) == "foreach":
        held = [event for part in temporary(rank) for event in _spread(rank, part, STEP)]
        yield from held
        yield from (event._replace(bytes=-event.bytes) for event in held)
    else:
        yield from _at_once(temporary(rank), STEP)


def _at_once(parts: Iterable[Part], op: str) -> Iterator[Event]:
    """Parts that are allocated together, and then freed together."""
    there = [part for part in parts if part.bytes]
    yield from (Event(op, (op, part.name), op, part.bytes) for part in there)
    yield from (Event(op, (op, part.name), op, -part.bytes) for part in there)


class _Passes:
    """The passes of a rank. What one graph hands over to the next is one storage for both.

    Attributes:
        rank: The rank.
        first: Whether this is the first iteration, whose gradients may outlive it.
        renamed: Storages that were handed over, with the name under which they were born.
        tied: The gradients of a tied table: one of the head and one of the embedding.
        of_table: Those that are there, with their names.
    """

    def __init__(self, rank: Rank, first: bool) -> None:
        self.rank = rank
        self.first = first
        self.renamed: dict[Hashable, Hashable] = {}
        self.of_table: dict[Hashable, Hashable] = {}
        tied = gradients.of_tied_head(rank) > 0
        ends = [_graph(rank.config, name) for name in (HEAD, EMBEDDING)] if tied else []
        self.tied = {
            (weight.name, "gradient")
            for graph in ends
            for op in graph.ops
            for weight in op.weights
            if weight.shared or op.kind is LOOKUP
        }

    def run(self, step: Step, keeps: bool) -> Iterator[Event]:
        """The events of one micro-batch's pass through a chunk."""
        forwards = step.phase == FORWARD
        graphs = self._graphs(step.chunk)
        carried: tuple[Hashable, int] | None = None
        for name, kind, policy in graphs if forwards else reversed(graphs):
            graph, own = _graph(self.rank.config, kind), self.rank.config.run.activation_bytes
            span = _span(graph, policy, own, forwards, keeps)
            owner = self.first, step.microbatch, step.chunk, name
            given, carried = carried, None
            late = []
            for event in span.events:
                key: Hashable = (owner, event.storage)
                if event.storage in self.tied and not forwards:
                    if event.bytes > 0:
                        self.of_table[event.storage] = key
                        yield event._replace(storage=key)
                    continue  # it is freed when both are added
                if event.bytes > 0:
                    if given and event.storage == span.takes and event.bytes == given[1]:
                        self.renamed[key], given = given[0], None
                        continue
                    yield event._replace(storage=key)
                    continue
                key = self.renamed.pop(key, key)
                if event.storage == span.leaves:
                    carried = key, -event.bytes
                elif name == EMBEDDING and _is_tokens(event.storage):
                    late.append(event._replace(storage=key))  # the loop refers to the tokens
                else:
                    yield event._replace(storage=key)
            if given:
                yield Event(PASS, given[0], walk.WORKING, -given[1])
            if not forwards and name == EMBEDDING:
                yield from self._sum_of_tied(owner, keeps)
            yield from late
        if carried:
            yield Event(PASS, carried[0], walk.WORKING, -carried[1])
        if not forwards and self.rank.head:
            # the caller refers to what the head returned until the whole backward is over
            for save, _ in _graph(self.rank.config, HEAD).returned:
                key = (self.first, step.microbatch, step.chunk, HEAD), save.tensor
                yield Event(PASS, key, walk.SAVED, -save.tensor.bytes)

    @staticmethod
    def at_the_end(event: Event) -> bool:
        """Whether an event belongs to the embedding."""
        owner = event.storage[0] if isinstance(event.storage, tuple) else ()
        return isinstance(owner, tuple) and owner[-1:] == (EMBEDDING,)

    def _sum_of_tied(self, owner: Hashable, keeps: bool) -> Iterator[Event]:
        """Both gradients of a tied table are added, out of place."""
        if self.of_table:
            size = gradients.of_tied_head(self.rank)
            total = Event("add", (owner, "sum of a tied table's gradients"), WEIGHT, size)
            yield total
            for key in self.of_table.values():
                yield total._replace(storage=key, bytes=-size)
            if not keeps:
                yield total._replace(bytes=-size)
            self.of_table = {}

    def _graphs(self, chunk: int) -> list[tuple[Hashable, str, Policy]]:
        """The graphs of a chunk in forward order: a name, the kind, and what is recomputed."""
        config, rank = self.rank.config, self.rank
        layers = enumerate(rank.chunks[chunk])
        found: list[tuple[Hashable, str, Policy]] = [
            (number, kind, policy_of(config, number)) for number, kind in layers
        ]
        if rank.places[chunk] == 0:
            found.insert(0, (EMBEDDING, EMBEDDING, NOTHING))
        if rank.places[chunk] == config.parallel.chunks - 1:
            found.append((HEAD, HEAD, NOTHING))
        return found


@lru_cache(256)  # by the graph itself: one that is built again has other tensors
def _span(graph: Graph, policy: Policy, own: int, forwards: bool, keeps: bool) -> Span:
    """The events of a layer's pass, or of that of an end of the model."""
    read = {tensor for op in graph.ops for tensor in op.inputs}
    made = {tensor for op in graph.ops for tensor in op.outputs}
    outputs = [t for op in graph.ops for t in op.outputs if t not in read]
    inputs = [t for op in graph.ops for t in op.inputs if t not in made and t not in graph.shared]
    if forwards:
        found = tuple(walk.forward_events(graph, policy))
        return Span(found, inputs[0] if inputs else None, outputs[-1] if outputs else None)
    found = tuple(walk.backward_events(graph, policy, own, keeps=keeps))
    gone = [e.storage for e in found if e.op == "" and e.bytes < 0 and e.kind == walk.WORKING]
    takes = (outputs[-1], "gradient") if outputs else None
    return Span(found, takes, gone[0] if gone else None)


@lru_cache(64)  # forward and backward refer to the same tensors
def _graph(config: Config, name: str) -> Graph:
    ends: Mapping[str, Callable[[Config], Graph]] = {EMBEDDING: embedding_graph, HEAD: head_graph}
    return ends[name](config) if name in ends else layer_graph(config, kind=name)
