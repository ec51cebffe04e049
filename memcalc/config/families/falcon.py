"""Falcon."""

from memcalc.config.families import names, words
from memcalc.config.families.content import PLAIN, Content
from memcalc.config.families.layers import flag
from memcalc.config.families.record import Facts, Family, Remaining


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


_INDICES = Remaining(
    16, "two int64 indices, with which it takes key and value from one GEMM's output"
)

FAMILIES = {
    "falcon": Family(
        _falcon,
        architectures=("FalconForCausalLM",),
        defaults={"max_seq_length": 2048},
        four_h=True,
        layer="FalconDecoderLayer",
        packs=("qkv",),
        words={
            "hidden_size": "hidden_size",
            "num_attention_heads": "heads",
            "num_kv_heads": "kv_heads",
            "ffn_hidden_size": "ffn_size",
            "activation": words.plain,
            "new_decoder_architecture": "repeated_kv",
            "multi_query": lambda model, dense: model.kv_heads == 1,
            "parallel_attn": lambda model, dense: model.block.startswith("parallel"),
            "num_ln_in_parallel_attn": lambda model, dense: 1 + (model.block != "parallel"),
            "alibi": lambda model, dense: model.position == "alibi",
            "bias": "mlp_bias",
            "attention_dropout": "attention_dropout",
            "hidden_dropout": "hidden_dropout",
        },
        names={
            **names.HEADS_FIRST,
            "input_layernorm": (*names.norm_of("input_norm"), "ln_attn"),
            "post_attention_layernorm": (*names.norm_of("mlp_norm"), "ln_mlp"),
        },
        remaining={"transformers-eager": _INDICES, "transformers-sdpa": _INDICES},
    ),
}
