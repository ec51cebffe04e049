"""Activation memory: the distinct tensors that a graph saves for backward, under any policy."""

from collections.abc import Callable
from typing import NamedTuple

from memcalc.config.recompute import POLICIES, Policy
from memcalc.errors import UsageError, nearest
from memcalc.graph.graph import OF_WEIGHT, Graph, Op, Region, Save, Tensor
from memcalc.graph.mesh import Size
from memcalc.graph.ops.collectives import REDUCE_SCATTER

ACCOUNTINGS = {
    "paper": "without small buffers such as norm statistics, as in Korthikanti et al. 2022",
    "exact": "every byte that autograd saves for backward",
}
CHECKPOINT = "torch.utils.checkpoint keeps the inputs of a checkpointed region"
SELECTIVE_CHECKPOINT = "torch.utils.checkpoint, create_selective_checkpoint_contexts: MUST_SAVE"

NOTHING = POLICIES["none"]


class Entry(NamedTuple):
    """A tensor that is saved for backward: once, however many operations save it.

    Attributes:
        tensor: The tensor.
        ops: The operations that save it, in the order of the forward pass.
        reason: Why the first of them saves it.
        source: Where that is documented or implemented.
        part: The part of the model that the first of them is in: the region inside the outermost.
        small: Whether the paper's accounting leaves it out.
    """

    tensor: Tensor
    ops: tuple[str, ...]
    reason: str
    source: str
    part: str
    small: bool


def kept(graph: Graph, policy: Policy = NOTHING) -> list[Entry]:
    """The tensors that backward finds in memory, in the order of the forward pass.

    Outside the recomputed regions they are what operations save. Each recomputed region keeps its
    inputs from outside (of a view, the whole tensor) and its cached outputs, as checkpointing does;
    all else is recomputed. A dropped output is kept by no operation, an offloaded tensor is not on
    the GPU, and a tensor shared with other graphs counts where it is computed. What the caller
    refers to until backward is over is there too.

    >>> from memcalc.blocks.layer import layer_graph
    >>> from memcalc.config import load
    >>> [entry.tensor.name for entry in kept(layer_graph(load("22b")), POLICIES["full"])]
    ['layer_input']
    """
    if policy.offloaded:
        return []
    found: dict[Tensor, Entry] = {}
    gone: set[Tensor] = set(graph.shared)
    made: dict[Region, set[Tensor]] = {}
    products: dict[Region, int] = {}
    for op in graph.ops:
        region = outermost(op, policy)
        if region is None:
            for save in op.saves:
                if save.tensor not in gone:
                    whole = save.tensor.kept_as or save.tensor
                    _keep(found, save._replace(tensor=whole), op.name, op.regions)
            continue
        inside = made.setdefault(region, set())
        path = op.regions[: op.regions.index(region) + 1]
        for tensor in op.inputs:
            if tensor not in inside and tensor not in gone:
                whole = tensor.kept_as or tensor
                save = Save(whole, f"input of the recomputed {region.name}", CHECKPOINT)
                _keep(found, save, region.name, path)
        inside.update(op.outputs)
        cached, products[region] = cached_tensors(op, policy, products.get(region, 0))
        if region.name in policy.dropped:
            gone.update(op.outputs)
        small = {save.tensor for save in op.saves if save.small}
        for tensor in cached:
            reason = f"cached: not recomputed with the rest of {region.name}"
            save = Save(tensor, reason, SELECTIVE_CHECKPOINT, tensor in small)
            _keep(found, save, op.name, path)
    for save, path in graph.returned:
        _keep(found, save, "returned", path)
    return list(found.values())


def cached_tensors(op: Op, policy: Policy, products: int) -> tuple[list[Tensor], int]:
    """The outputs that a policy caches of an operation in a recomputed region.

    Args:
        op: The operation.
        policy: What backward recomputes.
        products: The number of outputs of linears in the region before it.

    Returns:
        The tensors, and the outputs of linears so far.
    """
    every = min((op.kind.cached[word] for word in policy.cached & op.kind.cached.keys()), default=0)
    if every == 0:
        return [], products
    if every == 1:
        # a flash kernel's statistics are outputs as well; a linear saves its input
        linear = op.kind.gemm == OF_WEIGHT
        own = [] if linear else [x.tensor for x in op.saves if x.tensor not in op.inputs]
        return list(dict.fromkeys([*op.outputs, *own])), products
    numbered = enumerate(op.outputs, products)
    return [tensor for i, tensor in numbered if i % every == 0], products + len(op.outputs)


def total(entries: list[Entry]) -> Size:
    """The bytes of the entries, on one rank."""
    return sum(entry.tensor.bytes for entry in entries)


def waiting(graph: Graph) -> Size:
    """The bytes held between the backward of a pass's inputs and that of its weights.

    They are the saved input and the output gradient of each GEMM with a weight: 32sbh for the
    paper's layer, as in Qi et al. 2023 (arXiv 2401.10241), table 1. A gathered gradient is kept as
    its shard, as inputs are, and gathered again.

    >>> from memcalc.blocks.layer import layer_graph
    >>> from memcalc.config import load
    >>> s, b, h, t = 2048, 1, 12288, 8
    >>> waiting(layer_graph(load("175b", tp=1))) == 32 * s * b * h
    True
    >>> waiting(layer_graph(load("175b", tp=t, sp=True))) == 32 * s * b * h // t
    True
    """
    shards = {op.inputs[0]: op.outputs[0] for op in graph.ops if op.kind is REDUCE_SCATTER}
    remain: dict[Tensor, None] = {}
    for op in graph.ops:
        inputs = [save.tensor.kept_as or save.tensor for save in op.saves if save.for_weights]
        if inputs:
            gradients = [shards.get(tensor, tensor) for tensor in op.outputs]
            remain.update(dict.fromkeys([*inputs, *gradients]))
    return sum(tensor.bytes for tensor in remain)


def drops(graph: Graph) -> Callable[[Tensor], list[str]]:
    """A function that lists which of selective and full recomputation do not keep a tensor."""
    kept_by = {
        name: {entry.tensor for entry in kept(graph, POLICIES[name])}
        for name in ("selective", "full")
    }
    return lambda tensor: [policy for policy, names in kept_by.items() if tensor not in names]


def counted(entries: list[Entry], accounting: str) -> list[Entry]:
    """The entries that an accounting counts: all of them, or those that the paper counts.

    The paper leaves out small buffers (Korthikanti et al. 2022, section 4): norm statistics and,
    likewise, the tensors that operations mark as small.
    """
    if accounting == "exact":
        return entries
    if accounting == "paper":
        return [entry for entry in entries if not entry.small]
    raise UsageError(
        f"accounting {accounting!r} is unknown; {nearest(str(accounting), ACCOUNTINGS)}"
    )


def outermost(op: Op, policy: Policy) -> Region | None:
    """The recomputed region that an operation is in, or None."""
    chosen = (r for r in op.regions if r.always or (r.alone and r.name in policy.regions))
    return next(chosen, None)


def _keep(found: dict[Tensor, Entry], save: Save, by: str, regions: tuple[Region, ...]) -> None:
    entry = found.get(save.tensor)
    if entry is None:
        part = regions[:2][-1].name if regions else ""
        found[save.tensor] = Entry(save.tensor, (by,), save.reason, save.source, part, save.small)
    elif by not in entry.ops:
        found[save.tensor] = entry._replace(ops=(*entry.ops, by))
