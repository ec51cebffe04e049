"""nanotron: its ZeRO; what else its step holds was never measured, and is not counted."""

from memcalc.frameworks.megatron import SHARDER
from memcalc.frameworks.torch import TORCH

NANOTRON = TORCH._replace(
    title="nanotron",
    steps_with=("nanotron",),
    optimizer_step="fused",  # torch_adam_is_fused
    gradients_in_backward=False,
)

ZERO = SHARDER._replace(
    summary="nanotron's ZeRO, over data-parallel ranks only",
    framework="nanotron",
    source="nanotron optim/zero.py, optim/gradient_accumulator.py",
    default_for=(),
    over_context=False,
    known_order=False,
)
