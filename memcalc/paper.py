"""Korthikanti et al. 2022 (arXiv 2205.05198), as printed: an oracle without the engine.

Each formula is a function of the paper's letters as numbers or symbols: ``x.s``, ``x.h``, ...
Bytes are those of 2-byte activations and 1-byte dropout masks; x.B is the global batch.
"""

from collections.abc import Callable
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

Printed = Callable[[SimpleNamespace], Any]

# Table 2, page 9: bytes of activations per transformer layer.
TABLE_2: dict[str, Printed] = {
    "none": lambda x: x.s * x.b * x.h * (34 + 5 * x.a * x.s / x.h),
    "tensor": lambda x: x.s * x.b * x.h * (10 + 24 / x.t + 5 * x.a * x.s / (x.h * x.t)),
    "tensor+sequence": lambda x: x.s * x.b * x.h * (34 / x.t + 5 * x.a * x.s / (x.h * x.t)),
    "tensor+selective": lambda x: x.s * x.b * x.h * (10 + 24 / x.t),
    "tensor+sequence+selective": lambda x: x.s * x.b * x.h * (34 / x.t),
    "full": lambda x: x.s * x.b * x.h * 2,
}

# The numbered equations except 3, which counts nothing, and 9, an approximate ratio of 8 and 7.
EQUATIONS: dict[int, Printed] = {
    1: lambda x: x.s * x.b * x.h * (34 + 5 * x.a * x.s / x.h),  # page 5
    2: lambda x: x.s * x.b * x.h * (10 + 24 / x.t + 5 * x.a * x.s / (x.h * x.t)),  # page 5
    4: lambda x: (x.s * x.b * x.h / x.t) * (34 + 5 * x.a * x.s / x.h),  # page 7
    5: lambda x: (x.s * x.b * x.h * x.L / x.t) * (34 + 5 * x.a * x.s / x.h),  # page 8
    6: lambda x: 34 * x.s * x.b * x.h * x.L / x.t,  # page 9
    7: lambda x: (
        72 * x.B * x.L * x.s * x.h**2 * (1 + x.s / (6 * x.h) + x.v / (12 * x.h * x.L))
    ),  # page 15
    8: lambda x: (
        72 * x.B * x.L * x.s * x.h**2 * (1 + x.s / (3 * x.h) + x.v / (12 * x.h * x.L))
    ),  # page 15
}

# Equation 8 as corrected by an author (NVIDIA/Megatron-LM issue 523): one more forward pass of the
# attention's two GEMMs adds 4BLs^2h, not 12BLs^2h.
CORRECTED: dict[int, Printed] = {
    8: lambda x: 72 * x.B * x.L * x.s * x.h**2 * (1 + 2 * x.s / (9 * x.h) + x.v / (12 * x.h * x.L)),
}

# Section 4.1, pages 4 and 5: bytes of each item.
ITEMS: dict[str, Printed] = {
    "qkv_input": lambda x: 2 * x.s * x.b * x.h,
    "query_and_key": lambda x: 4 * x.s * x.b * x.h,
    "softmax_output": lambda x: 2 * x.a * x.s**2 * x.b,
    "softmax_dropout_mask": lambda x: x.a * x.s**2 * x.b,
    "softmax_dropout_output": lambda x: 2 * x.a * x.s**2 * x.b,
    "value": lambda x: 2 * x.s * x.b * x.h,
    "proj_input": lambda x: 2 * x.s * x.b * x.h,
    "attention_dropout_mask": lambda x: x.s * x.b * x.h,
    "mlp_input": lambda x: 2 * x.s * x.b * x.h,
    "gelu_input": lambda x: 8 * x.s * x.b * x.h,
    "gelu_output": lambda x: 8 * x.s * x.b * x.h,
    "mlp_dropout_mask": lambda x: x.s * x.b * x.h,
}

# Other printed counts, by where they stand.
COUNTS: dict[str, Printed] = {
    # section 4.1, pages 4 and 5
    "attention": lambda x: 11 * x.s * x.b * x.h + 5 * x.a * x.s**2 * x.b,
    "mlp": lambda x: 19 * x.s * x.b * x.h,
    "norm": lambda x: 4 * x.s * x.b * x.h,
    # section 4.2.3, page 8
    "interleave": lambda x: 1 + (x.p - 1) / (x.p * x.m),
    # section 4.3, page 8
    "embedding": lambda x: x.s * x.b * x.h * x.p / x.t,
    "final_norm": lambda x: 2 * x.s * x.b * x.h / x.t,
    "projection": lambda x: 2 * x.s * x.b * x.h / x.t,
    "logits": lambda x: 4 * x.s * x.b * x.v / x.t,
    # section 5, page 8, and table 2
    "full": lambda x: 2 * x.s * x.b * x.h * x.L,
    "full_sharded": lambda x: 2 * x.s * x.b * x.h * x.L / x.t,
    # appendix A, page 15: forward FLOPs
    "qkv_flops": lambda x: 6 * x.B * x.s * x.h**2,
    "scores_flops": lambda x: 2 * x.B * x.s**2 * x.h,
    "context_flops": lambda x: 2 * x.B * x.s**2 * x.h,
    "proj_flops": lambda x: 2 * x.B * x.s * x.h**2,
    "mlp_flops": lambda x: 16 * x.B * x.s * x.h**2,
    "layer_flops": lambda x: 24 * x.B * x.s * x.h**2 + 4 * x.B * x.s**2 * x.h,
    "output_flops": lambda x: 2 * x.B * x.s * x.h * x.v,
    # appendix B, pages 15 and 16: bytes, of 2-byte elements
    "freed_outputs": lambda x: 2 * x.s * x.b * x.h * x.p,
}


def exact(letters: dict[str, int]) -> SimpleNamespace:
    """Letters as exact numbers, for the functions above.

    >>> EQUATIONS[1](exact({"s": 2048, "b": 1, "h": 12288, "a": 96})) / 2**20
    Fraction(2736, 1)
    """
    return SimpleNamespace(**{letter: Fraction(value) for letter, value in letters.items()})
