"""A layer under PyTorch's tensor parallelism: plain modules, which ``parallelize_module`` shards.

The modules are written for one rank; DTensor shards, gathers and reduces. The layout is (s, b, h),
so sequence parallelism shards the first axis.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name

from memcalc.config import Config
from memcalc.errors import UsageError
from memcalc.validation.layers.modules import FlashCore, OpModule, Place, UnfusedCore, region
from memcalc.validation.measuring import kernels

# Operations of the ledger, and modules, that have another module's name in the comparison.
OPERATIONS = {
    "attention_enter": "attention",
    "attention_residual": ".",
    "mlp_enter": "mlp",
    **dict.fromkeys(("gelu", "silu"), "activation"),
    **dict.fromkeys(("geglu", "swiglu"), "product"),
}
MODULES = {
    **dict.fromkeys(("query", "key", "value"), "qkv"),
    **dict.fromkeys(("gate", "up"), "fc1"),
}


def require(config: Config) -> None:
    """Refuse what PyTorch's tensor parallelism cannot shard, and other implementations.

    Raises:
        UsageError: With what to choose instead.
    """
    implementation, model, t = config.run.implementation, config.model, config.parallel.tp
    if not implementation.maker.dtensor:
        raise UsageError(f"--against torch needs --implementation torch, not {implementation.name}")
    if model.kv_heads < t:
        raise UsageError(
            f"--against torch needs --tp of at most {model.kv_heads}, not {t}: DTensor does not "
            "replicate key-value heads"
        )
    if model.kv_heads != model.heads and implementation.attention == "unfused":
        raise UsageError("--against torch needs --attention flash for a model with GQA")


class TorchLayer(nn.Module):
    """A transformer layer, x (s, b, h) or (s/t, b, h) -> the same: pre-norm, with residuals.

    Every rank draws the whole weights from one seed, before they are sharded.
    """

    def __init__(self, config: Config, place: Place) -> None:
        super().__init__()
        model = config.model
        self.policy = config.run.policy
        norm = nn.LayerNorm if model.norm == "layernorm" else RmsNorm
        with torch.device(place.device), torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            self.input_norm = norm(model.hidden_size)
            self.attention = Attention(config, place)
            self.mlp_norm = norm(model.hidden_size)
            self.mlp = Mlp(config)
        self.to(place.dtype)
        if place.t > 1:
            _parallelize(self, place)

    def forward(self, x: Tensor) -> Tensor:
        """The layer, recomputed in backward where its config says so."""
        return region(self.policy, "layer", self._layer, x)

    def _layer(self, x: Tensor) -> Tensor:
        y = region(self.policy, "norm", self.input_norm, x)
        x = x + region(self.policy, "attention", self.attention, y)
        y = region(self.policy, "norm", self.mlp_norm, x)
        return x + region(self.policy, "mlp", self.mlp, y)


class RmsNorm(nn.RMSNorm):
    """RMSNorm in one kernel on every device."""

    def forward(self, x: Tensor) -> Tensor:
        """x (s, b, h) -> (s, b, h)."""
        return kernels.rms_norm(x, self.weight)


class Attention(nn.Module):
    """x (s, b, h) -> (s, b, h), with the heads of a rank's shard of the projections."""

    def __init__(self, config: Config, place: Place) -> None:
        super().__init__()
        model, run = config.model, config.run
        h, d, bias = model.hidden_size, model.head_size, model.qkv_bias
        self.head_size, self.policy = d, run.policy
        self.query = nn.Linear(h, model.heads * d, bias)
        self.key = nn.Linear(h, model.kv_heads * d, bias)
        self.value = nn.Linear(h, model.kv_heads * d, bias)
        self.rotary = model.position == "rotary"
        if self.rotary:
            cos, sin = kernels.angles(run.seq_length, d, place.dtype, place.device)
            self.register_buffer("cos", cos)
            self.register_buffer("sin", sin)
            self.query_rotary = OpModule(kernels.Rotate.apply)
            self.key_rotary = OpModule(kernels.Rotate.apply)
        core = FlashCore if run.implementation.attention == "flash" else UnfusedCore
        self.core = core(config, place)
        self.proj = nn.Linear(model.heads * d, h, model.proj_bias)
        self.attention_dropout = OpModule(lambda x: kernels.dropout(x, model.hidden_dropout))

    def forward(self, x: Tensor) -> Tensor:
        """The attention of every head, projected."""
        linears = (self.query, self.key, self.value)
        q, k, v = (linear(x).unflatten(-1, (-1, self.head_size)) for linear in linears)
        if self.rotary:
            q = self.query_rotary(q, self.cos, self.sin)
            k = self.key_rotary(k, self.cos, self.sin)
        context = region(self.policy, "core_attention", self.core, q, k, v, inside="attention")
        out: Tensor = self.attention_dropout(self.proj(context.flatten(2)))
        return out


class Mlp(nn.Module):
    """x (s, b, h) -> (s, b, h), through f features, gated or not."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        model = config.model
        h, f, bias = model.hidden_size, model.ffn_size, model.mlp_bias
        self.gated = model.gated
        if model.gated:
            self.gate, self.up = nn.Linear(h, f, bias), nn.Linear(h, f, bias)
            self.product = OpModule(torch.mul)
        else:
            self.fc1 = nn.Linear(h, f, bias)
        self.activation = OpModule(F.silu if model.activation in ("silu", "swiglu") else F.gelu)
        self.fc2 = nn.Linear(f, h, bias)
        self.mlp_dropout = OpModule(lambda x: kernels.dropout(x, model.hidden_dropout))

    def forward(self, x: Tensor) -> Tensor:
        """The MLP's output."""
        if self.gated:
            y = self.product(self.activation(self.gate(x)), self.up(x))
        else:
            y = self.activation(self.fc1(x))
        out: Tensor = self.mlp_dropout(self.fc2(y))
        return out


def _parallelize(layer: nn.Module, place: Place) -> None:
    """Shard a layer's weights and activations over the ranks of the process group."""
    # imported here, as they take half a second that other layers need not wait for
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        ParallelStyle,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    outside = Shard(0) if place.sp else Replicate()
    plan: dict[str, ParallelStyle] = {}
    for name, module in layer.named_modules():
        if isinstance(module, nn.Linear):
            row = name in ("attention.proj", "mlp.fc2")
            plan[name] = RowwiseParallel(output_layouts=outside) if row else ColwiseParallel()
    if place.sp:
        for name in ("input_norm", "mlp_norm"):
            plan[name] = SequenceParallel(sequence_dim=0)
        for name in ("attention", "mlp"):
            plan[name] = PrepareModuleInput(
                input_layouts=outside, desired_input_layouts=Replicate()
            )
    # there is no mesh of device meta; a CPU mesh leaves tensors on meta
    mesh = init_device_mesh("cpu", (place.t,))
    parallelize_module(layer, mesh, plan, src_data_rank=None)
