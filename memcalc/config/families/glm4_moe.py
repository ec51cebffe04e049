"""GLM-4.5."""

from memcalc.config.families import experts, llama, names, words
from memcalc.config.families.content import Content
from memcalc.config.families.record import Facts, Family


def _glm4_moe(said: Content) -> Facts:
    width = said.size("moe_intermediate_size", 1408)
    return {
        **llama.read(said),
        "proj_bias": False,
        "qk_norm": said.get("use_qk_norm", False),
        **experts.read(said, width),
        "shared_ffn_size": experts.shared(said, width, 1),
        "router": experts.scores(said, "sigmoid"),
        "router_dtype": "fp32",
        "router_norm": said.get("norm_topk_prob", True),
        "mtp_layers": experts.mtp(said),
    }


FAMILIES = {
    "glm4_moe": Family(
        _glm4_moe,
        architectures=("Glm4MoeForCausalLM",),
        defaults={
            "kv_heads": 8,
            "experts": 128,
            "experts_per_token": 8,
            "mtp_layers": 1,
            "first_dense": 1,
        },
        layer="Glm4MoeDecoderLayer",
        words={**words.BIASED, **experts.ROUTED, "use_qk_norm": "qk_norm"},
        names={**names.NORMED_HEADS, **names.SHARED_EXPERTS},
    ),
}
