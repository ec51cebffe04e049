"""Gemma, Gemma-2 and Gemma-3."""

from typing import Any

from memcalc.config import fields
from memcalc.config.families import llama, names, words
from memcalc.config.families.content import GATED, Content
from memcalc.config.families.layers import flag, windows
from memcalc.config.families.record import Facts, Family, Remaining, Word


def _gemma(said: Content) -> Facts:
    both_ways = flag(said, "use_bidirectional_attention", False)
    return {
        **llama.read(said),
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


def _cap(said: Content, key: str, default: float | None) -> Any:
    """A soft-cap; a null means none."""
    return said.get(key, None if said.states(key) else default)


_GEMMA: dict[str, Word] = {
    **words.BIASED,
    **words.WINDOW,
    "attn_logit_softcapping": "attention_softcap",
}
_SANDWICH = {
    **names.NORMED_HEADS,
    "post_attention_layernorm": names.norm_of("attention_post_norm"),
    "pre_feedforward_layernorm": names.norm_of("mlp_norm"),
    "post_feedforward_layernorm": names.norm_of("mlp_post_norm"),
    "o_proj": ("proj",),
    "down_proj": ("fc2",),
}
_GEMMA3_DEFAULTS = {
    "kv_heads": 4,
    "head_size": 256,
    "vocab_size": 262208,
    "max_seq_length": 131072,
    "sliding_window": 4096,
}

FAMILIES = {
    "gemma": Family(
        _gemma,
        architectures=("GemmaForCausalLM",),
        defaults={"kv_heads": 16, "head_size": 256},
    ),
    "gemma2": Family(
        _gemma2,
        architectures=("Gemma2ForCausalLM",),
        defaults={"kv_heads": 4, "head_size": 256, "sliding_window": 4096},
        layer="Gemma2DecoderLayer",
        words=_GEMMA,
        names=_SANDWICH,
        remaining={"transformers-sdpa": Remaining(None, "sdpa has no soft cap of the scores")},
    ),
    "gemma3": Family(
        _gemma3,
        architectures=("Gemma3ForConditionalGeneration",),
        defaults=_GEMMA3_DEFAULTS,
        built_as="gemma3_text",
    ),
    "gemma3_text": Family(
        _gemma3,
        architectures=("Gemma3ForCausalLM",),
        defaults=_GEMMA3_DEFAULTS,
        layer="Gemma3DecoderLayer",
        words=_GEMMA,
        names=_SANDWICH,
    ),
}
