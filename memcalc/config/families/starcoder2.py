"""StarCoder2."""

from memcalc.config.families import names, words
from memcalc.config.families.content import PLAIN, Content
from memcalc.config.families.layers import windows
from memcalc.config.families.record import Facts, Family


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


FAMILIES = {
    "starcoder2": Family(
        _starcoder2,
        architectures=("Starcoder2ForCausalLM",),
        defaults={"kv_heads": 2},
        layer="Starcoder2DecoderLayer",
        words={
            **words.SIZES,
            **words.WINDOW,
            "num_key_value_heads": "kv_heads",
            "hidden_act": words.plain,
            "use_bias": "mlp_bias",
            "residual_dropout": "hidden_dropout",
            # the class's defaults are outside the vocabulary, and transformers would warn
            "bos_token_id": lambda model, dense: None,
            "eos_token_id": lambda model, dense: None,
        },
        names={
            **names.HEADS_FIRST,
            "self_attn": (*names.HEADS_FIRST["self_attn"], "attention_dropout"),
            "mlp": ("mlp_dropout",),
        },
    ),
}
