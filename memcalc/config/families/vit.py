"""ViT, a vision encoder."""

from typing import Any

from memcalc.config.families import names, words
from memcalc.config.families.content import PLAIN, Content
from memcalc.config.families.record import Facts, Family
from memcalc.errors import InputError


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
                raise InputError(f"{key} must be square: other shapes are not modeled")
            return height
    return value


FAMILIES = {
    "vit": Family(
        _vit,
        architectures=(
            "ViTForImageClassification",
            "ViTModel",
        ),
        layer="ViTLayer",
        cross_entropy="torch-16bit",  # ForSequenceClassificationLoss
        words={
            "hidden_size": "hidden_size",
            "num_attention_heads": "heads",
            "intermediate_size": "ffn_size",
            "hidden_act": words.plain,
            "qkv_bias": "qkv_bias",
            "hidden_dropout_prob": "hidden_dropout",
            "attention_probs_dropout_prob": "attention_dropout",
        },
        names={
            "attention": (*names.CORE, *names.LINEARS),
            "layernorm_before": ("input_norm",),
            "layernorm_after": ("mlp_norm",),
            "activation_fn": ("gelu", "relu", "silu"),
            "dropout": ("attention_dropout", "mlp_dropout"),
            ".": ("attention_residual", "layer"),
        },
    ),
}
