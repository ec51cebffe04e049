"""Hugging Face ``config.json``: the GPT-2 family and the Llama family."""

from collections.abc import Callable, Mapping
from typing import Any

from memcalc.config.config import Source
from memcalc.config.model import Model
from memcalc.errors import ConfigError, InputError, nearest

# The names under which one fact is found; the first is the one that a message asks for.
ALIASES = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim", "embed_dim"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_kv_heads"),
    "head_size": ("head_dim",),
    "ffn_size": ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size"),
    "vocab_size": ("vocab_size",),
    "max_seq_length": ("max_position_embeddings", "n_positions", "max_seq_len"),
}

# What changes memory or FLOPs where it is set, and is not modelled: key -> what to know.
UNMODELLED = {
    "sliding_window": "FLOPs are counted over the whole sequence; kept bytes are the same",
    "gradient_checkpointing": "choose recomputation with --recompute full",
    "attn_implementation": "choose kernels with --implementation",
    "_attn_implementation": "choose kernels with --implementation",
    "quantization_config": "activations are counted in the run's precision",
    "add_cross_attention": "the cross-attention's activations are missing",
    "reorder_and_upcast_attn": "unfused attention keeps a wider softmax than counted",
}

# What is read beside the sizes, and what changes neither a layer's memory nor its FLOPs.
USED = """
    _name_or_path activation_function architectures attention_bias attention_dropout attn_pdrop
    embd_pdrop hidden_act mlp_bias model_type resid_pdrop tie_word_embeddings use_sliding_window
""".split()  # noqa: SIM905 - words read best as words
HARMLESS = """
    auto_map bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward
    decoder_start_token_id do_sample dtype eos_token_id finetuning_task
    id2label initializer_range is_decoder is_encoder_decoder label2id layer_norm_eps
    layer_norm_epsilon layer_types max_length max_window_layers n_ctx name_or_path
    output_attentions output_hidden_states pad_token_id pretraining_tp return_dict rms_norm_eps
    rope_parameters rope_scaling rope_theta scale_attn_by_inverse_layer_idx scale_attn_weights
    sep_token_id summary_activation summary_first_dropout summary_proj_to_labels summary_type
    summary_use_proj task_specific_params tokenizer_class torch_dtype transformers_version
    unk_token_id use_cache use_mrope
""".split()  # noqa: SIM905 - as above

# Activations by the name that a config gives them: of a plain MLP, and of a gate.
_PLAIN = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_new": "gelu_new",
    "gelu_python_tanh": "gelu_new",
    "silu": "silu",
    "swish": "silu",
}
_GATED = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu"}


def read(content: Mapping[str, Any], name: str) -> Source:
    """The Source that a ``config.json`` describes.

    Args:
        content: The parsed file.
        name: What to call the model if the file does not say.

    Raises:
        InputError: The family is not one that memcalc models, or a size is missing.
        ConfigError: Two names of one fact disagree, or a value is out of its bounds.

    >>> config = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "n_inner": None}
    >>> read(config, "gpt2").model.ffn_size
    3072
    """
    family = _family(content)
    assumed: list[str] = []
    sizes = {fact: _value(content, fact) for fact in ALIASES}
    for fact in ("layers", "hidden_size", "heads"):
        if sizes[fact] is None:
            names = ALIASES[fact]
            raise InputError(f"no {names[0]} (nor {', '.join(names[1:])}) in the config")
    if sizes["ffn_size"] is None:
        assumed.append("ffn_size 4 x hidden_size (the config gives none)")
    if sizes["kv_heads"] is None and family in KV_HEADS:
        sizes["kv_heads"] = KV_HEADS[family]
        assumed.append(f"kv_heads {KV_HEADS[family]} (the family's default)")
    if family == "gpt2":
        unsaid = [key for key in PDROPS if content.get(key) is None]
        assumed += [f"{key} 0.1 (the family's default)" for key in unsaid]
    facts = FAMILIES[family](content)
    model = Model(
        name=_name(content, name),
        source=f"Hugging Face config.json, model_type {family}",
        **{fact: value for fact, value in sizes.items() if value is not None},
        **facts,
    )
    return Source(model, {}, tuple(assumed), _unmodelled(content, family))


