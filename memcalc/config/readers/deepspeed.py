"""DeepSpeed's JSON: a run without a model. A value ``"auto"`` counts as missing."""

from collections.abc import Iterable, Mapping
from typing import Any

from memcalc.config.readers import keys
from memcalc.config.readers.keys import OFFLOADED
from memcalc.config.readers.shell.marks import shown
from memcalc.config.source import Source

UNMODELLED = {
    "amp": "actual memory is higher (weights may stay in fp32, with 16-bit copies)",
    "compression_training": "quantization and pruning are ignored",
    "data_efficiency": "tokens that skip layers are counted in every layer",
    "elasticity": "the micro-batch size that it chooses is not read",
    "progressive_layer_drop": "actual memory is lower (layers are skipped)",
    "quantize_training": "quantization is ignored",
    "sparse_attention": "attention is counted as dense",
    "torch_autocast": "actual memory is higher (weights stay in fp32, with 16-bit copies)",
}
USED = """
    activation_checkpointing bf16 bfloat16 data_types fp16 gradient_accumulation_steps optimizer
    tensor_parallel
    train_batch_size train_micro_batch_size_per_gpu zero_optimization
""".split()  # noqa: SIM905 - words read best as words
HARMLESS = """
    aio autotuning checkpoint comms_logger communication_data_type csv_monitor
    curriculum_learning disable_allgather dump_state flops_profiler
    fp32_allreduce gradient_clipping gradient_predivide_factor load_universal_checkpoint
    memory_breakdown monitor_config prescale_gradients scheduler
    seq_parallel_communication_data_type sparse_gradients steps_per_print tensorboard
    wall_clock_breakdown wandb zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
""".split()  # noqa: SIM905 - as above

# Keys of sections that change memory and are not modeled: a key, its default (which changes
# nothing), the likely sign of the error, and why. Keys without an effect are in KNOWN.
GATHERED = "gathered weights are counted for two layers, the current and the next"
TOGETHER = "actual memory is higher (weights of several modules are gathered together)"
OF_ZERO = {
    "zenflow": (None, "counted as if all optimizer states were updated on the GPU"),
    "zero_quantized_gradients": (
        False,
        "actual memory is higher (quantized copies of gradients)",
    ),
    "zeropp_loco_param": (None, "actual memory is higher (quantization errors are kept)"),
}
OF_BUCKETS = {  # ZeRO stages 1 and 2
    "contiguous_gradients": (True, "actual memory is lower (there is no gradient bucket)"),
    "overlap_comm": (False, "actual memory is higher (a second gradient bucket)"),
}
OF_STAGE_3 = {  # also without the prefix "stage3_"
    "leaf_module": (None, TOGETHER),
    "max_live_parameters": (10**9, GATHERED),
    "max_reuse_distance": (10**9, GATHERED),
    "memory_efficient_linear": (
        True,
        "actual memory is higher (gathered weights stay until backward)",
    ),
    "mics_shard_size": (
        -1,
        "actual memory is higher (states are sharded over fewer ranks: set --shard-copies)",
    ),
    "module_granularity_threshold": (0, TOGETHER),
    "param_persistence_threshold": (
        10**5,
        "actual memory is higher (weights with fewer elements are replicated)",
    ),
    "prefetch_bucket_size": (5 * 10**7, GATHERED),
    "sub_group_size": (10**9, "fp32 gradients are counted for sub-groups of 1e9 elements"),
    "zero_hpz_partition_size": (
        1,
        "actual memory is higher (a second copy of the weights, sharded separately)",
    ),
    "zero_quantized_nontrainable_weights": (
        False,
        "actual memory is lower (frozen weights are kept quantized)",
    ),
    "zero_quantized_weights": (
        False,
        "actual memory is higher (quantized copies of gathered weights)",
    ),
}
OF_SECTIONS = {
    "fp16": {
        "fp16_master_weights_and_grads": (
            False,
            "actual memory is lower (master weights are fp16)",
        ),
    },
    "activation_checkpointing": {
        "partition_activations": (
            False,
            "actual memory is lower (saved inputs are sharded over ranks)",
        ),
        "cpu_checkpointing": (False, OFFLOADED),
    },
}
KNOWN = {
    "zero_optimization": """
        allgather_bucket_size allgather_partitions cpu_offload_use_pin_memory elastic_checkpoint
        enable_sanity_checks gather_16bit_weights_on_model_save
        gather_fp16_weights_on_model_save ignore_unused_parameters legacy_stage1
        load_from_fp32_weights log_trace_cache_warnings mics_hierarchical_params_gather
        model_persistence_threshold offload_optimizer offload_param override_module_apply
        pipeline_loading_checkpoint reduce_bucket_size reduce_scatter round_robin_gradients stage
        use_all_reduce_for_fetch_params use_multi_rank_bucket_allreduce
    """,
    "bf16": "check_grad_overflow enabled immediate_grad_update",
    "fp16": """
        auto_cast consecutive_hysteresis enabled fp16 hysteresis initial_scale_power loss_scale
        loss_scale_window min_loss_scale type
    """,
    "activation_checkpointing": """
        contiguous_memory_optimization number_checkpoints profile synchronize_checkpoint_boundary
    """,
    "data_types": "grad_accum_dtype",
    "optimizer": "legacy_fusion params type",
    "tensor_parallel": """
        autotp_size dtype keep_module_on_host mpu tensor_parallel tp tp_grain_size tp_group
        tp_overlap_comm tp_size
    """,
}
KNOWN["bfloat16"] = KNOWN["bf16"]
OFFLOADS = {  # with their former names
    "offload_optimizer": "cpu_offload",
    "offload_param": "cpu_offload_param",
}


