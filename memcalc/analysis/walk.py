"""A pass as births and deaths: its operations are walked forward and backward.

A forward walk holds what is saved for backward, what later operations still read, and the scratch
memory of the current operation. A backward walk holds what is still saved, the gradients that are
still read, and a weight gradient until it is accumulated. The gradients of a weight that several
operations use are first summed. The most that a pass holds, its ``Moment``, is the maximum of the
running sum of its events.
"""

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

from memcalc.analysis.activations import NOTHING, kept, outermost
from memcalc.config.recompute import Policy
from memcalc.graph.graph import (
    NO_GRADIENT,
    OF_WEIGHT,
    PASSED_ON,
    VIEW,
    Graph,
    Op,
    Region,
    Tensor,
    Weight,
)
from memcalc.graph.mesh import Size
from memcalc.graph.ops.collectives import REDUCE_SCATTER

# What a storage of a pass is.
SAVED, RECOMPUTED, WORKING = "saved for backward", "recomputed", "working memory"
WEIGHT = "weight gradient"


class Event(NamedTuple):
    """A storage is allocated or freed.

    Attributes:
        op: The operation that runs.
        storage: The storage: a tensor, or what it belongs to and what it is of it.
        kind: ``SAVED``, ``RECOMPUTED``, ``WORKING`` or ``WEIGHT``.
        bytes: Its bytes where it is allocated; negative where it is freed.
    """

    op: str
    storage: Hashable
    kind: str
    bytes: Size


class Moment(NamedTuple):
    """What a pass holds while one of its operations runs, in bytes.

    Attributes:
        op: The operation.
        kept: Tensors that are saved for backward, or that the caller refers to until it is over;
            recomputed ones among them.
        working: Other activations or gradients, and the operation's scratch memory.
        weight: The gradients of its weights.
    """

    op: str
    kept: Size
    working: Size
    weight: Size = 0

    @property
    def bytes(self) -> Size:
        """All of it."""
        return self.kept + self.working + self.weight


def forward(graph: Graph, policy: Policy = NOTHING) -> Moment:
    """The moment of the forward pass that holds most.

    >>> from memcalc.blocks.head import head_graph
    >>> from memcalc.config import load
    >>> config = load("llama-3-8b", seq_length=4096, implementation="megatron")
    >>> moment = forward(head_graph(config))
    >>> moment.op, (moment.bytes - moment.kept) // (4096 * 128256)
    ('loss', 2)
    """
    return worst(forward_events(graph, policy), {})


def backward(
    graph: Graph,
    policy: Policy = NOTHING,
    own: int = 0,
    gathers: bool = True,
    reentrant: bool = False,
    splits: bool = False,
    keeps: bool = False,
    frozen: Collection[str] = (),
) -> Moment:
    """The moment of the backward pass that holds most, with the gradients of the pass's outputs.

    Args:
        graph: The pass.
        policy: What is recomputed: the operations of a region first run forward once more.
        own: Bytes per element of a weight gradient that is then accumulated; 0 where GEMMs
            accumulate directly (fused).
        gathers: Whether a GEMM whose input was saved as a shard gathers it into new memory,
            rather than into a buffer that exists anyway.
        reentrant: Whether recomputation of a region holds its outputs, and their gradients, until
            the region's backward is done (Megatron-core's tensor_parallel/random.py:
            CheckpointFunction).
        splits: Whether weight gradients are computed in a later pass, until which GEMMs keep their
            inputs and the gradients of their outputs.
        keeps: Whether a weight gradient stays when it is computed, rather than be accumulated.
        frozen: Regions whose weights have no gradient.

    >>> from memcalc.blocks.layer import layer_graph
    >>> from memcalc.config import load
    >>> s, f = 4096, 14336
    >>> config = load("llama-3-8b", seq_length=s, implementation="megatron")
    >>> moment = backward(layer_graph(config))
    >>> moment.op, moment.working == 2 * s * (4096 + f + 2 * f)
    ('swiglu', True)
    """
    events = backward_events(graph, policy, own, gathers, reentrant, splits, keeps, frozen)
    return worst(events, {SAVED: sum(entry.tensor.bytes for entry in kept(graph, policy))})


