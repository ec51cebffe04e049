"""The families of Hugging Face's layers: their classes, config.json keys and modules' names.

``as_config`` writes a Model as the family's config.json. ``memcalc.config.readers`` reads it back,
and the difference says whether the family has such a layer.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from memcalc.blocks.layer import DENSE, WINDOWED
from memcalc.config import Model

Word = str | Callable[[Model, str], Any]
_DENSE_KINDS = (DENSE, WINDOWED[DENSE])


class Family(NamedTuple):
    """A family of layers.

    Attributes:
        layer: Its class in transformers.
        words: For each key of its config.json an attribute of Model, or a function of a Model and
            the kind of layer.
        names: For each part of the layer, the ledger's operations and the layer's modules in it,
            except the module of the part's own name.
    """

    layer: str
    words: Mapping[str, Word]
    names: Mapping[str, tuple[str, ...]]


# --- keys of config.json -----------------------------------------------------------------------

_GATES = {"swiglu": "silu", "geglu": "gelu_pytorch_tanh", "clamped_swiglu": "silu"}
_PLAIN = {"squared_relu": "relu2"}


def _gate(model: Model, kind: str) -> str:
    return _GATES.get(model.activation, model.activation)


def _plain(model: Model, kind: str) -> str:
    return _PLAIN.get(model.activation, model.activation)


def _nope(model: Model, kind: str) -> int:
    return model.head_size - (model.rope_head_size or 0)


def _shared_experts(model: Model, kind: str) -> int | None:
    """The number of shared experts, each as wide as a routed expert."""
    width = model.expert_ffn_size
    return model.shared_ffn_size // width if model.shared_ffn_size and width else None


def _first_dense(model: Model, kind: str) -> int:
    return len(_dense_layers(model, kind))


def _dense_layers(model: Model, kind: str) -> list[int]:
    """The numbers of the dense layers, if the first layer is of a kind; else as in the model."""
    if kind:
        return [0] if kind in _DENSE_KINDS else []
    return [number for number, moe in enumerate(model.moe_layers or ()) if not moe]


def _windowed(model: Model, kind: str) -> bool:
    return model.sliding_window is not None


_SIZES: dict[str, Word] = {
    "hidden_size": "hidden_size",
    "num_attention_heads": "heads",
    "intermediate_size": "ffn_size",
    "attention_dropout": "attention_dropout",
}
_GROUPED: dict[str, Word] = {
    **_SIZES,
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_size",
    "hidden_act": _gate,
}
_BIASED: dict[str, Word] = {**_GROUPED, "attention_bias": "qkv_bias"}
_WINDOW: dict[str, Word] = {"sliding_window": "sliding_window"}
_QWEN_WINDOW: dict[str, Word] = {
    **_WINDOW,
    "use_sliding_window": _windowed,
    "max_window_layers": lambda model, kind: 0,
}
_GEMMA: dict[str, Word] = {**_BIASED, **_WINDOW, "attn_logit_softcapping": "attention_softcap"}
_LOCAL_EXPERTS: dict[str, Word] = {
    "intermediate_size": "expert_ffn_size",
    "num_local_experts": "experts",
    "num_experts_per_tok": "experts_per_token",
}
_QWEN_EXPERTS: dict[str, Word] = {
    "num_experts": "experts",
    "num_experts_per_tok": "experts_per_token",
    "moe_intermediate_size": "expert_ffn_size",
    "norm_topk_prob": "router_norm",
    "mlp_only_layers": _dense_layers,
}
_ROUTED_EXPERTS: dict[str, Word] = {
    "n_routed_experts": "experts",
    "num_experts_per_tok": "experts_per_token",
    "moe_intermediate_size": "expert_ffn_size",
    "n_shared_experts": _shared_experts,
    "norm_topk_prob": "router_norm",
    "first_k_dense_replace": _first_dense,
    "n_group": lambda model, kind: 1,
    "topk_group": lambda model, kind: 1,
}
_LATENT: dict[str, Word] = {
    **_SIZES,
    **_ROUTED_EXPERTS,
    "num_key_value_heads": "kv_heads",
    "hidden_act": _gate,
    "attention_bias": "proj_bias",
    "qk_rope_head_dim": "rope_head_size",
    "qk_nope_head_dim": _nope,
    "v_head_dim": "v_head_size",
    "kv_lora_rank": "kv_lora_rank",
    "q_lora_rank": "q_lora_rank",
}

# --- names of parts ----------------------------------------------------------------------------


def _norm(name: str) -> tuple[str, ...]:
    """A norm's operations, fused or unfused."""
    return name, f"{name}_fp32", f"{name}_normalise", f"{name}_normalised"


