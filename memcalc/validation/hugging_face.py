"""Hugging Face's own decoder layers, built from a model's config, on meta: nobody here wrote them.

Attention runs in a flash kernel's place where the implementation says sdpa: on meta PyTorch would
fall back to its math form, which keeps other tensors than CUDA's kernel.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.overrides import TorchFunctionMode

from memcalc.config import Config
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


# The class that is built of each family; Mistral's and Qwen2's layers are Llama's, but for biases.
LAYERS = {"llama": "LlamaDecoderLayer", "gpt2": "GPT2Block"}


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
    """One decoder layer, x (b, s, h) -> (b, s, h); what the whole model gives it are buffers."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        eager = config.run.implementation.attention == "unfused"
        dtype, s = TYPES[config.run.precision], config.run.seq_length
        build = _gpt2 if family(config) == "gpt2" else _llama
        with torch.device("meta"):
            self.layer = build(config, "eager" if eager else "sdpa").to(dtype).train()
            if eager:
                self.register_buffer("later", torch.zeros(1, 1, s, s, dtype=dtype))
            else:
                self.later = None
            if family(config) == "llama":
                table = torch.zeros(1, s, config.model.head_size, dtype=dtype)
                self.register_buffer("cos", table)
                self.register_buffer("sin", table.clone())
        self.kernels = cuda_kernels(config)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        given: dict[str, Any] = {"attention_mask": self.later}
        if hasattr(self, "cos"):
            given["position_embeddings"] = (self.cos, self.sin)
        with self.kernels:
            out = self.layer(x, **given)
        first: Tensor = out[0] if isinstance(out, tuple) else out
        return first


def cuda_kernels(config: Config) -> AbstractContextManager[Any]:
    """What runs on CUDA in place of what meta would run."""
    if config.run.implementation.name.startswith("transformers-"):
        return CudaKernels(config.run.implementation.rng_bytes)
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


def _llama(config: Config, attention: str) -> nn.Module:
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    model = config.model
    described = LlamaConfig(
        hidden_size=model.hidden_size,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_size,
        intermediate_size=model.ffn_size,
        hidden_act="silu" if model.activation == "swiglu" else "gelu",
        attention_bias=model.qkv_bias and model.proj_bias,
        attention_dropout=model.attention_dropout,
        mlp_bias=model.mlp_bias,
    )
    described._attn_implementation = attention
    layer: nn.Module = LlamaDecoderLayer(described, 0)
    return layer


def _gpt2(config: Config, attention: str) -> nn.Module:
    from transformers.models.gpt2.configuration_gpt2 import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    model = config.model
    described = GPT2Config(
        n_embd=model.hidden_size,
        n_head=model.heads,
        n_inner=model.ffn_size,
        activation_function=model.activation,
        attn_pdrop=model.attention_dropout,
        resid_pdrop=model.hidden_dropout,
        n_positions=config.run.seq_length,
    )
    described._attn_implementation = attention
    block: nn.Module = GPT2Block(described, 0)
    return block
