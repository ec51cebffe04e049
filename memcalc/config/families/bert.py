"""BERT."""

from memcalc.config.families import names, words
from memcalc.config.families.content import PLAIN, Content
from memcalc.config.families.record import Facts, Family


def _bert(said: Content) -> Facts:
    if said.get("position_embedding_type", "absolute") != "absolute":
        said.unmodelled.append(
            "position_embedding_type is not modeled: relative positions are not counted"
        )
    hidden = said.dropout("hidden_dropout_prob", 0.1)
    return {
        "norm": "layernorm",
        "block": "post_norm",
        "activation": said.activation(PLAIN, "gelu"),
        "position": "learned",
        "embedding_norm": True,
        "token_types": said.size("type_vocab_size", 2),
        "final_norm": False,
        "head_transform": True,
        "head_bias": True,
        "causal": said.get("is_decoder", False),
        "tied_embeddings": said.get("tie_word_embeddings", True),
        "attention_dropout": said.dropout("attention_probs_dropout_prob", 0.1),
        "hidden_dropout": hidden,
        "embedding_dropout": hidden,
    }


FAMILIES = {
    "bert": Family(
        _bert,
        architectures=(
            "BertForMaskedLM",
            "BertModel",
        ),
        defaults={"max_seq_length": 512},
        layer="BertLayer",
        cross_entropy="torch-16bit",  # BertForPreTraining; ForMaskedLMLoss upcasts
        words={
            "hidden_size": "hidden_size",
            "num_attention_heads": "heads",
            "intermediate_size": "ffn_size",
            "hidden_act": words.plain,
            "hidden_dropout_prob": "hidden_dropout",
            "attention_probs_dropout_prob": "attention_dropout",
            "is_decoder": "causal",
        },
        names={
            "self": (*names.CORE, "query", "key", "value"),
            "output": ("attention_residual", "mlp_residual"),
            "LayerNorm": ("attention_norm", "mlp_norm"),
            "dense": ("fc1",),
            "intermediate_act_fn": ("gelu", "relu", "silu"),
            "dropout": ("attention_dropout", "mlp_dropout"),
        },
    ),
}
