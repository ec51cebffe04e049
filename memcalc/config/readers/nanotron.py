"""nanotron YAML: ``model``, ``parallelism``, ``tokens`` and the other sections of a run."""

from collections.abc import Mapping
from typing import Any

from memcalc.config import fields, pipeline
from memcalc.config.assumption import Assumption
from memcalc.config.model import Model
from memcalc.config.readers import keys
from memcalc.config.source import Source
from memcalc.errors import InputError

ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu"}
PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float": "fp32"}
MODES = {"REDUCE_SCATTER": True, "ALL_REDUCE": False}
SIZES = {
    "layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "heads": "num_attention_heads",
}

PARALLELISM = """
    context_parallel_size dp dp_engine enabled_moe expert_data_parallel_size
    expert_parallel_size expert_tensor_parallel_size fsdp_hybrid fsdp_reshard_after_forward
    moe_layer_recompute pp pp_engine recompute_layer tp tp_linear_async_communication tp_mode
    tp_recompute_allgather
""".split()  # noqa: SIM905 - words read best as words
MODEL = """
    _attn_implementation _fused_rms_norm _fused_rotary_emb _use_doc_masking _use_qkv_packed
    attention_bias bos_token_id eos_token_id flex_attention_mask head_dim hidden_act hidden_size
    initializer_range intermediate_size is_llama_config is_qwen2_config max_position_embeddings
    moe_config no_rope_layer num_attention_heads num_hidden_layers num_key_value_heads
    pad_token_id pretraining_tp rms_norm_eps rope_interleaved rope_scaling
    rope_seq_len_interpolation_factor rope_theta sliding_window_size tie_word_embeddings
    use_cache vocab_size z_loss_coefficient z_loss_enabled
""".split()  # noqa: SIM905 - as above


def read(content: Mapping[str, Any], name: str) -> Source:
    """Read a nanotron file; ``name`` is the model's name.

    Raises:
        InputError: A value is of the wrong kind, or is not modeled.
        ConfigError: A value is out of range.

    >>> sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    >>> model = {"dtype": "bfloat16", "model_config": sizes | {"intermediate_size": 128}}
    >>> parallelism = {"dp": 2, "tp": 4, "tp_mode": "REDUCE_SCATTER"}
    >>> source = read({"model": model, "parallelism": parallelism}, "x")
    >>> source.model.activation, source.settings["sp"], source.settings["precision"]
    ('swiglu', True, 'bf16')
    """
    model = keys.section(content, "model")
    spread = keys.section(content, "parallelism")
    unmodelled: list[str] = []
    assumed: list[Assumption] = []
    settings, accumulation = _tokens(keys.section(content, "tokens"))
    settings = {**_parallel(spread, unmodelled), **settings, **_states(content, unmodelled)}
    if "dtype" in model:
        settings["precision"] = keys.word(model, "dtype", PRECISIONS, "bfloat16")
    if "model_config" not in model:
        return Source(None, settings, tuple(assumed), tuple(unmodelled), accumulation)
    config = keys.section(model, "model_config")
    if config.get("_attn_implementation") == "sdpa":
        assumed.append(Assumption("attention", "flash", "SDPA runs its flash kernel"))
    assumed.append(Assumption("implementation", "megatron", "the closest to nanotron's"))
    settings["implementation"] = "megatron"
    unmodelled += keys.lines(config, {}, MODEL)
    found = _model(config, name, _vocabulary(model, config, settings, assumed), unmodelled)
    return Source(found, settings, tuple(assumed), tuple(unmodelled), accumulation)


def _states(content: Mapping[str, Any], unmodelled: list[str]) -> dict[str, Any]:
    """The optimizer, what ZeRO shards of it, and the gradient accumulation dtype."""
    said = keys.section(content, "optimizer")
    factory = keys.section(said, "optimizer_factory")
    settings = keys.named_optimizer(factory.get("name"), unmodelled)
    if settings.get("optimizer") == "adam" and not keys.flag(factory, "torch_adam_is_fused", True):
        settings["optimizer_step"] = "foreach"
    if stage := keys.count(said, "zero_stage"):
        settings |= {"zero": stage, "sharder": "nanotron"}
    if not keys.flag(said, "accumulate_grad_in_fp32", True):
        settings["main_grads"] = "bf16"
    return settings


def _tokens(tokens: Mapping[str, Any]) -> tuple[dict[str, Any], int | None]:
    settings, accumulation = keys.batch(
        keys.count(tokens, "micro_batch_size"),
        keys.count(tokens, "batch_accumulation_per_replica"),
        None,
    )
    length = keys.count(tokens, "sequence_length")
    return settings if length is None else {**settings, "seq_length": length}, accumulation


