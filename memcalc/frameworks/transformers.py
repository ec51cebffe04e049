"""Hugging Face transformers: its layers, in a step that PyTorch runs."""

from memcalc.frameworks.torch import TORCH

TRANSFORMERS = TORCH._replace(
    title="Hugging Face",
    clamps_fp16=True,
    whole_models=True,
    layers="transformers",
    dtensor=False,
    attentions={"unfused": "transformers-eager", "flash": "transformers-sdpa"},
    sharded_as="torch",
)
