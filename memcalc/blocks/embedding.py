"""The embedding: tokens (s, b), or patches of an image, -> (s, b, h)."""

from collections.abc import Mapping

from memcalc.blocks.build import build
from memcalc.blocks.norm import norm
from memcalc.blocks.spec import Spec
from memcalc.config import Config
from memcalc.graph import ops
from memcalc.graph.graph import Graph, Tensor
from memcalc.graph.mesh import Axis, Size


def embedding(g: Graph, m: Spec, of: str = "", shared: bool = False) -> Tensor:
    """Tokens (s, b) -> (s, b, h): a table's rows, learned positions, a norm, dropout.

    Korthikanti et al. 2022, section 4.3. Names begin with ``of``; ``shared`` says whether the table
    belongs to another embedding.
    """
    with g.region("embedding"):
        x = patches(g, m, m.pixels) if m.pixels else words(g, m, of, shared)
        if m.model.position == "learned":
            x = ops.position_embedding(g, "position_embedding", x, m.positions())
        if m.model.token_types is not None:
            types = Axis.whole("types", m.model.token_types)
            x = ops.position_embedding(g, "type_embedding", x, types)
        if m.model.embedding_norm:
            x = norm(g, "embedding_norm", x, m)
        if m.model.position == "relative":
            buckets = Axis.whole("buckets", m.model.relative_buckets)
            ops.relative_table(g, f"{of}relative_table", buckets, m.a, m.s)
        if m.model.position == "rotary" and m.kernels.rotary_tables:
            ops.rotary_tables(g, "rotary", m.s, m.latent.rotary if m.latent else m.d)
        return ops.dropout(g, f"{of}embedding_dropout", x, m.model.embedding_dropout)


def words(g: Graph, m: Spec, of: str, shared: bool) -> Tensor:
    """Tokens (s, b) -> (s, b, h), as ranks hold it between tensor-parallel regions."""
    tokens = Tensor(f"{of}tokens", (m.s, m.b), 8)
    x = ops.embedding(g, f"{of}word_embedding", tokens, m.vocabulary(), m.h, shared)
    return ops.leave_tensor_parallel(g, f"{of}embedding_leave", x)


def patches(g: Graph, m: Spec, pixels: Axis) -> Tensor:
    """The patches of an image (s-1, b, pixels) and a class token -> (s, b, h).

    Dosovitskiy et al. 2020 (arXiv 2010.11929), section 3.1. If ranks shard the sequence,
    one without the class token is counted.
    """
    tokens = g.mesh.sequence(m.s)
    whole = not tokens.splits
    axis = tokens._replace(
        letter=f"({m.s.letter}-1)",
        size=m.s.size - 1,
        local=tokens.local - 1 if whole else tokens.local,
    )
    image = g.input("patches", (axis, m.b, pixels))
    return ops.patch_embedding(g, "patch_embedding", image, tokens, m.h)


def encoder_end(g: Graph, x: Tensor, m: Spec) -> None:
    """x (s, b, h) -> an encoder's output, which all decoder layers read: a norm, dropout."""
    with g.region("encoder_end"):
        x = norm(g, "encoder_norm", x, m)
        x = ops.dropout(g, "encoder_dropout", x, m.model.hidden_dropout)
        ops.share(g, "encoder_output", x)


def embedding_graph(config: Config, sizes: Mapping[str, Size] | None = None) -> Graph:
    """The graph of the embedding: one rank's forward pass of one micro-batch.

    For an encoder-decoder, the embeddings of both stacks and the end of the encoder.

    Arguments and errors are those of ``memcalc.blocks.layer.layer_graph``.
    """
    return build(_embeddings, config, sizes)


def _embeddings(g: Graph, m: Spec) -> None:
    """The embedding; of an encoder-decoder, those of both stacks and the end of the encoder."""
    embedding(g, m)
    if m.model.encoder_layers is not None:
        encoder_end(g, m.hidden_state(g, "encoder_last"), m)
        embedding(g, m, "target_", shared=True)
