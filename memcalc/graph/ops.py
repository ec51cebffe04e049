"""The operations: the shapes of each, what it saves for backward and why, its FLOPs and weights.

All coefficients are in this file. A layer's 34 is the sum of what the functions below save.

Conventions: FLOPs are those of GEMMs only, two per multiply-add, and a causal mask saves none.
Activations have tokens first: ``(s, b, features...)``.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from memcalc.graph.graph import Graph, Move, Save, Scratch, Tensor, Weight
from memcalc.graph.mesh import CONTEXT, Axis, Size, divide, elements

KORTHIKANTI = "Korthikanti et al. 2022, section 4.1"
KORTHIKANTI_ENDS = "Korthikanti et al. 2022, section 4.3"
KORTHIKANTI_SP = "Korthikanti et al. 2022, section 4.2.2"
TORCH_NORM = "PyTorch derivatives.yaml, native_layer_norm: result1 and result2 (fp32 on CUDA)"
TORCH_RMS_NORM = "PyTorch derivatives.yaml, _fused_rms_norm: input and result1 (fp32)"
TORCH_CHAIN = "PyTorch autograd, operation by operation (derivatives.yaml)"
MEGATRON_CE = "Megatron-core tensor_parallel/cross_entropy.py: save_for_backward"
MEGATRON_FUSED_CE = "Megatron-core fusions/fused_cross_entropy.py: save_for_backward"
TE_CE = "Transformer Engine pytorch/cross_entropy.py, triton/cross_entropy.py"
LIGER_CE = "Liger-Kernel ops/fused_linear_cross_entropy.py: fused_linear_cross_entropy_forward"
TE_FLASH = "Transformer Engine dot_product_attention/backends.py: FlashAttention, sbhd"
TE_PADDING = (
    "Transformer Engine dot_product_attention/backends.py: UnfusedDotProductAttention; "
    "dot_product_attention/utils.py: get_full_mask"
)
MEGATRON_VP = "Megatron-core tensor_parallel/layers.py: VocabParallelEmbedding"
HF_BIAS = "transformers integrations/sdpa_attention.py: create_position_bias_mask"
TORCH_BIAS = (
    "PyTorch aten/src/ATen/native/transformers/attention.cpp: convert_boolean_attn_mask, pad_bias"
)
TORCH_EFFICIENT = (
    "PyTorch derivatives.yaml, _scaled_dot_product_efficient_attention: query, key, value, "
    "attn_bias, output, log_sumexp, philox_seed, philox_offset"
)
HF_T5 = "transformers models/t5/modeling_t5.py: T5LayerNorm"
HF_GPT_OSS = "transformers models/gpt_oss/modeling_gpt_oss.py: GptOssExperts._apply_gate"
HF_COHERE = "transformers models/cohere/modeling_cohere.py: CohereLayerNorm"
HF_BATCHED = "transformers integrations/moe.py: batched_mm_experts_forward"
HF_EXPERTS = "transformers integrations/moe.py: grouped_mm_experts_forward"
MEGATRON_ROUTER = (
    "Megatron-core transformer/moe/router.py, moe_utils.py: topk_routing_with_score_function"
)
MEGATRON_EXPERTS = "Megatron-core transformer/moe/experts.py: bias_act_func"
MEGATRON_GATE = "Megatron-core fusions/fused_bias_swiglu.py, fused_bias_geglu.py: input"
FLASH = "FlashAttention: save_for_backward(q, k, v, out_padded, softmax_lse, rng_state)"
TORCH_RNN = "PyTorch aten/src/ATen/native/RNN.cpp: SimpleCell, GRUCell, LSTMCell"
TORCH_FUSED_RNN = "PyTorch derivatives.yaml: _thnn_fused_gru_cell, _thnn_fused_lstm_cell"

DIFFERENTIABLE = "saved for a double backward, whether or not there is one"

LSE_TILE = 32  # rows of the log-sum-exp of PyTorch's memory-efficient kernel (kAlignLSE)
BIAS_TILE = 8  # numbers of a row of its bias, which it pads (mem_eff_alignment)

FUSED_ATTENTION = ("flash_attention", "efficient_attention")  # kernels that save no scores

COLUMN = "column"
ROW = "row"
REPLICATED = "replicated"


# --- GEMMs -------------------------------------------------------------------------------------


def linear(
    g: Graph,
    name: str,
    x: Tensor,
    outputs: Mapping[str, tuple[Axis, ...]],
    split: str,
    bias: bool = False,
    shared: bool = False,
    packed: bool = False,
) -> list[Tensor]:
    """x (s, b, in...) -> one tensor (s, b, out...) for each of ``outputs``, by one GEMM.

    Saves its input: the weight's gradient is x^T dy. A bias saves nothing more.

    Args:
        g: The graph.
        name: The name of the operation.
        x: The input; the features of a row-parallel linear's input are sharded already.
        outputs: The features of each output, over all ranks.
        split: ``COLUMN`` (the first axis of the features of each output is sharded), ``ROW`` (the
            output is a partial sum) or ``REPLICATED``.
        bias: Whether it has a bias.
        shared: Whether its weight belongs to another operation and counts there.
        packed: Whether the outputs are views of one tensor, which is saved if one of them is.
    """
    tokens, features = x.axes[:2], x.axes[2:]
    made = []
    width: Size = 0
    for output, axes in outputs.items():
        width += elements(axes)
        local = (g.mesh.tensor(axes[0]), *axes[1:]) if split == COLUMN else axes
        made.append(Tensor(output, (*tokens, *local), g.dtype_bytes))
    out = Axis.whole("out", width)
    if split == COLUMN:
        out = g.mesh.tensor(out)
    weights = [Weight(f"{name}.weight", (out, *features), shared)]
    if bias:
        weights.append(Weight(f"{name}.bias", (out,)))
    save = Save(
        _quantised(g, x), "input: needed for the weight gradient", KORTHIKANTI, for_weights=True
    )
    if x.kept_as is not None:
        shard = _quantised(g, x.kept_as)
        reason = "shard of the input: backward all-gathers it again"
        save = Save(shard, reason, KORTHIKANTI_SP, for_weights=True)
    if packed:
        whole = Tensor("+".join(outputs), (*tokens, out), g.dtype_bytes)
        for tensor in made:
            tensor.kept_as = whole
    g.record(
        name,
        "linear",
        (x,),
        made,
        saves=(save,),
        flops=2 * elements(x.axes) * width,
        weights=weights,
    )
    return made


def matmul(
    g: Graph,
    name: str,
    output: str,
    x: Tensor,
    y: Tensor,
    axes: tuple[Axis, ...],
    over: Axis,
    causal: bool = False,
) -> Tensor:
    """A GEMM of two activations, x and y, summed over the axis ``over``.

    Saves both: the gradient of each needs the other.
    """
    out = Tensor(output, axes, x.dtype_bytes)
    reason = "factor: needed for the other factor's gradient"
    g.record(
        name,
        "matmul",
        (x, y),
        (out,),
        saves=(Save(x, reason, KORTHIKANTI), Save(y, reason, KORTHIKANTI)),
        flops=2 * elements(axes) * over.size,
        causal=causal,
    )
    return out


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
    return _attended(g, name, "flash_attention", q, k, v, causal, sinks, prefix, saves, FLASH)


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
    kind = "efficient_attention"
    return _attended(g, name, kind, q, k, v, causal, sinks, prefix, saves, TORCH_EFFICIENT)


def _of_kernel(rng_name: str, lse: Tensor, rng_bytes: int, source: str) -> list[Save]:
    """What a fused attention kernel saves beside its inputs and its output."""
    reason = "log-sum-exp, fp32: normalises the recomputed scores"
    saves = [Save(lse, reason, source, small=True)]
    if rng_bytes:
        rng = Tensor(rng_name, (Axis.whole(str(rng_bytes), rng_bytes),), 1)
        reason = "seed and offset of the kernel's random number generator"
        saves.append(Save(rng, reason, source, small=True))
    return saves


def _attended(
    g: Graph,
    name: str,
    kind: str,
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
    g.record(name, "tokens_first", (x,), (out,))
    return out


# --- unfused attention -------------------------------------------------------------------------


def rotary(g: Graph, name: str, x: Tensor) -> Tensor:
    """Rotary position embedding: a rotation by fixed angles.

    Saves only the tables of sines and cosines, which the whole model shares.
    """
    return _elementwise(g, name, "rotary", x)


def concatenate(
    g: Graph, name: str, output: str, parts: Sequence[Tensor], axes: tuple[Axis, ...]
) -> Tensor:
    """Parts concatenated along their last axis by a copy. Saves nothing."""
    out = Tensor(output, axes, parts[0].dtype_bytes)
    g.record(name, "concatenate", tuple(parts), (out,))
    return out


def repeat_heads(g: Graph, name: str, x: Tensor, heads: Axis) -> Tensor:
    """(s, b, k, d) -> (s, b, a, d): each key-value head copied for its group. Saves nothing."""
    s, b, _, d = x.axes
    out = Tensor(f"{x.name}_repeated", (s, b, heads, d), x.dtype_bytes)
    g.record(name, "repeat_heads", (x,), (out,))
    return out


def scale(g: Graph, name: str, x: Tensor) -> Tensor:
    """A multiplication by a constant. Saves nothing."""
    return _elementwise(g, name, "scale", x)


def mask(g: Graph, name: str, x: Tensor) -> Tensor:
    """Masked scores become -inf.

    Saves nothing: if a mask is materialised, the whole model shares it.
    """
    return _elementwise(g, name, "mask", x)


def mask_bias(g: Graph, name: str, axes: tuple[Axis, ...]) -> list[Save]:
    """A layer's copy of a mask or bias that a fused kernel adds to the scores.

    Saves nothing itself; the kernel saves what is returned. The model's mask has one byte per token
    pair. Each call of the kernel converts it to the dtype of the activations, for each sequence and
    once for all heads.
    """
    bias = Tensor(name, axes, g.dtype_bytes)
    g.record(name, "mask_bias", (), (bias,))
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
    g.record(name, "relative_bias", (), (bias,))
    saves = [Save(bias, "bias of the scores, which backward recomputes", HF_BIAS)]
    if causal:
        earlier = Tensor(f"{name}_earlier", (s, keys), 1)
        g.record(f"{name}_choose", "relative_bias", (), (earlier,))
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
    g.record(name, "sink", (x,), (out,), saves=saves, weights=weights)
    return out


def without_sink(g: Graph, name: str, x: Tensor, keys: Axis) -> Tensor:
    """Probabilities (b, a, s, s+1) -> (b, a, s, s), a view of them. Saves nothing."""
    out = Tensor(f"{name}_output", (*x.axes[:-1], keys), x.dtype_bytes, kept_as=x)
    g.record(name, "without_sink", (x,), (out,))
    return out


def softmax(g: Graph, name: str, x: Tensor, dtype_bytes: int) -> Tensor:
    """Softmax over the last axis. Saves its output, from which its gradient is computed."""
    out = Tensor(f"{name}_output", x.axes, dtype_bytes)
    save = Save(out, "output: its gradient is computed from it", KORTHIKANTI)
    g.record(name, "softmax", (x,), (out,), saves=(save,))
    return out


def fill_padding(g: Graph, name: str, x: Tensor) -> Tensor:
    """Probabilities (b, a, s, s) -> the same, with zeros where a token or its key is padding.

    Saves the mask that it makes, one byte per token pair of a sequence.
    """
    batch, _, rows, keys = x.axes
    padded = Tensor(f"{name}_mask", (batch, rows, keys), 1)
    out = Tensor(f"{name}_output", x.axes, x.dtype_bytes)
    save = Save(padded, "padding mask, one byte per token pair", TE_PADDING)
    g.record(name, "fill_padding", (x,), (out,), saves=(save,))
    return out


def cast(g: Graph, name: str, x: Tensor, dtype_bytes: int) -> Tensor:
    """A copy in another dtype, or the same tensor if the dtype is the same. Saves nothing."""
    if x.dtype_bytes == dtype_bytes:
        return x
    out = Tensor(name, x.axes, dtype_bytes)
    g.record(name, "cast", (x,), (out,))
    return out


# --- element by element ------------------------------------------------------------------------


def dropout(g: Graph, name: str, x: Tensor, probability: float) -> Tensor:
    """Dropout, if its probability is not 0. Saves its mask, one byte per element."""
    if not probability:
        return x
    drop_mask = Tensor(f"{name}_mask", x.axes, 1)
    out = Tensor(f"{name}_output", x.axes, x.dtype_bytes)
    save = Save(drop_mask, "mask, one byte per element", KORTHIKANTI)
    g.record(name, "dropout", (x,), (out,), saves=(save,))
    return out


def tanh(g: Graph, name: str, x: Tensor) -> Tensor:
    """A soft cap: tanh of the scaled input. Saves the tanh, from which its gradient is computed."""
    out = Tensor(f"{name}_output", x.axes, x.dtype_bytes)
    save = Save(out, "output of tanh: its gradient is computed from it", TORCH_CHAIN)
    g.record(name, "tanh", (x,), (out,), saves=(save,))
    return scale(g, f"{name}_scale", out)


def add(g: Graph, name: str, x: Tensor, y: Tensor) -> Tensor:
    """A sum, as of a residual connection. Saves nothing."""
    out = Tensor(f"{name}_output", x.axes, x.dtype_bytes)
    g.record(name, "add", (x, y), (out,))
    return out


def weigh(g: Graph, name: str, x: Tensor, weights: Tensor) -> Tensor:
    """Routed tokens (routed tokens, f), each times its weight. Saves both factors."""
    out = Tensor(f"{name}_output", x.axes, x.dtype_bytes)
    reason = "factor: needed for the other factor's gradient"
    saves = (
        Save(x, reason, MEGATRON_EXPERTS),
        Save(weights, reason, MEGATRON_EXPERTS, small=True),
    )
    g.record(name, "weigh", (x, weights), (out,), saves=saves)
    return out


def multiply(g: Graph, name: str, x: Tensor, y: Tensor) -> Tensor:
    """An element-wise product. Saves both factors."""
    out = Tensor(f"{name}_output", x.axes, x.dtype_bytes)
    reason = "factor: needed for the other factor's gradient"
    saves = (Save(x, reason, TORCH_CHAIN), Save(y, reason, TORCH_CHAIN))
    g.record(name, "multiply", (x, y), (out,), saves=saves)
    return out


def gelu(g: Graph, name: str, x: Tensor) -> Tensor:
    """GeLU in one kernel. Saves its input."""
    return _activation(g, name, "gelu", x, KORTHIKANTI)


def silu(g: Graph, name: str, x: Tensor) -> Tensor:
    """SiLU in one kernel. Saves its input."""
    return _activation(g, name, "silu", x, TORCH_CHAIN)


def relu(g: Graph, name: str, x: Tensor) -> Tensor:
    """ReLU. Saves its output, since the gradient needs only its sign."""
    out = Tensor(f"{name}_output", x.axes, x.dtype_bytes)
    save = Save(out, "output: the gradient needs its sign", TORCH_CHAIN)
    g.record(name, "relu", (x,), (out,), saves=(save,))
    return out


def square(g: Graph, name: str, x: Tensor) -> Tensor:
    """The square of each element. Saves its input."""
    return _activation(g, name, "square", x, TORCH_CHAIN)


def gelu_chain(g: Graph, name: str, x: Tensor) -> Tensor:
    """GeLU's tanh form, 0.5x * (1 + tanh(c(x + c'x^3))), operation by operation.

    Saves x (for the power), the tanh (for its own gradient), and both factors of the last product.
    """
    inner, half, factor = (
        Tensor(f"{name}_{part}", x.axes, x.dtype_bytes) for part in ("tanh", "half", "factor")
    )
    out = Tensor(f"{name}_output", x.axes, x.dtype_bytes)
    saves = (
        Save(x, "input: needed for the gradient of the power", TORCH_CHAIN),
        Save(inner, "tanh: its gradient is computed from it", TORCH_CHAIN),
        Save(half, "factor: needed for the other factor's gradient", TORCH_CHAIN),
        Save(factor, "factor: needed for the other factor's gradient", TORCH_CHAIN),
    )
    g.record(name, "gelu_chain", (x,), (out,), saves=saves)
    return out


def gelu_fast_chain(g: Graph, name: str, x: Tensor) -> Tensor:
    """GeLU's tanh form as 0.5x * (1 + tanh(cx * (1 + c'x * x))), operation by operation.

    Saves both factors of its three products, x among them, and the tanh.
    """
    cubic, scaled, rest, inner, half, factor = (
        Tensor(f"{name}_{part}", x.axes, x.dtype_bytes)
        for part in ("cubic", "scaled", "rest", "tanh", "half", "factor")
    )
    out = Tensor(f"{name}_output", x.axes, x.dtype_bytes)
    reason = "factor: needed for the other factor's gradient"
    saves = [Save(each, reason, TORCH_CHAIN) for each in (x, cubic, scaled, rest, half, factor)]
    saves.append(Save(inner, "tanh: its gradient is computed from it", TORCH_CHAIN))
    g.record(name, "gelu_fast_chain", (x,), (out,), saves=saves)
    return out


def clamped_swiglu(g: Graph, name: str, gate: Tensor, up: Tensor) -> Tensor:
    """(up + 1) * gate * sigmoid(c gate) of a clamped gate and up (..., f), operation by operation.

    Saves gate and up for their clamps, and both factors of its two products: the clamped gate and
    its sigmoid, then the gated product and up + 1.
    """
    clamped, sigmoid, gated, raised = (
        Tensor(f"{name}_{part}", gate.axes, gate.dtype_bytes)
        for part in ("clamped", "sigmoid", "gated", "raised")
    )
    out = Tensor(f"{name}_output", gate.axes, gate.dtype_bytes)
    saves = [
        Save(each, "input: decides where the clamp passes the gradient", HF_GPT_OSS)
        for each in (gate, up)
    ]
    reason = "factor: needed for the other factor's gradient"
    saves += [Save(each, reason, HF_GPT_OSS) for each in (clamped, sigmoid, gated, raised)]
    g.record(name, "clamped_swiglu", (gate, up), (out,), saves=saves)
    return out


def halves(g: Graph, name: str, packed: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """(..., 2f) -> gate and up (..., f), which are views of it. Saves nothing."""
    axes = (*packed.axes[:-1], axis)
    gate, up = (Tensor(f"{name}_{part}", axes, packed.dtype_bytes) for part in ("gate", "up"))
    g.record(name, "halves", (packed,), (gate, up))
    return gate, up


def gated_activation(g: Graph, name: str, packed: Tensor, axis: Axis) -> Tensor:
    """(..., 2f) -> (..., f): act(gate) * up in one kernel. Saves its packed input.

    ``axis`` is the output features f on one rank.
    """
    out = Tensor(f"{name}_output", (*packed.axes[:-1], axis), packed.dtype_bytes)
    save = Save(packed, "packed gate and up: needed for both gradients", MEGATRON_GATE)
    g.record(name, "gated_activation", (packed,), (out,), saves=(save,))
    return out


# --- norms -------------------------------------------------------------------------------------


def layer_norm(
    g: Graph, name: str, x: Tensor, statistic_bytes: int = 4, bias: bool = True
) -> Tensor:
    """LayerNorm. Saves its input, and each row's mean and reciprocal standard deviation in fp32."""
    mean = Tensor(f"{name}_mean", x.axes[:-1], statistic_bytes)
    rstd = Tensor(f"{name}_rstd", x.axes[:-1], statistic_bytes)
    out = Tensor(f"{name}_output", x.axes, x.dtype_bytes)
    weights = [Weight(f"{name}.weight", x.axes[-1:])]
    if bias:
        weights.append(Weight(f"{name}.bias", x.axes[-1:]))
    g.record(
        name,
        "layer_norm",
        (x,),
        (out,),
        saves=(
            Save(x, "input: backward normalises it again", KORTHIKANTI),
            Save(mean, "mean of each row, fp32", TORCH_NORM, small=True),
            Save(rstd, "reciprocal standard deviation of each row, fp32", TORCH_NORM, small=True),
        ),
        weights=weights,
    )
    return out


