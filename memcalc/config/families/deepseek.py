"""DeepSeek-V2 and -V3, with multi-head latent attention; and Kimi-K2, which is DeepSeek-V3."""

from memcalc.config import fields
from memcalc.config.families import experts, llama, names, words
from memcalc.config.families.content import Content
from memcalc.config.families.record import Facts, Family, Word
from memcalc.config.model import Model


def _deepseek_v2(said: Content) -> Facts:
    rotated = said.size("qk_rope_head_dim", 64)
    rest = said.size("qk_nope_head_dim", 128)
    for key, size in (("qk_rope_head_dim", rotated), ("qk_nope_head_dim", rest)):
        fields.whole(key, size, 2**20)
    width = said.size("moe_intermediate_size", 1407)
    return {
        **llama.read(said),
        "kv_heads": said.fact("kv_heads") or said.fact("heads"),
        "head_size": rotated + rest,
        "rope_head_size": rotated,
        "v_head_size": said.size("v_head_dim", 128),
        "kv_lora_rank": said.size("kv_lora_rank", 512),
        "q_lora_rank": said.size("q_lora_rank", None if said.states("q_lora_rank") else 1536),
        **experts.read(said, width),
        "shared_ffn_size": experts.shared(said, width, 2),
        "router": experts.scores(said, "softmax"),
        "router_dtype": "fp32",
        "router_norm": said.get("norm_topk_prob", False),
    }


def _deepseek_v3(said: Content) -> Facts:
    width = said.size("moe_intermediate_size", 2048)
    return {
        **_deepseek_v2(said),
        "expert_ffn_size": width,
        "shared_ffn_size": experts.shared(said, width, 1),
        "router": experts.scores(said, "sigmoid"),
        "router_norm": said.get("norm_topk_prob", True),
        "mtp_layers": experts.mtp(said),
    }


def _nope(model: Model, dense: bool | None) -> int:
    return model.head_size - (model.latent.rope_head_size if model.latent else 0)


_LATENT: dict[str, Word] = {
    **words.SIZES,
    **experts.ROUTED,
    "num_key_value_heads": "kv_heads",
    "hidden_act": words.gate,
    "attention_bias": "proj_bias",
    "qk_rope_head_dim": "rope_head_size",
    "qk_nope_head_dim": _nope,
    "v_head_dim": "v_head_size",
    "kv_lora_rank": "kv_lora_rank",
    "q_lora_rank": "q_lora_rank",
}
_MLA = {
    **names.BLOCK,
    "self_attn": (
        *(*names.CORE, *names.LINEARS, "q_down", "kv_down", "q_up", "kv_up", "key_join", "q_enter"),
        *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
    ),
    "q_a_layernorm": names.norm_of("q_norm"),
    "kv_a_layernorm": names.norm_of("kv_norm"),
}
_DEEPSEEK_V3_DEFAULTS = {"experts": 256, "experts_per_token": 8, "mtp_layers": 1, "first_dense": 3}

FAMILIES = {
    "deepseek_v2": Family(
        _deepseek_v2,
        architectures=("DeepseekV2ForCausalLM",),
        defaults={"experts": 64},
        layer="DeepseekV2DecoderLayer",
        words={**_LATENT, "topk_method": lambda model, dense: "greedy"},
        names={**_MLA, **names.SHARED_EXPERTS},
    ),
    "deepseek_v3": Family(
        _deepseek_v3,
        architectures=("DeepseekV3ForCausalLM",),
        defaults=_DEEPSEEK_V3_DEFAULTS,
        layer="DeepseekV3DecoderLayer",
        words=_LATENT,
        names={**_MLA, **names.SHARED_EXPERTS},
    ),
    "kimi_k2": Family(
        _deepseek_v3,
        defaults=_DEEPSEEK_V3_DEFAULTS,
        built_as="deepseek_v3",
    ),
}
