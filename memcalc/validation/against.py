"""Whose layer ``validate`` runs: a record per word of ``--against``."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from memcalc.config import IMPLEMENTATIONS, Config, Implementation
from memcalc.config.assumption import Assumption
from memcalc.errors import UsageError
from memcalc.frameworks import FRAMEWORKS
from memcalc.validation import match
from memcalc.validation.layers import dtensor, families, hugging_face, megatron
from memcalc.validation.layers.modules import Layer, Place, hidden_state, lacking
from memcalc.validation.measuring import cuda
from memcalc.validation.measuring.measure import Measured, measure

Names = Mapping[str, str]
Found = tuple[Measured, Names, Names]


class Against(NamedTuple):
    """A layer that ``validate`` runs.

    Attributes:
        devices: The devices on which it runs.
        own: Whether it is memcalc's own, whose modules have the names of the ledger's operations,
            and which is also stacked (for peaks and FLOPs) and timed.
        replicates_kv: Whether tensor-parallel ranks may hold replicated key-value heads.
        run_as: From a config to the same with an implementation of this layer, where none was
            named.
        lacking: What a config needs and the layer does not have, or an empty string.
        require: Refuses any other config, on a device.
        measured: What the layer saves on a rank; the module that does each operation of the
            ledger; and modules that have another name in the comparison.
        build: Makes the layer, where every rank draws its weights alike, so that gradients can be
            compared; else None.
        notes: Whose layer ran on a device, and which kernels were replaced by stand-ins.
    """

    devices: Collection[str]
    own: bool
    replicates_kv: bool
    run_as: Callable[[Config], Config]
    lacking: Callable[[Config], str]
    require: Callable[[Config, str], None]
    measured: Callable[[Config, Place], Found]
    build: Callable[[Config, Place], nn.Module] | None
    notes: Callable[[Config, str], tuple[str, ...]]


def whose(config: Config, against: str) -> tuple[Config, str]:
    """The config with the implementation of the layer that runs, and whose layer that is.

    Raises:
        UsageError: The implementation is another one's.
    """
    if AGAINST[against].own:
        against = config.run.implementation.maker.layers
    return AGAINST[against].run_as(config), against


def _as_it_is(config: Config) -> Config:
    return config


def _assumed(config: Config) -> bool:
    return any(each.setting == "implementation" for each in config.assumed)


def _with(config: Config, kernels: Implementation) -> Config:
    """The config with an implementation that is assumed."""
    others = (each for each in config.assumed if each.setting != "implementation")
    assumed = (*others, Assumption("implementation", kernels.name))
    return replace(config, run=replace(config.run, implementation=kernels), assumed=assumed)


# --- memcalc's own -------------------------------------------------------------------------------


def _own(config: Config, place: Place) -> Found:
    layer, x = Layer(config, place), hidden_state(config, place)
    allocated = None
    if place.device == "cuda":
        layer(x).sum().backward()  # libraries allocate their workspaces on first use
        layer.zero_grad()
        x.grad = None
        cuda.settle()
        allocated = torch.cuda.memory_allocated
    return measure(layer, x, allocated=allocated), match.OPERATIONS, match.NO_NAMES


def _require_own(config: Config, device: str) -> None:
    model, kernels = config.model, config.run.implementation
    grouped = model.kv_heads != model.heads
    if grouped and kernels.attention == "unfused" and not kernels.repeats_kv:
        raise UsageError(
            f"no PyTorch layer runs GQA with unfused attention as --implementation {kernels.name} "
            "counts it; choose --implementation megatron-local"
        )


def _stand_ins(config: Config, device: str) -> tuple[str, ...]:
    """Which fused kernels are replaced by functions that save the same tensors."""
    model, kernels = config.model, config.run.implementation
    flash = kernels.attention == "flash"
    fused = {
        "flash attention": flash and (device == "meta" or _math_on_cpu(config, device)),
        "RMSNorm": model.norm == "rmsnorm" and device != "cuda",
        "the gated activation": model.gated and kernels.fused_gate,
        "rotary positions": model.position == "rotary",
    }
    names = ", ".join(name for name, used in fused.items() if used)
    if not names:
        return ()
    return (f"stand-ins that save the same tensors replace these fused kernels: {names}",)


def _math_on_cpu(config: Config, device: str) -> bool:
    """Whether PyTorch would fall back to unfused attention: the CPU's kernel has no dropout."""
    return device == "cpu" and config.model.attention_dropout > 0


