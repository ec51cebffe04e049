"""Phi, whose sublayers are parallel; and Phi-3, which is Llama with packed projections."""

from memcalc.config.families import llama, names, words
from memcalc.config.families.content import PLAIN, Content
from memcalc.config.families.layers import windows
from memcalc.config.families.record import Facts, Family


def _phi(said: Content) -> Facts:
    return {
        "norm": "layernorm",
        "block": "parallel",
        "head_bias": True,
        "activation": said.activation(PLAIN, "gelu_new"),
        "position": "rotary",
        "qk_norm": said.get("qk_layernorm", False),
        "softmax_fp32": True,
        "tied_embeddings": said.get("tie_word_embeddings", False),
        "attention_dropout": said.get("attention_dropout", 0.0),
        "hidden_dropout": said.get("resid_pdrop", 0.0),
        "embedding_dropout": said.get("embd_pdrop", 0.0),
    }


def _phi3(said: Content) -> Facts:
    return {
        **llama.read(said),
        "packed_qkv": True,
        "hidden_dropout": said.get("resid_pdrop", 0.0),
        "embedding_dropout": said.get("embd_pdrop", 0.0),
        **windows(said),
    }


FAMILIES = {
    "phi": Family(
        _phi,
        architectures=("PhiForCausalLM",),
        layer="PhiDecoderLayer",
        words={
            **words.SIZES,
            "num_key_value_heads": "kv_heads",
            "hidden_act": words.plain,
            "qk_layernorm": "qk_norm",
            "resid_pdrop": "hidden_dropout",
        },
        names={**names.HEADS_FIRST, "resid_dropout": ("attention_dropout", "mlp_dropout")},
    ),
    "phi3": Family(
        _phi3,
        architectures=("Phi3ForCausalLM",),
        layer="Phi3DecoderLayer",
        packs=("qkv", "gate"),
        words={**words.GROUPED, **words.WINDOW, "resid_pdrop": "hidden_dropout"},
        names={
            **names.PARTS,
            "resid_attn_dropout": ("attention_dropout",),
            "resid_mlp_dropout": ("mlp_dropout",),
        },
    ),
}
