"""The most that a pass holds: its operations are walked forward and backward.

A forward walk holds what is saved for backward, what later operations still read, and the scratch
memory of the current operation. A backward walk holds what is still saved, the gradients that are
still read, and a weight gradient until it is accumulated.
"""

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

from memcalc.analysis.activations import NOTHING, kept, outermost
from memcalc.config.recompute import Policy
from memcalc.graph.graph import OF_WEIGHT, PASSED_ON, Graph, Op, Region, Tensor
from memcalc.graph.mesh import Size


class Moment(NamedTuple):
    """What a pass holds while one of its operations runs, in bytes.

    Attributes:
        op: The operation.
        kept: Tensors that are saved for backward.
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
    return _forward(graph.ops, {entry.tensor for entry in kept(graph, policy)})


def backward(
    graph: Graph,
    policy: Policy = NOTHING,
    own: int = 0,
    gathers: bool = True,
    reentrant: bool = False,
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

    >>> from memcalc.blocks.layer import layer_graph
    >>> from memcalc.config import load
    >>> s, f = 4096, 14336
    >>> config = load("llama-3-8b", seq_length=s, implementation="megatron")
    >>> moment = backward(layer_graph(config))
    >>> moment.op, moment.working == 2 * s * (4096 + f + 2 * f)
    ('swiglu', True)
    """
    runs = _runs(graph.ops, policy)
    walk = _Backward({entry.tensor for entry in kept(graph, policy)}, own, gathers)
    read = {tensor for op in graph.ops for tensor in op.inputs}
    ends = [tensor for op in graph.ops for tensor in op.outputs if tensor not in read]
    walk.gradients.update({tensor: tensor for tensor in ends})
    worst = Moment("", 0, 0)
    for number, ops in reversed(list(enumerate(runs))):
        before = {whole for run in runs[:number] for op in run for whole in _saved(op)}
        region = outermost(ops[0], policy)
        walk.returned = []
        if region is not None:
            worst = max(worst, walk.again(ops), key=_bytes)
            if reentrant and region.name not in policy.dropped:
                inside = {tensor for op in ops for tensor in op.inputs}
                made = [tensor for op in ops for tensor in op.outputs if tensor not in inside]
                walk.returned = [(tensor, walk.gradients.get(tensor)) for tensor in made]
        for index, op in reversed(list(enumerate(ops))):
            worst = max(worst, walk.back(op), key=_bytes)
            earlier = before.union(*(_saved(other) for other in ops[:index]))
            walk.held -= _saved(op) - earlier
    return worst


class _Backward:
    """What is held during the backward pass.

    Attributes:
        held: Saved tensors that are still needed.
        own: Bytes per element of a weight gradient that is not fused, or 0.
        gathers: Whether shards are gathered into new memory.
        gradients: Tensors with a gradient, each with the tensor whose gradient shares its memory.
        returned: Outputs of a recomputed region, likewise, while they are held.
    """

    def __init__(self, held: set[Tensor], own: int, gathers: bool) -> None:
        self.held = held
        self.own = own
        self.gathers = gathers
        self.gradients: dict[Tensor, Tensor] = {}
        self.returned: list[tuple[Tensor, Tensor | None]] = []

    def again(self, ops: Sequence[Op]) -> Moment:
        """The forward pass of a recomputed region; what it saves is held afterwards."""
        inside = {whole for op in ops for whole in _saved(op)}
        moment = _forward(ops, inside | self.held)
        around = sum(t.bytes for t in self.held - inside) + self._alive()
        self.held |= inside
        return moment._replace(working=moment.working + around)

    def back(self, op: Op) -> Moment:
        """The backward of one operation, with the gradients that it computes."""
        new = [tensor for tensor in op.inputs if tensor not in self.gradients]
        passes = op.kind.gradient == PASSED_ON
        made = 0 if passes or op.in_place else sum(tensor.bytes for tensor in new)
        if op.kind.gemm == OF_WEIGHT:
            # the shard is gathered again while the gradient of the whole is scattered
            shards = [(t, t.kept_as) for t in op.inputs if t.kept_as in self.held]
            made += sum(s.bytes + (t.bytes if self.gathers else 0) for t, s in shards if s)
        weight = sum(prod((axis.local for axis in w.axes), start=self.own) for w in op.weights)
        moment = Moment(
            op.name,
            sum(tensor.bytes for tensor in self.held),
            self._alive() + made + op.scratch.backward,
            weight,
        )
        owner = self.gradients.get(op.outputs[0]) if passes and op.outputs else None
        self.gradients.update({tensor: owner or tensor for tensor in new})
        for tensor in op.outputs:
            if tensor not in op.inputs:
                self.gradients.pop(tensor, None)
        return moment

    def _alive(self) -> Size:
        given = {owner for _, owner in self.returned if owner is not None}
        owners = sum(owner.bytes for owner in given.union(self.gradients.values()))
        return owners + sum(tensor.bytes for tensor, _ in self.returned)


def _saved(op: Op) -> set[Tensor]:
    return {save.tensor.kept_as or save.tensor for save in op.saves}


def _bytes(moment: Moment) -> Size:
    return moment.bytes


def _forward(ops: Sequence[Op], kept_: set[Tensor]) -> Moment:
    last = {t: index for index, op in enumerate(ops) for t in (*op.inputs, *op.holds)}
    alive: dict[Tensor, None] = {}
    worst = Moment("", 0, 0)
    saved: set[Tensor] = set()
    for index, op in enumerate(ops):
        alive.update(dict.fromkeys([*op.inputs, *op.outputs]))
        saved |= (set(alive) | _saved(op)) & kept_
        working = sum(t.bytes for t in alive if t not in kept_) + op.scratch.forward
        moment = Moment(op.name, sum(tensor.bytes for tensor in saved), working)
        worst = max(worst, moment, key=_bytes)
        alive = {tensor: None for tensor in alive if last.get(tensor, -1) > index}
    return worst


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
