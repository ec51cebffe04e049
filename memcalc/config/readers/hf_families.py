"""The families of Hugging Face models: from a config to the fields of ``Model``.

A missing key has the default of the family's class in transformers.
"""

import operator
from collections.abc import Callable
from typing import Any

from memcalc.config import fields
from memcalc.config.readers.hf_content import GATED, PLAIN, T5, Content
from memcalc.config.readers.hf_layers import (
    flag,
    gpt_neo_windows,
    moe_layers,
    qwen_windows,
    windows,
)
from memcalc.errors import InputError

Facts = dict[str, Any]


def _gpt2(said: Content) -> Facts:
    return {
        "norm": "layernorm",
        "activation": said.activation(PLAIN, "gelu_new"),
        "position": "learned",
        "tied_embeddings": said.get("tie_word_embeddings", True),
        "attention_dropout": said.dropout("attn_pdrop", 0.1),
        "hidden_dropout": said.dropout("resid_pdrop", 0.1),
        "embedding_dropout": said.dropout("embd_pdrop", 0.1),
    }


def _gpt_bigcode(said: Content) -> Facts:
    one = flag(said, "multi_query", True)
    return {
        **_gpt2(said),
        **({"kv_heads": 1} if one else {}),
        "activation": said.activation(PLAIN, "gelu_pytorch_tanh"),
        "softmax_fp32": said.get("attention_softmax_in_fp32", True),
    }


def _gpt_neo(said: Content) -> Facts:
    said.unmodelled.append(
        "GPT-Neo computes scores in fp32: unfused attention uses more memory than counted (fp32 "
        "query, key and scores)"
    )
    local = gpt_neo_windows(said)
    return {
        "norm": "layernorm",
        "activation": said.activation(PLAIN, "gelu_new"),
        "position": "learned",
        "qkv_bias": False,
        "softmax_fp32": True,
        "tied_embeddings": said.get("tie_word_embeddings", True),
        "attention_dropout": said.get("attention_dropout", 0.0),
        "hidden_dropout": said.get("resid_dropout", 0.0),
        "embedding_dropout": said.get("embed_dropout", 0.0),
        "sliding_window": said.size("window_size", 256) if any(local) else None,
        "window_layers": local if any(local) else None,
    }


def _gpt_neox(said: Content) -> Facts:
    parallel = flag(said, "use_parallel_residual", True)
    bias = said.get("attention_bias", True)
    return {
        "norm": "layernorm",
        "block": "parallel_two_norms" if parallel else "pre_norm",
        "activation": said.activation(PLAIN, "gelu"),
        "position": "rotary",
        "packed_qkv": True,
        "qkv_bias": bias,
        "proj_bias": bias,
        "softmax_fp32": True,
        "tied_embeddings": said.get("tie_word_embeddings", False),
        "attention_dropout": said.get("attention_dropout", 0.0),
        "hidden_dropout": said.get("hidden_dropout", 0.0),
        "embedding_dropout": said.get("hidden_dropout", 0.0),
    }


def _opt(said: Content) -> Facts:
    bias = said.get("enable_bias", True)
    width = said.size("word_embed_proj_dim")
    if width is not None and width != said.fact("hidden_size"):
        said.unmodelled.append(
            "word_embed_proj_dim is not modelled: the embedding and the head are counted with "
            "hidden_size, and their projections are not counted"
        )
    return {
        "norm": "layernorm",
        "block": "pre_norm" if flag(said, "do_layer_norm_before", True) else "post_norm",
        "activation": said.activation(PLAIN, "relu"),
        "position": "learned",
        "qkv_bias": bias,
        "proj_bias": bias,
        "mlp_bias": bias,
        "softmax_fp32": True,
        "tied_embeddings": said.get("tie_word_embeddings", True),
        "attention_dropout": said.get("attention_dropout", 0.0),
        "hidden_dropout": said.dropout("dropout", 0.1),
    }


