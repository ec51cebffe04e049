"""Fused kernels: PyTorch's own, or stand-ins that save the same tensors for backward.

On meta and on the CPU PyTorch would run unfused operations, which save other tensors: unfused
attention for scaled_dot_product_attention, fp32 copies for rms_norm. Kernels that PyTorch does not
have at all (Megatron-core's and Transformer Engine's gated activation and rotary positions) have
stand-ins on every device.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from memcalc.errors import UsageError
from memcalc.graph.ops import BIAS_TILE

SEQUENCES = (torch.gru, torch.lstm, torch.rnn_tanh, torch.rnn_relu)
CUDNN = (
    "the RNN runs op by op here; on CUDA, cuDNN's kernel saves its output and its reserve space "
    "instead"
)
FLASH_RNG_BYTES = 24  # PyTorch's flash kernel saves a seed with its offset, and 8 bytes more
ATTENTION, RMS_NORM = F.scaled_dot_product_attention, F.rms_norm
State = tuple[Tensor, ...]  # of a recurrent cell
EFFICIENT_ATTENTION = torch.ops.aten._scaled_dot_product_efficient_attention


def dropout(x: Tensor, probability: float) -> Tensor:
    """Dropout with a mask of one byte per element; F.dropout's is wider where CUDA is not used."""
    return torch.native_dropout(x, probability, True)[0] if probability else x


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """x (..., h) -> (..., h), over the last axis, in one kernel."""
    if x.is_cuda:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    out: Tensor = RmsNorm.apply(x, weight, eps)
    return out


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rng_bytes: int,
    order: str,
    probability: float = 0.0,
    causal: bool = True,
) -> Tensor:
    """q (b, a, s, d), k and v (b, k, s, d) -> (b, a, s, d), causal or not, in one kernel.

    The arguments are those of ``FlashAttention``, and the probability of dropout. CUDA's kernel
    saves nothing more for dropout; the CPU's kernel has none.
    """
    if q.is_cuda or (q.is_cpu and not probability):
        return native_flash_attention(q, k, v, probability, causal)
    out: Tensor = FlashAttention.apply(q, k, v, rng_bytes, order, causal)
    return out


def native_flash_attention(
    q: Tensor, k: Tensor, v: Tensor, probability: float, causal: bool = True
) -> Tensor:
    """PyTorch's own flash kernel.

    Raises:
        UsageError: PyTorch has no flash kernel for these tensors on this device.
    """
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            grouped = k.shape[1] != q.shape[1]
            return F.scaled_dot_product_attention(
                q, k, v, dropout_p=probability, is_causal=causal, enable_gqa=grouped
            )
    except RuntimeError as error:
        if "No available kernel" not in str(error):
            raise
        raise UsageError(
            f"PyTorch has no flash kernel on this {q.device.type} for head size {q.shape[-1]} in "
            f"{q.dtype}; choose --attention unfused"
        ) from error


class CudaKernels(TorchFunctionMode):
    """Runs CUDA's kernels in place of meta's: dropout, attention, RMSNorm, LSTM and GRU cells.

    Dropout's mask has one byte per element. Attention is the flash kernel; with a mask or in fp32
    the memory-efficient kernel; and unfused for GQA without ``enable_gqa`` (PyTorch's
    sdp_utils.cpp). RMSNorm is one kernel, and so is a cell of an LSTM or a GRU.

    Args:
        rng_bytes: Bytes of random-number state that the flash kernel saves.

    Attributes:
        otherwise: Functions that ran, without a stand-in, and that CUDA would run differently.
    """

    def __init__(self, rng_bytes: int = FLASH_RNG_BYTES) -> None:
        super().__init__()
        self.functions = {
            F.dropout: _dropout,
            F.rms_norm: _rms_norm,
            F.scaled_dot_product_attention: self._attention,
            torch.gru_cell: _gru_cell,
            torch.lstm_cell: _lstm_cell,
        }
        self.rng_bytes = rng_bytes
        self.otherwise: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run CUDA's kernel instead of a function."""
        if func is F.multi_head_attention_forward:  # a mode does not see the calls inside it
            with _standing_in(self.functions):
                return func(*args, **(kwargs or {}))
        if func in SEQUENCES:
            self.otherwise.add(f"{func.__name__}: {CUDNN}")
        return self.functions.get(func, func)(*args, **(kwargs or {}))

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **others: Any,
    ) -> Tensor:
        q, k, v = query, key, value
        alike = k.shape[1] == q.shape[1] or others.get("enable_gqa", False)
        if q.dim() != 4 or not alike:  # no fused kernel supports it
            return ATTENTION(q, k, v, attn_mask, dropout_p, is_causal, **others)
        if attn_mask is None and q.dtype != torch.float32:
            out: Tensor = FlashAttention.apply(q, k, v, self.rng_bytes, "bs", is_causal)
            return out
        bias = None if attn_mask is None else _padded(_as_bias(attn_mask, q))
        if k.shape[1] != q.shape[1]:
            k, v = _repeat(k, q), _repeat(v, q)
        wide = None if bias is None else bias.expand(*q.shape[:-1], k.shape[2])
        scale = others.get("scale")
        out, *_ = EFFICIENT_ATTENTION(q, k, v, wide, True, dropout_p, is_causal, scale=scale)
        return out


