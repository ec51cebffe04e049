"""Parameters: the weights that the operations of a model own."""

from collections.abc import Collection, Mapping
from fractions import Fraction
from math import prod

from memcalc.blocks.embedding import embedding_graph
from memcalc.blocks.head import head_graph
from memcalc.blocks.layer import MOE_KINDS, MTP, kinds, layer_graph
from memcalc.config import Config
from memcalc.graph.graph import Graph, Op
from memcalc.graph.mesh import Axis, Size, elements


def owned(graph: Graph) -> Size:
    """Parameters of a graph over all ranks, each counted once.

    >>> from memcalc.blocks.layer import layer_graph
    >>> from memcalc.config import load
    >>> h = 12288
    >>> owned(layer_graph(load("175b"))) == 12 * h**2 + 13 * h
    True
    """
    return sum(elements(w.axes) for op in graph.ops for w in op.weights if not w.shared)


def held(graph: Graph) -> Size:
    """Parameters of a graph that one rank holds.

    >>> from memcalc.blocks.layer import layer_graph
    >>> from memcalc.config import load
    >>> h, t = 12288, 8
    >>> held(layer_graph(load("175b"))) == (12 * h**2 + 7 * h) // t + 6 * h
    True
    """
    return sum(_local(op) for op in graph.ops)


def held_of_experts(graph: Graph) -> Size:
    """Of the parameters that one rank holds, those of experts, which have replicas of their own.

    >>> from memcalc.blocks.layer import layer_graph
    >>> from memcalc.config import load
    >>> h, g, experts, ep, etp = 4096, 14336, 8, 4, 2
    >>> graph = layer_graph(load("mixtral-8x7b", ep=ep, etp=etp))
    >>> held_of_experts(graph) == 3 * h * g * experts // (ep * etp)
    True
    """
    return sum(_local(op) for op in graph.ops if op.kind.of_experts)


def partly_used(graph: Graph, frozen: Collection[str] = ()) -> Size:
    """Parameters that every tensor-parallel rank holds whole, and uses for a part of the tokens.

    Or for a part of the heads. Each has only a part of their gradients: Megatron-core,
    distributed/finalize_model_grads.py, sums these once an iteration. Not those of experts, which
    other ranks share, nor of frozen regions.

    >>> from memcalc.blocks.layer import layer_graph
    >>> from memcalc.config import load
    >>> h, norms, biases = 12288, 4, 2
    >>> partly_used(layer_graph(load("175b", sp=True))) == (norms + biases) * h
    True
    >>> partly_used(layer_graph(load("175b")))  # every rank has all tokens
    0
    """
    return sum(
        prod(axis.local for axis in weight.axes)
        for op in graph.ops
        for weight in op.weights
        if not op.kind.of_experts and not op.is_in(frozen)
        if not weight.shared and not _splits(weight.axes)
        if any(_splits(each.axes) for each in op.outputs)
        or (graph.mesh.sequence_parallel and any(_splits(each.axes) for each in op.inputs))
    )


def parameters(config: Config, sizes: Mapping[str, Size] | None = None) -> Size:
    """Parameters of a whole model: embedding, layers, last norm, and a head that is not tied.

    Layers that predict further tokens are not among them, as in published counts.

    >>> from memcalc.config import load
    >>> round(parameters(load("llama-3-8b")) / 1e9, 2)
    8.03
    """
    ends = owned(embedding_graph(config, sizes)) + owned(head_graph(config, sizes))
    numbers: dict[str, Size] = {k: n for k, n in kinds(config).items() if k != MTP}
    if sizes is not None and len(numbers) == 1:
        numbers = dict.fromkeys(numbers, sizes["L"])
    layers = (n * owned(layer_graph(config, sizes, kind)) for kind, n in numbers.items())
    return ends + sum(layers)


def active_parameters(config: Config) -> int:
    """Parameters that one token uses: of the experts, only those that it is routed to.

    >>> from memcalc.config import load
    >>> active_parameters(load("llama-3-8b")) == parameters(load("llama-3-8b"))
    True
    """
    experts = config.model.experts
    if experts is None:
        return int(parameters(config))
    there = {kind: number for kind, number in kinds(config).items() if kind in MOE_KINDS}
    graph = layer_graph(config, kind=next(iter(there)))
    of_experts = sum(
        elements(weight.axes) for op in graph.ops for weight in op.weights if op.kind.of_experts
    )
    idle = Fraction(experts.number - experts.top_k, experts.number) * of_experts
    return int(parameters(config) - sum(there.values()) * idle)


def _splits(axes: tuple[Axis, ...]) -> bool:
    """Whether tensor-parallel ranks split an axis of these."""
    return any(split.letter == "t" for axis in axes for split in axis.splits)


def _local(op: Op) -> Size:
    return sum(prod(axis.local for axis in w.axes) for w in op.weights if not w.shared)
