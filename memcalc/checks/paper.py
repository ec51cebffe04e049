"""The quantities in the claims of Korthikanti et al. 2022, and memcalc's own value of each.

A quantity is a function of a catalog name, or of nothing. It returns an exact number, a word, or
a formula.
"""

from collections.abc import Callable
from typing import Any

from memcalc.checks import formulas, numbers, onchip
from memcalc.checks.claims import Claim, Ours

QUANTITIES: dict[str, Callable[..., Any]] = {
    "comm": numbers.comm,
    "core_percent": numbers.core_percent,
    "core_ratio": numbers.core_ratio,
    "ends": formulas.ends,
    "ends_percent": numbers.ends_percent,
    "equation": formulas.equation,
    "faster": numbers.faster,
    "figure1": numbers.figure1,
    "figure9": numbers.figure9,
    "fivefold": numbers.fivefold,
    "flops": formulas.flop,
    "flops_gain": numbers.flops_gain,
    "flops_overhead": numbers.flops_overhead,
    "freed_outputs": formulas.freed_outputs,
    "full": formulas.full,
    "full_sharded": lambda: formulas.full("full_sharded"),
    "hfu": numbers.hfu,
    "hfu_printed": numbers.hfu_printed,
    "figure10": numbers.figure10,
    "figure8": numbers.figure8,
    "filled": numbers.filled,
    "interleave": formulas.interleave,
    "item": formulas.item,
    "layers_per_device": numbers.layers_per_device,
    "li2021": formulas.li2021_,
    "mfu": numbers.mfu,
    "mfu_2240": numbers.mfu_2240,
    "outstanding": formulas.outstanding,
    "over_full": numbers.over_full,
    "overhead": numbers.overhead,
    "overhead_printed": numbers.overhead_printed,
    "overhead_removed": numbers.overhead_removed,
    "parameters": numbers.billions,
    "part": formulas.part,
    "peak": numbers.peak_tflops,
    "percent": numbers.percent,
    "size": numbers.size,
    "table2": formulas.table2,
    "table4": numbers.table4,
    "throughput_gain": numbers.throughput_gain,
    **onchip.QUANTITIES,
}


def ours(claim: Claim) -> Ours:
    """memcalc's own value for a claim; None if it has none.

    Raises:
        KeyError: There is no such quantity.
    """
    if not claim.quantity:
        return None
    found: Ours = _quantity(claim.quantity, claim.model)
    return found


def _quantity(name: str, model: str) -> Any:
    """A quantity by its name: the first part is in the table, the rest is its argument."""
    kind, _, rest = name.partition("/")
    function = QUANTITIES[kind]
    return function(*([model] if model else []), *([rest] if rest else []))
