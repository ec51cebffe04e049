"""DeepSpeed's JSON: a run without a model, whose ``"auto"`` says nothing."""

from collections.abc import Iterable, Mapping
from typing import Any

from memcalc.config.config import RunSource
from memcalc.config.readers import keys
from memcalc.config.readers.shell import shown

UNMODELLED = {
    "amp": "more than counted: weights may stay in fp32, with 16-bit copies",
    "compression_training": "what it quantizes or prunes is counted as it was",
    "data_efficiency": "what it routes around layers is counted all the same",
    "elasticity": "the micro-batch size that it chooses is not read",
    "progressive_layer_drop": "less than counted: layers are left out",
    "quantize_training": "what it quantizes is counted as it was",
    "sparse_attention": "attention is counted as dense",
    "torch_autocast": "more than counted: weights stay in fp32, with 16-bit copies",
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

# What sections say that changes memory and is not modelled: a key, its value that changes nothing
# (DeepSpeed's default), the likely sign and why. What changes nothing stands in KNOWN.
GATHERED = "gathered weights are counted as those of a layer and the next, whatever it says"
TOGETHER = "more than counted: weights of several modules are gathered together"
OFFLOADED = "less is kept on the GPU than counted"
OF_ZERO = {
    "zenflow": (None, "counted as if all states were updated on the GPU"),
    "zero_quantized_gradients": (False, "more than counted: quantized copies of gradients"),
    "zeropp_loco_param": (None, "more than counted: what quantization leaves out is kept"),
}
OF_BUCKETS = {  # of stages 1 and 2
    "contiguous_gradients": (True, "less than counted: gradients have no bucket of their own"),
    "overlap_comm": (False, "more than counted: a second bucket of gradients"),
}
OF_STAGE_3 = {  # also without their "stage3_"
    "leaf_module": (None, TOGETHER),
    "max_live_parameters": (10**9, GATHERED),
    "max_reuse_distance": (10**9, GATHERED),
    "memory_efficient_linear": (True, "more than counted: gathered weights stay until backward"),
    "mics_shard_size": (
        -1,
        "more than counted: states are split over so many ranks alone (give --shard-copies)",
    ),
    "module_granularity_threshold": (0, TOGETHER),
    "param_persistence_threshold": (
        10**5,
        "more than counted: weights of fewer elements are whole on every rank",
    ),
    "prefetch_bucket_size": (5 * 10**7, GATHERED),
    "sub_group_size": (10**9, "fp32 gradients of a step are counted of 1e9 elements at once"),
    "zero_hpz_partition_size": (
        1,
        "more than counted: a second copy of the weights, split over so many ranks",
    ),
    "zero_quantized_nontrainable_weights": (
        False,
        "less than counted: frozen weights are kept quantized",
    ),
    "zero_quantized_weights": (
        False,
        "more than counted: quantized copies of weights that are gathered",
    ),
}
OF_SECTIONS = {
    "fp16": {
        "fp16_master_weights_and_grads": (False, "less than counted: master weights are fp16"),
    },
    "activation_checkpointing": {
        "partition_activations": (
            False,
            "less than counted: kept inputs are split over ranks",
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
OFFLOADS = {  # and their words of before
    "offload_optimizer": "cpu_offload",
    "offload_param": "cpu_offload_param",
}


def read(content: Mapping[str, Any], name: str) -> RunSource:
    """What a DeepSpeed config says of a run; it has no model to give a name to.

    Raises:
        InputError: A value is of another kind than its key's.
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
    settings |= keys.optimizer(keys.section(said, "optimizer").get("type"), unmodelled)
    if keys.section(said, "activation_checkpointing"):
        unmodelled.append(
            "activation_checkpointing does not say what is recomputed: choose with --recompute"
        )
    return RunSource(settings, tuple(keys.zero(said)), tuple(unmodelled), accumulation)


def lines(said: Mapping[str, Any]) -> list[str]:
    """A line for each key of DeepSpeed's sections that is not modelled, and for unknown ones.

    >>> lines({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8, "foo": 1}})
    ... # doctest: +NORMALIZE_WHITESPACE
    ['zero_hpz_partition_size is not modelled: more than counted: a second copy of the weights,
      split over so many ranks',
     'not used, for memcalc does not know it: zero_optimization.foo']

    Raises:
        InputError: A section does not hold keys with values.
    """
    zero = keys.section(said, "zero_optimization")
    found = _offloads(zero)
    wide = keys.section(said, "data_types").get("grad_accum_dtype") == "fp32"
    if wide and keys.precision(said) == "bf16" and zero.get("stage", 0) in (0, 1):
        found.append(
            "grad_accum_dtype fp32: more than counted, for gradients of a pass are kept in bf16 too"
        )
    unknown = []
    for name, words in KNOWN.items():
        held = keys.section(said, name)
        unmodelled, known = _unmodelled(name, held.get("stage")), words.split()
        for key, value in held.items():
            nothing, why = unmodelled.get(key.removeprefix("stage3_"), (value, ""))
            if value != nothing and not keys.off(value):
                found.append(f"{shown(key)} is not modelled: {why}")
            if key.removeprefix("stage3_") not in (*known, *OFFLOADS.values(), *_all(name)):
                unknown.append(f"{name}.{key}")
    return found + keys.lines(dict.fromkeys(unknown, True), {}, ())


def _unmodelled(section: str, stage: Any) -> Mapping[str, tuple[Any, str]]:
    """What a section may say that is not modelled; what ZeRO does hangs on its stage."""
    if section != "zero_optimization":
        return OF_SECTIONS.get(section, {})
    of_stage = OF_STAGE_3 if stage == 3 else OF_BUCKETS
    return OF_ZERO | of_stage if stage else {}


def _all(section: str) -> Iterable[str]:
    """All keys of a section that may not be modelled."""
    of_zero = (*OF_ZERO, *OF_BUCKETS, *OF_STAGE_3)
    return of_zero if section == "zero_optimization" else OF_SECTIONS.get(section, ())


def _offloads(zero: Mapping[str, Any]) -> list[str]:
    """A line for each offload, of which states are counted on the GPU."""
    return [
        f"{key} is not modelled: {OFFLOADED}"
        for key, before in OFFLOADS.items()
        if keys.section(zero, key).get("device", "none") != "none" or zero.get(before)
    ]
