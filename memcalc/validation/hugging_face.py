"""Hugging Face's own decoder layers, built from a model's config, on meta: nobody here wrote them.

Attention runs in a flash kernel's place where the implementation says sdpa: on meta PyTorch would
fall back to its math form, which keeps other tensors than CUDA's kernel.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.overrides import TorchFunctionMode

from memcalc.config import Config, Model, Run
from memcalc.errors import UsageError
from memcalc.validation import kernels
from memcalc.validation.modules import TYPES

# The ledger's operations, and the layers' modules, by the part of the layer that they are.
_CORE = (
    *("scores", "scale", "mask", "softmax", "probabilities", "softmax_dropout", "context"),
    *("query_rotary", "key_rotary", "repeat_key", "repeat_value", "flash_attention"),
)
MODULES = {
    "llama": {
        **dict.fromkeys((*_CORE, "qkv", "q_proj", "k_proj", "v_proj"), "self_attn"),
        **dict.fromkeys(("input_norm", "input_norm_fp32"), "input_layernorm"),
        **dict.fromkeys(("input_norm_normalise", "input_norm_normalised"), "input_layernorm"),
        **dict.fromkeys(("mlp_norm", "mlp_norm_fp32"), "post_attention_layernorm"),
        **dict.fromkeys(("mlp_norm_normalise", "mlp_norm_normalised"), "post_attention_layernorm"),
        **dict.fromkeys(("fc1", "gate_proj", "up_proj"), "fc1"),
        **dict.fromkeys(("silu", "gelu", "act_fn"), "act_fn"),
        **dict.fromkeys(("swiglu", "geglu", "mlp"), "mlp"),
        **dict.fromkeys(("attention_residual", "layer"), "."),
    },
    "gpt2": {
        **dict.fromkeys((*_CORE, "qkv", "c_attn", "attn_dropout"), "attn"),
        "input_norm": "ln_1",
        "mlp_norm": "ln_2",
        **dict.fromkeys(("fc1", "c_fc"), "c_fc"),
        **dict.fromkeys(("gelu", "act"), "act"),
        **dict.fromkeys(("attention_dropout", "resid_dropout"), "resid_dropout"),
        **dict.fromkeys(("mlp_dropout", "dropout"), "dropout"),
        **dict.fromkeys(("attention_residual", "layer"), "."),
    },
}


# The class of each family; Mistral's and Qwen2's layers are Llama's, but for biases. All but the
# first two have no ledger yet: they can be measured, and not validated.
LAYERS = {
    "llama": "LlamaDecoderLayer",
    "gpt2": "GPT2Block",
    "mixtral": "MixtralDecoderLayer",
    "qwen3": "Qwen3DecoderLayer",
    "qwen3_moe": "Qwen3MoeDecoderLayer",
}


def family(config: Config) -> str:
    """``gpt2`` or ``llama``: which of the two families of layers a model is of."""
    return "gpt2" if config.model.norm == "layernorm" else "llama"


def require(config: Config) -> None:
    """Refuse a model whose layer is of neither family.

    Raises:
        UsageError: With what the families' layers have.
    """
    model = config.model
    kinds = {
        "gpt2": ("layernorm", "learned", ("gelu", "gelu_new")),
        "llama": ("rmsnorm", "rotary", ("swiglu", "geglu")),
    }
    norm, position, activations = kinds[family(config)]
    like = model.norm == norm and model.position == position and model.activation in activations
    if not like or not model.causal or (norm == "layernorm" and model.kv_heads != model.heads):
        raise UsageError(
            f"no Hugging Face layer here has {model.norm}, {model.position} positions and "
            f"{model.activation}: GPT-2's and Llama's do as those models do"
        )
    if norm == "rmsnorm" and (model.hidden_dropout or model.attention_dropout):
        raise UsageError("Llama's layers are validated without dropout")


class HuggingFaceLayer(nn.Module):
    """One decoder layer, x (b, s, h) -> (b, s, h); what the whole model gives it are buffers.

    Kept are as many bytes as each further layer of the whole model keeps: its layers share the
    tables of positions and the mask, and its output has no logits of the routers.

    Args:
        kind: The family, one of ``LAYERS``.
        described: The layer's sizes, as the family's config.json names them.
        run: The sequence, the precision and the kernels.
    """

    def __init__(self, kind: str, described: Mapping[str, Any], run: Run) -> None:
        super().__init__()
        eager = run.implementation.attention == "unfused"
        dtype, s = TYPES[run.precision], run.seq_length
        with torch.device("meta"):
            self.layer = _build(kind, described, "eager" if eager else "sdpa").to(dtype).train()
            if eager:
                self.register_buffer("later", torch.zeros(1, 1, s, s, dtype=dtype))
            else:
                self.later = None
            if kind != "gpt2":
                table = torch.zeros(1, s, self.layer.self_attn.head_dim, dtype=dtype)
                self.register_buffer("cos", table)
                self.register_buffer("sin", table.clone())
        self.kernels = cuda_kernels(run)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        given: dict[str, Any] = {"attention_mask": self.later}
        if hasattr(self, "cos"):
            given["position_embeddings"] = (self.cos, self.sin)
        with self.kernels:
            out = self.layer(x, **given)
        first: Tensor = out[0] if isinstance(out, tuple) else out
        return first


def layer_of(config: Config) -> HuggingFaceLayer:
    """The layer of a config's model, which is of one of the two families with a ledger."""
    kind = family(config)
    described = _gpt2(config) if kind == "gpt2" else _llama(config.model)
    return HuggingFaceLayer(kind, described, config.run)


