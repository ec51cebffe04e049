"""``formula --paper li2021``: the tables of the other sequence parallelism, and where it pays."""

from typing import Any

import sympy

from memcalc.formulas import Plain
from memcalc.li2021 import ATTENTION, MLP, B, H, L, N
from memcalc.report import Column, Report


def li2021() -> Report:
    """Tables 1 and 2 of Li et al. 2021 beside tensor parallelism's, with the break-even, derived.

    >>> print(li2021().records()[-1]["formula"])
    16*A*Z
    """
    rows: list[tuple[str, Any]] = []
    for block in (MLP, ATTENTION):
        saved = sympy.Mul(H * (N - 1) / N, B * L - block.break_even, evaluate=False)
        assert sympy.expand(block.tensor - block.sequence - saved) == 0
        rows += [
            (f"{block.name}, tensor parallelism", Plain(block.tensor)),
            (f"{block.name}, sequence parallelism", Plain(block.sequence)),
            (f"{block.name}, the first less the second", Plain(saved)),
            (f"{block.name}, sequence parallelism needs less where B*L >", Plain(block.break_even)),
        ]
    return Report(
        "formula",
        "Elements on a device, by Li et al. 2021 (tables 1 and 2)",
        (Column("step", "text"), Column("formula", "formula")),
        tuple(rows),
        {},
        (
            "elements, not bytes: parameters, gradients and Adam's two moments, and of the "
            "activations each operation's output once; not comparable with memcalc's bytes",
            "letters: B batch, L sequence length, H hidden size, A head size, Z heads, N devices",
            "here sequence parallelism splits everything along the sequence, and parameters are "
            "whole on every device (today's context parallelism without sharded states)",
        ),
    )
