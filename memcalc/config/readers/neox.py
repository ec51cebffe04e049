"""gpt-neox YAML: a model, a run, or both, with dashes or underscores in the keys.

Names, defaults and widths are those of ``megatron/neox_arguments`` and ``megatron/model``.
"""

from collections.abc import Mapping
from typing import Any

from memcalc.config import fields
from memcalc.config.assumption import Assumption
from memcalc.config.model import Model
from memcalc.config.readers import deepspeed, keys
from memcalc.config.readers.shell.marks import shown
from memcalc.config.source import Source
from memcalc.errors import ConfigError, InputError

SIZES = ("num_layers", "hidden_size", "num_attention_heads")
NORMS = {
    "layernorm": "layernorm",
    "te_layernorm": "layernorm",
    "rmsnorm": "rmsnorm",
    "te_rmsnorm": "rmsnorm",
}
POSITIONS = {"learned": "learned", "rotary": "rotary", "alibi": "alibi", "none": "none"}
ACTIVATIONS = {
    "gelu": "gelu",
    "relu": "relu",
    "swish": "silu",
    "silu": "silu",
    "swiglu": "swiglu",
    "geglu": "geglu",
}
PRECISIONS = {"fp16": "fp16", "bfloat16": "bf16", "bf16": "bf16", "fp32": "fp32"}

UNMODELLED = {
    "adapter_config": "activations of adapters are not counted",
    "cpu_checkpointing": keys.OFFLOADED,
    "lora": "activations of adapters are not counted",
    "moe_num_experts": "MoE layers are counted as dense",
    "partition_activations": "actual memory is lower (saved inputs are sharded over ranks)",
    "soft_prompt_tuning": "the prompt tokens are not counted",
    "sparsity_config": "attention is counted as dense",
}
USED = """
    activation apply_query_key_layer_scaling attention_config attention_dropout
    attention_softmax_in_fp32 bf16 bfloat16 checkpoint_activations checkpoint_num_layers
    expansion_factor fp16 gpt_j_residual gpt_j_tied gradient_accumulation_steps hidden_dropout
    intermediate_size make_vocab_size_divisible_by max_position_embeddings mlp_multiple_of
    mlp_type model_parallel_size no_weight_tying norm num_kv_heads optimizer padded_vocab_size
    pipe_parallel_size pos_emb precision seq_length sequence_parallel sliding_window_width
    train_batch_size train_micro_batch_size_per_gpu use_bias_in_attn_linear use_bias_in_mlp
    use_qk_layernorm vocab_size zero_optimization
""".split()  # noqa: SIM905 - words read best as words
HARMLESS = """
    bias_dropout_fusion bias_gelu_fusion contiguous_checkpointing deepspeed_mpi deepspeed_slurm
    do_train eod_mask_loss finetune fp16_lm_cross_entropy fp32_allreduce git_hash
    global_num_gpus gpt_j_rotary gradient_clipping hostfile include init_method init_method_std
    iteration keep_last_n_checkpoints label_data_paths launcher layernorm_epsilon load
    local_rank log_dir loss_scale lr_decay_iters lr_decay_style master_port max_grad_norm
    merge_file min_lr momentum mup_attn_temp no_ssh_check num_gpus num_nodes num_workers
    opt_pos_emb_offset optimizer_type output_layer_init_method
    output_layer_parallelism pack_impl pipe_partition_method prescale_gradients rms_norm_epsilon
    rope_fusion rotary_emb_base rotary_interleaved rotary_pct rotary_save_freqs_buffer s3_path
    save scaled_masked_softmax_fusion scaled_upper_triang_masked_softmax_fusion scheduler seed
    short_seq_prob split steps_per_print synchronize_each_layer tensorboard_dir text_gen_type
    tokenizer_type train_iters use_bias_in_norms use_cpu_initialization use_flashattn_swiglu
    use_tutel use_wandb user_script vocab_file wall_clock_breakdown warmup
    weight_by_num_documents weight_decay
""".split()  # noqa: SIM905 - as above
FAMILIES = ("checkpoint_", "data_", "deepspeed_", "distributed_", "eval_", "extra_save_", "log_")
MORE_FAMILIES = ("lr_", "mmap_", "profile", "save_", "test_", "train_data", "valid_", "wandb_")


