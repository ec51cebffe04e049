"""The transformer layer: (s, b, h) -> (s, b, h)."""

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache

from memcalc.blocks.attention import attention, cross_attention
from memcalc.blocks.build import build
from memcalc.blocks.mlp import mlp
from memcalc.blocks.moe import moe
from memcalc.blocks.norm import norm
from memcalc.blocks.spec import Spec
from memcalc.config import Config, Model
from memcalc.errors import ConfigError
from memcalc.graph import ops
from memcalc.graph.graph import Graph, Tensor
from memcalc.graph.mesh import Size

DENSE, MOE, ENCODER, DECODER, MTP = "dense", "moe", "encoder", "decoder", "mtp"
# the kinds of dense and expert layers whose window makes another kernel run
WINDOWED = {DENSE: "windowed", MOE: "windowed_moe"}
MOE_KINDS = (MOE, WINDOWED[MOE])
KINDS = (DENSE, MOE, *WINDOWED.values(), ENCODER, DECODER, MTP)

Sublayer = Callable[[Graph, Tensor, Spec], Tensor]


def pre_norm(g: Graph, x: Tensor, m: Spec, second: Sublayer) -> Tensor:
    """A norm before each sublayer: Korthikanti et al. 2022, figure 2.

    If norms are fused into linears, those before latent attention and experts are not.
    """
    y = attention(g, layer_norm(g, "input_norm", x, m, m.alone(m.model.latent is not None)), m)
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


# How sublayers, norms and residuals are arranged, by the model's word for it.
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

    Both are normalized, concatenated to 2h and projected to h, then pass a layer and a last norm
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

    Every decoder layer reads the encoder's output. The end of the encoder saves it once for all of
    them, and no layer does.
    """
    with g.region("layer"):
        if kind == DECODER:
            return decoder(g, x, m, mlp)
        if kind == MTP:
            of_experts = _plain_kind(m.model, m.model.layers - 1) == MOE
            return further_token(g, x, m, moe if of_experts else mlp)
        if kind == ENCODER:
            m = replace(m, causal=False)
        elif kind in WINDOWED.values():
            m = replace(m, masked=True)
        return BLOCKS[m.model.block](g, x, m, moe if kind in MOE_KINDS else mlp)


def layer_norm(g: Graph, name: str, x: Tensor, m: Spec, alone: bool = True) -> Tensor:
    """x (s, b, h) -> (s, b, h): a norm between sublayers, alone or fused into the next linear."""
    with g.region("norm", alone):
        return norm(g, name, x, m)


def kinds(config: Config) -> dict[str, int]:
    """The kinds of a model's layers in order of appearance, with the number of layers of each.

    Windowed layers are a kind of their own only if the run's kernels treat them differently.

    >>> from memcalc.config import load
    >>> kinds(load("22b"))
    {'dense': 48}
    >>> kinds(load("gemma-3-27b", seq_length=4096, implementation="transformers-sdpa"))
    {'windowed': 52, 'dense': 10}
    """
    return dict(_kinds(config))


@lru_cache(64)
def _kinds(config: Config) -> Counter[str]:
    found = Counter(kind_of(config, number) for number in range(layers(config.model)))
    if config.model.mtp_layers:
        found[MTP] = config.model.mtp_layers
    return found


def layers(model: Model) -> int:
    """The layers of all stacks of a model, without multi-token prediction layers.

    >>> from memcalc.config import load
    >>> layers(load("t5-11b").model)
    48
    """
    return model.layers + (model.encoder_layers or 0)


def usual_kind(config: Config) -> str:
    """The most frequent kind of layer, or the first of several."""
    model = config.model
    alike = config.masked_layers != "windowed"
    if model.experts is None and model.encoder_layers is None and alike:
        return DENSE
    there = {kind: number for kind, number in kinds(config).items() if kind != MTP}
    return max(there, key=lambda name: there[name])


def kind_of(config: Config, number: int) -> str:
    """The kind of a layer, counted from 0; an encoder's come before its decoder's."""
    kind, windows = _plain_kind(config.model, number), config.model.window_layers
    masks = kind in WINDOWED and config.masked_layers == "windowed"
    return WINDOWED[kind] if masks and (windows is None or windows[number]) else kind


def masked(config: Config, kind: str) -> bool:
    """Whether the fused attention of a kind of layer is given a mask or a bias of its scores."""
    return kind in WINDOWED.values() or config.masked_layers == "all"


def _plain_kind(model: Model, number: int) -> str:
    """The kind of a layer, whatever kernels run."""
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
        kind: The kind of layer; by default the most frequent one.

    Raises:
        ConfigError: The model has no layer of that kind.

    >>> from memcalc.config import load
    >>> len(layer_graph(load("22b")).ops)
    21
    """
    if kind is None:
        kind = usual_kind(config)
    elif kind not in (there := kinds(config)):
        raise ConfigError(f"{config.model.name} has no {kind} layer; it has {', '.join(there)}")
    return build(_layer, config, sizes, kind)


def _layer(g: Graph, m: Spec, kind: str) -> None:
    layer(g, m.hidden_state(g, "layer_input"), m, kind)
