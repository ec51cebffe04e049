"""Self-attention and cross-attention: (s, b, h) -> (s, b, h)."""

from collections.abc import Callable
from dataclasses import replace

from memcalc.blocks.norm import norm
from memcalc.blocks.spec import LatentAxes, Spec
from memcalc.graph import ops
from memcalc.graph.graph import Graph, Save, Tensor
from memcalc.graph.mesh import Axis
from memcalc.lazy import resolve

CROSS = "cross_"  # what names of a cross-attention begin with

Core = Callable[[Graph, str, Tensor, Tensor, Tensor, Spec], Tensor]


def attention(g: Graph, x: Tensor, m: Spec) -> Tensor:
    """x (s, b, h) -> (s, b, h), multi-head, grouped-query or latent.

    Korthikanti et al. 2022, section 4.1, figure 3; with tensor parallelism, section 4.2.
    """
    with g.region("attention"):
        if m.latent is None:
            q, k, v = projected(g, x, m)
        else:
            q, k, v = latent(g, x, m, m.latent)
        return attended(g, "", q, k, v, m)


def cross_attention(g: Graph, x: Tensor, source: Tensor, m: Spec) -> Tensor:
    """x (s, b, h) of a decoder, an encoder's output (s, b, h) -> (s, b, h), without a causal mask.

    Queries come from the decoder, keys and values from the encoder (Vaswani et al. 2017, section
    3.2.3); heads are as large as those of self-attention, and positions are not encoded.
    """
    with g.region("cross_attention"):
        x = ops.enter_tensor_parallel(g, "cross_enter", x, m.kernels.keeps_gathered)
        source = ops.enter_tensor_parallel(g, "source_enter", source, m.kernels.keeps_gathered)
        bias, query = m.model.qkv_bias, {"cross_query": (m.a, m.d)}
        (q,) = ops.linear(g, "cross_q", x, query, ops.COLUMN, bias=bias)
        heads = {"cross_key": (m.k, m.d), "cross_value": (m.k, m.d)}
        separate = m.separate("qkv")
        k, v = ops.linear(g, "cross_kv", source, heads, ops.COLUMN, bias=bias, separate=separate)
        return attended(g, CROSS, q, k, v, replace(m, causal=False))


def attended(g: Graph, prefix: str, q: Tensor, k: Tensor, v: Tensor, m: Spec) -> Tensor:
    """q (s, b, a, d), k (s, b, k, d), v (s, b, k, u) -> (s, b, h); names begin with a prefix."""
    with g.region("core_attention"):
        context = core_of(m)(g, prefix, q, k, v, m)
    out = {f"{prefix}proj_output": (m.h,)}
    (y,) = ops.linear(g, f"{prefix}proj", context, out, ops.ROW, bias=m.model.proj_bias)
    y = ops.leave_tensor_parallel(g, f"{prefix}attention_leave", y)
    return ops.dropout(g, f"{prefix}attention_dropout", y, m.model.hidden_dropout)


def projected(g: Graph, x: Tensor, m: Spec) -> tuple[Tensor, Tensor, Tensor]:
    """x (s, b, h) -> q (s, b, a, d), k and v (s, b, k, d): one GEMM, then norms, rotation."""
    x = ops.enter_tensor_parallel(g, "attention_enter", x, m.kernels.keeps_gathered)
    heads = {"query": (m.a, m.d), "key": (m.k, m.d), "value": (m.k, m.d)}
    packed = m.model.packed_qkv and views(m)
    bias, separate = m.model.qkv_bias, m.separate("qkv")
    q, k, v = ops.linear(
        g, "qkv", x, heads, ops.COLUMN, bias=bias, packed=packed, separate=separate
    )
    if m.model.qk_norm:
        q, k = norm(g, "query_norm", q, m), norm(g, "key_norm", k, m)
    if m.model.position == "rotary":
        q, k = ops.rotary(g, "query_rotary", q), ops.rotary(g, "key_rotary", k)
    return q, k, v


