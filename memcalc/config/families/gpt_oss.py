"""gpt-oss."""

from memcalc.config.families import experts, llama, names, words
from memcalc.config.families.content import Content
from memcalc.config.families.layers import windows
from memcalc.config.families.record import Facts, Family, Remaining


def _gpt_oss(said: Content) -> Facts:
    bias = said.get("attention_bias", True)
    return {
        **llama.read(said),
        "qkv_bias": bias,
        "proj_bias": bias,
        "mlp_bias": True,
        "norm_scale": "fp32",
        "activation": "clamped_swiglu",
        "softmax_fp32": False,
        "attention_sinks": True,
        **experts.read(said, said.fact("ffn_size")),
        "router_bias": True,
        "router_dtype": "chosen",
        **windows(said, every=2),
    }


FAMILIES = {
    "gpt_oss": Family(
        _gpt_oss,
        architectures=("GptOssForCausalLM",),
        defaults={
            "kv_heads": 8,
            "head_size": 64,
            "experts": 128,
            "experts_per_token": 4,
            "sliding_window": 128,
        },
        layer="GptOssDecoderLayer",
        words={**words.BIASED, **words.WINDOW, **experts.LOCAL},
        names={**names.BLOCK, **names.EXPERTS},
        remaining={"transformers-sdpa": Remaining(None, "sdpa has no attention sinks")},
    ),
}
