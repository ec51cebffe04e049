"""The graph of a block: one rank's forward pass of one micro-batch."""

from collections.abc import Callable, Mapping
from functools import lru_cache

from memcalc import symbols
from memcalc.blocks.spec import Spec
from memcalc.config import Config
from memcalc.graph.graph import Graph
from memcalc.graph.mesh import Mesh, Size

Block = Callable[..., object]


def build(block: Block, config: Config, sizes: Mapping[str, Size] | None, *kind: str) -> Graph:
    """The graph that a block records, over given sizes or the config's own.

    Args:
        block: What records itself in the graph: it is called with the empty graph, the spec and
            the kind. The cache compares it, so it is a function of a module.
        config: Model, parallelism and run.
        sizes: Sizes by letter, instead of the config's own: ints, Fractions or symbols.
        kind: The kind of the block, where there are several.
    """
    return _own(block, config, *kind) if sizes is None else _over(block, config, sizes, *kind)


@lru_cache(192)
def _own(block: Block, config: Config, *kind: str) -> Graph:
    """The graph over the config's own sizes, built once; it never changes."""
    return _over(block, config, symbols.values(config), *kind)


def _over(block: Block, config: Config, sizes: Mapping[str, Size], *kind: str) -> Graph:
    run = config.run
    mesh = Mesh.of(sizes, config.parallel.sp)
    g = Graph(mesh, run.activation_bytes, 1 if run.precision == "fp8" else None)
    block(g, Spec.of(config, mesh, sizes), *kind)
    return g