def layer_norm_chain(g: Graph, name: str, x: Tensor, bias: bool = True) -> Tensor:
    """LayerNorm operation by operation, in fp32, as Hugging Face's Command-R does it.

    Saves the centred input twice (for the variance, and as a factor), each row's reciprocal
    standard deviation, the normalised input, and an fp32 copy of the weight that scales it.
    """
    deviation, centred, normal = (
        Tensor(f"{name}_{part}_fp32", x.axes, 4) for part in ("deviation", "centred", "normalised")
    )
    rstd = Tensor(f"{name}_rstd", x.axes[:-1], 4)
    out = Tensor(f"{name}_output", x.axes, x.dtype_bytes)
    weights = [Weight(f"{name}.weight", x.axes[-1:])]
    if bias:
        weights.append(Weight(f"{name}.bias", x.axes[-1:]))
    reason = "factor, fp32: needed for the other factor's gradient"
    saves = [
        Save(deviation, "centred input, fp32: needed for its square's gradient", HF_COHERE),
        Save(centred, reason, HF_COHERE),
        Save(rstd, "reciprocal standard deviation of each row, fp32", HF_COHERE, small=True),
        Save(normal, reason, HF_COHERE),
    ]
    if x.dtype_bytes != 4:
        scale_ = Tensor(f"{name}_scale", x.axes[-1:], 4)
        saves.append(Save(scale_, "fp32 copy of the weight: a factor", HF_COHERE, small=True))
    g.record(name, "layer_norm_chain", (x,), (out,), saves=saves, weights=weights)
    return out


