"""Korthikanti et al. 2022 (arXiv 2205.05198), as printed: an oracle that knows no engine.

Only the letters are shared with the rest of memcalc. Bytes, for 2-byte activations and 1-byte
dropout masks.
"""

from memcalc.symbols import symbol

s, b, h, a, L, t = (symbol(letter) for letter in "sbhaLt")

# Table 2, page 9: bytes of activations per transformer layer.
TABLE_2 = {
    "none": s * b * h * (34 + 5 * a * s / h),
    "tensor": s * b * h * (10 + 24 / t + 5 * a * s / (h * t)),
    "tensor+sequence": s * b * h * (34 / t + 5 * a * s / (h * t)),
    "tensor+selective": s * b * h * (10 + 24 / t),
    "tensor+sequence+selective": s * b * h * (34 / t),
    "full": s * b * h * 2,
}

# The numbered equations that count one layer (1, 2, 4) or all of the first stage's (6).
EQUATIONS = {
    1: s * b * h * (34 + 5 * a * s / h),  # page 5
    2: s * b * h * (10 + 24 / t + 5 * a * s / (h * t)),  # page 5
    4: (s * b * h / t) * (34 + 5 * a * s / h),  # page 7
    6: 34 * s * b * h * L / t,  # page 9
}
