"""The frameworks, a file for each: the only place that knows a framework by its name."""

from memcalc.frameworks import deepspeed, megatron, nanotron, torch, transformers
from memcalc.frameworks.record import Framework, Sharder

FRAMEWORKS: dict[str, Framework] = {
    "megatron": megatron.MEGATRON,
    "megatron-2022": megatron.MEGATRON_2022,
    "torch": torch.TORCH,
    "transformers": transformers.TRANSFORMERS,
    "deepspeed": deepspeed.DEEPSPEED,
    "nanotron": nanotron.NANOTRON,
}

SHARDERS: dict[str, Sharder] = {
    "megatron": megatron.SHARDER,
    "megatron-fsdp": megatron.MEGATRON_FSDP,
    "deepspeed": deepspeed.ZERO,
    "fsdp2": torch.FSDP2,
    "nanotron": nanotron.ZERO,
}


def of_step(layers: str, sharder: str) -> Framework:
    """The framework that runs the step: the layers' own, or the sharder's.

    >>> of_step("megatron", "megatron").title, of_step("megatron", "deepspeed").title
    ('Megatron-LM', 'DeepSpeed')
    """
    own = FRAMEWORKS[layers]
    return own if sharder in own.steps_with else FRAMEWORKS[SHARDERS[sharder].framework]