def rms_norm(g: Graph, name: str, x: Tensor) -> Tensor:
    """RMSNorm in one kernel. Saves its input, and the fp32 reciprocal norm of each row."""
    rstd = Tensor(f"{name}_rstd", x.axes[:-1], 4)
    out = Tensor(f"{name}_output", x.axes, x.dtype_bytes)
    g.record(
        name,
        "rms_norm",
        (x,),
        (out,),
        saves=(
            Save(x, "input: backward normalises it again", TORCH_RMS_NORM),
            Save(rstd, "reciprocal norm of each row, fp32", TORCH_RMS_NORM, small=True),
        ),
        weights=(Weight(f"{name}.weight", x.axes[-1:]),),
    )
    return out


def rms_norm_chain(g: Graph, name: str, x: Tensor, scaled: str = "cast") -> Tensor:
    """RMSNorm operation by operation, in fp32, as Hugging Face's Llama does it.

    Saves the input in fp32, the reciprocal norm, and the normalised input that the weight scales:
    either cast to the dtype of the activations, or in fp32. Gemma scales by 1 + weight, which is
    saved too. ``scaled`` is a word of ``memcalc.config.model.NORM_SCALES``.
    """
    wide = cast(g, f"{name}_fp32", x, 4)
    rstd = Tensor(f"{name}_rstd", x.axes[:-1], 4)
    normal = Tensor(f"{name}_normalised_fp32", x.axes, 4)
    g.record(
        f"{name}_normalise",
        "rms_norm_chain",
        (wide,),
        (normal,),
        saves=(
            Save(
                wide, "input in fp32: needed for the gradients of square and product", TORCH_CHAIN
            ),
            Save(rstd, "reciprocal norm of each row, fp32", TORCH_CHAIN, small=True),
        ),
    )
    narrow = cast(g, f"{name}_normalised", normal, x.dtype_bytes) if scaled == "cast" else normal
    out = Tensor(f"{name}_output", x.axes, x.dtype_bytes)
    saves = [Save(narrow, "normalised input: needed for the weight gradient", TORCH_CHAIN)]
    if scaled == "one_plus":
        scale_ = Tensor(f"{name}_scale", x.axes[-1:], 4)
        saves.append(Save(scale_, "1 + weight, fp32: a factor", TORCH_CHAIN, small=True))
    g.record(
        name,
        "rms_norm_chain",
        (narrow,),
        (out,),
        saves=saves,
        weights=(Weight(f"{name}.weight", x.axes[-1:]),),
    )
    return out


