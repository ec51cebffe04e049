"""Activation memory: the distinct tensors that a graph keeps for backward, under any policy."""

from collections.abc import Callable
from typing import NamedTuple

from memcalc.analysis.recompute import POLICIES, regions
from memcalc.blocks.layer import layer_graph
from memcalc.config import Config
from memcalc.errors import UsageError, nearest
from memcalc.graph.graph import Graph, Op, Region, Tensor
from memcalc.graph.mesh import Size

ACCOUNTINGS = {
    "paper": "small buffers (norm statistics, log-sum-exp) left out, as the paper does",
    "exact": "every byte that autograd keeps",
}
CHECKPOINT = "torch.utils.checkpoint keeps what enters a recomputed region"


class Entry(NamedTuple):
    """A tensor that is kept, once, however many operations save it.

    Attributes:
        tensor: The tensor.
        ops: The operations that save it, in the order of the forward pass.
        reason: Why the first of them does.
        source: Where that was seen.
        regions: The regions that the first of them is in, outermost first.
    """

    tensor: Tensor
    ops: tuple[str, ...]
    reason: str
    source: str
    regions: tuple[str, ...]


def kept(graph: Graph, recomputed: frozenset[str] = frozenset()) -> list[Entry]:
    """The tensors that backward finds in memory, in the order of the forward pass.

    Outside the recomputed regions, what operations save. Of each recomputed region, what enters it
    from outside: that is what checkpointing keeps, and all else is made again.

    >>> from memcalc.blocks.layer import layer_graph
    >>> from memcalc.config import load
    >>> [entry.tensor.name for entry in kept(layer_graph(load("22b")), frozenset({"layer"}))]
    ['layer_input']
    """
    found: dict[Tensor, Entry] = {}
    made: dict[Region, set[Tensor]] = {}
    for op in graph.ops:
        region = _outermost(op, recomputed)
        if region is None:
            for tensor, reason, source in op.saves:
                _keep(found, tensor, op.name, reason, source, op)
            continue
        inside = made.setdefault(region, set())
        for tensor in op.inputs:
            if tensor not in inside:
                reason = f"enters the recomputed {region.name}"
                _keep(found, tensor, region.name, reason, CHECKPOINT, op)
        inside.update(op.outputs)
    return list(found.values())


def layer_activations(config: Config, accounting: str = "paper") -> list[Entry]:
    """The tensors that one layer keeps for backward on one rank, under the run's recomputation.

    Args:
        config: The model, its parallelism and its run.
        accounting: ``paper`` or ``exact``.

    Raises:
        UsageError: The recomputation names what is neither a policy nor a region, or there is no
            such accounting.

    >>> from memcalc.config import load
    >>> [entry.tensor.name for entry in layer_activations(load("22b", recompute="full"))]
    ['layer_input']
    """
    return counted(kept(layer_graph(config), regions(config.run.recompute)), accounting)


def activation_bytes(config: Config, accounting: str = "paper") -> int:
    """The bytes of ``layer_activations``.

    >>> from memcalc.config import load
    >>> activation_bytes(load("22b")) // 2**20
    1264
    """
    size: int = total(layer_activations(config, accounting))
    return size


def total(entries: list[Entry]) -> Size:
    """The bytes of the entries, on one rank."""
    return sum(entry.tensor.bytes for entry in entries)


def drops(graph: Graph) -> Callable[[Tensor], list[str]]:
    """A function that names the policies under which a tensor is not kept."""
    kept_by = {
        policy: {entry.tensor for entry in kept(graph, recomputed)}
        for policy, recomputed in POLICIES.items()
        if recomputed
    }
    return lambda tensor: [policy for policy, names in kept_by.items() if tensor not in names]


def counted(entries: list[Entry], accounting: str) -> list[Entry]:
    """The entries that an accounting counts: ``exact`` all, ``paper`` what the paper counts.

    The paper leaves out small buffers (Korthikanti et al. 2022, section 4): the statistics of norms
    and, in its spirit, every tensor without a feature axis or an s x s in its shape.
    """
    if accounting == "exact":
        return entries
    if accounting == "paper":
        return [entry for entry in entries if not small(entry.tensor)]
    raise UsageError(f"accounting {accounting!r} is unknown; {nearest(accounting, ACCOUNTINGS)}")


def small(tensor: Tensor) -> bool:
    """Whether the paper's accounting leaves a tensor out.

    >>> from memcalc.graph.mesh import Axis
    >>> s, h = Axis.whole("s", 8), Axis.whole("h", 4)
    >>> small(Tensor("rstd", (s,), 4)), small(Tensor("x", (s, h), 2)), small(Tensor("p", (s, s), 2))
    (True, False, False)
    """
    sequences = 0
    for axis in tensor.axes:
        letter = axis.letter
        if "h" in letter or "d" in letter or "f" in letter:
            return False
        sequences += letter[0] == "s"
    return sequences < 2


def _outermost(op: Op, recomputed: frozenset[str]) -> Region | None:
    return next((region for region in op.regions if region.name in recomputed), None)


def _keep(
    found: dict[Tensor, Entry], tensor: Tensor, by: str, reason: str, source: str, op: Op
) -> None:
    entry = found.get(tensor)
    if entry is None:
        found[tensor] = Entry(tensor, (by,), reason, source, tuple(r.name for r in op.regions))
    elif by not in entry.ops:
        found[tensor] = entry._replace(ops=(*entry.ops, by))