def cuda_kernels(run: Run) -> AbstractContextManager[Any]:
    """What runs on CUDA in place of what meta would run."""
    if run.implementation.name.startswith("transformers-"):
        return CudaKernels(run.implementation.rng_bytes)
    return nullcontext()


class CudaKernels(TorchFunctionMode):
    """Dropout with masks of a byte, and scaled_dot_product_attention in a flash kernel."""

    def __init__(self, rng_bytes: int) -> None:
        super().__init__()
        self.rng_bytes = rng_bytes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Put CUDA's kernel in place of a function."""
        kwargs = kwargs or {}
        if func is F.dropout:
            training = kwargs.get("training", args[2] if len(args) > 2 else True)
            probability = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
            return kernels.dropout(args[0], probability if training else 0.0)
        if func is F.scaled_dot_product_attention:
            q, k, v = args[:3]
            return kernels.FlashAttention.apply(q, k, v, self.rng_bytes, "bs")
        return func(*args, **kwargs)


def _build(kind: str, described: Mapping[str, Any], attention: str) -> Any:
    from transformers import AutoConfig

    config = AutoConfig.for_model(kind, **described)
    config._attn_implementation = attention
    # what the loop over experts keeps depends on the routing, which meta does not know
    config._experts_implementation = "grouped_mm"
    module = import_module(f"transformers.models.{kind}.modeling_{kind}")
    return getattr(module, LAYERS[kind])(config, 0)


def _llama(model: Model) -> dict[str, Any]:
    return {
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size,
        "intermediate_size": model.ffn_size,
        "hidden_act": "silu" if model.activation == "swiglu" else "gelu",
        "attention_bias": model.qkv_bias and model.proj_bias,
        "attention_dropout": model.attention_dropout,
        "mlp_bias": model.mlp_bias,
    }


def _gpt2(config: Config) -> dict[str, Any]:
    model = config.model
    return {
        "n_embd": model.hidden_size,
        "n_head": model.heads,
        "n_inner": model.ffn_size,
        "activation_function": model.activation,
        "attn_pdrop": model.attention_dropout,
        "resid_pdrop": model.hidden_dropout,
        "n_positions": config.run.seq_length,
    }