def read(content: Mapping[str, Any], name: str) -> Source:
    """Read a DeepSpeed config; it has no model, so ``name`` is not used.

    Raises:
        InputError: A value is of the wrong kind.
        ConfigError: Two values contradict each other.

    >>> config = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}
    >>> read(config | {"gradient_accumulation_steps": 2, "bf16": {"enabled": True}}, "").settings
    ... # doctest: +NORMALIZE_WHITESPACE
    {'micro_batch_size': 4, 'global_batch_size': 64, 'dp': 8, 'precision': 'bf16',
     'sharder': 'deepspeed'}
    """
    said = keys.section({"file": dict(content)}, "file")
    settings, accumulation = keys.batch(
        keys.count(said, "train_micro_batch_size_per_gpu"),
        keys.count(said, "gradient_accumulation_steps"),
        keys.count(said, "train_batch_size"),
    )
    found = {
        "precision": keys.precision(said),
        "tp": keys.count(keys.section(said, "tensor_parallel"), "autotp_size"),
    }
    settings |= {key: value for key, value in found.items() if value is not None}
    settings |= keys.sharding(said)
    on = {key: value for key, value in said.items() if not keys.off(value)}
    unmodelled = keys.lines(on, UNMODELLED, (*USED, *HARMLESS)) + lines(said)
    settings |= keys.optimizer(keys.section(said, "optimizer"), unmodelled)
    if keys.section(said, "activation_checkpointing"):
        unmodelled.append(
            "activation_checkpointing does not say what is recomputed: set --recompute"
        )
    return Source(None, settings, (), tuple(unmodelled), accumulation)


def lines(said: Mapping[str, Any]) -> list[str]:
    """A line for each key of DeepSpeed's sections that is not modeled, and one for unknown keys.

    >>> lines({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8, "foo": 1}})
    ... # doctest: +NORMALIZE_WHITESPACE
    ['zero_hpz_partition_size is not modeled: actual memory is higher (a second copy of the
      weights, sharded separately)',
     'unknown to memcalc, ignored: zero_optimization.foo']

    Raises:
        InputError: A section is not an object of keys and values.
    """
    zero = keys.section(said, "zero_optimization")
    found = _offloads(zero)
    wide = keys.section(said, "data_types").get("grad_accum_dtype") == "fp32"
    if wide and keys.precision(said) == "bf16" and zero.get("stage", 0) in (0, 1):
        found.append(
            "grad_accum_dtype fp32 uses more memory than counted (bf16 gradients beside fp32 ones)"
        )
    unknown = []
    for name, words in KNOWN.items():
        held = keys.section(said, name)
        unmodelled, known = _unmodelled(name, held.get("stage")), words.split()
        for key, value in held.items():
            nothing, why = unmodelled.get(key.removeprefix("stage3_"), (value, ""))
            if value != nothing and not keys.off(value):
                found.append(f"{shown(key)} is not modeled: {why}")
            if key.removeprefix("stage3_") not in (*known, *OFFLOADS.values(), *_all(name)):
                unknown.append(f"{name}.{key}")
    return found + keys.lines(dict.fromkeys(unknown, True), {}, ())


def _unmodelled(section: str, stage: Any) -> Mapping[str, tuple[Any, str]]:
    """Keys of a section that are not modeled; those of ZeRO depend on its stage."""
    if section != "zero_optimization":
        return OF_SECTIONS.get(section, {})
    of_stage = OF_STAGE_3 if stage == 3 else OF_BUCKETS
    return OF_ZERO | of_stage if stage else {}


def _all(section: str) -> Iterable[str]:
    """All keys of a section that are not modeled in some case."""
    of_zero = (*OF_ZERO, *OF_BUCKETS, *OF_STAGE_3)
    return of_zero if section == "zero_optimization" else OF_SECTIONS.get(section, ())


def _offloads(zero: Mapping[str, Any]) -> list[str]:
    """A line for each offload: its states are counted on the GPU."""
    return [
        f"{key} is not modeled: {OFFLOADED}"
        for key, before in OFFLOADS.items()
        if keys.section(zero, key).get("device", "none") != "none" or zero.get(before)
    ]
