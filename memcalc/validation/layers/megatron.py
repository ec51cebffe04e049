"""Megatron-core's own GPT layer (local spec), on meta or on the CPU.

Megatron-core takes its device and its random numbers from CUDA. While the layer is built and runs,
stand-ins replace both. Its norm for sequence parallelism comes from Apex or Transformer Engine,
which need CUDA; PyTorch's norm replaces it.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from memcalc.config import Config, Model
from memcalc.config.recompute import POLICIES
from memcalc.errors import UsageError
from memcalc.validation.layers.modules import Place
from memcalc.validation.measuring import kernels
from memcalc.validation.measuring.kernels import CudaKernels

# The module of Megatron-core that does each operation of the ledger.
OPERATIONS = {
    "input_norm": "input_layernorm",
    "attention_enter": "linear_qkv",
    "qkv": "linear_qkv",
    **dict.fromkeys(("scores", "repeat_key", "repeat_value", "context"), "core_attention"),
    **dict.fromkeys(("scale", "mask", "softmax", "probabilities"), "scale_mask_softmax"),
    "softmax_dropout": "attention_dropout",
    "proj": "linear_proj",
    **dict.fromkeys(("attention_dropout", "attention_residual", "mlp_dropout"), "layer"),
    "mlp_norm": "pre_mlp_layernorm",
    **dict.fromkeys(("mlp_enter", "fc1", "gelu", "silu", "swiglu", "geglu"), "mlp"),
}

# Modules of Megatron-core that are compared under another module's name.
MODULES = {"linear_fc1": "mlp", "self_attention": "linear_qkv"}


class MegatronLayer(nn.Module):
    """One layer, x (s, b, h) or (s/t, b, h) -> the same, with the causal mask as a buffer."""

    def __init__(self, config: Config, place: Place) -> None:
        super().__init__()
        with off_cuda(config, place):
            self.layer = _build(config, place)
        s = config.run.seq_length
        later = torch.ones(1, 1, s, s, dtype=torch.bool, device=place.device).triu(1)
        self.register_buffer("later", later)
        self.surroundings = off_cuda, config, place

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        parallel_state, _ = _core()
        enter, config, place = self.surroundings
        with enter(config, place), CudaKernels(0), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about CUDA's settings for overlap
            out: Tensor = self.layer(x, attention_mask=self.later)[0]
            # its buffer for scores exists once per model, so it is not part of a layer
            parallel_state.destroy_global_memory_buffer()
            parallel_state._set_global_memory_buffer()
        return out


def _core() -> tuple[Any, Any]:
    """Megatron-core's parallel state and random numbers.

    Its imports warn that Apex and Transformer Engine are missing, and building a layer warns of
    deprecated options. A user cannot change either, so the warnings are hidden.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import random
    return parallel_state, random


@contextmanager
def off_cuda(config: Config, place: Place) -> Iterator[None]:
    """What Megatron-core needs without CUDA: process groups, a device and random numbers."""
    parallel_state, random = _core()
    replaced = [
        (torch.cuda, "current_device", lambda: torch.device(place.device)),
        (random, "_CUDA_RNG_STATE_TRACKER", _Tracker()),
        (random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", True),
        (random, "_get_cuda_rng_state", lambda *a, **k: torch.empty(0)),
        (random, "_set_cuda_rng_state", lambda *a, **k: None),
        # the tokens of experts are counted on a separate stream
        (torch.cuda, "Stream", _Stream),
        (torch.cuda, "current_stream", lambda *a: _Stream()),
        (torch.cuda, "stream", lambda *a: nullcontext()),
        (Tensor, "record_stream", lambda *a: None),
    ]
    old = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    for owner, name, value in replaced:
        setattr(owner, name, value)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=place.t, create_gloo_process_groups=False
        )
    try:
        yield
    finally:
        for owner, name, value in old:
            setattr(owner, name, value)


