"""T5 and mT5, encoder-decoders."""

from memcalc.config.families.content import T5, Content
from memcalc.config.families.record import Facts, Family


def _t5(said: Content, mlp: str = "relu") -> Facts:
    dropout = said.dropout("dropout_rate", 0.1)
    return {
        "encoder_layers": said.size("num_layers", said.fact("layers")),
        "norm": "rmsnorm",
        "norm_keeps_input": True,
        "activation": said.word("feed_forward_proj", T5, mlp),
        "position": "relative",
        "relative_buckets": said.size("relative_attention_num_buckets", 32),
        "drops_activation": True,
        "qkv_bias": False,
        "proj_bias": False,
        "mlp_bias": False,
        "tied_embeddings": said.get("tie_word_embeddings", True),
        "attention_dropout": dropout,
        "hidden_dropout": dropout,
        "embedding_dropout": dropout,
    }


def _mt5(said: Content) -> Facts:
    return _t5(said, "gated-gelu")


FAMILIES = {
    "t5": Family(
        _t5,
        architectures=("T5ForConditionalGeneration",),
        defaults={"head_size": 64},
        cross_entropy="torch-16bit",
    ),
    "mt5": Family(
        _mt5,
        architectures=("MT5ForConditionalGeneration",),
        defaults={"head_size": 64},
        cross_entropy="torch-16bit",
    ),
}
