"""Self-attention: (s, b, h) -> (s, b, h)."""

from memcalc.blocks.spec import Spec
from memcalc.graph import ops
from memcalc.graph.graph import Graph, Tensor


def attention(g: Graph, x: Tensor, m: Spec) -> Tensor:
    """x (s, b, h) -> (s, b, h), multi-head or grouped-query.

    Korthikanti et al. 2022, section 4.1, figure 3; with tensor parallelism, section 4.2.
    """
    with g.region("attention"):
        x = ops.enter_tensor_parallel(g, "attention_enter", x, m.kernels.keeps_gathered)
        heads = {"query": (m.a, m.d), "key": (m.k, m.d), "value": (m.k, m.d)}
        q, k, v = ops.linear(g, "qkv", x, heads, ops.COLUMN, bias=m.model.qkv_bias)
        if m.model.position == "rotary":
            q, k = ops.rotary(g, "query_rotary", q), ops.rotary(g, "key_rotary", k)
        with g.region("core_attention"):
            core = flash_core if m.kernels.attention == "flash" else unfused_core
            context = core(g, q, k, v, m)
        out = {"proj_output": (m.h,)}
        (y,) = ops.linear(g, "proj", context, out, ops.ROW, bias=m.model.proj_bias)
        y = ops.leave_tensor_parallel(g, "attention_leave", y)
        return ops.dropout(g, "attention_dropout", y, m.model.hidden_dropout)


def flash_core(g: Graph, q: Tensor, k: Tensor, v: Tensor, m: Spec) -> Tensor:
    """q (s, b, a, d), k and v (s, b, k, d) -> (s, b, a, d), in one kernel."""
    causal = m.model.causal
    return ops.flash_attention(g, "flash_attention", q, k, v, m.kernels.rng_bytes, causal)


def unfused_core(g: Graph, q: Tensor, k: Tensor, v: Tensor, m: Spec) -> Tensor:
    """q (s, b, a, d), k and v (s, b, k, d) -> (s, b, a, d), through scores (b, a, s, s)."""
    s, b, heads, d = q.axes
    if m.kernels.repeats_kv and m.grouped:
        k = ops.repeat_heads(g, "repeat_key", k, heads)
        v = ops.repeat_heads(g, "repeat_value", v, heads)
    wide = 4 if m.kernels.softmax_fp32 and m.model.softmax_fp32 else g.dtype_bytes
    causal = m.model.causal
    scores = ops.matmul(g, "scores", "scores", q, k, (b, heads, s, s), over=d, causal=causal)
    scores = ops.scale(g, "scale", scores)
    if causal:
        scores = ops.mask(g, "mask", scores)
    probs = ops.softmax(g, "softmax", scores, wide)
    probs = ops.cast(g, "probabilities", probs, g.dtype_bytes)
    probs = ops.dropout(g, "softmax_dropout", probs, m.model.attention_dropout)
    return ops.matmul(g, "context", "context", probs, v, q.axes, over=s, causal=causal)
