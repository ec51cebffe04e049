"""Command-R."""

from memcalc.config.families import llama, names, words
from memcalc.config.families.content import Content
from memcalc.config.families.layers import flag
from memcalc.config.families.record import Facts, Family


def _cohere(said: Content) -> Facts:
    longest = said.size("model_max_length")  # overrides max_position_embeddings
    if flag(said, "use_qk_norm", False):
        said.unmodelled.append(
            "query and key norms with weights per head are not modeled: counted with weights "
            "shared by all heads"
        )
    return {
        **llama.read(said),
        **({"max_seq_length": longest} if longest is not None else {}),
        "norm": "layernorm",
        "norm_bias": False,
        "norm_scale": "fp32",
        "block": "parallel",
        "qk_norm": said.get("use_qk_norm", False),
        "tied_embeddings": said.get("tie_word_embeddings", True),
    }


FAMILIES = {
    "cohere": Family(
        _cohere,
        architectures=("CohereForCausalLM",),
        layer="CohereDecoderLayer",
        words={**words.BIASED, "use_qk_norm": "qk_norm"},
        names=names.PARTS,
    ),
}
