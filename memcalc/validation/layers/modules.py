"""memcalc's own layer in plain PyTorch, which validation measures.

Every operation is a module with the name of the ledger's operation, so the module that makes a
storage names its operation. The layout is Megatron-LM's, (s, b, h).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from memcalc.config import Config
from memcalc.config.recompute import Policy
from memcalc.validation.measuring import collectives, kernels

PRODUCTS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
)  # GEMMs without and with a bias
FLASH_OPERATIONS = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)
ACTIVATIONS = ("gelu", "gelu_new", "silu", "swiglu", "geglu")
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a layer runs.

    Attributes:
        device: ``meta``, ``cpu`` or ``cuda``.
        dtype: The dtype of weights and activations.
        t: The tensor-parallel size.
        rank: This rank.
        sp: Whether sequence parallelism is on.
    """

    device: str
    dtype: torch.dtype
    t: int = 1
    rank: int = 0
    sp: bool = False

    def shard(self, whole: Tensor, dim: int = 0) -> nn.Parameter:
        """This rank's shard of a weight that every rank has drawn alike."""
        size = whole.shape[dim] // self.t
        part = whole.narrow(dim, self.rank * size, size)
        return nn.Parameter(part.detach().clone())


class OpModule(nn.Module):
    """An operation without weights as a module, so that it has a name."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        """The function's value."""
        return self.function(*inputs)


class ColumnLinear(nn.Module):
    """x (s, b, h) -> several (s, b, out/t): g or f, and one GEMM per output."""

    def __init__(self, weights: Sequence[nn.Parameter], place: Place, keeps_gathered: bool) -> None:
        super().__init__()
        self.weights = nn.ParameterList(weights)
        self.place = place
        self.keeps_gathered = keeps_gathered

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """One output per weight."""
        if self.place.t > 1 and self.place.sp and not self.keeps_gathered:
            outputs: tuple[Tensor, ...] = collectives.GatheredLinear.apply(x, *self.weights)
            return outputs
        if self.place.t > 1:
            enter: Any = collectives.Gather if self.place.sp else collectives.Copy
            x = enter.apply(x)
        return tuple(F.linear(x, weight) for weight in self.weights)


class RowLinear(nn.Module):
    """x (s, b, in/t...) -> (s, b, h), or (s/t, b, h): a GEMM, and g-bar or f-bar."""

    def __init__(self, weight: nn.Parameter, place: Place) -> None:
        super().__init__()
        self.weight = weight
        self.place = place

    def forward(self, x: Tensor) -> Tensor:
        """The sum over ranks."""
        x = x.flatten(2)
        if x.is_contiguous():
            y = F.linear(x, self.weight)
        else:  # the output of the CPU's flash kernel is batch first; this GEMM copies nothing
            y = F.linear(x.transpose(0, 1), self.weight).transpose(0, 1)
        if self.place.t == 1:
            return y
        leave: Any = collectives.ReduceScatter if self.place.sp else collectives.Reduce
        out: Tensor = leave.apply(y)
        return out


class Norm(nn.Module):
    """LayerNorm, or RMSNorm in one kernel."""

    def __init__(self, kind: str, weight: nn.Parameter, bias: nn.Parameter) -> None:
        super().__init__()
        self.kind, self.weight = kind, weight
        if kind == "layernorm":
            self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """x (s, b, h) -> (s, b, h)."""
        if self.kind == "layernorm":
            return F.layer_norm(x, x.shape[-1:], self.weight, self.bias)
        return kernels.rms_norm(x, self.weight)