def rms_norm_chain_of_both(g: Graph, name: str, x: Tensor) -> Tensor:
    """RMSNorm operation by operation as in T5: squares in fp32, a product with x in its own dtype.

    Saves the input in its own dtype, beside what ``rms_norm_chain`` saves.
    """
    reason = "factor: needed for the gradient of the reciprocal norm"
    g.record(f"{name}_product", "rms_norm_chain", (x,), (), saves=(Save(x, reason, HF_T5),))
    return rms_norm_chain(g, name, x)


# --- embedding and head ------------------------------------------------------------------------


def embedding(
    g: Graph, name: str, tokens: Tensor, vocabulary: Axis, hidden: Axis, shared: bool = False
) -> Tensor:
    """Tokens (s, b) -> (s, b, h): rows of a table, which is sharded by rows over the ranks.

    Saves its indices. If the table is sharded, these are shifted to a rank's own rows, one byte per
    token marks those of other ranks, and the output is a partial sum. ``shared`` says whether the
    table belongs to another operation and counts there.
    """
    s, b = tokens.axes
    out = Tensor(f"{name}_output", (s, b, hidden), g.dtype_bytes)
    reason = "indices, int64: rows of the table that have a gradient"
    saves = [Save(tokens, reason, MEGATRON_VP, small=True)]
    if g.mesh.t != 1:
        rows = Tensor(f"{name}_rows", (s, b), 8)
        foreign = Tensor(f"{name}_foreign", (s, b), 1)
        saves = [
            Save(rows, reason, MEGATRON_VP, small=True),
            Save(
                foreign,
                "which tokens belong to another rank, one byte per token",
                MEGATRON_VP,
                small=True,
            ),
        ]
    weights = (Weight(f"{name}.weight", (g.mesh.tensor(vocabulary), hidden), shared),)
    g.record(name, "embedding", (tokens,), (out,), saves=saves, weights=weights)
    return out


def position_embedding(g: Graph, name: str, x: Tensor, positions: Axis) -> Tensor:
    """x (s, b, h) -> (s, b, h): a learned row is added for each position.

    Saves only its indices, which the whole model shares.
    """
    out = Tensor(f"{name}_output", x.axes, x.dtype_bytes)
    weights = (Weight(f"{name}.weight", (positions, *x.axes[2:])),)
    g.record(name, "position_embedding", (x,), (out,), weights=weights)
    return out


def relative_table(g: Graph, name: str, buckets: Axis, heads: Axis, s: Axis) -> None:
    """A stack's table of relative positions: a bias (a, s, s) of the scores, from learned rows.

    Saves its indices, int64, once for all of the stack's layers.
    """
    heads = g.mesh.tensor(heads)
    index = Tensor(f"{name}_index", (s, Axis.whole("s", s.size)), 8)
    bias = Tensor(f"{name}_output", (heads, *index.axes), g.dtype_bytes)
    save = Save(index, "bucket of each pair of tokens, int64", TORCH_CHAIN)
    weights = (Weight(f"{name}.weight", (buckets, heads)),)
    g.record(name, "relative_table", (), (bias,), saves=(save,), weights=weights)


def share(g: Graph, name: str, x: Tensor) -> None:
    """What every layer of another stack reads. Saves it once for all of them."""
    reason = "every decoder layer computes keys and values from it"
    g.record(name, "share", (x,), (), saves=(Save(x, reason, KORTHIKANTI),))


