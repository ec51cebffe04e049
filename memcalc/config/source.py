"""What a file or a catalog entry says: a model, and settings of its run by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memcalc.config.assumption import Assumption
from memcalc.config.model import Model

PARALLEL_SETTINGS = (
    *("tp", "sp", "pp", "vpp", "dp", "cp", "cp_kind", "ep", "etp", "schedule"),
    *("microbatch_group_size", "first_stage_layers", "last_stage_layers", "layout"),
    *("embedding_as_layer", "loss_as_layer", "zero", "sharder", "shard_copies"),
)
RUN_SETTINGS = (
    "seq_length",
    "micro_batch_size",
    "global_batch_size",
    "precision",
    "framework",
    "gpu",
    "imbalance",
    "recompute_method",
    "recompute_layers",
    *("optimizer", "optimizer_step", "momentum", "weight_decay", "ema"),
    *("main_grads", "main_params", "moments", "fp8_params", "frozen", "bucket"),
    "keep_gradients",
    "environment",
)
OTHER_SETTINGS = (
    *("recompute", "implementation", "attention", "expert_products", "dropout"),
    *("cross_entropy", "batch_first", "softmax_fp32", "fused_gate", "gathers_tokens"),
    *("holds_logits", "versions"),
    *("distributed_optimizer", "vocab_size", "vocab_multiple"),
)
SETTINGS = (*PARALLEL_SETTINGS, *RUN_SETTINGS, *OTHER_SETTINGS)


@dataclass(frozen=True, slots=True)
class Source:
    """The content of a file or of a catalog entry.

    Attributes:
        model: The model; None if there are only parallelism and run settings.
        settings: Its parallelism and run settings, by the names of ``SETTINGS``.
        assumed: What the reader assumed.
        unmodelled: What the file sets and memcalc does not model.
        accumulation: Gradient accumulation steps, where the file gives these rather than the
            global batch size.
        framework: The framework that the file belongs to, a key of ``FRAMEWORKS``; nothing where
            it is not said, or the settings have its implementation.
    """

    model: Model | None
    settings: Mapping[str, Any]
    assumed: tuple[Assumption, ...] = ()
    unmodelled: tuple[str, ...] = ()
    accumulation: int | None = None
    framework: str = ""
