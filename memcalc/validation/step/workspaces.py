"""Memory that CUDA kernels allocate for themselves, which no dispatch mode sees.

Not modeled are the workspaces of memory-efficient attention's backward, of cuDNN and of NCCL, and
the partial sums of LayerNorm's weight gradients.
"""

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten
GEMMS = frozenset(
    {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
)  # each takes a cuBLAS handle
SORTED = 3072  # EmbeddingBackwardKernel.cu: with more indices, they are sorted first
SEGMENT = 10  # the same, NROWS_PER_THREAD: indices per partial sum
INDEX_BYTES = 26  # sorted indices, their order and offsets, per index; met within 0.4 MB
BLOCK_M = 128  # flash_api.cpp: rows of dq are rounded up to this


def workspace(func: Any, args: Any) -> int:
    """Bytes that an operation's kernel allocates while it runs.

    >>> x = torch.empty(2, 8, 4)
    >>> workspace(aten.native_layer_norm_backward.default, (x.transpose(0, 1),))
    256
    """
    found = _OF.get(func)
    return found(*args) if found else 0


def _norm_backward(grad: Any, *others: Any) -> int:
    """A gradient that is not contiguous is copied (layer_norm_kernel.cu)."""
    return 0 if grad.is_contiguous() else grad.numel() * grad.element_size()


def _flash_backward(grad: Any, q: Any, k: Any, *others: Any) -> int:
    """dq in fp32 and sums of rows; under GQA dk and dv of every head (flash_api.cpp: mha_bwd)."""
    batch, heads, length, size = q.shape
    rows = -(-length // BLOCK_M) * BLOCK_M
    step = 32 if size <= 128 else 64
    total: int = 4 * batch * heads * rows * (-(-size // step) * step + 1)
    if k.shape[1] != heads:
        total += 2 * batch * k.shape[2] * heads * size * q.element_size()
    return total


def _embedding_backward(grad: Any, indices: Any, rows: int, *others: Any) -> int:
    """Partial sums in fp32, and the sorted indices (EmbeddingBackwardKernel.cu)."""
    number = indices.numel()
    if number <= SORTED:
        return 0
    width = -(-grad.shape[-1] // 32) * 32
    total: int = 4 * width * (number // SEGMENT + min(number, rows)) + INDEX_BYTES * number
    return total


_OF: dict[Any, Callable[..., int]] = {
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.native_layer_norm_backward.default: _norm_backward,
    aten._fused_rms_norm_backward.default: _norm_backward,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
}
