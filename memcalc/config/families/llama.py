"""Llama, and Granite, which has Llama's sizes."""

from memcalc.config.families import names, words
from memcalc.config.families.content import GATED, Content
from memcalc.config.families.record import Facts, Family


def read(said: Content) -> Facts:
    """Llama's facts, with which other families begin."""
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


FAMILIES = {
    "llama": Family(
        read,
        architectures=(
            "LlamaForCausalLM",
            "LlamaModel",
        ),
        layer="LlamaDecoderLayer",
        words={**words.BIASED, "mlp_bias": "mlp_bias"},
        names=names.PARTS,
    ),
    "granite": Family(
        read,
        architectures=("GraniteForCausalLM",),
    ),
}
