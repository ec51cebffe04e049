"""BLOOM."""

from memcalc.config.families import names
from memcalc.config.families.content import Content
from memcalc.config.families.layers import flag
from memcalc.config.families.record import Facts, Family, Remaining


def _bloom(said: Content) -> Facts:
    if flag(said, "apply_residual_connection_post_layernorm", False):
        said.unmodelled.append(
            "apply_residual_connection_post_layernorm is not modeled: counted with "
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


FAMILIES = {
    "bloom": Family(
        _bloom,
        architectures=("BloomForCausalLM",),
        defaults={"max_seq_length": 2048},
        four_h=True,
        layer="BloomBlock",
        packs=("qkv",),
        words={
            "hidden_size": "hidden_size",
            "n_head": "heads",
            "attention_dropout": "attention_dropout",
            "hidden_dropout": "hidden_dropout",
        },
        names={
            **names.HEADS_FIRST,
            "self_attn": (
                *names.HEADS_FIRST["self_attn"],
                "attention_dropout",
                "attention_residual",
            ),
            "act_fn": ("gelu", "gelu_impl"),
            "mlp": ("mlp_dropout", "mlp_residual"),
            ".": ("layer",),
        },
        remaining={"transformers-sdpa": Remaining(None, "its class supports only eager attention")},
    ),
}
