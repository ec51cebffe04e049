"""Which kernels run: the implementation that settings name, and what it chooses on a GPU."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from memcalc.config import fields
from memcalc.config.environment import Environment
from memcalc.config.gpus import gpu
from memcalc.config.implementation import IMPLEMENTATIONS, Implementation
from memcalc.errors import ConfigError


def chosen(said: Mapping[str, Any]) -> Implementation:
    """The implementation that settings name, with the kernels that they replace.

    Raises:
        ConfigError: The implementation is unknown, or does not have the attention.
    """
    name = said.get("implementation", "megatron")
    if isinstance(name, Implementation):
        kernels = name
    else:
        fields.word("implementation", name, IMPLEMENTATIONS)
        kernels = IMPLEMENTATIONS[name]
    if said.get("attention") not in (None, kernels.attention):
        if others := kernels.maker.attentions:
            raise ConfigError(
                f"--implementation {kernels.name} has {kernels.attention} attention: for "
                f"{said['attention']} attention use --implementation {others[said['attention']]}"
            )
        source = f"otherwise {kernels.source}"
        kernels = replace(kernels, attention=said["attention"], source=source)
    given = ("expert_products", "cross_entropy", "batch_first", "softmax_fp32", "fused_gate")
    own = {name: said[name] for name in (*given, "gathers_tokens") if name in said}
    if "batch_first" in own:
        return replace(kernels, **own, kernel_by_gpu=False)
    first = batch_first(kernels, said.get("gpu"), said.get("environment", Environment()))
    return replace(kernels, **own, batch_first=first)


def batch_first(kernels: Implementation, name: str | None, environment: Environment) -> bool:
    """Whether Transformer Engine on a GPU runs FlashAttention by default, not cuDNN's kernel.

    It does before Hopper, and on Blackwell in deterministic mode (Transformer Engine,
    dot_product_attention/utils.py: get_attention_backend).
    """
    if name is None or not kernels.kernel_by_gpu or not kernels.fused_attention:
        return kernels.batch_first
    capability = gpu(name).capability
    if capability is None:
        return kernels.batch_first
    return capability < 90 or (capability >= 100 and environment.deterministic)
