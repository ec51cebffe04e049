"""GPT-2, and GPT-BigCode, which is GPT-2 with one key and value head."""

from memcalc.config.families import names, words
from memcalc.config.families.content import PLAIN, Content
from memcalc.config.families.layers import flag
from memcalc.config.families.record import Facts, Family


def _gpt2(said: Content) -> Facts:
    return {
        "norm": "layernorm",
        "activation": said.activation(PLAIN, "gelu_new"),
        "position": "learned",
        "tied_embeddings": said.get("tie_word_embeddings", True),
        "attention_dropout": said.dropout("attn_pdrop", 0.1),
        "hidden_dropout": said.dropout("resid_pdrop", 0.1),
        "embedding_dropout": said.dropout("embd_pdrop", 0.1),
    }


def _gpt_bigcode(said: Content) -> Facts:
    one = flag(said, "multi_query", True)
    return {
        **_gpt2(said),
        **({"kv_heads": 1} if one else {}),
        "activation": said.activation(PLAIN, "gelu_pytorch_tanh"),
        "softmax_fp32": said.get("attention_softmax_in_fp32", True),
    }


FAMILIES = {
    "gpt2": Family(
        _gpt2,
        architectures=(
            "GPT2LMHeadModel",
            "GPT2Model",
        ),
        four_h=True,
        layer="GPT2Block",
        packs=("qkv",),
        words={
            "n_embd": "hidden_size",
            "n_head": "heads",
            "n_inner": "ffn_size",
            "activation_function": words.plain,
            "attn_pdrop": "attention_dropout",
            "resid_pdrop": "hidden_dropout",
        },
        names={
            "attn": (*names.CORE, "c_attn", "attn_dropout"),
            "ln_1": ("input_norm",),
            "ln_2": ("mlp_norm",),
            "c_fc": ("fc1",),
            "act": ("gelu", "silu", "relu"),
            "resid_dropout": ("attention_dropout",),
            "dropout": ("mlp_dropout",),
            ".": ("attention_residual", "layer"),
        },
    ),
    "gpt_bigcode": Family(
        _gpt_bigcode,
        architectures=("GPTBigCodeForCausalLM",),
        four_h=True,
    ),
}