def read(content: Mapping[str, Any], name: str) -> Source:
    """Read a gpt-neox file; ``name`` is the model's name.

    Raises:
        InputError: A value is of the wrong kind, or is not modeled.
        ConfigError: Two values contradict each other, or one is out of range.

    >>> sizes = {"num-layers": 2, "hidden-size": 512, "num_attention_heads": 8}
    >>> gated = {"activation": "swiglu", "intermediate_size": 3 * 1024, "model-parallel-size": 2}
    >>> source = read(sizes | gated, "x")
    >>> source.model.ffn_size, source.settings["tp"]
    (1024, 2)
    """
    said = _underscored(content)
    assumed: list[Assumption] = []
    settings, accumulation = _run(said)
    unmodelled = _lines(said)
    settings |= keys.sharding(said)
    if settings.get("precision") == "bf16" and "zero" not in settings:
        settings.setdefault("main_grads", "fp32")  # gpt-neox's DeepSpeed is older than 0.18
    settings |= keys.optimizer(keys.section(said, "optimizer"), unmodelled)
    settings |= _recompute(said, unmodelled)
    settings["vocab_multiple"] = _vocab_multiple(said)
    if not any(size in said for size in SIZES):
        return Source(None, settings, tuple(assumed), tuple(unmodelled), accumulation)
    model = _model(said, name, settings.get("tp", 1), assumed)
    settings |= _kernels(said, model, assumed, unmodelled)
    return Source(model, settings, tuple(assumed), tuple(unmodelled), accumulation)


def _underscored(content: Mapping[str, Any]) -> dict[str, Any]:
    said: dict[str, Any] = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        if value is None or value == "auto":
            continue
        if said.setdefault(name, value) != value:
            raise ConfigError(f"the key {name[:40]!r} is given twice, with different values")
    return said


def _run(said: Mapping[str, Any]) -> tuple[dict[str, Any], int | None]:
    settings, accumulation = keys.batch(
        keys.count(said, "train_micro_batch_size_per_gpu"),
        keys.count(said, "gradient_accumulation_steps"),
        keys.count(said, "train_batch_size"),
    )
    stages = keys.count(said, "pipe_parallel_size")
    found = {
        "tp": keys.count(said, "model_parallel_size"),
        "pp": 1 if stages == 0 else stages,
        "sp": keys.flag(said, "sequence_parallel") or None,
        "seq_length": keys.count(said, "seq_length"),
        "precision": keys.precision(said),
    }
    if "precision" in said:
        found["precision"] = keys.word(said, "precision", PRECISIONS, "fp16")
    settings |= {key: value for key, value in found.items() if value is not None}
    return settings, accumulation


def _recompute(said: Mapping[str, Any], unmodelled: list[str]) -> dict[str, Any]:
    if not keys.flag(said, "checkpoint_activations"):
        return {}
    layers = keys.count(said, "checkpoint_num_layers")
    if layers is not None and layers > 1:
        unmodelled.append(
            f"checkpoint_num_layers {layers} is not modeled: actual memory is lower (one "
            "saved input per layer)"
        )
    return {"recompute": "full"}


def _model(said: Mapping[str, Any], name: str, tp: int, assumed: list[Assumption]) -> Model:
    sizes = {size: keys.count(said, size) for size in SIZES}
    for size, value in sizes.items():
        if value is None or value < 1:
            raise InputError(
                f"{size} is missing" if value is None else f"{size} must be at least 1"
            )
    activation = keys.word(said, "activation", ACTIVATIONS, "gelu")
    layers, hidden, heads = (value or 0 for value in sizes.values())
    attention_bias = keys.flag(said, "use_bias_in_attn_linear", True)
    mlp_bias = keys.flag(said, "use_bias_in_mlp", said.get("mlp_type") != "llama")
    facts: dict[str, Any] = {
        "kv_heads": keys.count(said, "num_kv_heads"),
        "vocab_size": _vocabulary(said, tp, assumed),
        "max_seq_length": keys.count(said, "max_position_embeddings"),
        "sliding_window": keys.count(said, "sliding_window_width"),
    }
    hidden_dropout = _dropout(said, "hidden_dropout", assumed)
    return Model(
        name=name,
        source="gpt-neox config",
        layers=layers,
        hidden_size=hidden,
        heads=heads,
        ffn_size=_width(said, hidden, activation, assumed),
        activation=activation,
        norm=keys.word(said, "norm", NORMS, "layernorm"),
        position=keys.word(said, "pos_emb", POSITIONS, "learned"),
        block=_block(said),
        qkv_bias=attention_bias,
        proj_bias=attention_bias,
        mlp_bias=mlp_bias,
        qk_norm=keys.flag(said, "use_qk_layernorm"),
        softmax_fp32=keys.flag(said, "attention_softmax_in_fp32")
        or keys.flag(said, "apply_query_key_layer_scaling"),
        tied_embeddings=not keys.flag(said, "no_weight_tying"),
        attention_dropout=_dropout(said, "attention_dropout", assumed),
        hidden_dropout=hidden_dropout,
        embedding_dropout=hidden_dropout,
        **{fact: value for fact, value in facts.items() if value is not None},
    )


