"""The ends of a model: embeddings, and heads of one token."""

from memcalc.graph.graph import NO_GRADIENT, OF_PATCHES, Graph, Save, Tensor, Weight, plain
from memcalc.graph.mesh import Axis, elements
from memcalc.graph.ops.products import LINEAR
from memcalc.graph.ops.sources import HF_ROTARY, KORTHIKANTI, MEGATRON_VP, TORCH_CHAIN

PATCH_EMBEDDING = plain("patch_embedding", gemm=OF_PATCHES)
EMBEDDING = plain("embedding", gradient=NO_GRADIENT)
POSITION_EMBEDDING = plain("position_embedding")
RELATIVE_TABLE = plain("relative_table")
ROTARY_TABLES = plain("rotary_tables")
SHARE = plain("share")


def embedding(
    g: Graph, name: str, tokens: Tensor, vocabulary: Axis, hidden: Axis, shared: bool = False
) -> Tensor:
    """Tokens (s, b) -> (s, b, h): rows of a table, which is sharded by rows over the ranks.

    Saves its indices. If the table is sharded, these are shifted to a rank's own rows, one byte per
    token marks those of other ranks, and the output is a partial sum. ``shared`` says whether the
    table belongs to another operation and counts there.
    """
    s, b = tokens.axes
    out = Tensor(f"{name}_output", (s, b, hidden), g.dtype_bytes)
    reason = "indices, int64: rows of the table that have a gradient"
    saves = [Save(tokens, reason, MEGATRON_VP, small=True)]
    if g.mesh.t != 1:
        rows = Tensor(f"{name}_rows", (s, b), 8)
        foreign = Tensor(f"{name}_foreign", (s, b), 1)
        saves = [
            Save(rows, reason, MEGATRON_VP, small=True),
            Save(
                foreign,
                "which tokens belong to another rank, one byte per token",
                MEGATRON_VP,
                small=True,
            ),
        ]
    weights = (Weight(f"{name}.weight", (g.mesh.tensor(vocabulary), hidden), shared),)
    g.record(name, EMBEDDING, (tokens,), (out,), saves=saves, weights=weights)
    return out


def position_embedding(g: Graph, name: str, x: Tensor, positions: Axis) -> Tensor:
    """x (s, b, h) -> (s, b, h): a learned row is added for each position.

    Saves only its indices, which the whole model shares.
    """
    out = Tensor(f"{name}_output", x.axes, x.dtype_bytes)
    weights = (Weight(f"{name}.weight", (positions, *x.axes[2:])),)
    g.record(name, POSITION_EMBEDDING, (x,), (out,), weights=weights)
    return out


def relative_table(g: Graph, name: str, buckets: Axis, heads: Axis, s: Axis) -> None:
    """A stack's table of relative positions: a bias (a, s, s) of the scores, from learned rows.

    Saves its indices, int64, once for all of the stack's layers.
    """
    heads = g.mesh.tensor(heads)
    index = Tensor(f"{name}_index", (s, Axis.whole("s", s.size)), 8)
    bias = Tensor(f"{name}_output", (heads, *index.axes), g.dtype_bytes)
    save = Save(index, "bucket of each pair of tokens, int64", TORCH_CHAIN)
    weights = (Weight(f"{name}.weight", (buckets, heads)),)
    g.record(name, RELATIVE_TABLE, (), (bias,), saves=(save,), weights=weights)


def rotary_tables(g: Graph, name: str, s: Axis, features: Axis) -> None:
    """Cosines and sines (s, d) of each position's angles. Saves them once for all layers."""
    reason = "factor of every layer's queries and keys"
    tables = (Tensor(f"{name}_{part}", (s, features), g.dtype_bytes) for part in ("cos", "sin"))
    saves = [Save(table, reason, HF_ROTARY, small=True) for table in tables]
    g.record(name, ROTARY_TABLES, (), (), saves=saves)


def share(g: Graph, name: str, x: Tensor) -> None:
    """What every layer of another stack reads. Saves it once for all of them."""
    reason = "every decoder layer computes keys and values from it"
    g.record(name, SHARE, (x,), (), saves=(Save(x, reason, KORTHIKANTI),))


def patch_embedding(g: Graph, name: str, patches: Tensor, tokens: Axis, hidden: Axis) -> Tensor:
    """Patches of an image (s-1, b, pixels) -> (s, b, h), by a linear, after a class token.

    Saves the patches, that is the image. Every rank embeds its own tokens with the whole weight.
    """
    _, b, pixels = patches.axes
    out = Tensor(f"{name}_output", (tokens, b, hidden), g.dtype_bytes)
    weights = (
        Weight(f"{name}.weight", (hidden, pixels)),
        Weight(f"{name}.bias", (hidden,)),
        Weight("class_token", (hidden,)),
    )
    save = Save(patches, "input: needed for the weight gradient", TORCH_CHAIN, for_weights=True)
    flops = 2 * elements(patches.axes) * hidden.size
    g.record(name, PATCH_EMBEDDING, (patches,), (out,), (save,), flops, weights=weights)
    return out


def pooler(g: Graph, name: str, x: Tensor) -> Tensor:
    """x (s, b, h) -> (1, b, h) of the first token: a linear and a tanh.

    Saves x, of which the first token is a view, and the tanh, from which its gradient is computed.
    """
    _, b, hidden = x.axes
    out = Tensor(f"{name}_output", (Axis.whole("1", 1), b, hidden), g.dtype_bytes)
    weights = (Weight(f"{name}.weight", (hidden, hidden)), Weight(f"{name}.bias", (hidden,)))
    saves = (
        Save(x, "input: the first token is a view of it", TORCH_CHAIN, for_weights=True),
        Save(out, "output of tanh: its gradient is computed from it", TORCH_CHAIN),
    )
    flops = 2 * elements((b, hidden)) * hidden.size
    g.record(name, LINEAR, (x,), (out,), saves, flops, weights=weights)
    return out


def class_logits(g: Graph, name: str, x: Tensor, classes: Axis) -> Tensor:
    """x (s, b, h) -> logits (1, b, classes) of the first token, a view of x. Saves x."""
    _, b, hidden = x.axes
    out = Tensor(f"{name}_output", (Axis.whole("1", 1), b, classes), g.dtype_bytes)
    weights = (Weight(f"{name}.weight", (classes, hidden)), Weight(f"{name}.bias", (classes,)))
    save = Save(x, "input: the first token is a view of it", TORCH_CHAIN, for_weights=True)
    flops = 2 * elements((b, hidden)) * classes.size
    g.record(name, LINEAR, (x,), (out,), (save,), flops, weights=weights)
    return out
