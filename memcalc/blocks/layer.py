"""The transformer layer: (s, b, h) -> (s, b, h)."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache

from memcalc import symbols
from memcalc.blocks.attention import attention, cross_attention
from memcalc.blocks.mlp import mlp
from memcalc.blocks.moe import moe
from memcalc.blocks.norm import norm
from memcalc.blocks.spec import Spec, graph
from memcalc.config import Config, Model
from memcalc.errors import ConfigError
from memcalc.graph import ops
from memcalc.graph.graph import Graph, Tensor
from memcalc.graph.mesh import Size

DENSE, MOE, ENCODER, DECODER, MTP = "dense", "moe", "encoder", "decoder", "mtp"
# the last sublayer of each kind of layer; the first is attention
SECOND = {DENSE: mlp, MOE: moe, ENCODER: mlp, DECODER: mlp}

Sublayer = Callable[[Graph, Tensor, Spec], Tensor]


def pre_norm(g: Graph, x: Tensor, m: Spec, second: Sublayer) -> Tensor:
    """A norm before each sublayer: Korthikanti et al. 2022, figure 2.

    Where norms are parts of linears, latent attention and experts have theirs before them still.
    """
    y = attention(g, layer_norm(g, "input_norm", x, m, m.alone(m.model.latent)), m)
    x = ops.add(g, "attention_residual", x, y)
    alone = m.alone(second is moe)
    with nullcontext() if alone else g.region("mlp"):
        y = second(g, layer_norm(g, "mlp_norm", x, m, alone), m)
    return ops.add(g, "mlp_residual", x, y)


def post_norm(g: Graph, x: Tensor, m: Spec, second: Sublayer) -> Tensor:
    """A norm after each residual sum: Vaswani et al. 2017, section 3.1."""
    x = ops.add(g, "attention_residual", x, attention(g, x, m))
    x = layer_norm(g, "attention_norm", x, m)
    x = ops.add(g, "mlp_residual", x, second(g, x, m))
    return layer_norm(g, "mlp_norm", x, m)


def sandwich(g: Graph, x: Tensor, m: Spec, second: Sublayer) -> Tensor:
    """A norm before and after each sublayer: Gemma-2 (arXiv 2408.00118), section 2."""
    y = attention(g, layer_norm(g, "input_norm", x, m), m)
    x = ops.add(g, "attention_residual", x, layer_norm(g, "attention_post_norm", y, m))
    y = second(g, layer_norm(g, "mlp_norm", x, m), m)
    return ops.add(g, "mlp_residual", x, layer_norm(g, "mlp_post_norm", y, m))


def parallel(g: Graph, x: Tensor, m: Spec, second: Sublayer) -> Tensor:
    """Both sublayers on one norm's output: GPT-J's form, as Command-R and Falcon-7B have it."""
    normed = layer_norm(g, "input_norm", x, m)
    y = ops.add(g, "sublayers_sum", attention(g, normed, m), second(g, normed, m))
    return ops.add(g, "residual", x, y)


def parallel_two_norms(g: Graph, x: Tensor, m: Spec, second: Sublayer) -> Tensor:
    """Both sublayers side by side, each behind its own norm: GPT-NeoX (arXiv 2204.06745)."""
    y = attention(g, layer_norm(g, "input_norm", x, m), m)
    z = second(g, layer_norm(g, "mlp_norm", x, m), m)
    return ops.add(g, "residual", x, ops.add(g, "sublayers_sum", y, z))


# How sublayers stand to norms and residuals, by the model's word for it.
BLOCKS = {
    "pre_norm": pre_norm,
    "post_norm": post_norm,
    "sandwich": sandwich,
    "parallel": parallel,
    "parallel_two_norms": parallel_two_norms,
}


def decoder(g: Graph, x: Tensor, m: Spec, second: Sublayer) -> Tensor:
    """Three sublayers, each behind a norm: T5 (arXiv 1910.10683), section 2.1."""
    y = attention(g, layer_norm(g, "input_norm", x, m), m)
    x = ops.add(g, "attention_residual", x, y)
    source = m.hidden_state(g, "encoder_output", shared=True)
    y = cross_attention(g, layer_norm(g, "cross_norm", x, m), source, m)
    x = ops.add(g, "cross_residual", x, y)
    y = second(g, layer_norm(g, "mlp_norm", x, m), m)
    return ops.add(g, "mlp_residual", x, y)


def further_token(g: Graph, x: Tensor, m: Spec, second: Sublayer) -> Tensor:
    """x (s, b, h) and the next tokens' embedding -> (s, b, h): multi-token prediction.

    Both are normed, joined to a width of 2h and projected to h, then pass a layer and a last norm
    (DeepSeek-V3, arXiv 2412.19437, section 2.2; Megatron-core, multi_token_prediction.py).
    """
    embedded = m.hidden_state(g, "next_tokens")
    parts = layer_norm(g, "embedded_norm", embedded, m), layer_norm(g, "hidden_norm", x, m)
    *tokens, h = x.axes
    joined = ops.concatenate(g, "join", "joined", parts, (*tokens, h.times(2)))
    y = ops.enter_tensor_parallel(g, "join_enter", joined, m.kernels.keeps_gathered)
    (y,) = ops.linear(g, "join_proj", y, {"join_proj_output": (m.h,)}, ops.COLUMN)
    x = ops.gather_features(g, "join_gather", y, x.axes)
    return layer_norm(g, "further_norm", BLOCKS[m.model.block](g, x, m, second), m)


def layer(g: Graph, x: Tensor, m: Spec, kind: str) -> Tensor:
    """x (s, b, h) -> (s, b, h): attention and an MLP, or experts; a decoder's has cross-attention.

    An encoder's output is an input of every decoder layer, and kept once for all of them: by the
    end of the encoder, and by none of the layers.
    """
    with g.region("layer"):
        if kind == DECODER:
            return decoder(g, x, m, SECOND[kind])
        if kind == MTP:
            return further_token(g, x, m, SECOND[kind_of(m.model, m.model.layers - 1)])
        if kind == ENCODER:
            m = replace(m, causal=False)
        return BLOCKS[m.model.block](g, x, m, SECOND[kind])


def layer_norm(g: Graph, name: str, x: Tensor, m: Spec, alone: bool = True) -> Tensor:
    """x (s, b, h) -> (s, b, h): a norm between sublayers, alone or part of the linear behind it."""
    with g.region("norm", alone):
        return norm(g, name, x, m)


def kinds(model: Model) -> dict[str, int]:
    """The kinds of a model's layers, in the order of their first, with how many there are of each.

    >>> from memcalc.config import load
    >>> kinds(load("22b").model)
    {'dense': 48}
    """
    names = [kind_of(model, number) for number in range(layers(model))]
    names += [MTP] * model.mtp_layers
    return {name: names.count(name) for name in dict.fromkeys(names)}


def layers(model: Model) -> int:
    """The layers of all of a model's stacks, without those that predict further tokens.

    >>> from memcalc.config import load
    >>> layers(load("t5-11b").model)
    48
    """
    return model.layers + (model.encoder_layers or 0)


def usual_kind(model: Model) -> str:
    """The kind of layer that there is most of; of as many, the first."""
    if model.experts is None and model.encoder_layers is None:
        return DENSE
    there = {kind: number for kind, number in kinds(model).items() if kind != MTP}
    return max(there, key=lambda name: there[name])


def kind_of(model: Model, number: int) -> str:
    """The kind of a layer, counted from 0; an encoder's come before its decoder's."""
    if model.encoder_layers is not None:
        return ENCODER if number < model.encoder_layers else DECODER
    if model.experts is None:
        return DENSE
    return MOE if model.moe_layers is None or model.moe_layers[number] else DENSE


def layer_graph(
    config: Config, sizes: Mapping[str, Size] | None = None, kind: str | None = None
) -> Graph:
    """The graph of one layer of a config: one rank's forward pass of one micro-batch.

    Args:
        config: Model, parallelism and run.
        sizes: Sizes by letter, instead of the config's own: ints, Fractions or symbols.
        kind: The kind of layer; by default the kind that there is most of.

    Raises:
        ConfigError: The model has no layer of that kind.

    >>> from memcalc.config import load
    >>> len(layer_graph(load("22b")).ops)
    21
    """
    if kind is None:
        kind = usual_kind(config.model)
    elif kind not in (there := kinds(config.model)):
        raise ConfigError(f"{config.model.name} has no {kind} layer; it has {', '.join(there)}")
    return _own_graph(config, kind) if sizes is None else _graph(config, sizes, kind)


@lru_cache(64)
def _own_graph(config: Config, kind: str) -> Graph:
    """The graph over the config's own sizes, made once: nobody changes it."""
    return _graph(config, symbols.values(config), kind)


def _graph(config: Config, sizes: Mapping[str, Size], kind: str) -> Graph:
    g = graph(config, sizes)
    m = Spec.of(config, sizes)
    layer(g, m.hidden_state(g, "layer_input"), m, kind)
    return g
