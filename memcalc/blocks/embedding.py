"""The embedding: tokens (s, b) -> (s, b, h)."""

from collections.abc import Mapping

from memcalc import symbols
from memcalc.blocks.norm import norm
from memcalc.blocks.spec import Spec, graph
from memcalc.config import Config
from memcalc.graph import ops
from memcalc.graph.graph import Graph, Tensor
from memcalc.graph.mesh import Axis, Size


def embedding(g: Graph, m: Spec) -> Tensor:
    """Tokens (s, b) -> (s, b, h): a table's rows, learned positions, a norm, dropout.

    Korthikanti et al. 2022, section 4.3.
    """
    with g.region("embedding"):
        tokens = Tensor("tokens", (m.s, m.b), 8)
        x = ops.embedding(g, "word_embedding", tokens, m.vocabulary(), m.h)
        x = ops.leave_tensor_parallel(g, "embedding_leave", x)
        if m.model.position == "learned":
            x = ops.position_embedding(g, "position_embedding", x, m.positions())
        if m.model.token_types is not None:
            types = Axis.whole("types", m.model.token_types)
            x = ops.position_embedding(g, "type_embedding", x, types)
        if m.model.embedding_norm:
            x = norm(g, "embedding_norm", x, m)
        return ops.dropout(g, "embedding_dropout", x, m.model.embedding_dropout)


def embedding_graph(config: Config, sizes: Mapping[str, Size] | None = None) -> Graph:
    """The graph of the embedding: one rank's forward pass of one micro-batch.

    The arguments, and what is raised, are those of ``memcalc.blocks.layer.layer_graph``.
    """
    sizes = symbols.values(config) if sizes is None else sizes
    g = graph(config, sizes)
    m = Spec.of(config, sizes)
    embedding(g, m)
    return g
