"""Which kernels run: the implementation that settings name, and what it chooses on a GPU."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from memcalc.config import fields
from memcalc.config.environment import Environment
from memcalc.config.families import FAMILIES
from memcalc.config.gpus import gpu
from memcalc.config.implementation import CROSS_ENTROPIES, IMPLEMENTATIONS, Implementation
from memcalc.errors import ConfigError
from memcalc.frameworks import FRAMEWORKS

GIVEN = (
    *("expert_products", "cross_entropy", "holds_logits", "batch_first", "softmax_fp32"),
    *("fused_gate", "gathers_tokens"),
)


def chosen(said: Mapping[str, Any], family: str | None = None) -> Implementation:
    """The implementation that settings name, with the kernels that they replace.

    Args:
        said: The settings.
        family: The model's, whose class in transformers may have a loss of its own.

    Raises:
        ConfigError: The implementation is unknown, or does not have the attention.
    """
    framework = said.get("framework", "megatron")
    fields.word("framework", framework, FRAMEWORKS)
    name = said.get("implementation", FRAMEWORKS[framework].kernels)
    if isinstance(name, Implementation):
        kernels = name
    else:
        fields.word("implementation", name, IMPLEMENTATIONS)
        kernels = _with_loss(IMPLEMENTATIONS[name], family, said)
    if said.get("attention") not in (None, kernels.attention):
        if others := kernels.maker.attentions:
            raise ConfigError(
                f"--implementation {kernels.name} has {kernels.attention} attention: for "
                f"{said['attention']} attention use --implementation {others[said['attention']]}"
            )
        source = f"otherwise {kernels.source}"
        kernels = replace(kernels, attention=said["attention"], source=source)
    own = {name: said[name] for name in GIVEN if name in said}
    if "batch_first" in own:
        return replace(kernels, **own, kernel_by_gpu=False)
    first = batch_first(kernels, said.get("gpu"), said.get("environment", Environment()))
    return replace(kernels, **own, batch_first=first)


def _with_loss(
    kernels: Implementation, family: str | None, said: Mapping[str, Any]
) -> Implementation:
    """The loss of the family's class in transformers; no logits held where its loop drops them.

    Modules that DTensor shards have its parallel loss, as torchtitan's have.
    """
    if kernels.maker.whole_models and family in FAMILIES:
        kernels = replace(kernels, cross_entropy=FAMILIES[family].cross_entropy)
    elif kernels.maker.dtensor and said.get("tp", 1) != 1:
        kernels = replace(kernels, cross_entropy="loss-parallel")
    loss = CROSS_ENTROPIES.get(str(said.get("cross_entropy", kernels.cross_entropy)))
    kept = loss is None or (loss.makes_logits and not loss.dropped)
    return replace(kernels, holds_logits=kernels.holds_logits and kept)


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