_CORE = (
    *("qkv", "query_rotary", "key_rotary", "repeat_key", "repeat_value", "flash_attention"),
    *("efficient_attention", "mask_bias", "query_rotary_output_fp32", "key_rotary_output_fp32"),
    *("value_fp32", "context_cast"),
    *("scores", "scale", "mask", "score_cap", "alibi", "sink", "without_sink", "softmax"),
    *("probabilities", "padding", "softmax_dropout", "context"),
)
_LINEARS = ("q_proj", "k_proj", "v_proj", "qkv_proj")
_BLOCK: dict[str, tuple[str, ...]] = {
    "self_attn": (*_CORE, *_LINEARS),
    "input_layernorm": _norm("input_norm"),
    "post_attention_layernorm": _norm("mlp_norm"),
    ".": ("attention_residual", "layer"),
}
_PARTS: dict[str, tuple[str, ...]] = {
    **_BLOCK,
    "fc1": ("fc1", "gate_proj", "up_proj", "gate_up_proj"),
    "act_fn": ("silu", "gelu", "activation_fn"),
    "mlp": ("swiglu", "geglu"),
}
_NORMED_HEADS = {**_PARTS, "q_norm": _norm("query_norm"), "k_norm": _norm("key_norm")}
_SANDWICH = {
    **_NORMED_HEADS,
    "post_attention_layernorm": _norm("attention_post_norm"),
    "pre_feedforward_layernorm": _norm("mlp_norm"),
    "post_feedforward_layernorm": _norm("mlp_post_norm"),
    "o_proj": ("proj",),
    "down_proj": ("fc2",),
}
_EXPERTS: dict[str, tuple[str, ...]] = {
    "experts": (
        *("router", "router_input_fp32", "gate", "dispatch", "experts_fc1", "experts_halves"),
        *("experts_silu", "experts_gelu", "experts_swiglu", "experts_geglu", "combine"),
        *("experts_clamped_swiglu", "experts_fc2", "act_fn", "mlp"),
    ),
}
_SHARED_EXPERTS: dict[str, tuple[str, ...]] = {
    "experts": (
        *(*_EXPERTS["experts"], "shared_fc1", "shared_silu", "shared_gelu", "shared_swiglu"),
        *("shared_geglu", "shared_fc2", "shared_gate", "shared_scale", "gate_proj", "up_proj"),
        *("down_proj", "shared_expert", "shared_experts", "shared_expert_gate"),
    ),
}
_HEADS_FIRST = {
    **_PARTS,
    "self_attn": (*_CORE, *_LINEARS, "attention", "self_attention", "query_key_value"),
    "fc1": ("dense_h_to_4h", "c_fc"),
    "act_fn": ("silu", "gelu", "act", "activation_fn", "relu"),
}
_MLA = {
    **_BLOCK,
    "self_attn": (
        *(*_CORE, *_LINEARS, "q_down", "kv_down", "q_up", "kv_up", "key_join", "q_enter"),
        *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
    ),
    "q_a_layernorm": _norm("q_norm"),
    "kv_a_layernorm": _norm("kv_norm"),
}

FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        "GPT2Block",
        {
            "n_embd": "hidden_size",
            "n_head": "heads",
            "n_inner": "ffn_size",
            "activation_function": _plain,
            "attn_pdrop": "attention_dropout",
            "resid_pdrop": "hidden_dropout",
        },
        {
            "attn": (*_CORE, "c_attn", "attn_dropout"),
            "ln_1": ("input_norm",),
            "ln_2": ("mlp_norm",),
            "c_fc": ("fc1",),
            "act": ("gelu", "silu", "relu"),
            "resid_dropout": ("attention_dropout",),
            "dropout": ("mlp_dropout",),
            ".": ("attention_residual", "layer"),
        },
    ),
    "llama": Family("LlamaDecoderLayer", {**_BIASED, "mlp_bias": "mlp_bias"}, _PARTS),
    "mistral": Family("MistralDecoderLayer", {**_GROUPED, **_WINDOW}, _PARTS),
    "qwen2": Family("Qwen2DecoderLayer", {**_GROUPED, **_QWEN_WINDOW}, _PARTS),
    "qwen3": Family("Qwen3DecoderLayer", {**_BIASED, **_QWEN_WINDOW}, _NORMED_HEADS),
    "phi3": Family(
        "Phi3DecoderLayer",
        {**_GROUPED, **_WINDOW, "resid_pdrop": "hidden_dropout"},
        {
            **_PARTS,
            "resid_attn_dropout": ("attention_dropout",),
            "resid_mlp_dropout": ("mlp_dropout",),
        },
    ),
    "gemma2": Family("Gemma2DecoderLayer", _GEMMA, _SANDWICH),
    "gemma3_text": Family("Gemma3DecoderLayer", _GEMMA, _SANDWICH),
    "cohere": Family("CohereDecoderLayer", {**_BIASED, "use_qk_norm": "qk_norm"}, _PARTS),
    "bert": Family(
        "BertLayer",
        {
            "hidden_size": "hidden_size",
            "num_attention_heads": "heads",
            "intermediate_size": "ffn_size",
            "hidden_act": _plain,
            "hidden_dropout_prob": "hidden_dropout",
            "attention_probs_dropout_prob": "attention_dropout",
            "is_decoder": "causal",
        },
        {
            "self": (*_CORE, "query", "key", "value"),
            "output": ("attention_residual", "mlp_residual"),
            "LayerNorm": ("attention_norm", "mlp_norm"),
            "dense": ("fc1",),
            "intermediate_act_fn": ("gelu", "relu", "silu"),
            "dropout": ("attention_dropout", "mlp_dropout"),
        },
    ),
    "vit": Family(
        "ViTLayer",
        {
            "hidden_size": "hidden_size",
            "num_attention_heads": "heads",
            "intermediate_size": "ffn_size",
            "hidden_act": _plain,
            "qkv_bias": "qkv_bias",
            "hidden_dropout_prob": "hidden_dropout",
            "attention_probs_dropout_prob": "attention_dropout",
        },
        {
            "attention": (*_CORE, *_LINEARS),
            "layernorm_before": ("input_norm",),
            "layernorm_after": ("mlp_norm",),
            "activation_fn": ("gelu", "relu", "silu"),
            "dropout": ("attention_dropout", "mlp_dropout"),
            ".": ("attention_residual", "layer"),
        },
    ),
    "bloom": Family(
        "BloomBlock",
        {
            "hidden_size": "hidden_size",
            "n_head": "heads",
            "attention_dropout": "attention_dropout",
            "hidden_dropout": "hidden_dropout",
        },
        {
            **_HEADS_FIRST,
            "self_attn": (*_HEADS_FIRST["self_attn"], "attention_dropout", "attention_residual"),
            "act_fn": ("gelu", "gelu_impl"),
            "mlp": ("mlp_dropout", "mlp_residual"),
            ".": ("layer",),
        },
    ),
    "falcon": Family(
        "FalconDecoderLayer",
        {
            "hidden_size": "hidden_size",
            "num_attention_heads": "heads",
            "num_kv_heads": "kv_heads",
            "ffn_hidden_size": "ffn_size",
            "activation": _plain,
            "new_decoder_architecture": "repeated_kv",
            "multi_query": lambda model, kind: model.kv_heads == 1,
            "parallel_attn": lambda model, kind: model.block.startswith("parallel"),
            "num_ln_in_parallel_attn": lambda model, kind: 1 + (model.block != "parallel"),
            "alibi": lambda model, kind: model.position == "alibi",
            "bias": "mlp_bias",
            "attention_dropout": "attention_dropout",
            "hidden_dropout": "hidden_dropout",
        },
        {
            **_HEADS_FIRST,
            "input_layernorm": (*_norm("input_norm"), "ln_attn"),
            "post_attention_layernorm": (*_norm("mlp_norm"), "ln_mlp"),
        },
    ),
    "gpt_neox": Family(
        "GPTNeoXLayer",
        {
            **_SIZES,
            "hidden_act": _plain,
            "hidden_dropout": "hidden_dropout",
            "attention_bias": "qkv_bias",
            "use_parallel_residual": lambda model, kind: model.block == "parallel_two_norms",
        },
        {
            **_HEADS_FIRST,
            "post_attention_dropout": ("attention_dropout",),
            "post_mlp_dropout": ("mlp_dropout",),
        },
    ),
    "opt": Family(
        "OPTDecoderLayer",
        {
            "hidden_size": "hidden_size",
            "num_attention_heads": "heads",
            "ffn_dim": "ffn_size",
            "activation_function": _plain,
            "attention_dropout": "attention_dropout",
            "dropout": "hidden_dropout",
            "do_layer_norm_before": lambda model, kind: model.block == "pre_norm",
            "enable_bias": "mlp_bias",
        },
        {
            **_HEADS_FIRST,
            "self_attn_layer_norm": ("input_norm", "attention_norm"),
            "final_layer_norm": ("mlp_norm",),
            ".": ("attention_dropout", "attention_residual", "mlp_dropout", "layer"),
        },
    ),
    "phi": Family(
        "PhiDecoderLayer",
        {
            **_SIZES,
            "num_key_value_heads": "kv_heads",
            "hidden_act": _plain,
            "qk_layernorm": "qk_norm",
            "resid_pdrop": "hidden_dropout",
        },
        {**_HEADS_FIRST, "resid_dropout": ("attention_dropout", "mlp_dropout")},
    ),
    "starcoder2": Family(
        "Starcoder2DecoderLayer",
        {
            **_SIZES,
            **_WINDOW,
            "num_key_value_heads": "kv_heads",
            "hidden_act": _plain,
            "use_bias": "mlp_bias",
            "residual_dropout": "hidden_dropout",
            # the class's defaults are outside the vocabulary, and transformers would warn
            "bos_token_id": lambda model, kind: None,
            "eos_token_id": lambda model, kind: None,
        },
        {
            **_HEADS_FIRST,
            "self_attn": (*_HEADS_FIRST["self_attn"], "attention_dropout"),
            "mlp": ("mlp_dropout",),
        },
    ),
    "mixtral": Family(
        "MixtralDecoderLayer", {**_GROUPED, **_WINDOW, **_LOCAL_EXPERTS}, {**_BLOCK, **_EXPERTS}
    ),
    "gpt_oss": Family(
        "GptOssDecoderLayer", {**_BIASED, **_WINDOW, **_LOCAL_EXPERTS}, {**_BLOCK, **_EXPERTS}
    ),
    "qwen2_moe": Family(
        "Qwen2MoeDecoderLayer",
        {
            **_GROUPED,
            **_QWEN_WINDOW,
            **_QWEN_EXPERTS,
            "qkv_bias": "qkv_bias",
            "shared_expert_intermediate_size": "shared_ffn_size",
        },
        {**_BLOCK, **_SHARED_EXPERTS},
    ),
    "qwen3_moe": Family(
        "Qwen3MoeDecoderLayer",
        {**_BIASED, **_QWEN_WINDOW, **_QWEN_EXPERTS},
        {**_NORMED_HEADS, **_EXPERTS},
    ),
    "glm4_moe": Family(
        "Glm4MoeDecoderLayer",
        {**_BIASED, **_ROUTED_EXPERTS, "use_qk_norm": "qk_norm"},
        {**_NORMED_HEADS, **_SHARED_EXPERTS},
    ),
    "deepseek_v2": Family(
        "DeepseekV2DecoderLayer",
        {**_LATENT, "topk_method": lambda model, kind: "greedy"},
        {**_MLA, **_SHARED_EXPERTS},
    ),
    "deepseek_v3": Family("DeepseekV3DecoderLayer", _LATENT, {**_MLA, **_SHARED_EXPERTS}),
}


def as_config(family: str, model: Model, kind: str = "") -> dict[str, Any]:
    """A model as a config.json of a family.

    Its first layer is of the given kind; without a kind, layers are those of the model.

    >>> from memcalc.config import load
    >>> as_config("gpt2", load("gpt2").model, "dense")["n_inner"]
    3072
    """
    return {
        key: getattr(model, word) if isinstance(word, str) else word(model, kind)
        for key, word in FAMILIES[family].words.items()
    }


def parts(family: str, kind: str = "") -> dict[str, str]:
    """The part of a family's layer that each operation of the ledger and each module belongs to.

    A dense layer of a MoE model has the parts of an MLP.
    """
    names = FAMILIES[family].names
    if kind in _DENSE_KINDS and "experts" in names:
        mlp = {part: _PARTS[part] for part in ("fc1", "act_fn", "mlp")}
        names = {part: those for part, those in names.items() if part != "experts"} | mlp
    return {each: part for part, those in names.items() for each in those}
