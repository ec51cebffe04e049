"""``F.scaled_dot_product_attention`` as CUDA runs it.

A CPU build would run unfused attention for CUDA tensors. Functions named in docstrings are those of
ATen/native/transformers/attention.cpp and cuda/sdp_utils.cpp.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn import functional as F  # noqa: N812 - its usual name

aten = torch.ops.aten
KERNELS = ("flash", "efficient", "math", "cudnn")
HALF = (torch.float16, torch.bfloat16)
ALIGNMENT = 8  # of a mask's strides, in numbers, and of flash attention's head size


def attention(capability: int, kernel: str | None = None) -> Callable[..., Tensor]:
    """CUDA's ``scaled_dot_product_attention``.

    On Hopper and Blackwell PyTorch may prefer cuDNN's kernel (check_prefer_cudnn_attention); here
    it runs only if it is asked for.

    Args:
        capability: The GPU's compute capability, times 10.
        kernel: One of ``KERNELS``; by default the one that PyTorch chooses.
    """

    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        q, k, v, mask = query, key, value, attn_mask
        if torch.is_autocast_enabled("cuda"):  # autocast_mode.h: lower_precision_fp
            dtype = torch.get_autocast_dtype("cuda")
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
            if mask is not None and mask.is_floating_point():
                mask = mask.to(dtype)
        if mask is not None and mask.dtype == torch.bool:
            mask = _as_bias(mask, q.dtype)
        name = kernel or chosen(q, k, v, mask, capability, enable_gqa)
        with torch.autocast("cuda", enabled=False):
            return _RUN[name](q, k, v, mask, dropout_p, is_causal, scale, enable_gqa)

    return scaled_dot_product_attention


def chosen(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, capability: int, gqa: bool) -> str:
    """The kernel that PyTorch chooses (select_sdp_backend): the first that supports the inputs."""
    ampere = capability >= 80
    half, size = q.dtype in HALF, q.shape[-1]
    grouped = q.dim() == 4 and q.shape[1] != k.shape[1]
    grouped_flash, grouped_efficient = not grouped or gqa, not grouped
    flash = half and mask is None and ampere and size == v.shape[-1] <= 256
    efficient = q.dtype in (torch.float16, torch.float32) or (half and ampere)
    aligned = size % (8 if half else 4) == 0 == v.shape[-1] % (8 if half else 4)
    supported = {
        "flash": cuda.flash_sdp_enabled() and flash and grouped_flash and q.dim() == 4,
        "efficient": cuda.mem_efficient_sdp_enabled()
        and efficient
        and grouped_efficient
        and aligned
        and q.dim() == 4,
        "math": cuda.math_sdp_enabled(),
        "cudnn": cuda.cudnn_sdp_enabled(),
    }
    for name, works in supported.items():
        if works:
            return name
    raise RuntimeError("No available kernel. Aborting execution.")


def _as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Zero where a mask is true, else minus infinity (convert_boolean_attn_mask)."""
    least = mask.new_full((), float("-inf"), dtype=dtype)
    return torch.where(mask, mask.new_zeros((), dtype=dtype), least)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, p: float, causal: bool, scale: Any, gqa: bool
) -> Tensor:
    """With heads padded to a multiple of 8 (pad_last_dim)."""
    size = q.shape[-1]
    scale = size**-0.5 if scale is None else scale
    padding = -size % ALIGNMENT
    if padding:
        q, k, v = (F.pad(each, (0, padding)) for each in (q, k, v))
    out: Tensor = aten._scaled_dot_product_flash_attention(q, k, v, p, causal, False, scale=scale)[
        0
    ]
    return out[..., :size] if padding else out


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, p: float, causal: bool, scale: Any, gqa: bool
) -> Tensor:
    bias = None if mask is None else _aligned(mask).expand(*q.shape[:-1], k.shape[-2])
    out: Tensor = aten._scaled_dot_product_efficient_attention(
        q, k, v, bias, torch.is_grad_enabled(), p, causal, scale=scale
    )[0]
    return out


def _aligned(mask: Tensor) -> Tensor:
    """A mask whose rows are padded if their strides are not a multiple of 8 (preprocess_mask)."""
    strides, last = mask.stride()[:-1], mask.shape[-1]
    if mask.stride(-1) == 1 and all(each % ALIGNMENT == 0 for each in strides):
        return mask
    return F.pad(mask, (0, ALIGNMENT - last % ALIGNMENT))[..., :last]


def _math(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, p: float, causal: bool, scale: Any, gqa: bool
) -> Tensor:
    out: Tensor = aten._scaled_dot_product_attention_math(
        q, k, v, mask, p, causal, scale=scale, enable_gqa=gqa
    )[0]
    return out


def _cudnn(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, p: float, causal: bool, scale: Any, gqa: bool
) -> Tensor:
    out: Tensor = aten._scaled_dot_product_cudnn_attention(
        q, k, v, mask, torch.is_grad_enabled(), p, causal, False, scale=scale
    )[0]
    return out


_RUN = {"flash": _flash, "efficient": _efficient, "math": _math, "cudnn": _cudnn}