def _bloom(said: Content) -> Facts:
    if flag(said, "apply_residual_connection_post_layernorm", False):
        said.unmodelled.append(
            "apply_residual_connection_post_layernorm is not modelled: counted with "
            "the residual from before the norm"
        )
    return {
        "norm": "layernorm",
        "activation": "gelu",
        "position": "alibi",
        "embedding_norm": True,
        "softmax_fp32": True,
        "tied_embeddings": said.get("tie_word_embeddings", True),
        "attention_dropout": said.get("attention_dropout", 0.0),
        "hidden_dropout": said.get("hidden_dropout", 0.0),
    }


def _falcon(said: Content) -> Facts:
    new = flag(said, "new_decoder_architecture", False)
    one = flag(said, "multi_query", True) and not new
    parallel = flag(said, "parallel_attn", True) or new
    two = said.size("num_ln_in_parallel_attn", 2) == 2 and new
    bias = said.get("bias", False)
    return {
        **({"kv_heads": 1} if one else {}),
        "norm": "layernorm",
        "block": ("parallel_two_norms" if two else "parallel") if parallel else "pre_norm",
        "activation": said.activation(PLAIN, "gelu"),
        "position": "alibi" if flag(said, "alibi", False) else "rotary",
        "packed_qkv": not (new or one),
        "repeated_kv": new,
        "calls_attention": True,
        "qkv_bias": bias,
        "proj_bias": bias,
        "mlp_bias": bias,
        "tied_embeddings": said.get("tie_word_embeddings", True),
        "attention_dropout": said.get("attention_dropout", 0.0),
        "hidden_dropout": said.get("hidden_dropout", 0.0),
    }


def _phi(said: Content) -> Facts:
    return {
        "norm": "layernorm",
        "block": "parallel",
        "head_bias": True,
        "activation": said.activation(PLAIN, "gelu_new"),
        "position": "rotary",
        "qk_norm": said.get("qk_layernorm", False),
        "softmax_fp32": True,
        "tied_embeddings": said.get("tie_word_embeddings", False),
        "attention_dropout": said.get("attention_dropout", 0.0),
        "hidden_dropout": said.get("resid_pdrop", 0.0),
        "embedding_dropout": said.get("embd_pdrop", 0.0),
    }


def _starcoder2(said: Content) -> Facts:
    bias = said.get("use_bias", True)
    return {
        "norm": "layernorm",
        "activation": said.activation(PLAIN, "gelu_pytorch_tanh"),
        "position": "rotary",
        "qkv_bias": bias,
        "proj_bias": bias,
        "mlp_bias": bias,
        "softmax_fp32": True,
        "tied_embeddings": said.get("tie_word_embeddings", True),
        "attention_dropout": said.get("attention_dropout", 0.0),
        "hidden_dropout": said.get("residual_dropout", 0.0),
        "embedding_dropout": said.get("embedding_dropout", 0.0),
        **windows(said),
    }


def _bert(said: Content) -> Facts:
    if said.get("position_embedding_type", "absolute") != "absolute":
        said.unmodelled.append(
            "position_embedding_type is not modelled: relative positions are not counted"
        )
    hidden = said.dropout("hidden_dropout_prob", 0.1)
    return {
        "norm": "layernorm",
        "block": "post_norm",
        "activation": said.activation(PLAIN, "gelu"),
        "position": "learned",
        "embedding_norm": True,
        "token_types": said.size("type_vocab_size", 2),
        "final_norm": False,
        "head_transform": True,
        "head_bias": True,
        "causal": said.get("is_decoder", False),
        "tied_embeddings": said.get("tie_word_embeddings", True),
        "attention_dropout": said.dropout("attention_probs_dropout_prob", 0.1),
        "hidden_dropout": hidden,
        "embedding_dropout": hidden,
    }


