"""Attention: fused kernels, and the operations of an unfused one."""

from collections.abc import Sequence
from dataclasses import replace

from memcalc.graph.graph import (
    NEW,
    OF_ATTENTION,
    OVER_INPUT,
    PASSED_ON,
    Graph,
    OpKind,
    Save,
    Scratch,
    Tensor,
    Weight,
    plain,
)
from memcalc.graph.mesh import Axis, elements
from memcalc.graph.ops.elementwise import elementwise
from memcalc.graph.ops.sources import (
    FLASH,
    HF_BIAS,
    KORTHIKANTI,
    TE_PADDING,
    TORCH_BIAS,
    TORCH_CHAIN,
    TORCH_EFFICIENT,
)

LSE_TILE = 32  # rows of the log-sum-exp of PyTorch's memory-efficient kernel (kAlignLSE)
BIAS_TILE = 8  # numbers of a row of its bias, which it pads (mem_eff_alignment)
FLASH_ATTENTION = OpKind(
    name="flash_attention",
    gemm=OF_ATTENTION,
    output=NEW,
    gradient=NEW,
    cached={"selective_op": 1},
    of_experts=False,
)
EFFICIENT_ATTENTION = replace(FLASH_ATTENTION, name="efficient_attention")
TOKENS_FIRST = plain("tokens_first")
ROTARY = plain("rotary")
REPEAT_HEADS = plain("repeat_heads")
MASK_BIAS = plain("mask_bias")
RELATIVE_BIAS = plain("relative_bias")
SINK = plain("sink")
SOFTMAX = plain("softmax")
FILL_PADDING = plain("fill_padding")
MASK = plain("mask", output=OVER_INPUT)
WITHOUT_SINK = plain("without_sink", output=OVER_INPUT, gradient=PASSED_ON)


def flash_attention(
    g: Graph,
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rng_bytes: int,
    causal: bool,
    sinks: bool = False,
    prefix: str = "",
) -> Tensor:
    """q (s, b, a, d), k (s, b, k, d), v (s, b, k, u) -> (s, b, a, u), saving nothing of s x s.

    Saves q, k, v, the output and the fp32 log-sum-exp of each row, from which backward recomputes
    the probabilities. The state of the random number generator replaces a dropout mask. FLOPs are
    those of the two GEMMs over all s x s scores, causal or not. ``sinks`` says whether each head
    also has a learned logit. The names of its tensors begin with ``prefix``.
    """
    s, b, heads, _ = q.axes
    lse = Tensor(f"{prefix}log_sum_exp", (b, heads, s), 4)
    saves = _of_kernel(f"{prefix}rng_state", lse, rng_bytes, FLASH)
    return _attended(g, name, FLASH_ATTENTION, q, k, v, causal, sinks, prefix, saves, FLASH)


def efficient_attention(
    g: Graph,
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    sinks: bool = False,
    prefix: str = "",
    bias: Sequence[Save] = (),
) -> Tensor:
    """q (s, b, a, d), k and v (s, b, a, u) -> (s, b, a, u): PyTorch's memory-efficient kernel.

    It runs where PyTorch's flash kernel does not, since it takes a mask or a bias of the scores.
    Saves what a flash kernel saves, with the rows of the log-sum-exp padded to tiles of 32 and 8
    bytes each of seed and offset, and the bias (``mask_bias``, ``relative_bias``). All else is as
    in ``flash_attention``.
    """
    s, b, heads, _ = q.axes
    lse = Tensor(f"{prefix}log_sum_exp", (b, heads, s.tiles(LSE_TILE)), 4)
    saves = [*_of_kernel(f"{prefix}rng_state", lse, 16, TORCH_EFFICIENT), *bias]
    kind = EFFICIENT_ATTENTION
    return _attended(g, name, kind, q, k, v, causal, sinks, prefix, saves, TORCH_EFFICIENT)


def _of_kernel(rng_name: str, lse: Tensor, rng_bytes: int, source: str) -> list[Save]:
    """What a fused attention kernel saves beside its inputs and its output."""
    reason = "log-sum-exp, fp32: normalizes the recomputed scores"
    saves = [Save(lse, reason, source, small=True)]
    if rng_bytes:
        rng = Tensor(rng_name, (Axis.whole(str(rng_bytes), rng_bytes),), 1)
        reason = "seed and offset of the kernel's random number generator"
        saves.append(Save(rng, reason, source, small=True))
    return saves


def _attended(
    g: Graph,
    name: str,
    kind: OpKind,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    sinks: bool,
    prefix: str,
    more: Sequence[Save],
    source: str,
) -> Tensor:
    """The output of a fused attention kernel, which saves q, k, v, the output and ``more``."""
    s, b, heads, d = q.axes
    u = v.axes[-1]
    out = Tensor(f"{prefix}context", (s, b, heads, u), g.dtype_bytes)
    saves = [
        Save(q, "backward recomputes the scores from it", source),
        Save(k, "backward recomputes the scores from it", source),
        Save(v, "needed for the gradient of the probabilities", source),
        Save(out, "needed for the softmax gradient: row sums of output x its gradient", source),
        *more,
    ]
    biases = (save.tensor for save in more if not save.small)
    g.record(
        name,
        kind,
        (q, k, v, *biases),
        (out,),
        saves=saves,
        flops=2 * (elements((s, b, heads, d)) + elements((s, b, heads, u))) * s.size,
        weights=(Weight(f"{name}.sink", (heads,)),) if sinks else (),
        causal=causal,
    )
    return out