def worst(events: Iterable[Event], before: Mapping[str, Size]) -> Moment:
    """The moment at which most is held.

    Args:
        events: The events of a pass.
        before: The bytes of each kind before the first of them.
    """
    held: Counter[str] = Counter(before)
    most, total = Moment("", 0, 0), sum(before.values())
    for op, _, kind, size in events:
        held[kind] += size
        total += size
        if total > most.bytes:
            most = Moment(op, held[SAVED] + held[RECOMPUTED], held[WORKING], held[WEIGHT])
    return most


def forward_events(graph: Graph, policy: Policy = NOTHING) -> Iterator[Event]:
    """The births and deaths of a forward pass. What is saved for backward is not freed.

    >>> from memcalc.blocks.layer import layer_graph
    >>> from memcalc.config import load
    >>> config = load("llama-3-8b", seq_length=4096, implementation="megatron")
    >>> events = list(forward_events(layer_graph(config)))
    >>> freed = {event.storage for event in events if event.bytes < 0}
    >>> {event.kind for event in events if event.storage not in freed}
    {'saved for backward'}
    """
    saved = {entry.tensor for entry in kept(graph, policy)}
    return _Walk(graph).forward(graph.ops, saved, SAVED)


def backward_events(
    graph: Graph,
    policy: Policy = NOTHING,
    own: int = 0,
    gathers: bool = True,
    reentrant: bool = False,
    splits: bool = False,
    keeps: bool = False,
    frozen: Collection[str] = (),
) -> Iterator[Event]:
    """The births and deaths of a backward pass, which starts with what forward saved.

    The gradients of the pass's outputs are born first, and those of its inputs die last. What the
    caller refers to outlives it. For the arguments, see ``backward``.
    """
    saved = [entry.tensor for entry in kept(graph, policy)]  # in order: so are frees
    runs = _runs(graph.ops, policy)
    walk = _Backward(graph, saved, own, gathers, splits, keeps)
    walk.frozen = frozen
    read = {tensor for op in graph.ops for tensor in op.inputs}
    ends = [tensor for op in graph.ops for tensor in op.outputs if tensor not in read]
    walk.gradients.update({tensor: tensor for tensor in ends})
    if splits:
        walk.shards = {op.inputs[0]: op.outputs[0] for op in graph.ops if op.kind is REDUCE_SCATTER}
    for number, ops in reversed(list(enumerate(runs))):
        region = outermost(ops[0], policy)
        walk.returned = []
        if region is not None:
            yield from walk.again(ops)
            if reentrant and region.name not in policy.dropped:
                inside = {tensor for op in ops for tensor in op.inputs}
                made = [tensor for op in ops for tensor in op.outputs if tensor not in inside]
                walk.returned = [(tensor, walk.gradients.get(tensor)) for tensor in made]
        for op in reversed(ops):
            yield from walk.back(op)
            walk.let_go(op)
            yield from walk.add(op)
        if region is not None:  # a checkpoint's inputs go with it
            first = graph.until(sum(map(len, runs[:number])))
            walk.stay({entry.tensor for entry in kept(first, policy)})
    yield from walk.now(graph.ops[0].name, walk.held_now())
    walk.gradients.clear()
    walk.returned = []
    yield from walk.now("", walk.held_now())