def _t5(said: Content, mlp: str = "relu") -> Facts:
    dropout = said.dropout("dropout_rate", 0.1)
    return {
        "encoder_layers": said.size("num_layers", said.fact("layers")),
        "norm": "rmsnorm",
        "norm_keeps_input": True,
        "activation": said.word("feed_forward_proj", T5, mlp),
        "position": "relative",
        "relative_buckets": said.size("relative_attention_num_buckets", 32),
        "drops_activation": True,
        "qkv_bias": False,
        "proj_bias": False,
        "mlp_bias": False,
        "tied_embeddings": said.get("tie_word_embeddings", True),
        "attention_dropout": dropout,
        "hidden_dropout": dropout,
        "embedding_dropout": dropout,
    }


def _mt5(said: Content) -> Facts:
    return _t5(said, "gated-gelu")


def _vit(said: Content) -> Facts:
    hidden = said.get("hidden_dropout_prob", 0.0)
    labels = said.get("id2label", {})
    return {
        "image_size": _side(said, "image_size", 224),
        "patch_size": _side(said, "patch_size", 16),
        "image_channels": said.size("num_channels", 3),
        "classes": said.size("num_labels", len(labels) if isinstance(labels, dict) else 0) or 2,
        "norm": "layernorm",
        "activation": said.activation(PLAIN, "gelu"),
        "position": "learned",
        "qkv_bias": said.get("qkv_bias", True),
        "softmax_fp32": True,
        "causal": False,
        "tied_embeddings": False,
        "attention_dropout": said.get("attention_probs_dropout_prob", 0.0),
        "hidden_dropout": hidden,
        "embedding_dropout": hidden,
    }


def _side(said: Content, key: str, default: int) -> Any:
    """Pixels of a square's side; a config may give both sides."""
    value = said.size(key, default)
    match value:
        case [height, width]:
            if height != width:
                raise InputError(f"{key} must be square: other shapes are not modelled")
            return height
    return value


def _llama(said: Content) -> Facts:
    bias = said.get("attention_bias", False)
    return {
        "norm": "rmsnorm",
        "activation": said.activation(GATED, "silu"),
        "position": "rotary",
        "qkv_bias": bias,
        "proj_bias": bias,
        "mlp_bias": said.get("mlp_bias", False),
        "softmax_fp32": True,
        "tied_embeddings": said.get("tie_word_embeddings", False),
        "attention_dropout": said.get("attention_dropout", 0.0),
    }


def _mistral(said: Content) -> Facts:
    return {**_llama(said), **windows(said)}


def _qwen2(said: Content) -> Facts:
    return {
        **_llama(said),
        "qkv_bias": True,
        "proj_bias": False,
        **qwen_windows(said, operator.ge),
    }


def _qwen3(said: Content) -> Facts:
    return {**_llama(said), "qk_norm": True, **qwen_windows(said, operator.ge)}


def _phi3(said: Content) -> Facts:
    return {
        **_llama(said),
        "packed_qkv": True,
        "hidden_dropout": said.get("resid_pdrop", 0.0),
        "embedding_dropout": said.get("embd_pdrop", 0.0),
        **windows(said),
    }


def _cohere(said: Content) -> Facts:
    longest = said.size("model_max_length")  # overrides max_position_embeddings
    if flag(said, "use_qk_norm", False):
        said.unmodelled.append(
            "query and key norms with weights per head are not modelled: counted with weights "
            "shared by all heads"
        )
    return {
        **_llama(said),
        **({"max_seq_length": longest} if longest is not None else {}),
        "norm": "layernorm",
        "norm_bias": False,
        "norm_scale": "fp32",
        "block": "parallel",
        "qk_norm": said.get("use_qk_norm", False),
        "tied_embeddings": said.get("tie_word_embeddings", True),
    }


def _gemma(said: Content) -> Facts:
    both_ways = flag(said, "use_bidirectional_attention", False)
    return {
        **_llama(said),
        "norm_scale": "one_plus",
        "activation": said.activation(GATED, "gelu_pytorch_tanh"),
        "causal": not both_ways,
        "tied_embeddings": said.get("tie_word_embeddings", True),
    }


def _gemma2(said: Content) -> Facts:
    return {
        **_gemma(said),
        "block": "sandwich",
        "attention_softcap": _cap(said, "attn_logit_softcapping", 50.0),
        "final_softcap": _cap(said, "final_logit_softcapping", 30.0),
        **windows(said, every=2),
    }


