"""Hugging Face's own decoder layers, built from a model's config, on meta: nobody here wrote them.

Attention runs in a flash kernel's place where the implementation says sdpa: on meta PyTorch would
fall back to its math form, which keeps other tensors than CUDA's kernel.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from importlib import import_module
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from memcalc.blocks.layer import masked, usual_kind
from memcalc.config import Config, Model, Run
from memcalc.config.readers import huggingface
from memcalc.errors import MemcalcError, UsageError
from memcalc.validation.families import FAMILIES, described
from memcalc.validation.kernels import CudaKernels
from memcalc.validation.modules import TYPES


class NoAttentionError(UsageError):
    """A family has no such attention in transformers."""


class Remaining(NamedTuple):
    """What of a family's layer the exact ledger does not have.

    Attributes:
        bytes: How many bytes more the layer keeps; None where there is no such layer.
        cause: Why.
    """

    bytes: int | None
    cause: str


FP32_ALWAYS = "_keep_in_fp32_modules_strict"  # transformers' word for parameters in fp32

_INDICES = Remaining(16, "the two int64 indices by which it takes key and value off one product")

# Of the catalogue's families, under an implementation; all others' layers keep what the ledger has.
REMAINING: dict[tuple[str, str], Remaining] = {
    ("falcon", "transformers-eager"): _INDICES,
    ("falcon", "transformers-sdpa"): _INDICES,
    ("bloom", "transformers-sdpa"): Remaining(None, "its class supports eager attention alone"),
    ("gemma2", "transformers-sdpa"): Remaining(None, "sdpa has no soft cap of scores"),
    ("gpt_oss", "transformers-sdpa"): Remaining(None, "sdpa has no sinks"),
}

# What a layer does not depend on.
_BESIDE_LAYERS = (
    *("name", "source", "layers", "vocab_size", "max_seq_length", "embedding_norm", "final_norm"),
    *("token_types", "head_transform", "head_bias", "tied_embeddings", "embedding_dropout"),
    *("final_softcap", "mtp_layers", "window_layers", "moe_layers"),
    *("image_size", "patch_size", "image_channels", "classes"),
)


def family(config: Config) -> str:
    """The family whose layer a model has, or whose is the nearest.

    >>> from memcalc.config import load
    >>> family(load("22b")), family(load("llama-3-8b")), family(load("kimi-k2"))
    ('gpt2', 'llama', 'deepseek_v3')
    """
    found = {name: _differences(name, config) for name in FAMILIES}
    return min(found, key=lambda name: (len(_that_matter(found[name], config)), len(found[name])))


def require(config: Config) -> None:
    """Refuse a model of whose layer no family has one, or not under its implementation.

    Raises:
        UsageError: With what the nearest family's layers have.
        NoAttentionError: It has no such attention.
    """
    nearest = family(config)
    different = _that_matter(_differences(nearest, config), config)
    if different:
        ours = ", ".join(f"{name} {getattr(config.model, name)}" for name in different)
        theirs = ", ".join(f"{name} {value}" for name, value in different.items())
        raise UsageError(
            f"no Hugging Face layer here has {ours}, and the rest of {config.model.name}; the "
            f"nearest is {nearest}'s, of {theirs}"
        )
    if config.model.experts and config.run.precision != "bf16":
        raise UsageError("Hugging Face's layers of experts are validated in bf16, as grouped_mm is")
    name = config.run.implementation.name
    remaining = REMAINING.get((nearest, name))
    if remaining is not None and remaining.bytes is None:
        raise NoAttentionError(
            f"{nearest} has no {name} layer: {remaining.cause}; choose transformers-eager"
        )


def _differences(name: str, config: Config) -> dict[str, Any]:
    """What a family's layers have otherwise than a model, read back from its config.json."""
    model, kind = config.model, usual_kind(config)
    content = {"model_type": name, "num_hidden_layers": 1, **described(name, model, kind)}
    try:
        theirs = huggingface.read(content, model.name).model
    except MemcalcError:  # it cannot be said so
        return dict.fromkeys((each.name for each in fields(Model)), "other sizes")
    names = [each.name for each in fields(Model) if each.name not in _BESIDE_LAYERS]
    return {
        name: getattr(theirs, name)
        for name in names
        if getattr(theirs, name) != getattr(model, name)
    }


def _that_matter(different: dict[str, Any], config: Config) -> dict[str, Any]:
    """What differs, without what a fused kernel, or none, has nothing to do with."""
    flash = config.run.implementation.attention == "flash"
    beside = "softmax_fp32" if flash else "calls_attention"
    return {name: value for name, value in different.items() if name != beside}


class HuggingFaceLayer(nn.Module):
    """One decoder layer, x (b, s, h) -> (b, s, h); what the whole model gives it are buffers.

    Kept are as many bytes as each further layer of the whole model keeps: its layers share the
    tables of positions and the mask, and its output has no logits of the routers.

    Args:
        kind: The family, one of ``FAMILIES``.
        content: The layer's sizes, as the family's config.json names them.
        run: The sequence, the precision and the kernels.
        number: Which of the model's layers it is, counted from 0.
        masked: Whether the model gives it a mask under sdpa.
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
            if masked and not eager:  # of a byte a pair of tokens, and viewed for all sequences
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
    """The layer of a config's model, of the kind that it has most of."""
    of, kind = family(config), usual_kind(config)
    content = described(of, config.model, kind)
    return HuggingFaceLayer(of, content, config.run, masked=masked(config, kind))


def cuda_kernels(run: Run) -> AbstractContextManager[Any]:
    """What runs on CUDA in place of what meta would run."""
    if run.implementation.name.startswith("transformers-"):
        return CudaKernels(run.implementation.rng_bytes)
    return nullcontext()


def _configured(kind: str, content: Mapping[str, Any], attention: str, products: str) -> Any:
    from transformers import AutoConfig

    config = AutoConfig.for_model(kind, **content)
    config._attn_implementation = attention
    # what the loop over experts keeps depends on the routing, which meta does not know
    config._experts_implementation = f"{products}_mm"
    return config


def _typed(layer: nn.Module, modeling: Any, dtype: torch.dtype) -> nn.Module:
    """A layer's weights in a type, but for those that its family keeps in fp32, as routers' are."""
    models = [each for each in vars(modeling).values() if hasattr(each, FP32_ALWAYS)]
    wide = {name for each in models for name in getattr(each, FP32_ALWAYS) or ()}
    layer = layer.to(dtype)
    for path, parameter in layer.named_parameters():
        if any(path.endswith(name) for name in wide):
            parameter.data = parameter.data.float()
    return layer


def _build(layer: Any, config: Any, number: int) -> Any:
    """A layer of a class; some classes do not ask for its number."""
    return layer(config, number) if len(signature(layer).parameters) > 1 else layer(config)


def _positions(modeling: Any, config: Any, run: Run, number: int) -> dict[str, Tensor]:
    """The tables of positions, which the whole model makes once for all its layers.

    Cosines and sines (1, s, d) each, or as DeepSeek-V2 has them complex numbers, or ALiBi's
    slopes (b a, 1, s).
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
    """Whether layers of several kinds have their own positions (Gemma-3)."""
    return "layer_type" in signature(rotary.forward).parameters