class _Walk:
    """What is alive, and the events that change it.

    Attributes:
        alive: The kind and the bytes of each storage that is allocated.
        wholes: Views, each with the tensor of which it is one.
    """

    def __init__(self, graph: Graph) -> None:
        self.alive: dict[Hashable, tuple[str, Size]] = {}
        self.wholes: dict[Tensor, Tensor] = {}
        for op in graph.ops:
            if op.kind.output == VIEW:
                self.wholes |= dict.fromkeys(op.outputs, self.whole(op.inputs[0]))

    def whole(self, tensor: Tensor) -> Tensor:
        """The tensor that this one is a view of, or itself if it is no view."""
        return self.wholes.get(tensor, tensor)

    def now(self, op: str, wanted: dict[Hashable, tuple[str, Size]]) -> Iterator[Event]:
        """The events after which exactly the wanted storages are alive."""
        for storage in [each for each in self.alive if each not in wanted]:
            kind, size = self.alive.pop(storage)
            yield Event(op, storage, kind, -size)
        for storage, (kind, size) in wanted.items():
            if storage not in self.alive and type(size) is int and size == 0:
                continue
            if storage not in self.alive:
                self.alive[storage] = kind, size
                yield Event(op, storage, kind, size)

    def forward(
        self,
        ops: Sequence[Op],
        keeps: set[Tensor],
        kind: str,
        around: Mapping[Hashable, tuple[str, Size]] | None = None,
    ) -> Iterator[Event]:
        """Operations run forward; what they save of ``keeps`` stays, and what is around them."""
        around = around or {}
        whole = self.whole
        last = {whole(t): index for index, op in enumerate(ops) for t in (*op.inputs, *op.holds)}
        at_work: dict[Tensor, None] = {}
        saved: dict[Tensor, None] = {}
        for index, op in enumerate(ops):
            at_work.update(dict.fromkeys(whole(t) for t in (*op.inputs, *op.outputs)))
            saved.update(dict.fromkeys(t for t in (*at_work, *_saved(op)) if t in keeps))
            wanted: dict[Hashable, tuple[str, Size]] = dict(around)
            wanted |= {t: (kind, t.bytes) for t in saved if t not in wanted}
            wanted |= {t: (WORKING, t.bytes) for t in at_work if t not in keeps}
            yield from self.now(
                op.name, wanted | {(op.name, "scratch"): (WORKING, op.scratch.forward)}
            )
            at_work = {tensor: None for tensor in at_work if last.get(tensor, -1) > index}
            gone = [t for t in wanted if isinstance(t, Tensor) and t not in at_work]
            stay = {
                t: each for t, each in wanted.items() if t not in gone or t in saved or t in around
            }
            yield from self.now(op.name, stay)


