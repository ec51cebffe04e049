"""The transformer layer: (s, b, h) -> (s, b, h)."""

from collections.abc import Mapping

from memcalc import symbols
from memcalc.blocks.attention import attention
from memcalc.blocks.mlp import mlp
from memcalc.blocks.norm import norm
from memcalc.blocks.spec import Spec, graph
from memcalc.config import Config
from memcalc.graph import ops
from memcalc.graph.graph import Graph, Tensor
from memcalc.graph.mesh import Size

KIND = "dense"  # the one kind of layer so far


def layer(g: Graph, x: Tensor, m: Spec) -> Tensor:
    """x (s, b, h) -> (s, b, h): attention, then the MLP, each behind a norm, with residuals.

    Korthikanti et al. 2022, figure 2 (pre-LN).
    """
    with g.region("layer"):
        y = attention(g, norm(g, "input_norm", x, m), m)
        x = ops.add(g, "attention_residual", x, y)
        y = mlp(g, norm(g, "mlp_norm", x, m), m)
        return ops.add(g, "mlp_residual", x, y)


def layer_graph(config: Config, sizes: Mapping[str, Size] | None = None) -> Graph:
    """The graph of one layer of a config: one rank's forward pass of one micro-batch.

    Args:
        config: Model, parallelism and run.
        sizes: Sizes by letter, instead of the config's own: ints, Fractions or symbols.

    >>> from memcalc.config import load
    >>> len(layer_graph(load("22b")).ops)
    21
    """
    sizes = symbols.values(config) if sizes is None else sizes
    g = graph(config, sizes["t"])
    m = Spec.of(config, sizes)
    layer(g, m.hidden_state(g, "layer_input"), m)
    return g
