"""Self-attention: (s, b, h) -> (s, b, h)."""

from memcalc.blocks.norm import norm
from memcalc.blocks.spec import Spec
from memcalc.graph import ops
from memcalc.graph.graph import Graph, Tensor
from memcalc.graph.mesh import Axis


def attention(g: Graph, x: Tensor, m: Spec) -> Tensor:
    """x (s, b, h) -> (s, b, h), multi-head, grouped-query or latent.

    Korthikanti et al. 2022, section 4.1, figure 3; with tensor parallelism, section 4.2.
    """
    with g.region("attention"):
        q, k, v = (latent if m.model.latent else projected)(g, x, m)
        with g.region("core_attention"):
            core = flash_core if m.kernels.attention == "flash" else unfused_core
            context = core(g, q, k, v, m)
        out = {"proj_output": (m.h,)}
        (y,) = ops.linear(g, "proj", context, out, ops.ROW, bias=m.model.proj_bias)
        y = ops.leave_tensor_parallel(g, "attention_leave", y)
        return ops.dropout(g, "attention_dropout", y, m.model.hidden_dropout)


def projected(g: Graph, x: Tensor, m: Spec) -> tuple[Tensor, Tensor, Tensor]:
    """x (s, b, h) -> q (s, b, a, d), k and v (s, b, k, d): one product, then norms and rotation."""
    x = ops.enter_tensor_parallel(g, "attention_enter", x, m.kernels.keeps_gathered)
    heads = {"query": (m.a, m.d), "key": (m.k, m.d), "value": (m.k, m.d)}
    packed = m.model.packed_qkv and views(m)
    q, k, v = ops.linear(g, "qkv", x, heads, ops.COLUMN, bias=m.model.qkv_bias, packed=packed)
    if m.model.qk_norm:
        q, k = norm(g, "query_norm", q, m), norm(g, "key_norm", k, m)
    if m.model.position == "rotary":
        q, k = ops.rotary(g, "query_rotary", q), ops.rotary(g, "key_rotary", k)
    return q, k, v


def latent(g: Graph, x: Tensor, m: Spec) -> tuple[Tensor, Tensor, Tensor]:
    """x (s, b, h) -> q and k (s, b, a, d), v (s, b, a, u), through narrow, normed projections.

    Multi-head latent attention as it is trained (DeepSeek-V2, section 2.1; Megatron-core,
    multi_latent_attention.py): every rank compresses its own tokens, and expands its own heads. The
    rotated part of the key, of size o, is one for all heads.
    """
    rank, rope, value = m.others["l"], m.others["o"], m.others["u"]
    nope = Axis.whole("(d-o)", m.d.size - rope.size)
    down = {"kv_compressed": (rank,), "key_rope": (rope,)}
    if "q" in m.others:
        outputs = {"query_compressed": (m.others["q"],)}
        (q,) = ops.linear(g, "q_down", x, outputs, ops.REPLICATED)
        q = norm(g, "q_norm", q, m)
        q = ops.enter_tensor_parallel(g, "q_enter", q, m.kernels.keeps_gathered)
    else:
        q = ops.enter_tensor_parallel(g, "q_enter", x, m.kernels.keeps_gathered)
    compressed, key_rope = ops.linear(g, "kv_down", x, down, ops.REPLICATED)
    compressed = norm(g, "kv_norm", compressed, m)
    compressed = ops.enter_tensor_parallel(g, "kv_enter", compressed, m.kernels.keeps_gathered)
    key_rope = ops.enter_tensor_parallel(g, "rope_enter", key_rope, True)
    with g.region("mla_up"):
        (q,) = ops.linear(g, "q_up", q, {"query": (m.a, m.d)}, ops.COLUMN)
        up = {"key_nope": (m.a, nope), "value": (m.a, value)}
        key_nope, v = ops.linear(g, "kv_up", compressed, up, ops.COLUMN, packed=views(m))
        q = ops.rotary(g, "query_rotary", q)
        key_rope = ops.rotary(g, "key_rotary", key_rope)
        k = ops.concatenate(g, "key_join", "key", (key_nope, key_rope), q.axes)
        return q, k, v


def views(m: Spec) -> bool:
    """Whether what is packed is kept whole: by a flash kernel, or by products of one sequence."""
    return m.kernels.own_heads and (m.kernels.attention == "flash" or m.single)


def repeats(m: Spec) -> bool:
    """Whether K and V are copied to all heads: of a sequence's only head products take views."""
    view = m.kernels.own_heads and m.single and m.model.kv_heads == 1
    return m.kernels.repeats_kv and m.grouped and not view


def repeated(g: Graph, k: Tensor, v: Tensor, heads: Axis) -> tuple[Tensor, Tensor]:
    """k (s, b, k, d), v (s, b, k, u) -> (s, b, a, d), (s, b, a, u): as many heads as queries."""
    return ops.repeat_heads(g, "repeat_key", k, heads), ops.repeat_heads(
        g, "repeat_value", v, heads
    )


def flash_core(g: Graph, q: Tensor, k: Tensor, v: Tensor, m: Spec) -> Tensor:
    """q (s, b, a, d), k (s, b, k, d), v (s, b, k, u) -> (s, b, a, u), in one kernel."""
    if m.parallel.cp_kind == "all_to_all":
        ops.exchange_heads(g, "heads_enter", (q, k, v))
    else:
        ops.share_context(g, "share_context", k, v, m.parallel.cp_kind)
    if m.model.repeated_kv and m.kernels.own_heads and m.grouped:
        k, v = repeated(g, k, v, q.axes[2])
    causal, sinks = m.model.causal, m.model.attention_sinks
    out = ops.flash_attention(g, "flash_attention", q, k, v, m.kernels.rng_bytes, causal, sinks)
    if m.parallel.cp_kind == "all_to_all":
        ops.exchange_heads(g, "heads_leave", (out,))
    return out


def unfused_core(g: Graph, q: Tensor, k: Tensor, v: Tensor, m: Spec) -> Tensor:
    """q (s, b, a, d), k (s, b, k, d), v (s, b, k, u) -> (s, b, a, u), by scores (b, a, s, s)."""
    s, b, heads, d = q.axes
    if repeats(m):
        k, v = repeated(g, k, v, heads)
    wide = 4 if m.kernels.softmax_fp32 and m.model.softmax_fp32 else g.dtype_bytes
    causal = m.model.causal
    k, v = ops.gather_context(g, "gather_context", k, v)
    keys = k.axes[0]
    scores = ops.matmul(g, "scores", "scores", q, k, (b, heads, s, keys), over=d, causal=causal)
    scores = ops.scale(g, "scale", scores)
    if m.model.attention_softcap is not None:
        scores = ops.tanh(g, "score_cap", scores)
    if m.model.position == "alibi":
        scores = ops.mask(g, "alibi", scores)
    if causal:
        scores = ops.mask(g, "mask", scores)
    if m.model.attention_sinks:
        scores = ops.sink(g, "sink", scores)
    probs = ops.softmax(g, "softmax", scores, wide)
    probs = ops.cast(g, "probabilities", probs, g.dtype_bytes)
    if m.model.attention_sinks:
        probs = ops.without_sink(g, "without_sink", probs, keys)
    probs = ops.dropout(g, "softmax_dropout", probs, m.model.attention_dropout)
    axes = (*q.axes[:-1], v.axes[-1])
    return ops.matmul(g, "context", "context", probs, v, axes, over=keys, causal=causal)
