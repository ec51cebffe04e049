"""Hugging Face's own decoder layers, built on meta from a model's config.

Under sdpa a stand-in replaces the flash kernel: on meta PyTorch would run unfused attention, which
saves other tensors than CUDA's kernel.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from memcalc.blocks.layer import masked, usual_kind
from memcalc.config import Config, Run
from memcalc.config import families as records
from memcalc.config.families.record import Remaining
from memcalc.config.model import FACTS
from memcalc.config.readers import huggingface
from memcalc.errors import MemcalcError, UsageError
from memcalc.validation.layers.families import FAMILIES, as_config
from memcalc.validation.layers.modules import TYPES
from memcalc.validation.measuring.kernels import CudaKernels

FP32_ALWAYS = "_keep_in_fp32_modules_strict"  # transformers' name for parameters that stay fp32

# By family and implementation; all other layers of the catalog's families equal the ledger.
REMAINING: dict[tuple[str, str], Remaining] = {
    (name, implementation): remaining
    for name, each in FAMILIES.items()
    for implementation, remaining in each.remaining.items()
}

# Attributes of a model that do not change its layers.
_BESIDE_LAYERS = (
    *("name", "source", "family", "layers", "vocab_size", "max_seq_length"),
    *("embedding_norm", "final_norm"),
    *("token_types", "head_transform", "head_bias", "tied_embeddings", "embedding_dropout"),
    *("final_softcap", "mtp_layers", "window_layers", "moe_layers"),
    *("image_size", "patch_size", "image_channels", "classes"),
)


def family(config: Config) -> str:
    """The family whose layer a model has: that which it names, or the nearest one.

    >>> from memcalc.config import load
    >>> family(load("22b")), family(load("llama-3-8b")), family(load("kimi-k2"))
    ('gpt2', 'llama', 'deepseek_v3')
    """
    known = config.model.family or ""
    if known in records.FAMILIES:
        known = records.FAMILIES[known].built_as or known
    if known in FAMILIES:
        return known
    found = {name: _differences(name, config) for name in FAMILIES}
    return min(found, key=lambda name: (len(_that_matter(found[name], config)), len(found[name])))


def nearest(config: Config) -> tuple[str, dict[str, Any]]:
    """The nearest family, and what its layer has that differs from the model's."""
    name = family(config)
    return name, _that_matter(_differences(name, config), config)


def require(config: Config) -> None:
    """Refuse a model if no family has its layer, or the nearest family lacks its attention.

    Raises:
        UsageError: With the nearest family's layer.
        NoLayerError: The family does not have this attention.
    """
    closest, different = nearest(config)
    if different:
        ours = ", ".join(f"{name} {config.model.facts()[name]}" for name in different)
        theirs = ", ".join(f"{name} {value}" for name, value in different.items())
        raise UsageError(
            f"no known Hugging Face layer matches {config.model.name}, which has {ours}; the "
            f"nearest, {closest}'s, has {theirs}"
        )
    if config.model.experts and config.run.precision != "bf16":
        raise UsageError(
            "MoE layers of Hugging Face need --precision bf16, as PyTorch's grouped_mm does"
        )
    records.require_layer(closest, config.run.implementation.name)


def _differences(name: str, config: Config) -> dict[str, Any]:
    """How a family's layers differ from a model, read back from its config.json."""
    model, kind = config.model, usual_kind(config)
    content = {"model_type": name, "num_hidden_layers": 1, **as_config(name, model, kind)}
    try:
        read = huggingface.read(content, model.name).model
    except MemcalcError:  # its config.json cannot describe this model
        return dict.fromkeys(FACTS, "other sizes")
    assert read is not None
    ours, theirs = model.facts(), read.facts()
    return {
        name: theirs[name]
        for name in FACTS
        if name not in _BESIDE_LAYERS and theirs[name] != ours[name]
    }


def _that_matter(different: dict[str, Any], config: Config) -> dict[str, Any]:
    """The differences that have an effect with fused, or with unfused, attention."""
    flash = config.run.implementation.attention == "flash"
    beside = "softmax_fp32" if flash else "calls_attention"
    return {name: value for name, value in different.items() if name != beside}