def _gpt2(content: Mapping[str, Any]) -> dict[str, Any]:
    act = _get(content, "activation_function", "gelu_new")
    return {
        "norm": "layernorm",
        "activation": _activation(act, _PLAIN),
        "position": "learned",
        "tied_embeddings": _get(content, "tie_word_embeddings", True),
        "attention_dropout": _get(content, "attn_pdrop", 0.1),
        "hidden_dropout": _get(content, "resid_pdrop", 0.1),
        "embedding_dropout": _get(content, "embd_pdrop", 0.1),
    }


def _llama(content: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "norm": "rmsnorm",
        "activation": _activation(_get(content, "hidden_act", "silu"), _GATED),
        "position": "rotary",
        "qkv_bias": _get(content, "attention_bias", False),
        "proj_bias": _get(content, "attention_bias", False),
        "mlp_bias": _get(content, "mlp_bias", False),
        "softmax_fp32": True,
        "tied_embeddings": _get(content, "tie_word_embeddings", False),
        "attention_dropout": _get(content, "attention_dropout", 0.0),
    }


def _qwen2(content: Mapping[str, Any]) -> dict[str, Any]:
    return {**_llama(content), "qkv_bias": True, "proj_bias": False}


FAMILIES: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _qwen2,
}

# What transformers takes where a config says nothing.
KV_HEADS = {"mistral": 8}
PDROPS = ("attn_pdrop", "resid_pdrop", "embd_pdrop")

_ARCHITECTURES = {
    "GPT2LMHeadModel": "gpt2",
    "GPT2Model": "gpt2",
    "LlamaForCausalLM": "llama",
    "LlamaModel": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
}


def _family(content: Mapping[str, Any]) -> str:
    family = content.get("model_type")
    if family is None:
        architectures = content.get("architectures")
        first = architectures[0] if isinstance(architectures, list) and architectures else None
        family = _ARCHITECTURES.get(first, first) if isinstance(first, str) else None
    if not isinstance(family, str):
        raise InputError("neither model_type nor architectures names a model family")
    if family not in FAMILIES:
        raise InputError(f"model_type {family[:40]!r} is not modelled; {nearest(family, FAMILIES)}")
    return family


def _value(content: Mapping[str, Any], fact: str) -> Any:
    """A fact under whichever of its names; two names that disagree are a contradiction."""
    found = {n: content[n] for n in ALIASES[fact] if content.get(n) is not None}
    values = list(found.values())
    if any(value != values[0] for value in values):
        pairs = " and ".join(f"{n} {str(v)[:20]}" for n, v in found.items())
        raise ConfigError(f"{pairs} contradict each other")
    return values[0] if values else None


def _get(content: Mapping[str, Any], key: str, default: Any) -> Any:
    """A value, or the family's default where the key is missing or null."""
    value = content.get(key)
    return default if value is None else value


def _activation(name: Any, known: Mapping[str, str]) -> str:
    if not isinstance(name, str) or name not in known:
        shown = str(name)[:40]
        raise InputError(f"the activation {shown!r} is not modelled; {nearest(shown, known)}")
    return known[name]


def _name(content: Mapping[str, Any], fallback: str) -> str:
    path = content.get("_name_or_path")
    if isinstance(path, str) and 0 < len(path) <= 200 and path.isprintable():
        return path
    return fallback


def _unmodelled(content: Mapping[str, Any], family: str) -> tuple[str, ...]:
    """A line for each key that changes what is counted, and one for all that are not known."""
    known = {*UNMODELLED, *HARMLESS, *USED, *(name for names in ALIASES.values() for name in names)}
    unknown = sorted(key[:40] for key, value in content.items() if value and key not in known)
    met = [key for key in UNMODELLED if content.get(key)]
    if family == "qwen2" and not content.get("use_sliding_window"):
        met = [key for key in met if key != "sliding_window"]
    lines = [f"{key} is not modelled: {UNMODELLED[key]}" for key in met]
    if unknown:
        lines.append(f"not used, for memcalc does not know it: {', '.join(unknown)}")
    return tuple(lines)
