"""OPT."""

from memcalc.config.families import names, words
from memcalc.config.families.content import PLAIN, Content
from memcalc.config.families.layers import flag
from memcalc.config.families.record import Facts, Family


def _opt(said: Content) -> Facts:
    bias = said.get("enable_bias", True)
    width = said.size("word_embed_proj_dim")
    if width is not None and width != said.fact("hidden_size"):
        said.unmodelled.append(
            "word_embed_proj_dim is not modeled: the embedding and the head are counted with "
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


FAMILIES = {
    "opt": Family(
        _opt,
        architectures=("OPTForCausalLM",),
        layer="OPTDecoderLayer",
        words={
            "hidden_size": "hidden_size",
            "num_attention_heads": "heads",
            "ffn_dim": "ffn_size",
            "activation_function": words.plain,
            "attention_dropout": "attention_dropout",
            "dropout": "hidden_dropout",
            "do_layer_norm_before": lambda model, dense: model.block == "pre_norm",
            "enable_bias": "mlp_bias",
        },
        names={
            **names.HEADS_FIRST,
            "self_attn_layer_norm": ("input_norm", "attention_norm"),
            "final_layer_norm": ("mlp_norm",),
            ".": ("attention_dropout", "attention_residual", "mlp_dropout", "layer"),
        },
    ),
}
