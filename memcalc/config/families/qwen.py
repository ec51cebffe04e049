"""Qwen-2 and Qwen-3, dense and of experts: Llama with biases or with norms of heads."""

import operator

from memcalc.config.families import experts, llama, names, words
from memcalc.config.families.content import Content
from memcalc.config.families.layers import qwen_windows
from memcalc.config.families.record import Facts, Family, Word
from memcalc.config.model import Model


def _qwen2(said: Content) -> Facts:
    return {
        **llama.read(said),
        "qkv_bias": True,
        "proj_bias": False,
        **qwen_windows(said, operator.ge),
    }


def _qwen3(said: Content) -> Facts:
    return {**llama.read(said), "qk_norm": True, **qwen_windows(said, operator.ge)}


def _qwen2_moe(said: Content) -> Facts:
    return {
        **llama.read(said),
        "qkv_bias": said.get("qkv_bias", True),
        "proj_bias": False,
        **experts.read(said, said.size("moe_intermediate_size", 1408)),
        "shared_ffn_size": said.size("shared_expert_intermediate_size", 5632),
        "shared_gate": True,
        **experts.cast_router(said),
        **qwen_windows(said, lambda layer, most: layer < most and layer % 2 == 0),
    }


def _qwen3_moe(said: Content) -> Facts:
    return {
        **llama.read(said),
        "qk_norm": True,
        **experts.read(said, said.size("moe_intermediate_size", 768)),
        **experts.cast_router(said),
        **qwen_windows(said, lambda layer, most: True),
    }


def _windowed(model: Model, dense: bool | None) -> bool:
    return model.sliding_window is not None


_QWEN_WINDOW: dict[str, Word] = {
    **words.WINDOW,
    "use_sliding_window": _windowed,
    "max_window_layers": lambda model, dense: 0,
}
_QWEN_EXPERTS: dict[str, Word] = {
    "num_experts": "experts",
    "num_experts_per_tok": "experts_per_token",
    "moe_intermediate_size": "expert_ffn_size",
    "norm_topk_prob": "router_norm",
    "mlp_only_layers": experts.dense_layers,
}

FAMILIES = {
    "qwen2": Family(
        _qwen2,
        architectures=("Qwen2ForCausalLM",),
        defaults={"kv_heads": 32, "sliding_window": 4096},
        layer="Qwen2DecoderLayer",
        words={**words.GROUPED, **_QWEN_WINDOW},
        names=names.PARTS,
    ),
    "qwen3": Family(
        _qwen3,
        architectures=("Qwen3ForCausalLM",),
        defaults={"kv_heads": 32, "head_size": 128, "sliding_window": 4096},
        layer="Qwen3DecoderLayer",
        words={**words.BIASED, **_QWEN_WINDOW},
        names=names.NORMED_HEADS,
    ),
    "qwen2_moe": Family(
        _qwen2_moe,
        architectures=("Qwen2MoeForCausalLM",),
        defaults={
            "kv_heads": 16,
            "experts": 60,
            "experts_per_token": 4,
            "sliding_window": 4096,
        },
        layer="Qwen2MoeDecoderLayer",
        words={
            **words.GROUPED,
            **_QWEN_WINDOW,
            **_QWEN_EXPERTS,
            "qkv_bias": "qkv_bias",
            "shared_expert_intermediate_size": "shared_ffn_size",
        },
        names={**names.BLOCK, **names.SHARED_EXPERTS},
    ),
    "qwen3_moe": Family(
        _qwen3_moe,
        architectures=("Qwen3MoeForCausalLM",),
        defaults={
            "kv_heads": 4,
            "experts": 128,
            "experts_per_token": 8,
            "sliding_window": 4096,
        },
        layer="Qwen3MoeDecoderLayer",
        words={**words.BIASED, **_QWEN_WINDOW, **_QWEN_EXPERTS},
        names={**names.NORMED_HEADS, **names.EXPERTS},
    ),
}
