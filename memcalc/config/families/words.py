"""Keys of config.json that many families share: tables for ``Family.words``."""

from memcalc.config.families.record import Word
from memcalc.config.model import Model

_GATES = {"swiglu": "silu", "geglu": "gelu_pytorch_tanh", "clamped_swiglu": "silu"}
_PLAIN = {"squared_relu": "relu2"}


def gate(model: Model, dense: bool | None) -> str:
    """The activation of a gated MLP, by transformers' name."""
    return _GATES.get(model.activation, model.activation)


def plain(model: Model, dense: bool | None) -> str:
    """The activation of a plain MLP, by transformers' name."""
    return _PLAIN.get(model.activation, model.activation)


SIZES: dict[str, Word] = {
    "hidden_size": "hidden_size",
    "num_attention_heads": "heads",
    "intermediate_size": "ffn_size",
    "attention_dropout": "attention_dropout",
}
GROUPED: dict[str, Word] = {
    **SIZES,
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_size",
    "hidden_act": gate,
}
BIASED: dict[str, Word] = {**GROUPED, "attention_bias": "qkv_bias"}
WINDOW: dict[str, Word] = {"sliding_window": "sliding_window"}