def latent(g: Graph, x: Tensor, m: Spec, axes: LatentAxes) -> tuple[Tensor, Tensor, Tensor]:
    """x (s, b, h) -> q and k (s, b, a, d), v (s, b, a, u), by low-rank projections with norms.

    Multi-head latent attention in training (DeepSeek-V2, section 2.1; Megatron-core,
    multi_latent_attention.py): every rank compresses its own tokens and expands its own heads. All
    heads share the rotary part of the key, of size o. The up-projections are a region, with their
    gathers, which belong to the column-parallel linears.
    """
    nope = Axis.whole("(d-o)", m.d.size - axes.rotary.size)
    down = {"kv_compressed": (axes.key_value,), "key_rope": (axes.rotary,)}
    if axes.query is not None:
        outputs = {"query_compressed": (axes.query,)}
        (q,) = ops.linear(g, "q_down", x, outputs, ops.REPLICATED)
    else:
        q = x
    compressed, key_rope = ops.linear(g, "kv_down", x, down, ops.REPLICATED)
    key_rope = ops.enter_tensor_parallel(g, "rope_enter", key_rope, True)
    if m.alone(False):
        q, compressed = latent_norms(g, q, compressed, m, axes)
    with g.region("mla_up"):
        if not m.alone(False):
            q, compressed = latent_norms(g, q, compressed, m, axes)
        q = ops.enter_tensor_parallel(g, "q_enter", q, m.kernels.keeps_gathered)
        compressed = ops.enter_tensor_parallel(g, "kv_enter", compressed, m.kernels.keeps_gathered)
        (q,) = ops.linear(g, "q_up", q, {"query": (m.a, m.d)}, ops.COLUMN)
        up = {"key_nope": (m.a, nope), "value": (m.a, axes.value)}
        key_nope, v = ops.linear(g, "kv_up", compressed, up, ops.COLUMN, packed=views(m))
        q = ops.rotary(g, "query_rotary", q)
        key_rope = ops.rotary(g, "key_rotary", key_rope)
        k = ops.concatenate(g, "key_join", "key", (key_nope, key_rope), q.axes)
        return q, k, v


def latent_norms(
    g: Graph, q: Tensor, compressed: Tensor, m: Spec, axes: LatentAxes
) -> tuple[Tensor, Tensor]:
    """The norms of the compressed query (s, b, q), if there is one, and of (s, b, l)."""
    if axes.query is not None:
        q = norm(g, "q_norm", q, m)
    return q, norm(g, "kv_norm", compressed, m)


def core_of(m: Spec) -> Core:
    """The function that computes the attention of every head.

    PyTorch's fused kernels take as many key and value heads as query heads, unless they are told to
    share them (sdp_utils_cpp.h: check_batch_size_and_num_heads_dense).
    """
    if not m.kernels.fused_attention:
        return unfused_core
    told = not m.model.calls_attention or m.model.repeated_kv or not m.kernels.keeps_masks
    return flash_core if told or not m.grouped else math_core


def views(m: Spec) -> bool:
    """Whether the packed tensor is saved whole: by a flash kernel, or by GEMMs of one sequence."""
    return m.kernels.own_heads and (bool(m.kernels.fused_attention) or m.single)


def repeats(m: Spec) -> bool:
    """Whether K and V are copied to all heads; GEMMs of one sequence's only head take views."""
    view = m.kernels.own_heads and m.single and m.model.kv_heads == 1
    return m.kernels.repeats_kv and m.grouped and not view


def repeated(g: Graph, prefix: str, k: Tensor, v: Tensor, heads: Axis) -> tuple[Tensor, Tensor]:
    """k (s, b, k, d), v (s, b, k, u) -> (s, b, a, d), (s, b, a, u): as many heads as queries."""
    k = ops.repeat_heads(g, f"{prefix}repeat_key", k, heads)
    return k, ops.repeat_heads(g, f"{prefix}repeat_value", v, heads)


def flash_core(g: Graph, prefix: str, q: Tensor, k: Tensor, v: Tensor, m: Spec) -> Tensor:
    """q (s, b, a, d), k (s, b, k, d), v (s, b, k, u) -> (s, b, a, u), in one kernel."""
    if m.parallel.cp_kind == "all_to_all":
        q, k, v = ops.exchange_heads(g, f"{prefix}heads_enter", (q, k, v))
    else:
        ops.share_context(g, f"{prefix}share_context", k, v, m.parallel.cp_kind)
    # given a mask, transformers repeats heads (sdpa_attention.py: use_gqa_in_sdpa); one is viewed
    repeats_anyway = m.model.repeated_kv or (m.masked and m.model.kv_heads > 1)
    if repeats_anyway and m.kernels.own_heads and m.grouped:
        k, v = repeated(g, prefix, k, v, q.axes[2])
    sinks = m.model.attention_sinks
    if m.masked:
        name, bias = f"{prefix}efficient_attention", mask_of(g, prefix, q, m)
        out = ops.efficient_attention(g, name, q, k, v, m.causal, sinks, prefix, bias)
    else:
        kernel, rng_bytes = resolve(m.kernels.fused_attention), m.kernels.rng_bytes
        name = f"{prefix}{kernel.__name__}"
        out = kernel(g, name, q, k, v, rng_bytes, m.causal, sinks, prefix)
    if m.kernels.batch_first and not m.single:
        out = ops.tokens_first(g, f"{prefix}context_order", out)
    if m.parallel.cp_kind == "all_to_all":
        (out,) = ops.exchange_heads(g, f"{prefix}heads_leave", (out,))
    return out