class _Backward(_Walk):
    """What is held during the backward pass.

    Attributes:
        held: Saved tensors that are still needed, with their kinds.
        own: Bytes per element of a weight gradient that is not fused, or 0.
        gathers: Whether shards are gathered into new memory.
        splits: Whether weight gradients are computed later.
        keeps: Whether weight gradients stay.
        frozen: Regions whose weights have no gradient.
        gradients: Tensors with a gradient, each with the tensor whose gradient shares its memory.
        returned: Outputs of a recomputed region, likewise, while they are held.
        late: Saved tensors that a later pass needs for weight gradients.
        waiting: Tensors whose gradients wait for that pass.
        made: The weight gradients that stay.
        shards: The shard of each tensor whose gradient is kept as one.
        over: Tensors that the caller refers to, over which their gradients are written.
        sums: The weight gradients to which those of operations before are added.
    """

    def __init__(
        self,
        graph: Graph,
        held: Sequence[Tensor],
        own: int,
        gathers: bool,
        splits: bool,
        keeps: bool,
    ) -> None:
        super().__init__(graph)
        self.held = dict.fromkeys(held, SAVED)
        self.alive = {tensor: (SAVED, tensor.bytes) for tensor in held}
        self.own = own
        self.gathers = gathers
        self.splits = splits
        self.keeps = keeps
        self.frozen: Collection[str] = ()
        self.gradients: dict[Tensor, Tensor] = {}
        self.returned: list[tuple[Tensor, Tensor | None]] = []
        self.late: set[Tensor] = set()
        self.waiting: set[Tensor] = set()
        self.made: dict[Hashable, tuple[str, Size]] = {}
        self.shards: dict[Tensor, Tensor] = {}
        self.sums: dict[Hashable, tuple[str, Size]] = {}
        self.over: set[Tensor] = set()
        self._uses = Counter(weight.name for op in graph.ops for weight in op.weights)
        self._done: Counter[str] = Counter()
        # whose backward is the last that needs a tensor; None of what the caller refers to
        self._last: dict[Tensor, Op | None] = {save.tensor: None for save, _ in graph.returned}
        for op in graph.ops:
            for tensor in _saved(op):
                self._last.setdefault(tensor, op)

    def held_now(self) -> dict[Hashable, tuple[str, Size]]:
        """All that is alive between two operations."""
        found: dict[Hashable, tuple[str, Size]] = {
            tensor: (kind, tensor.bytes) for tensor, kind in self.held.items()
        }
        owners = {owner for _, owner in self.returned if owner is not None}
        owners |= self.waiting.union(self.gradients.values()) - self.over
        found |= {(owner, "gradient"): (WORKING, owner.bytes) for owner in owners}
        found |= {(t, "returned"): (WORKING, t.bytes) for t, _ in self.returned}
        return found | self.made | self.sums

    def again(self, ops: Sequence[Op]) -> Iterator[Event]:
        """The forward pass of a recomputed region; what it saves is held afterwards."""
        inside = [whole for op in ops for whole in _saved(op)]
        around = self.held_now()
        yield from self.now(ops[0].name, around)
        keeps = {*inside, *self.held}
        yield from self.forward(ops, keeps, RECOMPUTED, around)
        self.held |= {tensor: RECOMPUTED for tensor in inside if tensor not in self.held}

    def back(self, op: Op) -> Iterator[Event]:
        """The backward of one operation, with the gradients that it computes."""
        new = [tensor for tensor in op.inputs if tensor not in self.gradients]
        new = [] if op.kind.gradient == NO_GRADIENT else new
        passes = op.kind.gradient == PASSED_ON
        wanted = self.held_now()
        if not (passes or op.in_place):
            wanted |= {(t, "gradient"): (WORKING, t.bytes) for t in new}
        if op.kind.gemm == OF_WEIGHT:
            # the shard is gathered again while the gradient of the whole is scattered
            for t in op.inputs:
                shard = self.whole(t).kept_as
                if shard is not None and shard in self.held:
                    size = shard.bytes + (t.bytes if self.gathers else 0)
                    wanted[t, "gathered"] = WORKING, size
        trained = () if op.is_in(self.frozen) else op.weights
        for weight in trained if not op.in_place else ():
            further = (weight.name, "gradient") in self.sums
            key = weight.name, "further gradient" if further else "gradient"
            wanted[key] = WEIGHT, self._gradient(weight)
        wanted[op.name, "scratch"] = WORKING, op.scratch.backward
        yield from self.now(op.name, wanted)
        if op.in_place:
            self.over |= {tensor for tensor in new if self._last.get(tensor, op) is None}
        owner = self.gradients.get(op.outputs[0]) if passes and op.outputs else None
        self.gradients.update({tensor: owner or tensor for tensor in new})
        for tensor in op.outputs:
            if tensor not in op.inputs:
                self.gradients.pop(tensor, None)

    def add(self, op: Op) -> Iterator[Event]:
        """Sum the gradients of weights that several operations use.

        The first two are summed into a new tensor, to which others are then added in place
        (PyTorch torch/csrc/autograd/input_buffer.cpp: InputBuffer::accumulate).
        """
        for weight in () if op.is_in(self.frozen) else op.weights:
            key, each = (weight.name, "gradient"), (WEIGHT, self._gradient(weight))
            self._done[weight.name] += 1
            if self._done[weight.name] == 2 and not op.in_place:
                more = {(weight.name, name): each for name in ("further gradient", "sum")}
                yield from self.now(op.name, self.held_now() | more)
            if self._done[weight.name] < self._uses[weight.name]:
                self.sums[key] = each
            else:
                self.sums.pop(key, None)
                if self.keeps:
                    self.made[key] = each

    def _gradient(self, weight: Weight) -> Size:
        return prod((axis.local for axis in weight.axes), start=self.own)

    def let_go(self, op: Op) -> None:
        """Free what an operation saved, unless it is needed, or its weight gradient is late."""
        late = {s.tensor.kept_as or s.tensor for s in op.saves if s.for_weights and self.splits}
        if late:
            self.late |= late
            self.waiting |= {self.shards.get(tensor, tensor) for tensor in op.outputs}
        for tensor in _saved(op):
            if tensor not in late and self._last[tensor] is op:
                self.held.pop(tensor, None)

    def stay(self, needed: set[Tensor]) -> None:
        """Free all saved tensors but these, and those for late weight gradients."""
        for tensor in self.held.keys() - needed - self.late:
            del self.held[tensor]


def _saved(op: Op) -> list[Tensor]:
    return [save.tensor.kept_as or save.tensor for save in op.saves]


def _runs(ops: Iterable[Op], policy: Policy) -> list[list[Op]]:
    """The operations in order, grouped by recomputed region."""
    found: list[list[Op]] = []
    before: Region | None = None
    for op in ops:
        region = outermost(op, policy)
        if not found or region is None or region is not before:
            found.append([])
        found[-1].append(op)
        before = region
    return found