class UnfusedCore(nn.Module):
    """q (s, b, a, d), k and v (s, b, k, d) -> (s, b, a, d), through scores (b*a, s, s)."""

    def __init__(self, config: Config, place: Place) -> None:
        super().__init__()
        model, implementation = config.model, config.run.implementation
        s = config.run.seq_length
        later = torch.ones(s, s, dtype=torch.bool, device=place.device).triu(1)
        self.register_buffer("later", later, persistent=False)
        wide = implementation.softmax_fp32 and model.softmax_fp32
        dtype = torch.float32 if wide else None
        self.causal = model.causal
        padded = not model.causal and model.vision is None
        self.fills_padding = implementation.fills_padding and padded
        self.repeat_key = OpModule(_repeat)
        self.repeat_value = OpModule(_repeat)
        self.scores = OpModule(
            lambda q, k: torch.bmm(_heads_first(q), _heads_first(k).transpose(1, 2))
        )
        self.scale = OpModule(lambda scores, d: scores / d**0.5)
        self.mask = OpModule(lambda scores, later: scores.masked_fill(later, float("-inf")))
        self.softmax = OpModule(lambda scores: torch.softmax(scores, -1, dtype=dtype))
        self.probabilities = OpModule(lambda probs, to: probs.to(to))
        self.padding = OpModule(_fill_padding)
        self.softmax_dropout = OpModule(
            lambda probs: kernels.dropout(probs, model.attention_dropout)
        )
        self.context = OpModule(_context)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The attention of every head."""
        _, _, heads, d = q.shape
        if k.shape[2] != heads:
            k, v = self.repeat_key(k, heads), self.repeat_value(v, heads)
        scores = self.scale(self.scores(q, k), d)
        if self.causal:
            scores = self.mask(scores, self.later)
        probs = self.probabilities(self.softmax(scores), q.dtype)
        if self.fills_padding:
            probs = self.padding(probs, q.shape[1])
        probs = self.softmax_dropout(probs)
        context: Tensor = self.context(probs, v)
        return context


class FlashCore(nn.Module):
    """q (s, b, a, d), k and v (s, b, k, d) -> (s, b, a, d), in one kernel."""

    def __init__(self, config: Config, place: Place) -> None:
        super().__init__()
        rng_bytes = config.run.implementation.rng_bytes
        self.batch_first = config.run.implementation.batch_first
        order = "bs" if self.batch_first else "sb"

        def attend(*qkv: Tensor) -> Tensor:
            q, k, v = (x.permute(1, 2, 0, 3) for x in qkv)
            dropout, causal = config.model.attention_dropout, config.model.causal
            out = kernels.flash_attention(q, k, v, rng_bytes, order, dropout, causal)
            return out.permute(2, 0, 1, 3)

        self.flash_attention = OpModule(attend)
        self.context_order = OpModule(lambda x: x.contiguous())

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The attention of every head."""
        out: Tensor = self.flash_attention(q, k, v)
        return self.context_order(out) if self.batch_first else out