@contextmanager
def _standing_in(functions: dict[Any, Any]) -> Iterator[None]:
    """Replace functions of torch.nn.functional, and restore them at the end."""
    theirs = {function.__name__: function for function in functions}
    for name, function in theirs.items():
        setattr(F, name, functions[function])
    try:
        yield
    finally:
        for name, function in theirs.items():
            setattr(F, name, function)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: A002 - PyTorch's own word
    return dropout(input, p if training else 0.0)


def _rms_norm(
    input: Tensor,  # noqa: A002 - PyTorch's own word
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    if len(normalized_shape) != 1:
        return RMS_NORM(input, normalized_shape, weight, eps)
    out: Tensor = RmsNorm.apply(input, weight, torch.finfo(input.dtype).eps if eps is None else eps)
    return out


def _gru_cell(x: Tensor, state: Tensor, w_ih: Tensor, w_hh: Tensor, *biases: Any) -> Tensor:
    added = [w_ih.new_zeros(len(w_ih)) if bias is None else bias for bias in biases]
    (out,) = fused_gru(F.linear(x, w_ih), F.linear(state, w_hh), state, *added)
    return out


def _lstm_cell(x: Tensor, states: State, w_ih: Tensor, w_hh: Tensor, *biases: Any) -> State:
    return fused_lstm(F.linear(x, w_ih), F.linear(states[0], w_hh), states[1], *biases)


def _as_bias(mask: Tensor, q: Tensor) -> Tensor:
    """A mask as the bias that the memory-efficient kernel adds to the scores."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask.logical_not(), float("-inf"))


def _padded(bias: Tensor) -> Tensor:
    """A view of a bias whose rows are padded to a multiple of 8 (attention.cpp: pad_bias).

    The kernel needs aligned strides of all axes but the last.
    """
    *others, keys = bias.shape
    if not keys % BIAS_TILE > 0:  # an inequality, as an equation would fix a symbolic size
        return bias
    wide = bias.new_zeros(*others, ceil(keys / BIAS_TILE) * BIAS_TILE)
    return wide[..., :keys].copy_(bias)


class RmsNorm(Function):
    """x (..., h) -> (..., h); saves x and the fp32 reciprocal norm, as PyTorch's fused kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        """The normalized input times the weight, if there is one."""
        wide = x.float()
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, rstd)
        normal = (wide * rstd).to(x.dtype)
        return normal if weight is None else normal * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """By the chain rule, in fp32."""
        x, weight, rstd = ctx.saved_tensors
        dy, normal = grads[0].float(), x.float() * rstd
        scaled = dy if weight is None else dy * weight.float()
        dx = rstd * (scaled - normal * (scaled * normal).mean(-1, keepdim=True))
        dw = None if weight is None else (dy * normal).flatten(0, -2).sum(0).to(weight.dtype)
        return dx.to(x.dtype), dw, None


