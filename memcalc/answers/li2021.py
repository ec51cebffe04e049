"""``formula --paper li2021``: the sequence parallelism of Li et al. 2021, and where it pays."""

from typing import Any

import sympy

from memcalc.answers.formula import COLUMNS
from memcalc.formulas import Plain
from memcalc.li2021 import ATTENTION, MLP, B, H, L, N
from memcalc.report import Report


def li2021() -> Report:
    """Tables 1 and 2 of Li et al. 2021 with the derived break-even between the two parallelisms.

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
            (f"{block.name}, tensor minus sequence parallelism", Plain(saved)),
            (f"{block.name}, sequence parallelism needs less where B*L >", Plain(block.break_even)),
        ]
    return Report(
        "formula",
        "Elements per device, by Li et al. 2021 (tables 1 and 2)",
        COLUMNS,
        tuple(rows),
        {},
        (
            "elements, not bytes: parameters, gradients, Adam's two moments and each operation's "
            "output once; not comparable with memcalc's bytes",
            "letters: B batch, L sequence length, H hidden size, A head size, Z heads, N devices",
            "sequence parallelism here shards all activations along the sequence and replicates "
            "parameters on every device (today's context parallelism without sharded states)",
        ),
        answer="sequence parallelism needs less memory than tensor parallelism where "
        f"B*L > {Plain(MLP.break_even)} (MLP) and B*L > {Plain(ATTENTION.break_even)} (attention)",
    )