# --- Megatron-core's -----------------------------------------------------------------------------


def _megatron(config: Config, place: Place) -> Found:
    x = hidden_state(config, place)
    with megatron.groups(place):
        measured = measure(megatron.MegatronLayer(config, place), x)
    return measured, megatron.OPERATIONS, megatron.MODULES


def _require_megatron(config: Config, device: str) -> None:
    megatron.require(config)
    _require_own(config, device)


def _megatron_notes(config: Config, device: str) -> tuple[str, ...]:
    return (
        "layer: Megatron-core's TransformerLayer (local spec); stand-ins replace its norms and "
        "CUDA's dropout",
    )


# --- plain PyTorch -------------------------------------------------------------------------------


def _as_torch(config: Config) -> Config:
    """Where no implementation was named, or its layer cannot be built today, PyTorch's own."""
    kernels = config.run.implementation
    if kernels.maker.built and not _assumed(config):
        return config
    return _with(config, replace(IMPLEMENTATIONS["torch"], attention=kernels.attention))


def _torch(config: Config, place: Place) -> Found:
    measured = measure(dtensor.TorchLayer(config, place), hidden_state(config, place))
    return measured, dtensor.OPERATIONS, dtensor.MODULES


def _require_torch(config: Config, device: str) -> None:
    dtensor.require(config)


def _torch_notes(config: Config, device: str) -> tuple[str, ...]:
    t = config.parallel.tp
    return (
        f"layer: plain PyTorch modules sharded by DTensor over {t} tensor-parallel ranks; a "
        "stand-in replaces CUDA's dropout",
        *_stand_ins(config, device),
    )


# --- Hugging Face's ------------------------------------------------------------------------------


def _as_transformers(config: Config) -> Config:
    """Where no implementation was named, that of Hugging Face's with the same attention."""
    kernels = config.run.implementation
    if kernels.maker.whole_models:
        return config
    if not _assumed(config):
        raise UsageError(
            "--against transformers needs --implementation transformers-eager or "
            f"transformers-sdpa, not {kernels.name}"
        )
    name = FRAMEWORKS["transformers"].attentions[kernels.attention]
    return _with(config, IMPLEMENTATIONS[name])


def _transformers(config: Config, place: Place) -> Found:
    x = hidden_state(config, place).transpose(0, 1).contiguous()
    names = families.parts(hugging_face.family(config))
    return measure(hugging_face.layer_of(config), x), names, names


def _lacks_nothing(config: Config) -> str:
    return ""  # hugging_face.require compares the whole model


def _require_transformers(config: Config, device: str) -> None:
    hugging_face.require(config)
    parallel = config.parallel
    if device != "meta" or parallel.tp * parallel.cp > 1 or config.run.policy.regions:
        raise UsageError(
            "--against transformers needs --device meta, --tp 1, --cp 1 and --recompute none"
        )


def _transformers_notes(config: Config, device: str) -> tuple[str, ...]:
    built = families.FAMILIES[hugging_face.family(config)].layer
    return (
        f"layer: transformers' {built}; stand-ins replace CUDA's dropout and attention kernels",
    )


AGAINST = {
    "own": Against(
        devices=("meta", "cpu", "cuda"),
        own=True,
        replicates_kv=True,
        run_as=_as_it_is,
        lacking=lacking,
        require=_require_own,
        measured=_own,
        build=Layer,
        notes=_stand_ins,
    ),
    "megatron": Against(
        devices=("meta", "cpu"),
        own=False,
        replicates_kv=True,
        run_as=_as_it_is,
        lacking=lacking,
        require=_require_megatron,
        measured=_megatron,
        build=None,
        notes=_megatron_notes,
    ),
    "torch": Against(
        devices=("meta", "cpu"),
        own=False,
        replicates_kv=False,
        run_as=_as_torch,
        lacking=lacking,
        require=_require_torch,
        measured=_torch,
        build=dtensor.TorchLayer,
        notes=_torch_notes,
    ),
    "transformers": Against(
        devices=("meta",),
        own=False,
        replicates_kv=True,
        run_as=_as_transformers,
        lacking=_lacks_nothing,
        require=_require_transformers,
        measured=_transformers,
        build=None,
        notes=_transformers_notes,
    ),
}