class Layer(nn.Module):
    """A transformer layer, x (s, b, h) or (s/t, b, h) -> the same: pre-norm, with residuals.

    Every rank draws the whole weights from one seed and keeps its shard, so that the ranks together
    are the unsharded layer.
    """

    def __init__(self, config: Config, place: Place, seed: int = 0) -> None:
        super().__init__()
        model, implementation = config.model, config.run.implementation
        self.policy, self.early_stop = config.run.policy, False
        draw = _Weights(place, seed)
        h, d, f = model.hidden_size, model.head_size, model.ffn_size
        keeps = implementation.keeps_gathered
        self.head_size, self.rotary = d, model.position == "rotary"

        self.norms_in_linears = implementation.norms_in_linears
        self.input_norm = Norm(model.norm, draw.ones(h), draw.zeros(h))
        q = draw.split(model.heads * d, h)
        key, value = (draw.heads(model.kv_heads, d, h) for _ in range(2))
        self.qkv = ColumnLinear([q, key, value], place, keeps)
        self.query_rotary = OpModule(kernels.Rotate.apply)
        self.key_rotary = OpModule(kernels.Rotate.apply)
        core = FlashCore if implementation.attention == "flash" else UnfusedCore
        self.core = core(config, place)
        self.proj = RowLinear(draw.split(h, model.heads * d, dim=1), place)
        self.attention_dropout = OpModule(lambda x: kernels.dropout(x, model.hidden_dropout))
        self.mlp_norm = Norm(model.norm, draw.ones(h), draw.zeros(h))
        self.gated, self.fused = model.gated, implementation.fused_gate
        rows = [draw.split(f, h) for _ in range(2 if model.gated else 1)]
        if model.gated and self.fused:
            rows = [nn.Parameter(torch.cat([row.detach() for row in rows]))]
        self.fc1 = ColumnLinear(rows, place, keeps)
        self.activation = model.activation
        self.add_module(*self._activation(model.activation))
        self.silu = OpModule(F.silu)
        self.gelu = OpModule(F.gelu)
        self.fc2 = RowLinear(draw.split(h, f, dim=1), place)
        self.mlp_dropout = OpModule(lambda x: kernels.dropout(x, model.hidden_dropout))
        s = config.run.seq_length
        if self.rotary:
            cos, sin = kernels.angles(s, d, place.dtype, place.device)
            self.register_buffer("cos", cos, persistent=False)
            self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """The layer, recomputed in backward where its config says so."""
        return self._region("layer", self._layer, x)

    def _region(
        self, name: str, function: Callable[..., Any], *inputs: Tensor, inside: str = ""
    ) -> Tensor:
        stop = self.early_stop
        return region(self.policy, name, function, *inputs, inside=inside, early_stop=stop)

    def _layer(self, x: Tensor) -> Tensor:
        if self.norms_in_linears:
            x = x + self._region("attention", self._attention, self.input_norm(x))
            return x + self._region("mlp", lambda x: self._mlp(self.mlp_norm(x)), x)
        y = self._region("norm", self.input_norm, x)
        x = x + self._region("attention", self._attention, y)
        y = self._region("norm", self.mlp_norm, x)
        return x + self._region("mlp", self._mlp, y)

    def _attention(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (-1, self.head_size)) for y in self.qkv(x))
        if self.rotary:
            q = self.query_rotary(q, self.cos, self.sin)
            k = self.key_rotary(k, self.cos, self.sin)
        context = self._region("core_attention", self.core, q, k, v, inside="attention")
        out: Tensor = self.attention_dropout(self.proj(context))
        return out

    def _mlp(self, x: Tensor) -> Tensor:
        outputs = self.fc1(x)
        if not self.gated:
            y = self.gelu(*outputs) if self.activation.startswith("gelu") else self.silu(*outputs)
        elif self.fused:
            y = getattr(self, self.activation)(*outputs)
        else:
            gate, up = outputs
            gate = self.silu(gate) if self.activation == "swiglu" else self.gelu(gate)
            y = getattr(self, self.activation)(gate, up)
        out: Tensor = self.mlp_dropout(self.fc2(y))
        return out

    def _activation(self, name: str) -> tuple[str, nn.Module]:
        if not self.gated:
            return "activation_", nn.Identity()
        if self.fused:
            return name, OpModule(lambda packed: kernels.GatedActivation.apply(packed, name))
        return name, OpModule(torch.mul)