def patch_embedding(g: Graph, name: str, patches: Tensor, tokens: Axis, hidden: Axis) -> Tensor:
    """Patches of an image (s-1, b, pixels) -> (s, b, h), by a linear, after a class token.

    Saves the patches, that is the image. Every rank embeds its own tokens with the whole weight.
    """
    _, b, pixels = patches.axes
    out = Tensor(f"{name}_output", (tokens, b, hidden), g.dtype_bytes)
    weights = (
        Weight(f"{name}.weight", (hidden, pixels)),
        Weight(f"{name}.bias", (hidden,)),
        Weight("class_token", (hidden,)),
    )
    save = Save(patches, "input: needed for the weight gradient", TORCH_CHAIN, for_weights=True)
    flops = 2 * elements(patches.axes) * hidden.size
    g.record(name, "patch_embedding", (patches,), (out,), (save,), flops, weights=weights)
    return out


def pooler(g: Graph, name: str, x: Tensor) -> Tensor:
    """x (s, b, h) -> (1, b, h) of the first token: a linear and a tanh.

    Saves x, of which the first token is a view, and the tanh, from which its gradient is computed.
    """
    _, b, hidden = x.axes
    out = Tensor(f"{name}_output", (Axis.whole("1", 1), b, hidden), g.dtype_bytes)
    weights = (Weight(f"{name}.weight", (hidden, hidden)), Weight(f"{name}.bias", (hidden,)))
    saves = (
        Save(x, "input: the first token is a view of it", TORCH_CHAIN, for_weights=True),
        Save(out, "output of tanh: its gradient is computed from it", TORCH_CHAIN),
    )
    flops = 2 * elements((b, hidden)) * hidden.size
    g.record(name, "linear", (x,), (out,), saves, flops, weights=weights)
    return out


def class_logits(g: Graph, name: str, x: Tensor, classes: Axis) -> Tensor:
    """x (s, b, h) -> logits (1, b, classes) of the first token, a view of x. Saves x."""
    _, b, hidden = x.axes
    out = Tensor(f"{name}_output", (Axis.whole("1", 1), b, classes), g.dtype_bytes)
    weights = (Weight(f"{name}.weight", (classes, hidden)), Weight(f"{name}.bias", (classes,)))
    save = Save(x, "input: the first token is a view of it", TORCH_CHAIN, for_weights=True)
    flops = 2 * elements((b, hidden)) * classes.size
    g.record(name, "linear", (x,), (out,), (save,), flops, weights=weights)
    return out


def cross_entropy(g: Graph, name: str, logits: Tensor, kind: str = "unfused") -> Tensor:
    """Logits (s, b, v) -> losses (s, b), over a vocabulary that is sharded over the ranks.

    Saves each token's target among a rank's own rows (int64), and, depending on its kind:

    - ``unfused``: the fp32 softmax, computed in place on an fp32 copy of the logits while these are
      alive, and whether the target belongs to another rank (one byte). Backward overwrites the
      softmax with the gradient and casts it.
    - ``native``: the same, but the compiled exponential is not in place.
    - ``te``: the logits, which backward overwrites with their gradient, and each token's maximum,
      sum and target logit (fp32).
    """
    out = Tensor(f"{name}_output", logits.axes[:2], 4)
    target = Tensor(f"{name}_target", logits.axes[:2], 8)
    if kind == "te":
        sums = Tensor(f"{name}_sums", (*logits.axes[:2], Axis.whole("3", 3)), 4)
        saves = (
            Save(logits, "logits: backward overwrites them with their gradient", TE_CE),
            Save(target, "target of each token, int64", TE_CE, small=True),
            Save(sums, "maximum, sum and target logit of each token, fp32", TE_CE, small=True),
        )
        g.record(name, "cross_entropy", (logits,), (out,), saves=saves, in_place=True)
        return out
    source = MEGATRON_CE if kind == "unfused" else MEGATRON_FUSED_CE
    softmax = Tensor(f"{name}_softmax", logits.axes, 4)
    foreign = Tensor(f"{name}_foreign", logits.axes[:2], 1)
    saves = (
        Save(softmax, "softmax, fp32: its gradient is computed from it", KORTHIKANTI_ENDS),
        Save(target, "target of each token, int64", source, small=True),
        Save(
            foreign, "which targets belong to another rank, one byte per token", source, small=True
        ),
    )
    scratch = Scratch(forward=softmax.bytes if kind == "native" else 0)
    g.record(name, "cross_entropy", (logits,), (out,), saves=saves, scratch=scratch)
    return out


def linear_cross_entropy(
    g: Graph, name: str, x: Tensor, vocabulary: Axis, bias: bool, shared: bool
) -> Tensor:
    """x (s, b, h) -> losses (s, b): logits and loss in one kernel, in chunks of tokens.

    Only the logits of one chunk are alive. A chunk has so many tokens that its logits take about
    the memory of all hidden states; the number is rounded up to a power of 2. Saves the gradients
    of x and of the weight, which the forward pass computes.
    """
    s, b, hidden = x.axes
    tokens = s.local * b.local
    out = Tensor(f"{name}_loss", (s, b), 4)
    local = g.mesh.tensor(vocabulary)
    weight = Weight(f"{name}.weight", (local, hidden), shared)
    chunk = _chunk_tokens(tokens, local.local, hidden.local)
    saves = (
        Save(
            Tensor(f"{name}_input_gradient", x.axes, x.dtype_bytes),
            "computed in the forward pass",
            LIGER_CE,
        ),
        Save(
            Tensor(f"{name}_weight_gradient", weight.axes, x.dtype_bytes),
            "computed in the forward pass",
            LIGER_CE,
        ),
    )
    weights = [weight, Weight(f"{name}.bias", (local,))] if bias else [weight]
    scratch = Scratch(forward=(x.dtype_bytes + 4) * chunk * local.local)
    flops = 2 * elements(x.axes) * vocabulary.size
    g.record(
        name, "linear", (x,), (out,), saves, flops, weights=weights, scratch=scratch, in_place=True
    )
    return out