def _block(said: Mapping[str, Any]) -> str:
    if not keys.flag(said, "gpt_j_residual"):
        return "pre_norm"
    return "parallel" if keys.flag(said, "gpt_j_tied") else "parallel_two_norms"


def _width(said: Mapping[str, Any], hidden: int, activation: str, assumed: list[Assumption]) -> int:
    """The MLP's width: for a gated MLP a third of ``intermediate_size``, rounded up.

    gpt-neox takes two thirds of the width for a gated MLP, and half of that each for the gate and
    the up projection: its configs give three times the actual width. In older versions, with the
    key ``mlp_type``, a ``llama`` MLP has the width that is given.
    """
    written = keys.count(said, "intermediate_size")
    factor = said.get("expansion_factor")
    if written is None and factor is not None:
        if type(factor) not in (int, float) or not 0 < factor < 1000:
            raise InputError(
                "expansion_factor must be a number above 0 and under 1000, not "
                f"{str(factor)[:40]!r}"
            )
        written = int(factor * hidden)
    if written is None:
        written = 4 * hidden
        why = "4 x hidden_size, gpt-neox's default"
        assumed.append(Assumption("intermediate_size", written, why))
    if written < 1:
        raise ConfigError(f"intermediate_size must be at least 1, not {written}")
    if activation not in ("swiglu", "geglu") or said.get("mlp_type") == "llama":
        return written
    multiple = keys.count(said, "mlp_multiple_of") or 256
    if multiple < 1:
        raise ConfigError(f"mlp_multiple_of must be at least 1, not {multiple}")
    width = -(-(2 * written // 3 // 2) // multiple) * multiple
    why = f"a third of {written}, as for gpt-neox's gated MLP"
    assumed.append(Assumption("ffn_size", width, why))
    return width


def _dropout(said: Mapping[str, Any], key: str, assumed: list[Assumption]) -> Any:
    if key in said:
        return said[key]
    assumed.append(Assumption(key, 0, "gpt-neox's default"))
    return 0.0


def _vocabulary(said: Mapping[str, Any], tp: int, assumed: list[Assumption]) -> int | None:
    padded, size = keys.count(said, "padded_vocab_size"), keys.count(said, "vocab_size")
    if padded is not None or size is None:
        return padded
    return fields.padded(size, _vocab_multiple(said), tp, assumed)


def _vocab_multiple(said: Mapping[str, Any]) -> int:
    """The multiple that the vocabulary is padded to, per tensor-parallel rank."""
    multiple = keys.count(said, "make_vocab_size_divisible_by")
    return 128 if multiple is None else multiple


def _kernels(
    said: Mapping[str, Any], model: Model, assumed: list[Assumption], unmodelled: list[str]
) -> dict[str, Any]:
    """The implementation closest to gpt-neox's, with the file's attention."""
    why = "the closest to gpt-neox's"
    assumed.append(Assumption("implementation", "megatron-local", why))
    kinds = _attentions(said.get("attention_config", [[["global"], 1]]))
    if model.gated:
        unmodelled.append(
            "gpt-neox's gated activation is not modeled: actual memory is higher (it is unfused)"
        )
    if len(kinds) > 1 or not kinds <= {"flash", "global"}:
        names = ", ".join(sorted(shown(kind) for kind in kinds))
        unmodelled.append(f"attention_config {names} is not modeled: counted as unfused attention")
    attention = "flash" if kinds == {"flash"} else "unfused"
    return {"implementation": "megatron-local", "attention": attention}


def _attentions(config: Any) -> set[str]:
    """The kinds of attention that ``[[["flash"], 80]]`` names."""
    kinds: set[str] = set()
    for group in config if isinstance(config, list) else []:
        names = group[0] if isinstance(group, list) and group else group
        kinds |= {str(each) for each in (names if isinstance(names, list) else [names])}
    if not kinds:
        raise InputError("attention_config must be a list such as [[['flash'], 80]]")
    return kinds


def _lines(said: Mapping[str, Any]) -> list[str]:
    set_ = {key: value for key, value in said.items() if not keys.off(value)}
    known = [key for key in set_ if key.startswith((*FAMILIES, *MORE_FAMILIES))]
    zero = keys.section(said, "zero_optimization")
    if keys.count(said, "pipe_parallel_size"):
        zero.pop("overlap_comm", None)  # DeepSpeed disables it in a pipeline
    more = deepspeed.lines({**said, "zero_optimization": zero})
    return keys.lines(set_, UNMODELLED, (*USED, *SIZES, *HARMLESS, *known)) + more
