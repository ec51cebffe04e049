"""Parameters: the weights that the operations of a model own."""

from collections.abc import Mapping
from math import prod

from memcalc.blocks.embedding import embedding_graph
from memcalc.blocks.head import head_graph
from memcalc.blocks.layer import layer_graph
from memcalc.config import Config
from memcalc.graph.graph import Graph
from memcalc.graph.mesh import Size, elements


def owned(graph: Graph) -> Size:
    """Parameters of a graph over all ranks, each counted once.

    >>> from memcalc.blocks.layer import layer_graph
    >>> from memcalc.config import load
    >>> h = 12288
    >>> owned(layer_graph(load("175b"))) == 12 * h**2 + 13 * h
    True
    """
    return sum(elements(weight.axes) for op in graph.ops for weight in op.weights)


def held(graph: Graph) -> Size:
    """Parameters of a graph that one rank holds.

    >>> from memcalc.blocks.layer import layer_graph
    >>> from memcalc.config import load
    >>> h, t = 12288, 8
    >>> held(layer_graph(load("175b"))) == (12 * h**2 + 7 * h) // t + 6 * h
    True
    """
    return sum(
        prod(axis.local for axis in weight.axes) for op in graph.ops for weight in op.weights
    )


def parameters(config: Config, sizes: Mapping[str, Size] | None = None) -> Size:
    """Parameters of a whole model: embedding, layers, last norm, and a head that is not tied.

    >>> from memcalc.config import load
    >>> round(parameters(load("llama-3-8b")) / 1e9, 2)
    8.03
    """
    ends = owned(embedding_graph(config, sizes)) + owned(head_graph(config, sizes))
    layers = config.model.layers if sizes is None else sizes["L"]
    return ends + layers * owned(layer_graph(config, sizes))