def tokens_first(g: Graph, name: str, x: Tensor) -> Tensor:
    """A copy of (s, b, a, u), since a kernel with batches first returns it in another order.

    Saves nothing itself. An operation that saves this output keeps a second copy beside the
    kernel's own. With one sequence per micro-batch both orders are the same and the copy is a view.
    """
    out = Tensor(f"{name}_output", x.axes, x.dtype_bytes)
    g.record(name, TOKENS_FIRST, (x,), (out,))
    return out


def rotary(g: Graph, name: str, x: Tensor) -> Tensor:
    """Rotary position embedding: a rotation by fixed angles.

    Saves only the tables of sines and cosines, which the whole model shares.
    """
    return elementwise(g, name, ROTARY, x)


def repeat_heads(g: Graph, name: str, x: Tensor, heads: Axis) -> Tensor:
    """(s, b, k, d) -> (s, b, a, d): each key-value head copied for its group. Saves nothing."""
    s, b, _, d = x.axes
    out = Tensor(f"{x.name}_repeated", (s, b, heads, d), x.dtype_bytes)
    g.record(name, REPEAT_HEADS, (x,), (out,))
    return out


def mask(g: Graph, name: str, x: Tensor) -> Tensor:
    """Masked scores become -inf.

    Saves nothing: if a mask is materialized, the whole model shares it.
    """
    return elementwise(g, name, MASK, x)


def mask_bias(g: Graph, name: str, axes: tuple[Axis, ...]) -> list[Save]:
    """A layer's copy of a mask or bias that a fused kernel adds to the scores.

    Saves nothing itself; the kernel saves what is returned. The model's mask has one byte per token
    pair. Each call of the kernel converts it to the dtype of the activations, for each sequence and
    once for all heads.
    """
    bias = Tensor(name, axes, g.dtype_bytes)
    g.record(name, MASK_BIAS, (), (bias,))
    return [Save(bias, "mask in the scores' dtype, which backward adds again", TORCH_BIAS)]


def relative_bias(
    g: Graph, name: str, q: Tensor, keys: Axis, padded: Axis, causal: bool
) -> list[Save]:
    """q (s, b, a, d) -> a layer's copy of a bias (a, s, s) of its scores, for a fused kernel.

    Saves nothing itself. The kernel saves what is returned: the copy, whose rows are padded, and
    with a causal mask the choice between bias and -inf, one byte per token pair. The table belongs
    to the whole stack.
    """
    s, _, heads, _ = q.axes
    bias = Tensor(name, (heads, s, padded), g.dtype_bytes)
    g.record(name, RELATIVE_BIAS, (), (bias,))
    saves = [Save(bias, "bias of the scores, which backward recomputes", HF_BIAS)]
    if causal:
        earlier = Tensor(f"{name}_earlier", (s, keys), 1)
        g.record(f"{name}_choose", RELATIVE_BIAS, (), (earlier,))
        saves.append(Save(earlier, "which token pairs have a bias, one byte per pair", HF_BIAS))
    return saves


def sink(g: Graph, name: str, x: Tensor) -> Tensor:
    """Scores (b, a, s, s) -> (b, a, s, s+1): each head's learned logit is appended.

    Saves the index of each row's maximum (int64), which is subtracted against overflow.
    """
    *rows, keys = x.axes
    one_more = keys._replace(letter=f"({keys.letter}+1)", size=keys.size + 1, local=keys.local + 1)
    out = Tensor(f"{name}_output", (*rows, one_more), x.dtype_bytes)
    weights = (Weight(f"{name}.weight", (x.axes[1],)),)
    largest = Tensor(f"{name}_largest", tuple(rows), 8)
    reason = "index of each row's maximum, int64: its gradient goes there"
    saves = (Save(largest, reason, TORCH_CHAIN, small=True),)
    g.record(name, SINK, (x,), (out,), saves=saves, weights=weights)
    return out


def without_sink(g: Graph, name: str, x: Tensor, keys: Axis) -> Tensor:
    """Probabilities (b, a, s, s+1) -> (b, a, s, s), a view of them. Saves nothing."""
    out = Tensor(f"{name}_output", (*x.axes[:-1], keys), x.dtype_bytes, kept_as=x)
    g.record(name, WITHOUT_SINK, (x,), (out,))
    return out


def softmax(g: Graph, name: str, x: Tensor, dtype_bytes: int) -> Tensor:
    """Softmax over the last axis. Saves its output, from which its gradient is computed.

    In a wider dtype it has a wide copy of its input, and of its input's gradient (PyTorch
    aten/src/ATen/native/SoftMax.cpp: softmax, for all but fp16).
    """
    out = Tensor(f"{name}_output", x.axes, dtype_bytes)
    save = Save(out, "output: its gradient is computed from it", KORTHIKANTI)
    wider = dtype_bytes > x.dtype_bytes
    scratch = Scratch(out.bytes, out.bytes - x.bytes) if wider else Scratch()
    g.record(name, SOFTMAX, (x,), (out,), saves=(save,), scratch=scratch)
    return out


def fill_padding(g: Graph, name: str, x: Tensor) -> Tensor:
    """Probabilities (b, a, s, s) -> the same, with zeros where a token or its key is padding.

    Saves the mask that it makes, one byte per token pair of a sequence.
    """
    batch, _, rows, keys = x.axes
    padded = Tensor(f"{name}_mask", (batch, rows, keys), 1)
    out = Tensor(f"{name}_output", x.axes, x.dtype_bytes)
    save = Save(padded, "padding mask, one byte per token pair", TE_PADDING)
    g.record(name, FILL_PADDING, (x,), (out,), saves=(save,))
    return out