def _parallel(spread: Mapping[str, Any], unmodelled: list[str]) -> dict[str, Any]:
    degrees = {
        "tp": "tp",
        "pp": "pp",
        "dp": "dp",
        "cp": "context_parallel_size",
        "ep": "expert_parallel_size",
        "etp": "expert_tensor_parallel_size",
    }
    settings: dict[str, Any] = {name: keys.count(spread, key) for name, key in degrees.items()}
    mode = spread.get("tp_mode")
    upper = {"tp_mode": mode.upper() if isinstance(mode, str) else mode}
    settings["sp"] = keys.word(upper, "tp_mode", MODES, "ALL_REDUCE") or None
    if keys.flag(spread, "recompute_layer"):
        settings["recompute"] = "full"
    if spread.get("pp_engine") == "afab":
        unmodelled.append(
            "pp_engine afab is not modeled: actual memory is higher (all forward passes "
            "run before the first backward pass)"
        )
    if settings["sp"] and not keys.flag(spread, "tp_recompute_allgather", True):
        unmodelled.append(
            "tp_recompute_allgather false is not modeled: actual memory is higher "
            "(gathered inputs are saved)"
        )
    unmodelled += keys.lines(
        spread, {"domino": "micro-batches are counted as not split"}, PARALLELISM
    )
    return {name: value for name, value in settings.items() if value is not None}


def _model(
    config: Mapping[str, Any], name: str, vocabulary: int | None, unmodelled: list[str]
) -> Model:
    sizes = {fact: keys.count(config, key) for fact, key in SIZES.items()}
    for fact, value in sizes.items():
        if value is None:
            raise InputError(f"model_config needs {SIZES[fact]}")
    fields.whole("layers", sizes["layers"], pipeline.MOST)
    if config.get("is_starcoder2_config"):
        raise InputError("is_starcoder2_config is not modeled")
    bias = keys.flag(config, "attention_bias")
    facts: dict[str, Any] = {
        **sizes,
        "kv_heads": keys.count(config, "num_key_value_heads"),
        "head_size": keys.count(config, "head_dim"),
        "ffn_size": keys.count(config, "intermediate_size"),
        "max_seq_length": keys.count(config, "max_position_embeddings"),
        "sliding_window": keys.count(config, "sliding_window_size"),
        "vocab_size": vocabulary,
        **_experts(keys.section(config, "moe_config"), sizes["layers"] or 0, unmodelled),
    }
    return Model.of(
        name=name,
        source="nanotron config",
        norm="rmsnorm",
        position="rotary",
        activation=keys.word(config, "hidden_act", ACTIVATIONS, "silu"),
        qkv_bias=bias,
        proj_bias=False if config.get("is_qwen2_config") else bias,
        mlp_bias=False,
        tied_embeddings=keys.flag(config, "tie_word_embeddings"),
        **{fact: value for fact, value in facts.items() if value is not None},
    )


def _experts(moe: Mapping[str, Any], layers: int, unmodelled: list[str]) -> dict[str, Any]:
    experts = keys.count(moe, "num_experts")
    if experts is None:
        return {}
    shared = keys.count(moe, "shared_expert_intermediate_size")
    if not keys.flag(moe, "enable_shared_expert"):
        shared = None
    elif shared is None:
        unmodelled.append(
            "moe_config enables a shared expert but gives no width: it is not counted"
        )
    listed = moe.get("layers", [-1])
    if not isinstance(listed, list) or not all(type(each) is int for each in listed):
        raise InputError("moe_config layers must be a list of whole numbers")
    pattern = None if -1 in listed else tuple(int(layer in listed) for layer in range(layers))
    return {
        "experts": experts,
        "experts_per_token": keys.count(moe, "top_k"),
        "expert_ffn_size": keys.count(moe, "moe_intermediate_size"),
        "shared_ffn_size": shared,
        "moe_layers": pattern,
    }


def _vocabulary(
    model: Mapping[str, Any],
    config: Mapping[str, Any],
    settings: Mapping[str, Any],
    assumed: list[Assumption],
) -> int | None:
    size = keys.count(config, "vocab_size")
    if size is None:
        return None
    multiple = keys.count(model, "make_vocab_size_divisible_by")
    return fields.padded(size, 1 if multiple is None else multiple, settings.get("tp", 1), assumed)