class FlashAttention(Function):
    """q (b, a, s, d), k and v (b, k, s, d), of any memory layout -> (b, a, s, d).

    It saves q, k, v, the output, the fp32 log-sum-exp and the random-number state. Backward
    recomputes the probabilities as FlashAttention does, though not in tiles. ``order`` gives the
    memory layout of the output: ``sb``, tokens first, or ``bs``, batch first; heads and their
    elements last.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rng_bytes: int,
        order: str,
        causal: bool = True,
    ) -> Tensor:
        """The attention of every head."""
        ctx.causal = causal
        scores = _scores(q, k, causal)
        lse = torch.logsumexp(scores, -1)
        probs = scores if q.is_meta else torch.exp(scores - lse.unsqueeze(-1))
        out = torch.einsum(f"bast,batd->{order}ad", probs, _repeat(v, q).float())
        out = (
            out.to(q.dtype).contiguous().permute(*((1, 2, 0, 3) if order == "sb" else (0, 2, 1, 3)))
        )
        rng = torch.empty(rng_bytes, dtype=torch.uint8, device=q.device)
        ctx.save_for_backward(q, k, v, out, lse, *([rng] if rng_bytes else []))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients, from recomputed probabilities."""
        q, k, v, out, lse, *_ = ctx.saved_tensors
        dy = grads[0].float()
        probs = torch.exp(_scores(q, k, ctx.causal) - lse.unsqueeze(-1))
        dv = probs.transpose(-1, -2) @ dy
        dp = dy @ _repeat(v, q).float().transpose(-1, -2)
        ds = probs * (dp - (dy * out.float()).sum(-1, keepdim=True)) / q.shape[-1] ** 0.5
        dq = ds @ _repeat(k, q).float()
        dk = ds.transpose(-1, -2) @ q.float()
        return dq.to(q.dtype), _fold(dk, k), _fold(dv, v), None, None, None


class GatedActivation(Function):
    """packed (..., 2f) -> (..., f): act(gate) * up; it saves only the packed input."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, kind: str) -> Tensor:
        """The activated gate times up."""
        ctx.save_for_backward(packed)
        ctx.kind = kind
        return _gated(packed, kind)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient, through the recomputed operations."""
        (packed,) = ctx.saved_tensors
        with torch.enable_grad():
            again = packed.detach().requires_grad_()
            (dx,) = torch.autograd.grad(_gated(again, ctx.kind), again, grads[0])
        return dx, None


class FusedGru(Function):
    """Both GEMMs' outputs (b, 3h), the state and both biases -> the next state, in one kernel.

    It saves its inputs and a workspace of the reset, update and new gates, the state, and the new
    gate's part of the recurrent GEMM, as ``_thnn_fused_gru_cell`` does.
    """

    @staticmethod
    def forward(
        ctx: Any, input_: Tensor, recurrent: Tensor, state: Tensor, *biases: Tensor
    ) -> Tensor:
        """The next state."""
        of_input = (input_ + biases[0]).chunk(3, 1)
        of_state = (recurrent + biases[1]).chunk(3, 1)
        reset = torch.sigmoid(of_input[0] + of_state[0])
        update = torch.sigmoid(of_input[1] + of_state[1])
        new = torch.tanh(of_input[2] + reset * of_state[2])
        workspace = torch.cat((reset, update, new, state, of_state[2]), 1)
        ctx.save_for_backward(input_, recurrent, state, workspace)
        return new + update * (state - new)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        """By the chain rule, from the workspace."""
        reset, update, new, state, candidate = ctx.saved_tensors[3].chunk(5, 1)
        dy = grads[0]
        d_new = dy * (1 - update) * (1 - new**2)
        d_update = dy * (state - new) * update * (1 - update)
        d_reset = d_new * candidate * reset * (1 - reset)
        d_input = torch.cat((d_reset, d_update, d_new), 1)
        d_recurrent = torch.cat((d_reset, d_update, d_new * reset), 1)
        return d_input, d_recurrent, dy * update, d_input.sum(0), d_recurrent.sum(0)