class HuggingFaceLayer(nn.Module):
    """One decoder layer, x (b, s, h) -> (b, s, h); what the whole model passes to it are buffers.

    It saves as many bytes as each further layer of the whole model: the layers share the tables of
    positions and the mask, and router logits are not an output.

    Args:
        kind: The family, one of ``FAMILIES``.
        content: The layer's sizes, with the names of the family's config.json.
        run: The sequence length, the precision and the kernels.
        number: The layer's number in the model, from 0.
        masked: Whether the model passes it a mask under sdpa.
    """

    def __init__(
        self,
        kind: str,
        content: Mapping[str, Any],
        run: Run,
        number: int = 0,
        masked: bool = False,
    ) -> None:
        super().__init__()
        eager = run.implementation.attention == "unfused"
        dtype, s = TYPES[run.precision], run.seq_length
        products = run.implementation.expert_products
        config = _configured(kind, content, "eager" if eager else "sdpa", products)
        modeling = import_module(type(config).__module__.replace("configuration_", "modeling_"))
        with torch.device("meta"):
            self.layer = _build(getattr(modeling, FAMILIES[kind].layer), config, number)
            self.layer = _typed(self.layer, modeling, dtype).train()
            tables = {"later": torch.zeros(1, 1, s, s, dtype=dtype)} if eager else {}
            if masked and not eager:  # a byte per pair of tokens, expanded over all sequences
                tables["later"] = torch.zeros(1, 1, s, s, dtype=torch.bool)
            tables |= _positions(modeling, config, run, number)
            for name, table in tables.items():
                self.register_buffer(name, table)
        self.takes = signature(self.layer.forward).parameters
        self.kernels = cuda_kernels(run)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        shared = dict(self.named_buffers(recurse=False))
        later = shared.get("later")
        mask = None if later is None else later.expand(len(x), -1, -1, -1)
        given: dict[str, Any] = {"attention_mask": mask}
        if "alibi" in self.takes:
            given["alibi"] = shared.get("alibi")
        if "cos" in shared:
            given["position_embeddings"] = (shared["cos"], shared["sin"])
        if "turns" in shared:
            given["position_embeddings"] = shared["turns"]
        with self.kernels:
            out = self.layer(x, **given)
        first: Tensor = out[0] if isinstance(out, tuple) else out
        return first


def layer_of(config: Config) -> HuggingFaceLayer:
    """The layer of a config's model, of its most frequent kind."""
    of, kind = family(config), usual_kind(config)
    content = as_config(of, config.model, kind)
    return HuggingFaceLayer(of, content, config.run, masked=masked(config, kind))


def cuda_kernels(run: Run) -> AbstractContextManager[Any]:
    """The stand-ins for CUDA's kernels, if the implementation is Hugging Face's."""
    if run.implementation.maker.whole_models:
        return CudaKernels(run.implementation.rng_bytes)
    return nullcontext()


def _configured(kind: str, content: Mapping[str, Any], attention: str, products: str) -> Any:
    from transformers import AutoConfig

    config = AutoConfig.for_model(kind, **content)
    config._attn_implementation = attention
    # what transformers' loop over experts saves depends on the routing, which meta does not know
    config._experts_implementation = f"{products}_mm"
    return config


def _typed(layer: nn.Module, modeling: Any, dtype: torch.dtype) -> nn.Module:
    """A layer with its weights in a dtype, except those that stay fp32, such as routers'."""
    models = [each for each in vars(modeling).values() if hasattr(each, FP32_ALWAYS)]
    wide = {name for each in models for name in getattr(each, FP32_ALWAYS) or ()}
    layer = layer.to(dtype)
    for path, parameter in layer.named_parameters():
        if any(path.endswith(name) for name in wide):
            parameter.data = parameter.data.float()
    return layer


def _build(layer: Any, config: Any, number: int) -> Any:
    """A layer of a class; some classes do not take its number."""
    return layer(config, number) if len(signature(layer).parameters) > 1 else layer(config)


def _positions(modeling: Any, config: Any, run: Run, number: int) -> dict[str, Tensor]:
    """The tables of positions, which the model makes once for all layers.

    They are cosines and sines (1, s, d), complex numbers (DeepSeek-V2) or ALiBi slopes (b a, 1, s).
    """
    dtype, s = TYPES[run.precision], run.seq_length
    if getattr(config, "alibi", config.model_type == "bloom"):
        heads = config.num_attention_heads
        return {"alibi": torch.zeros(run.micro_batch_size * heads, 1, s, dtype=dtype)}
    rotary = [each for name, each in vars(modeling).items() if name.endswith("RotaryEmbedding")]
    if not rotary:
        return {}
    made = rotary[0](config)
    kind = {"layer_type": config.layer_types[number]} if _of_kinds(made) else {}
    x, places = torch.zeros(1, s, 1, dtype=dtype), torch.arange(s).unsqueeze(0)
    tables = made(x, places, **kind)
    if isinstance(tables, Tensor):
        return {"turns": tables}
    return dict(zip(("cos", "sin"), tables, strict=True))


def _of_kinds(rotary: nn.Module) -> bool:
    """Whether kinds of layers have different positions (Gemma-3)."""
    return "layer_type" in signature(rotary.forward).parameters