def _chunk_tokens(tokens: Size, vocabulary: Size, hidden: Size) -> Size:
    """Tokens of a chunk: tokens / ceil(v / h), rounded up to a power of 2."""
    if not all(type(size) is int for size in (tokens, vocabulary, hidden)):
        return tokens * hidden / vocabulary
    share = -(-tokens // -(-vocabulary // hidden))
    return min(tokens, 1 << (share - 1).bit_length())


# --- recurrent cells ---------------------------------------------------------------------------


def time_step(g: Graph, name: str, x: Tensor) -> Tensor:
    """x (s, b, ...) -> (b, ...): what one step reads, a view of x. Saves nothing."""
    out = Tensor(name, x.axes[1:], x.dtype_bytes, kept_as=x)
    g.record(name, "time_step", (x,), (out,))
    return out


def gates(g: Graph, name: str, x: Tensor, width: Axis, shared: bool) -> Tensor:
    """x (b, in) -> (b, gates of h): a GEMM with a weight and a bias, for all gates of a cell.

    Saves its input: the weight's gradient is x^T dy. ``shared`` says whether the weight is that of
    an earlier step, and not counted here.
    """
    b, features = x.axes
    out = Tensor(f"{name}_output", (b, width), x.dtype_bytes)
    weights = (Weight(f"{name}.weight", (width, features)), Weight(f"{name}.bias", (width,)))
    g.record(
        name,
        "linear",
        (x,),
        (out,),
        saves=(Save(x, "input: needed for the weight gradient", TORCH_RNN),),
        flops=2 * elements((b, features)) * width.size,
        weights=() if shared else weights,
    )
    return out


def vanilla_cell(g: Graph, name: str, input_: Tensor, recurrent: Tensor) -> Tensor:
    """The outputs of both GEMMs (b, h) -> the next state (b, h): a tanh of their sum.

    Saves its output, from which tanh's gradient is computed and which the next step reads.
    """
    state = Tensor(f"{name}_state", input_.axes, input_.dtype_bytes)
    save = Save(state, "output of tanh: its gradient is computed from it", TORCH_RNN)
    g.record(name, "vanilla_cell", (input_, recurrent), (state,), saves=(save,))
    return state


def gru_cell(g: Graph, name: str, input_: Tensor, recurrent: Tensor, state: Tensor) -> Tensor:
    """Both products (b, 3h) and the state (b, h) -> the next state, operation by operation.

    Saves the recurrent product, whose first two parts have become the reset and update gates in
    place; its third part as it was before the reset gate multiplied it in place; the new gate, an
    output of tanh; and the old state less the new gate, before the update gate multiplies it.
    """
    candidate, new, less, out = (
        Tensor(f"{name}_{part}", state.axes, state.dtype_bytes)
        for part in ("candidate", "new_gate", "difference", "state")
    )
    saves = (
        Save(recurrent, "reset and update gates, in place: outputs of sigmoid", TORCH_RNN),
        Save(candidate, "factor: needed for the reset gate's gradient", TORCH_RNN),
        Save(new, "output of tanh: its gradient is computed from it", TORCH_RNN),
        Save(less, "factor: needed for the update gate's gradient", TORCH_RNN),
    )
    g.record(name, "gru_cell", (input_, recurrent, state), (out,), saves=saves)
    return out


def lstm_cell(
    g: Graph, name: str, input_: Tensor, recurrent: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """Both products (b, 4h) and the memory (b, h) -> next state and memory, op by op.

    Saves the four gates, made in place of the recurrent product; the memory, which the forget gate
    multiplies; and the tanh of the next memory.
    """
    out, next_, tanh_ = _lstm_made(name, memory)
    saves = (
        Save(recurrent, "gates, in place: outputs of sigmoid and tanh, factors", TORCH_RNN),
        Save(memory, "factor: needed for the forget gate's gradient", TORCH_RNN),
        Save(tanh_, "output of tanh, a factor: needed for both gradients", TORCH_RNN),
    )
    g.record(name, "lstm_cell", (input_, recurrent, memory), (out, next_), saves=saves)
    return out, next_


def fused_gru_cell(g: Graph, name: str, input_: Tensor, recurrent: Tensor, state: Tensor) -> Tensor:
    """The same as ``gru_cell`` in one kernel of CUDA's.

    Saves a workspace (b, 5h) for its backward and, for a backward of backward, all its inputs.
    """
    b, h = state.axes
    work = Tensor(f"{name}_workspace", (b, h.times(5)), state.dtype_bytes)
    out = Tensor(f"{name}_state", state.axes, state.dtype_bytes)
    saves = (
        Save(work, "workspace: the kernel's backward computes from it", TORCH_FUSED_RNN),
        *(Save(x, DIFFERENTIABLE, TORCH_FUSED_RNN) for x in (input_, recurrent, state)),
    )
    g.record(name, "fused_gru_cell", (input_, recurrent, state), (out,), saves=saves)
    return out


def fused_lstm_cell(
    g: Graph, name: str, input_: Tensor, recurrent: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """The same as ``lstm_cell`` in one kernel of CUDA's.

    Saves a workspace (b, 4h), the memory and the next memory for its backward and, for a backward
    of backward, both products.
    """
    out, next_, _ = _lstm_made(name, memory)
    work = Tensor(f"{name}_workspace", recurrent.axes, recurrent.dtype_bytes)
    reason = "the kernel's backward computes from it"
    saves = (
        *(Save(x, reason, TORCH_FUSED_RNN) for x in (work, memory, next_)),
        *(Save(x, DIFFERENTIABLE, TORCH_FUSED_RNN) for x in (input_, recurrent)),
    )
    g.record(name, "fused_lstm_cell", (input_, recurrent, memory), (out, next_), saves=saves)
    return out, next_


def _lstm_made(name: str, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The next state, the next memory, and that one's tanh."""
    state, next_, tanh_ = (
        Tensor(f"{name}_{part}", memory.axes, memory.dtype_bytes)
        for part in ("state", "memory", "memory_tanh")
    )
    return state, next_, tanh_


# --- the conjugate collectives -----------------------------------------------------------------


def enter_tensor_parallel(g: Graph, name: str, x: Tensor, keeps_gathered: bool) -> Tensor:
    """x (s, b, h) entering a tensor-parallel region: g under sequence parallelism, else f.

    ``keeps_gathered`` says whether g's output is saved, or gathered again in backward.
    """
    if g.mesh.t == 1:
        return x
    if g.mesh.sequence_parallel:
        return all_gather(g, name, x, keeps_gathered)
    return copy(g, name, x)


def leave_tensor_parallel(g: Graph, name: str, x: Tensor) -> Tensor:
    """Partial sums x (s, b, h) leaving such a region: g-bar with SP, else f-bar."""
    if g.mesh.t == 1:
        return x
    return reduce_scatter(g, name, x) if g.mesh.sequence_parallel else all_reduce(g, name, x)


def copy(g: Graph, name: str, x: Tensor) -> Tensor:
    """f: nothing forward, an all-reduce of the gradient backward. Saves nothing.

    Megatron-LM overlaps it with the weight gradient's GEMM.
    """
    g.record(
        name,
        "copy",
        (x,),
        (x,),
        moves=(Move("all_reduce", "backward", x.bytes, g.mesh.t, "weight gradient"),),
    )
    return x


def all_reduce(g: Graph, name: str, x: Tensor) -> Tensor:
    """f-bar: an all-reduce of the partial sums forward, nothing backward. Saves nothing."""
    out = Tensor(f"{name}_output", x.axes, x.dtype_bytes)
    moves = (Move("all_reduce", "forward", x.bytes, g.mesh.t),)
    g.record(name, "all_reduce", (x,), (out,), moves=moves)
    return out


def gather_features(g: Graph, name: str, x: Tensor, axes: tuple[Axis, ...]) -> Tensor:
    """x (s, b, h/t) -> (s, b, h), or a part of the tokens; backward slices. Saves nothing.

    Under sequence parallelism the part is a view of the whole, which is saved if the part is
    (Megatron-core, mappings.py: ``_split_along_first_dim``). Backward first gathers the gradients
    of all tokens.
    """
    if g.mesh.t == 1:
        return x
    whole = Tensor(f"{name}_output", (*x.axes[:-1], axes[-1]), x.dtype_bytes)
    out = whole
    if g.mesh.sequence_parallel:
        out = Tensor(f"{name}_part", axes, x.dtype_bytes, kept_as=whole)
    phases = ("forward", "backward") if g.mesh.sequence_parallel else ("forward",)
    moves = [Move("all_gather", phase, x.bytes * g.mesh.t, g.mesh.t) for phase in phases]
    g.record(name, "gather_features", (x,), (out,), moves=moves)
    return out


def all_gather(g: Graph, name: str, x: Tensor, keeps_gathered: bool) -> Tensor:
    """g: x (s/t, b, h) -> (s, b, h); backward reduce-scatters the gradient.

    Saves nothing itself. Unless ``keeps_gathered``, an operation that saves its output keeps the
    shard x instead, and backward gathers it again while the data gradient is computed. The
    reduce-scatter overlaps with the weight gradient's GEMM (Megatron-LM,
    tensor_parallel/layers.py).
    """
    axes = tuple(g.mesh.gathered(axis) for axis in x.axes)
    out = Tensor(f"{x.name}_gathered", axes, x.dtype_bytes, None if keeps_gathered else x)
    moves = [
        Move("all_gather", "forward", out.bytes, g.mesh.t),
        Move("reduce_scatter", "backward", out.bytes, g.mesh.t, "weight gradient"),
    ]
    if not keeps_gathered:
        moves.append(Move("all_gather", "backward", out.bytes, g.mesh.t, "data gradient"))
    g.record(name, "all_gather", (x,), (out,), moves=moves)
    return out


def reduce_scatter(g: Graph, name: str, x: Tensor) -> Tensor:
    """g-bar: partial sums (s, b, h) -> (s/t, b, h); backward gathers. Saves nothing."""
    s, b, *features = x.axes
    out = Tensor(f"{name}_output", (g.mesh.sequence(s), b, *features), x.dtype_bytes)
    moves = (
        Move("reduce_scatter", "forward", x.bytes, g.mesh.t),
        Move("all_gather", "backward", x.bytes, g.mesh.t),
    )
    g.record(name, "reduce_scatter", (x,), (out,), moves=moves)
    return out


# --- context parallelism -----------------------------------------------------------------------


def share_context(g: Graph, name: str, k: Tensor, v: Tensor, kind: str) -> None:
    """The exchange of keys and values (s/c, b, k, d) between ranks. Saves nothing.

    ``ring``: they and their gradients are sent around the ring. ``all_gather``: they are gathered,
    and their gradients reduce-scattered. Either way Megatron-core keeps only the rank's own part.
    """
    if g.mesh.c == 1:
        return
    size = (k.bytes + v.bytes) * g.mesh.c
    forward, backward = {
        "ring": ("send_receive", ("send_receive", "send_receive")),
        "all_gather": ("all_gather", ("all_gather", "reduce_scatter")),
    }[kind]
    moves = (
        Move(forward, "forward", size, g.mesh.c, "attention"),
        *(Move(way, "backward", size, g.mesh.c, "attention") for way in backward),
    )
    g.record(name, "share_context", (k, v), (), moves=moves)


def gather_context(g: Graph, name: str, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v (s/c, b, k, d) -> (s, b, k, d), for unfused attention. Saves nothing."""
    if g.mesh.c == 1:
        return k, v
    whole = []
    for x in (k, v):
        s = x.axes[0]
        splits = tuple(split for split in s.splits if split.kind != CONTEXT)
        gathered = s._replace(local=s.local * g.mesh.c, splits=splits)
        whole.append(Tensor(f"{x.name}_gathered", (gathered, *x.axes[1:]), x.dtype_bytes))
    size = whole[0].bytes + whole[1].bytes
    moves = (
        Move("all_gather", "forward", size, g.mesh.c),
        Move("reduce_scatter", "backward", size, g.mesh.c),
    )
    g.record(name, "gather_context", (k, v), tuple(whole), moves=moves)
    return whole[0], whole[1]


def exchange_heads(g: Graph, name: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Ulysses: heads for tokens, (s/c, b, a, d) to (s, b, a/c, d), in as many bytes. Saves nothing.

    The result is a new tensor, and both may be saved.
    """
    if g.mesh.c == 1:
        return list(tensors)
    size = sum(tensor.bytes for tensor in tensors)
    moves = tuple(Move("all_to_all", phase, size, g.mesh.c) for phase in ("forward", "backward"))
    made = [Tensor(tensor.name, tensor.axes, tensor.dtype_bytes) for tensor in tensors]
    g.record(name, "exchange_heads", tuple(tensors), made, moves=moves)
    return made


# --- mixtures of experts -----------------------------------------------------------------------


def router(
    g: Graph,
    name: str,
    x: Tensor,
    experts: Axis,
    chosen: Axis,
    dtype: str,
    bias: bool = False,
    norm: bool = False,
) -> Tensor:
    """x (s, b, h) -> the weights (s, b, r) of each token's experts.

    A GEMM with the router's weight, a softmax or sigmoid, and a top-k. Saves its input, the fp32
    scores (or only those of a token's experts), and the index of each token's experts (int64). A
    router in fp32 saves an fp32 copy of its input. If weights are divided by their sum, both are
    saved.

    Args:
        g: The graph.
        name: The name of the operation.
        x: The input.
        experts: The experts.
        chosen: The experts of one token.
        dtype: What is in fp32, a word of ``memcalc.config.model.ROUTER_DTYPES``.
        bias: Whether the GEMM has a bias.
        norm: Whether the weights are divided by their sum.
    """
    tokens = x.axes[:-1]
    scores = Tensor(f"{name}_scores", (*tokens, experts), 4)
    if dtype == "chosen":
        scores = Tensor(f"{name}_scores", (*tokens, chosen), x.dtype_bytes)
    narrow = dtype in ("cast", "chosen")
    index = Tensor(f"{name}_index", (*tokens, chosen), 8)
    out = Tensor(f"{name}_weights", (*tokens, chosen), x.dtype_bytes if narrow else 4)
    weights = [Weight(f"{name}.weight", (experts, *x.axes[-1:]))]
    if bias:
        weights.append(Weight(f"{name}.bias", (experts,)))
    wide = cast(g, f"{name}_input_fp32", x, 4) if dtype == "fp32" else x
    saves = [
        Save(wide, "input: needed for the weight gradient", MEGATRON_ROUTER, for_weights=True),
        Save(scores, "scores: their gradient is computed from them", MEGATRON_ROUTER),
        Save(index, "experts of each token, int64", MEGATRON_ROUTER, small=True),
    ]
    if norm:
        reason = "needed for the gradient of the quotient"
        best = Tensor(f"{name}_best", (*tokens, chosen), 4)
        total = Tensor(f"{name}_sum", tokens, 4)
        saves += [Save(tensor, reason, TORCH_CHAIN, small=True) for tensor in (best, total)]
    g.record(
        name,
        "router",
        (wide,),
        (out,),
        saves=saves,
        flops=2 * elements(x.axes) * experts.size,
        weights=weights,
    )
    return out


def dispatch(
    g: Graph,
    name: str,
    x: Tensor,
    routed: Axis,
    chosen: Axis,
    experts: Axis,
    chunks: bool,
    sorts: bool,
    bias: bool = False,
) -> Tensor:
    """x (s, b, h) -> (routed tokens, h): a copy for each of a token's experts, on their ranks.

    The copies are sorted by expert and sent to the experts' ranks by an all-to-all, then gathered
    over their tensor-parallel ranks. With ``chunks`` the received parts are sorted once more. With
    ``sorts`` it saves the order, its inverse and the token of each copy (int64), the start of each
    expert's tokens (int32), and with a bias the expert of each copy (int64). Indices of other
    implementations are not counted.
    """
    *before, out = [x, *_steps(g, name, x, routed, chosen, experts, chunks)]
    places = [Tensor(f"{name}_{what}", (routed,), 8) for what in ("order", "inverse", "token")]
    if bias:
        places.append(Tensor(f"{name}_expert", (routed,), 8))
    places.append(Tensor(f"{name}_offsets", (g.mesh.experts(experts),), 4))
    reason = "position of each routed token: backward routes gradients by it"
    saves = [Save(place, reason, HF_EXPERTS, small=True) for place in places]
    for old, new in pairwise(before):
        g.record(new.name, "dispatch", (old,), (new,))
    moves = _exchanged(g, out, ("all_gather", "reduce_scatter"))
    g.record(name, "dispatch", before[-1:], (out,), saves=saves if sorts else (), moves=moves)
    return out


def grouped_linear(
    g: Graph,
    name: str,
    x: Tensor,
    experts: Axis,
    features: Axis,
    split: str,
    bias: bool,
    batched: bool = False,
) -> Tensor:
    """x (routed tokens, in) -> (routed tokens, out): each token times its expert's weight.

    Saves its input, as every linear. ``batched``, with one GEMM per token, it also saves a copy of
    the weight of each token's expert.
    """
    routed, inner = x.axes
    local = g.mesh.expert_tensor(features) if split == COLUMN else features
    out = Tensor(f"{name}_output", (routed, local), x.dtype_bytes)
    experts = g.mesh.experts(experts)
    weights = [Weight(f"{name}.weight", (experts, local, inner))]
    if bias:
        weights.append(Weight(f"{name}.bias", (experts, local)))
    reason = "input: needed for the weight gradients"
    saves = [Save(_quantised(g, x), reason, KORTHIKANTI, for_weights=True)]
    if batched:
        copies = Tensor(f"{name}_weights", (routed, local, inner), x.dtype_bytes)
        saves.append(
            Save(copies, "copy of each token's expert weight: needed for its gradient", HF_BATCHED)
        )
    g.record(
        name,
        "linear",
        (x,),
        (out,),
        saves=saves,
        flops=2 * elements(x.axes) * features.size,
        weights=weights,
    )
    return out


def combine(
    g: Graph,
    name: str,
    y: Tensor,
    weights: Tensor,
    x: Tensor,
    chosen: Axis,
    experts: Axis,
    chunks: bool,
    keeps: bool,
) -> Tensor:
    """(routed tokens, h) -> x's (s, b, h): each token's copies are summed on the token's rank.

    They return the way that ``dispatch`` sent them. Saves both factors if the copies are weighted
    here, and nothing if weights are applied before the experts' second GEMM.
    """
    out = Tensor(f"{name}_output", x.axes, y.dtype_bytes)
    reason = "factor: needed for the other factor's gradient"
    saves = (Save(y, reason, TORCH_CHAIN), Save(weights, reason, TORCH_CHAIN, small=True))
    *others, _ = _steps(g, name, x, y.axes[0], chosen, experts, chunks)
    before = [y, *reversed(others)]
    for old, new in pairwise(before):
        g.record(new.name, "combine", (old,), (new,))
    moves = _exchanged(g, y, ("reduce_scatter", "all_gather"))
    last = (before[-1], weights)
    g.record(name, "combine", last, (out,), saves=saves if keeps else (), moves=moves)
    return out


def _steps(
    g: Graph, name: str, x: Tensor, routed: Axis, chosen: Axis, experts: Axis, chunks: bool
) -> list[Tensor]:
    """The copies of tokens at each step between a layer and its experts."""
    *tokens, features = x.axes
    whole = type(routed.local) is int and type(g.mesh.x) is int
    received = -(-routed.local // g.mesh.x) if whole else routed.local / g.mesh.x
    part = routed._replace(local=received)
    found: dict[str, tuple[Axis, ...]] = {"sent": (*tokens, chosen)}
    if g.mesh.e != 1:
        found["received"] = (part,)
    if g.mesh.x != 1:
        found["gathered"] = (routed,)
    if chunks and g.mesh.experts(experts).local != 1:
        found["sorted"] = (routed,)
    *others, _ = found.items()
    steps = [(f"{name}_{step}", axes) for step, axes in others]
    steps.append((f"{name}_output", (routed,)))
    return [Tensor(step, (*axes, features), x.dtype_bytes) for step, axes in steps]


def _exchanged(g: Graph, routed: Tensor, ways: tuple[str, str]) -> list[Move]:
    """The collectives that send routed tokens to the experts, or back."""
    moves = []
    own = divide(routed.bytes, g.mesh.x, "routed bytes")
    for phase, way in zip(("forward", "backward"), ways, strict=True):
        if g.mesh.e != 1:
            moves.append(Move("all_to_all", phase, own, g.mesh.e))
        if g.mesh.x != 1:
            moves.append(Move(way, phase, routed.bytes, g.mesh.x))
    return moves


# --- helpers -----------------------------------------------------------------------------------


def _quantised(g: Graph, x: Tensor) -> Tensor:
    """A linear's input as it is saved: itself, or an fp8 copy.

    Transformer Engine's linears save one copy in fp8 if their GEMMs are in fp8 (module/linear.py,
    layernorm_linear.py: save_for_backward of the quantised input).
    """
    if g.linear_bytes in (None, x.dtype_bytes):
        return x
    return Tensor(f"{x.name}_fp8", x.axes, g.linear_bytes)


def _elementwise(g: Graph, name: str, kind: str, x: Tensor) -> Tensor:
    out = Tensor(f"{name}_output", x.axes, x.dtype_bytes)
    g.record(name, kind, (x,), (out,))
    return out


def _activation(g: Graph, name: str, kind: str, x: Tensor, source: str) -> Tensor:
    out = Tensor(f"{name}_output", x.axes, x.dtype_bytes)
    save = Save(x, "input: needed for the activation's gradient", source)
    g.record(name, kind, (x,), (out,), saves=(save,))
    return out