def _gemma3(said: Content) -> Facts:
    every = said.size("sliding_window_pattern", 6)
    fields.whole("sliding_window_pattern", every, 100_000)
    return {
        **_gemma(said),
        "block": "sandwich",
        "qk_norm": True,
        "attention_softcap": _cap(said, "attn_logit_softcapping", None),
        "final_softcap": _cap(said, "final_logit_softcapping", None),
        **windows(said, every=every),
    }


def _mixtral(said: Content) -> Facts:
    return {**_mistral(said), **_experts(said, said.fact("ffn_size")), "router_norm": True}


def _qwen2_moe(said: Content) -> Facts:
    return {
        **_llama(said),
        "qkv_bias": said.get("qkv_bias", True),
        "proj_bias": False,
        **_experts(said, said.size("moe_intermediate_size", 1408)),
        "shared_ffn_size": said.size("shared_expert_intermediate_size", 5632),
        "shared_gate": True,
        **_cast_router(said),
        **qwen_windows(said, lambda layer, most: layer < most and layer % 2 == 0),
    }


def _qwen3_moe(said: Content) -> Facts:
    return {
        **_llama(said),
        "qk_norm": True,
        **_experts(said, said.size("moe_intermediate_size", 768)),
        **_cast_router(said),
        **qwen_windows(said, lambda layer, most: True),
    }


def _gpt_oss(said: Content) -> Facts:
    bias = said.get("attention_bias", True)
    return {
        **_llama(said),
        "qkv_bias": bias,
        "proj_bias": bias,
        "mlp_bias": True,
        "norm_scale": "fp32",
        "activation": "clamped_swiglu",
        "softmax_fp32": False,
        "attention_sinks": True,
        **_experts(said, said.fact("ffn_size")),
        "router_bias": True,
        "router_dtype": "chosen",
        **windows(said, every=2),
    }


def _deepseek_v2(said: Content) -> Facts:
    rotated = said.size("qk_rope_head_dim", 64)
    rest = said.size("qk_nope_head_dim", 128)
    for key, size in (("qk_rope_head_dim", rotated), ("qk_nope_head_dim", rest)):
        fields.whole(key, size, 2**20)
    width = said.size("moe_intermediate_size", 1407)
    return {
        **_llama(said),
        "kv_heads": said.fact("kv_heads") or said.fact("heads"),
        "head_size": rotated + rest,
        "rope_head_size": rotated,
        "v_head_size": said.size("v_head_dim", 128),
        "kv_lora_rank": said.size("kv_lora_rank", 512),
        "q_lora_rank": said.size("q_lora_rank", None if said.states("q_lora_rank") else 1536),
        **_experts(said, width),
        "shared_ffn_size": _shared(said, width, 2),
        "router": _scores(said, "softmax"),
        "router_dtype": "fp32",
        "router_norm": said.get("norm_topk_prob", False),
    }


def _deepseek_v3(said: Content) -> Facts:
    width = said.size("moe_intermediate_size", 2048)
    return {
        **_deepseek_v2(said),
        "expert_ffn_size": width,
        "shared_ffn_size": _shared(said, width, 1),
        "router": _scores(said, "sigmoid"),
        "router_norm": said.get("norm_topk_prob", True),
        "mtp_layers": _mtp(said),
    }


def _glm4_moe(said: Content) -> Facts:
    width = said.size("moe_intermediate_size", 1408)
    return {
        **_llama(said),
        "proj_bias": False,
        "qk_norm": said.get("use_qk_norm", False),
        **_experts(said, width),
        "shared_ffn_size": _shared(said, width, 1),
        "router": _scores(said, "sigmoid"),
        "router_dtype": "fp32",
        "router_norm": said.get("norm_topk_prob", True),
        "mtp_layers": _mtp(said),
    }


