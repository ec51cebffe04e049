"""GPT-Neo."""

from memcalc.config.families.content import PLAIN, Content
from memcalc.config.families.layers import gpt_neo_windows
from memcalc.config.families.record import Facts, Family


def _gpt_neo(said: Content) -> Facts:
    said.unmodelled.append(
        "GPT-Neo computes scores in fp32: unfused attention uses more memory than counted (fp32 "
        "query, key and scores)"
    )
    local = gpt_neo_windows(said)
    return {
        "norm": "layernorm",
        "activation": said.activation(PLAIN, "gelu_new"),
        "position": "learned",
        "qkv_bias": False,
        "softmax_fp32": True,
        "tied_embeddings": said.get("tie_word_embeddings", True),
        "attention_dropout": said.get("attention_dropout", 0.0),
        "hidden_dropout": said.get("resid_dropout", 0.0),
        "embedding_dropout": said.get("embed_dropout", 0.0),
        "sliding_window": said.size("window_size", 256) if any(local) else None,
        "window_layers": local if any(local) else None,
    }


FAMILIES = {
    "gpt_neo": Family(
        _gpt_neo,
        architectures=("GPTNeoForCausalLM",),
        four_h=True,
    ),
}
