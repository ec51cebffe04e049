"""DeepSpeed's JSON: a run without a model, whose ``"auto"`` says nothing."""

from collections.abc import Mapping
from typing import Any

from memcalc.config.config import RunSource
from memcalc.config.readers import keys

UNMODELLED = {
    "compression_training": "what it quantizes or prunes is counted as it was",
    "data_efficiency": "what it routes around layers is counted all the same",
    "progressive_layer_drop": "less than counted: layers are left out",
    "quantize_training": "what it quantizes is counted as it was",
    "sparse_attention": "attention is counted as dense",
}
CHECKPOINTING = {
    "partition_activations": "less than counted: kept inputs are split over ranks",
    "cpu_checkpointing": "less is kept on the GPU than counted",
}
USED = """
    activation_checkpointing bf16 bfloat16 data_types fp16 gradient_accumulation_steps optimizer
    tensor_parallel
    train_batch_size train_micro_batch_size_per_gpu zero_optimization
""".split()  # noqa: SIM905 - words read best as words
HARMLESS = """
    aio amp autotuning checkpoint comms_logger communication_data_type csv_monitor
    curriculum_learning disable_allgather dump_state elasticity flops_profiler
    fp32_allreduce gradient_clipping gradient_predivide_factor load_universal_checkpoint
    memory_breakdown monitor_config prescale_gradients scheduler
    seq_parallel_communication_data_type sparse_gradients steps_per_print tensorboard
    torch_autocast wall_clock_breakdown wandb zero_allow_untested_optimizer
    zero_force_ds_cpu_optimizer
""".split()  # noqa: SIM905 - as above


def read(content: Mapping[str, Any], name: str) -> RunSource:
    """What a DeepSpeed config says of a run; it has no model to give a name to.

    Raises:
        InputError: A value is of another kind than its key's.
        ConfigError: Two values contradict each other.

    >>> config = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}
    >>> read(config | {"gradient_accumulation_steps": 2, "bf16": {"enabled": True}}, "").settings
    {'micro_batch_size': 4, 'global_batch_size': 64, 'dp': 8, 'precision': 'bf16'}
    """
    said = keys.section({"file": dict(content)}, "file")
    settings, accumulation = keys.batch(
        keys.count(said, "train_micro_batch_size_per_gpu"),
        keys.count(said, "gradient_accumulation_steps"),
        keys.count(said, "train_batch_size"),
    )
    precision = keys.precision(said)
    found = {
        "precision": precision,
        "tp": keys.count(keys.section(said, "tensor_parallel"), "autotp_size"),
    }
    settings |= {key: value for key, value in found.items() if value is not None}
    settings |= keys.sharding(said, precision)
    unmodelled = keys.lines(said, UNMODELLED, (*USED, *HARMLESS)) + keys.offloads(said)
    settings |= keys.optimizer(keys.section(said, "optimizer").get("type"), unmodelled)
    checkpointing = keys.section(said, "activation_checkpointing")
    unmodelled += keys.lines(checkpointing, CHECKPOINTING, checkpointing)
    if checkpointing:
        unmodelled.append(
            "activation_checkpointing does not say what is recomputed: choose with --recompute"
        )
    return RunSource(settings, tuple(keys.zero(said)), tuple(unmodelled), accumulation)
