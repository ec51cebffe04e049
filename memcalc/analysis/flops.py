"""FLOPs of matrix products, a multiply-add being two, over all ranks and each product once."""

from memcalc.graph.graph import Graph
from memcalc.graph.mesh import Size

BACKWARD_PER_FORWARD = 2  # a product's two gradients are two products of its size


def forward(graph: Graph) -> Size:
    """FLOPs of the forward pass.

    >>> from memcalc.blocks.layer import layer_graph
    >>> from memcalc.config import load
    >>> s, b, h = 2048, 4, 6144
    >>> forward(layer_graph(load("22b"))) == 24 * b * s * h**2 + 4 * b * s**2 * h
    True
    """
    return sum(op.flops for op in graph.ops)


def backward(graph: Graph) -> Size:
    """FLOPs of the backward pass, without recomputation."""
    return BACKWARD_PER_FORWARD * forward(graph)


def recomputed(graph: Graph, regions: frozenset[str]) -> Size:
    """FLOPs that recomputing the regions adds to the backward pass."""
    return sum(op.flops for op in graph.ops if any(region.name in regions for region in op.regions))
