"""The ledger's operations and the layer's modules in each part of a layer, of many families."""


def norm_of(name: str) -> tuple[str, ...]:
    """A norm's operations, fused or unfused."""
    return name, f"{name}_fp32", f"{name}_normalize", f"{name}_normalized"


CORE = (
    *("qkv", "query_rotary", "key_rotary", "repeat_key", "repeat_value", "flash_attention"),
    *("efficient_attention", "mask_bias", "query_rotary_output_fp32", "key_rotary_output_fp32"),
    *("value_fp32", "context_cast"),
    *("scores", "scale", "mask", "score_cap", "alibi", "sink", "without_sink", "softmax"),
    *("probabilities", "padding", "softmax_dropout", "context"),
)
LINEARS = ("q_proj", "k_proj", "v_proj", "qkv_proj")
BLOCK: dict[str, tuple[str, ...]] = {
    "self_attn": (*CORE, *LINEARS),
    "input_layernorm": norm_of("input_norm"),
    "post_attention_layernorm": norm_of("mlp_norm"),
    ".": ("attention_residual", "layer"),
}
PARTS: dict[str, tuple[str, ...]] = {
    **BLOCK,
    "fc1": ("fc1", "gate_proj", "up_proj", "gate_up_proj"),
    "act_fn": ("silu", "gelu", "activation_fn"),
    "mlp": ("swiglu", "geglu"),
}
NORMED_HEADS = {**PARTS, "q_norm": norm_of("query_norm"), "k_norm": norm_of("key_norm")}
HEADS_FIRST = {
    **PARTS,
    "self_attn": (*CORE, *LINEARS, "attention", "self_attention", "query_key_value"),
    "fc1": ("dense_h_to_4h", "c_fc"),
    "act_fn": ("silu", "gelu", "act", "activation_fn", "relu"),
}
EXPERTS: dict[str, tuple[str, ...]] = {
    "experts": (
        *("router", "router_input_fp32", "gate", "dispatch", "experts_fc1", "experts_halves"),
        *("experts_silu", "experts_gelu", "experts_swiglu", "experts_geglu", "combine"),
        *("experts_clamped_swiglu", "experts_fc2", "act_fn", "mlp"),
    ),
}
SHARED_EXPERTS: dict[str, tuple[str, ...]] = {
    "experts": (
        *(*EXPERTS["experts"], "shared_fc1", "shared_silu", "shared_gelu", "shared_swiglu"),
        *("shared_geglu", "shared_fc2", "shared_gate", "shared_scale", "gate_proj", "up_proj"),
        *("down_proj", "shared_expert", "shared_experts", "shared_expert_gate"),
    ),
}