class _Weights:
    """Weights from one seed, drawn whole on every rank and then sharded."""

    def __init__(self, place: Place, seed: int) -> None:
        self.place = place
        device = "cpu" if place.device == "meta" else place.device
        self.generator = torch.Generator(device).manual_seed(seed)

    def split(self, rows: int, columns: int, dim: int = 0) -> nn.Parameter:
        """A rank's shard of a weight."""
        return self.place.shard(self._draw(rows, columns), dim)

    def heads(self, heads: int, d: int, columns: int) -> nn.Parameter:
        """A rank's key or value heads: its shard, or a copy of one if ranks outnumber them."""
        whole = self._draw(heads * d, columns)
        t, rank = self.place.t, self.place.rank
        if heads >= t:
            return self.place.shard(whole)
        part = whole.narrow(0, rank * heads // t * d, d)
        return nn.Parameter(part.detach().clone())

    def ones(self, size: int) -> nn.Parameter:
        """A norm's weight."""
        return nn.Parameter(torch.ones(size, dtype=self.place.dtype, device=self.place.device))

    def zeros(self, size: int) -> nn.Parameter:
        """A norm's bias."""
        return nn.Parameter(torch.zeros(size, dtype=self.place.dtype, device=self.place.device))

    def _draw(self, rows: int, columns: int) -> Tensor:
        if self.place.device == "meta":
            return torch.empty(rows, columns, dtype=self.place.dtype, device="meta")
        place, generator = self.place, self.generator
        drawn = torch.randn(rows, columns, generator=generator, device=place.device)
        return drawn.div_(columns**0.5).to(place.dtype)


def lacking(config: Config) -> str:
    """What a config needs and the own layer does not have, or an empty string.

    >>> from memcalc.config import load
    >>> lacking(load("llama-3-8b")), lacking(load("mixtral-8x7b"))
    ('', 'experts')
    """
    model, parallel = config.model, config.parallel
    there = {
        "cross-attention": model.encoder_layers is not None,
        "experts": model.experts is not None,
        "latent attention": model.latent is not None,
        f"{model.block} blocks": model.block != "pre_norm",
        "query and key norms": model.qk_norm,
        "attention sinks": model.attention_sinks,
        "a soft cap of the scores": model.attention_softcap is not None,
        f"{model.position} positions": model.position not in ("learned", "rotary", "none"),
        f"activation {model.activation}": model.activation not in ACTIVATIONS,
        "context parallelism": parallel.cp > 1,
    }
    return next((name for name, met in there.items() if met), "")


def region(
    policy: Policy,
    name: str,
    function: Callable[..., Any],
    *inputs: Tensor,
    inside: str = "",
    early_stop: bool = False,
) -> Tensor:
    """A function's value, recomputed in backward if its region is in the policy.

    If the policy has the surrounding region too, that one recomputes it.
    """
    if name not in policy.regions or inside in policy.regions:
        result: Tensor = function(*inputs)
        return result
    options: dict[str, Any] = {"use_reentrant": False, "early_stop": early_stop}
    if policy.cached:
        options["context_fn"] = _caching(policy)
    out: Tensor = checkpoint(function, *inputs, **options)
    return out


def _repeat(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[2], 2)


def _fill_padding(probs: Tensor, b: int) -> Tensor:
    """Probabilities (b*a, s, s) -> the same, filled with a mask (b, 1, s, s) of no padding."""
    _, s, keys = probs.shape
    padded = torch.zeros(b, 1, s, keys, dtype=torch.bool, device=probs.device)
    return probs.view(b, -1, s, keys).masked_fill(padded, 0).flatten(0, 1)


def _context(probs: Tensor, v: Tensor) -> Tensor:
    """Probabilities (b*a, s, s) and v (s, b, a, d) -> (s, b, a, d), copied to this layout."""
    s, b, heads, d = v.shape
    context = torch.bmm(probs, _heads_first(v))
    return context.view(b, heads, s, d).permute(2, 0, 1, 3).contiguous()


def _heads_first(x: Tensor) -> Tensor:
    """(s, b, a, d) -> (b*a, s, d), a view."""
    s, b, heads, d = x.shape
    return x.reshape(s, b * heads, d).transpose(0, 1)


def _caching(policy: Policy) -> Callable[[], Any]:
    """A function that makes the contexts of a selective checkpoint, new ones per region."""
    return _caching_products if "save_linear" in policy.cached else _caching_every_second


def _caching_every_second() -> Any:
    """The contexts of torchtitan's selective checkpoint of operations.

    It saves the outputs of every second GEMM with a weight, from the first one on, and of flash
    kernels (torchtitan distributed/activation_checkpoint.py).
    """
    products = {True: 0, False: 0}  # while recomputing, and before

    def choose(context: Any, operation: Any, *inputs: Any, **keywords: Any) -> CheckpointPolicy:
        saved = operation in FLASH_OPERATIONS
        if operation in PRODUCTS:
            products[context.is_recompute] += 1
            saved = products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)


def _caching_products() -> Any:
    """The contexts of a checkpoint that saves the outputs of GEMMs with weights."""

    def choose(context: Any, operation: Any, *inputs: Any, **keywords: Any) -> CheckpointPolicy:
        saved = operation in PRODUCTS
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)


def hidden_state(config: Config, place: Place) -> Tensor:
    """A rank's input of a layer: every rank draws all of it and takes its shard."""
    s, b, h = config.run.seq_length, config.run.micro_batch_size, config.model.hidden_size
    sharded = place.sp and place.t > 1
    if place.device == "meta":
        shape = (s // place.t if sharded else s, b, h)
        return torch.empty(shape, dtype=place.dtype, device="meta", requires_grad=True)
    whole = torch.randn(s, b, h, generator=torch.Generator().manual_seed(1))
    part = whole.chunk(place.t)[place.rank].clone() if sharded else whole
    return part.to(place.device, place.dtype).requires_grad_()
