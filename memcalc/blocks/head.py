"""The head: (s, b, h) -> a loss."""

from collections.abc import Mapping

from memcalc import symbols
from memcalc.blocks.norm import norm
from memcalc.blocks.spec import Spec, graph
from memcalc.config import Config
from memcalc.graph import ops
from memcalc.graph.graph import Graph, Tensor
from memcalc.graph.mesh import Size


def head(g: Graph, x: Tensor, m: Spec) -> Tensor:
    """x (s, b, h) -> losses (s, b): the last norm, logits over the vocabulary, cross entropy.

    Korthikanti et al. 2022, section 4.3.
    """
    with g.region("head"):
        x = norm(g, "final_norm", x, m)
        x = ops.enter_tensor_parallel(g, "head_enter", x, m.kernels.keeps_gathered)
        outputs = {"logits": (m.vocabulary(),)}
        (logits,) = ops.linear(g, "output", x, outputs, ops.COLUMN, shared=m.model.tied_embeddings)
        return ops.cross_entropy(g, "loss", logits)


def head_graph(config: Config, sizes: Mapping[str, Size] | None = None) -> Graph:
    """The graph of the head: one rank's forward pass of one micro-batch.

    The arguments, and what is raised, are those of ``memcalc.blocks.layer.layer_graph``.
    """
    sizes = symbols.values(config) if sizes is None else sizes
    g = graph(config, sizes["t"])
    m = Spec.of(config, sizes)
    head(g, m.hidden_state(g, "head_input"), m)
    return g
