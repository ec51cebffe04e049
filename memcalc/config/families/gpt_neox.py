"""GPT-NeoX."""

from memcalc.config.families import names, words
from memcalc.config.families.content import PLAIN, Content
from memcalc.config.families.layers import flag
from memcalc.config.families.record import Facts, Family


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


FAMILIES = {
    "gpt_neox": Family(
        _gpt_neox,
        architectures=("GPTNeoXForCausalLM",),
        layer="GPTNeoXLayer",
        packs=("qkv",),
        words={
            **words.SIZES,
            "hidden_act": words.plain,
            "hidden_dropout": "hidden_dropout",
            "attention_bias": "qkv_bias",
            "use_parallel_residual": lambda model, dense: model.block == "parallel_two_norms",
        },
        names={
            **names.HEADS_FIRST,
            "post_attention_dropout": ("attention_dropout",),
            "post_mlp_dropout": ("mlp_dropout",),
        },
    ),
}