class FusedLstm(Function):
    """Both GEMMs' outputs (b, 4h), cell state and both biases -> the next states, in one kernel.

    It saves the GEMMs' outputs, both cell states and a workspace of the gates, as
    ``_thnn_fused_lstm_cell`` does.
    """

    @staticmethod
    def forward(
        ctx: Any, input_: Tensor, recurrent: Tensor, memory: Tensor, *biases: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The next state and memory."""
        gates = (input_ + recurrent + biases[0] + biases[1]).chunk(4, 1)
        in_, forget, out = (torch.sigmoid(gates[each]) for each in (0, 1, 3))
        cell = torch.tanh(gates[2])
        next_ = forget * memory + in_ * cell
        workspace = torch.cat((in_, forget, cell, out), 1)
        ctx.save_for_backward(input_, recurrent, memory, next_, workspace)
        return out * torch.tanh(next_), next_

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        """By the chain rule, from the cell states and the workspace."""
        memory, next_, workspace = ctx.saved_tensors[2:]
        in_, forget, cell, out = workspace.chunk(4, 1)
        dy, d_next = grads
        tanh_ = torch.tanh(next_)
        d_next = d_next + dy * out * (1 - tanh_**2)
        d_gates = torch.cat(
            (
                d_next * cell * in_ * (1 - in_),
                d_next * memory * forget * (1 - forget),
                d_next * in_ * (1 - cell**2),
                dy * tanh_ * out * (1 - out),
            ),
            1,
        )
        d_bias = d_gates.sum(0)
        return d_gates, d_gates, d_next * forget, d_bias, d_bias


def fused_gru(*inputs: Tensor) -> State:
    """PyTorch's own kernel on CUDA, its stand-in elsewhere."""
    if inputs[0].is_cuda:
        return (torch.ops.aten._thnn_fused_gru_cell(*inputs)[0],)
    return (FusedGru.apply(*inputs),)


def fused_lstm(*inputs: Tensor) -> State:
    """PyTorch's own kernel on CUDA and on meta, its stand-in elsewhere."""
    if inputs[0].is_cuda or inputs[0].is_meta:
        state, memory, _ = torch.ops.aten._thnn_fused_lstm_cell(*inputs)
        return state, memory
    found: State = FusedLstm.apply(*inputs)
    return found


def angles(s: int, d: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Cosines and sines (s, 1, 1, d/2) of rotary positions."""
    half = torch.arange(d // 2, device=device, dtype=torch.float32) * 2 / d
    turns = torch.outer(torch.arange(s, device=device, dtype=torch.float32), 10000.0**-half)
    cos, sin = (fn(turns).to(dtype)[:, None, None, :] for fn in (torch.cos, torch.sin))
    return cos, sin


class Rotate(Function):
    """Rotary positions of x (s, b, heads, d): the halves rotated by the angles of each token.

    It does not save x; the angles exist once per model.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The rotation."""
        ctx.angles = cos, sin
        return _turn(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The rotation back."""
        cos, sin = ctx.angles
        return _turn(grads[0], cos, -sin), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = _halves(x)
    if not x.is_meta:  # there only shapes count
        left, right = left * cos - right * sin, right * cos + left * sin
    return torch.cat([left, right], -1)


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """The halves of the last axis, whose size may be a symbol."""
    size = x.shape[-1] // 2
    return x.narrow(-1, 0, size), x.narrow(-1, size, size)


def _gated(packed: Tensor, kind: str) -> Tensor:
    gate, up = _halves(packed)
    return (F.silu(gate) if kind == "swiglu" else F.gelu(gate)) * up


def _scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """Scaled scores (b, a, s, s), causal or not, in fp32."""
    scores = q.float() @ _repeat(k, q).float().transpose(-1, -2)
    if q.is_meta:  # no values: only GEMMs and shapes count
        return scores
    scores = scores / q.shape[-1] ** 0.5
    if not causal:
        return scores
    s = q.shape[2]
    later = torch.ones(s, s, dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(later, float("-inf"))


def _repeat(x: Tensor, q: Tensor) -> Tensor:
    """Key or value heads, repeated to as many as query heads."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _fold(grad: Tensor, x: Tensor) -> Tensor:
    """A gradient of repeated heads, summed over the copies."""
    b, heads, s, d = x.shape
    return grad.reshape(b, heads, -1, s, d).sum(2).to(x.dtype)