FAMILIES: dict[str, Callable[[Content], Facts]] = {
    "bert": _bert,
    "bloom": _bloom,
    "cohere": _cohere,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "falcon": _falcon,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma3_text": _gemma3,
    "glm4_moe": _glm4_moe,
    "gpt2": _gpt2,
    "gpt_bigcode": _gpt_bigcode,
    "gpt_neo": _gpt_neo,
    "gpt_neox": _gpt_neox,
    "gpt_oss": _gpt_oss,
    "granite": _llama,
    "kimi_k2": _deepseek_v3,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "mt5": _mt5,
    "opt": _opt,
    "phi": _phi,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "starcoder2": _starcoder2,
    "t5": _t5,
    "vit": _vit,
}

# Defaults of the classes of transformers for facts that have no default above.
_GEMMA3 = {
    "kv_heads": 4,
    "head_size": 256,
    "vocab_size": 262208,
    "max_seq_length": 131072,
    "sliding_window": 4096,
}
_DEEPSEEK_V3 = {"experts": 256, "experts_per_token": 8, "mtp_layers": 1, "first_dense": 3}
DEFAULTS: dict[str, Facts] = {
    "bert": {"max_seq_length": 512},
    "bloom": {"max_seq_length": 2048},
    "deepseek_v2": {"experts": 64},
    "deepseek_v3": _DEEPSEEK_V3,
    "falcon": {"max_seq_length": 2048},
    "gemma": {"kv_heads": 16, "head_size": 256},
    "gemma2": {"kv_heads": 4, "head_size": 256, "sliding_window": 4096},
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "glm4_moe": {
        "kv_heads": 8,
        "experts": 128,
        "experts_per_token": 8,
        "mtp_layers": 1,
        "first_dense": 1,
    },
    "gpt_oss": {
        "kv_heads": 8,
        "head_size": 64,
        "experts": 128,
        "experts_per_token": 4,
        "sliding_window": 128,
    },
    "kimi_k2": _DEEPSEEK_V3,
    "mistral": {"kv_heads": 8, "sliding_window": 4096},
    "mixtral": {"kv_heads": 8, "experts": 8, "experts_per_token": 2},
    "qwen2": {"kv_heads": 32, "sliding_window": 4096},
    "qwen2_moe": {
        "kv_heads": 16,
        "experts": 60,
        "experts_per_token": 4,
        "sliding_window": 4096,
    },
    "qwen3": {"kv_heads": 32, "head_size": 128, "sliding_window": 4096},
    "qwen3_moe": {
        "kv_heads": 4,
        "experts": 128,
        "experts_per_token": 8,
        "sliding_window": 4096,
    },
    "mt5": {"head_size": 64},
    "starcoder2": {"kv_heads": 2},
    "t5": {"head_size": 64},
}

# Families whose MLP is 4 x hidden_size wide where the config gives no width.
FOUR_H = ("bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neo")


def _cap(said: Content, key: str, default: float | None) -> Any:
    """A soft-cap; a null means none."""
    return said.get(key, None if said.states(key) else default)


def _mtp(said: Content) -> Any:
    found = said.optional("mtp_layers")
    return 0 if found is None else found


def _shared(said: Content, width: Any, default: int) -> Any:
    """The width of all shared experts together; a null or a 0 means none."""
    count = said.size("n_shared_experts", 0 if said.states("n_shared_experts") else default)
    if count == 0:
        return None
    fields.whole("n_shared_experts", count, 2**16)
    fields.whole("moe_intermediate_size", width, 2**26)
    return count * width


def _cast_router(said: Content) -> Facts:
    return {"router_dtype": "cast", "router_norm": said.get("norm_topk_prob", False)}


def _scores(said: Content, default: str) -> Any:
    return said.get("scoring_func", default)


def _experts(said: Content, width: Any) -> Facts:
    """The number and width of the experts, and which layers have them."""
    return {
        "experts": said.optional("experts"),
        "experts_per_token": said.fact("experts_per_token"),
        "expert_ffn_size": width,
        "moe_layers": moe_layers(said),
    }