@contextmanager
def groups(place: Place) -> Iterator[None]:
    """Megatron-core's process groups, which even a single rank needs."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    parallel_state, _ = _core()
    alone = not dist.is_initialized()
    if alone:
        dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_global_memory_buffer()
        if alone:
            dist.destroy_process_group()


def require(config: Config) -> None:
    """Refuse what Megatron-core's local layer is not validated with.

    Raises:
        UsageError: With what to choose instead.
    """
    implementation, model = config.run.implementation, config.model
    local = implementation.maker.local_spec and not implementation.transformer_engine
    if not local or implementation.attention == "flash":
        raise UsageError(
            "--against megatron needs --implementation paper or megatron-local, and --attention "
            "unfused"
        )
    if not model.causal:
        raise UsageError("--against megatron needs a causal model")
    if model.position == "rotary":
        raise UsageError("--against megatron needs a model without rotary positions")
    if config.run.policy not in (POLICIES["none"], POLICIES["selective"]):
        raise UsageError("--against megatron needs --recompute none or selective")


class _Tracker:
    """Megatron-core's tracker of random-number states, without any state."""

    def fork(self, *arguments: Any, **keywords: Any) -> Any:
        """A context that does nothing."""
        return nullcontext()

    def is_initialized(self) -> bool:
        """Always true, since there is nothing to initialize."""
        return True

    def get_states(self) -> dict[str, Any]:
        """No states."""
        return {}

    def set_states(self, states: dict[str, Any]) -> None:
        """Do nothing."""


class _Stream:
    """A stand-in for a CUDA stream; its work is always done."""

    def wait_stream(self, *streams: Any) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""

    def record_event(self, *events: Any) -> "_Stream":
        """An event that has already happened: the stream itself."""
        return self


class _LayerNorm(nn.LayerNorm):
    """PyTorch's LayerNorm, with the arguments of Megatron-core's."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        device = torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)


class _RmsNorm(nn.Module):
    """A fused RMSNorm, with the arguments of Megatron-core's."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=device)
        )

    def forward(self, x: Tensor) -> Tensor:
        """x (s, b, h) -> (s, b, h)."""
        out: Tensor = kernels.RmsNorm.apply(x, self.weight, 1e-5)
        return out


def _mixture(model: Model) -> dict[str, Any]:
    """The options of a dropless MoE layer with one GEMM per expert."""
    if model.experts is None:
        return {}
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):  # part of Transformer Engine
        moe_utils.te_general_gemm = None
    return {
        "num_moe_experts": model.experts.number,
        "moe_router_topk": model.experts.top_k,
        "moe_ffn_hidden_size": model.experts.ffn_size,
        "moe_shared_expert_intermediate_size": model.experts.shared_ffn_size,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
    }


def _build(config: Config, place: Place) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as above
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer.spec_utils import build_module
        from megatron.core.transformer.transformer_config import TransformerConfig

        model, run = config.model, config.run
        act = torch.nn.functional.silu if model.activation in ("silu", "swiglu") else None
        described = TransformerConfig(
            num_layers=1,
            hidden_size=model.hidden_size,
            num_attention_heads=model.heads,
            num_query_groups=model.kv_heads,
            kv_channels=model.head_size,
            ffn_hidden_size=model.ffn_size,
            gated_linear_unit=model.gated,
            bias_activation_fusion=model.gated and run.implementation.fused_gate,
            add_bias_linear=model.mlp_bias and not model.gated,
            **({"activation_func": act} if act else {}),
            tensor_model_parallel_size=place.t,
            sequence_parallel=place.sp and place.t > 1,
            params_dtype=place.dtype,
            pipeline_dtype=place.dtype,
            bf16=place.dtype == torch.bfloat16,
            fp16=place.dtype == torch.float16,
            hidden_dropout=model.hidden_dropout,
            attention_dropout=model.attention_dropout,
            attention_softmax_in_fp32=False,
            apply_query_key_layer_scaling=False,
            masked_softmax_fusion=False,
            bias_dropout_fusion=False,
            perform_initialization=False,
            recompute_granularity="selective" if run.policy.regions else None,
            **_mixture(model),
        )
        spec = get_gpt_layer_local_spec(num_experts=model.experts.number if model.experts else None)
        norm = _LayerNorm if model.norm == "layernorm" else _RmsNorm
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = norm
        with torch.device(place.device):
            layer: nn.Module = build_module(spec, config=described, layer_number=1)
    return layer.train()