def mask_of(g: Graph, prefix: str, q: Tensor, m: Spec) -> list[Save]:
    """q (s, b, a, d) -> the mask or the bias of its scores, as a fused kernel keeps it.

    One in the activations' dtype is the whole model's, but for a copy of each layer's own where its
    rows are padded: ALiBi's with the causal mask in it, and a cross-attention's zeros.
    """
    s, b, heads, _ = q.axes
    keys = Axis.whole(m.s.letter, m.s.size)
    padded = keys.tiles(ops.BIAS_TILE) if m.padded else keys
    position = m.model.position
    if position == "relative" and prefix != CROSS:
        return ops.relative_bias(g, f"{prefix}relative_bias", q, keys, padded, m.causal)
    own = {"relative": (heads, s, padded), "alibi": (b, heads, s, padded)}
    if position in own and not m.padded:
        return []
    return ops.mask_bias(g, f"{prefix}mask_bias", own.get(position, (b, s, padded)))


def math_core(g: Graph, prefix: str, q: Tensor, k: Tensor, v: Tensor, m: Spec) -> Tensor:
    """q (s, b, a, d), k (s, b, k, d), v (s, b, k, u) -> (s, b, a, u): PyTorch's math form, in fp32.

    (attention.cpp: _scaled_dot_product_attention_math; it scales q and k, each by a root.)
    """
    q, k, v = (ops.cast(g, f"{each.name}_fp32", each, 4) for each in (q, k, v))
    context = unfused_core(g, prefix, q, k, v, m)
    return ops.cast(g, f"{prefix}context_cast", context, g.dtype_bytes)


def unfused_core(g: Graph, prefix: str, q: Tensor, k: Tensor, v: Tensor, m: Spec) -> Tensor:
    """q (s, b, a, d), k (s, b, k, d), v (s, b, k, u) -> (s, b, a, u), by scores (b, a, s, s)."""
    s, b, heads, d = q.axes
    if repeats(m):
        k, v = repeated(g, prefix, k, v, heads)
    k, v = ops.gather_context(g, f"{prefix}gather_context", k, v)
    keys = k.axes[0]
    name = f"{prefix}scores"
    scores = ops.matmul(g, name, name, q, k, (b, heads, s, keys), over=d, causal=m.causal)
    probs = probabilities(g, prefix, ops.scale(g, f"{prefix}scale", scores), m)
    name, axes = f"{prefix}context", (*q.axes[:-1], v.axes[-1])
    return ops.matmul(g, name, name, probs, v, axes, over=keys, causal=m.causal)


def probabilities(g: Graph, prefix: str, scores: Tensor, m: Spec) -> Tensor:
    """Scores (b, a, s, s) -> the probabilities of each row's keys, with dropout."""
    keys = scores.axes[-1]
    narrow = scores.dtype_bytes
    wide = 4 if m.kernels.softmax_fp32 and m.model.softmax_fp32 else narrow
    if m.model.attention_softcap is not None:
        scores = ops.tanh(g, f"{prefix}score_cap", scores)
    if m.model.position in ("alibi", "relative") and prefix != CROSS:
        scores = ops.mask(g, f"{prefix}{m.model.position}", scores)
    if m.causal:
        scores = ops.mask(g, f"{prefix}mask", scores)
    if m.model.attention_sinks:
        scores = ops.sink(g, f"{prefix}sink", scores)
    probs = ops.softmax(g, f"{prefix}softmax", scores, wide)
    probs = ops.cast(g, f"{prefix}probabilities", probs, narrow)
    if m.model.attention_sinks:
        probs = ops.without_sink(g, f"{prefix}without_sink", probs, keys)
    if m.kernels.fills_padding and not m.causal and m.pixels is None:
        probs = ops.fill_padding(g, f"{prefix}padding", probs)
    return ops.dropout(g, f"{prefix}softmax_dropout", probs, m.model.attention_dropout)
