"""Sources, settings that override them, and defaults, merged into a Config."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from memcalc.config import fields, kernels, pipeline
from memcalc.config.assumption import Assumption
from memcalc.config.config import Config
from memcalc.config.environment import environment, versions
from memcalc.config.families import require_layer
from memcalc.config.model import Model
from memcalc.config.parallel import Parallel
from memcalc.config.run import Run
from memcalc.config.source import PARALLEL_SETTINGS, RUN_SETTINGS, SETTINGS, Source
from memcalc.errors import ConfigError, NoLayerError, nearest
from memcalc.frameworks import FRAMEWORKS, SHARDERS
from memcalc.frameworks.megatron import DISTRIBUTED_OPTIMIZER

# Settings of sharding and of the optimizer that a newer setting replaces.
REPLACED = {
    "distributed_optimizer": ("zero", "sharder", "shard_copies"),
    "optimizer": ("optimizer_step", "momentum"),
    "sharder": ("zero", "distributed_optimizer", "shard_copies", "optimizer_step"),
    "zero": ("distributed_optimizer", "shard_copies"),
}
HELD = (
    "logits held until backward is over, as in out = model(...); out.loss.backward() (set "
    "--no-holds-logits for a loop that drops them)"
)
OF_A_SPLIT = ("first_stage_layers", "last_stage_layers", "layout")  # for one pp and vpp only


def configure(source: Source, overrides: Mapping[str, Any], run: Source | None = None) -> Config:
    """A Config from a source, the settings that override it, and defaults.

    Args:
        source: The model, with its parallelism and run settings.
        overrides: Settings that replace the source's; None leaves a setting as it is.
        run: Parallelism and run settings of another file, which override the source's.

    Raises:
        ConfigError: The source has no model, a setting is unknown or out of range, or the sequence
            length is unknown.
    """
    model, run = source.model, run or Source(None, {})
    if model is None:
        raise ConfigError("these are settings without a model")
    given = {name: fields.plain(value) for name, value in overrides.items() if value is not None}
    said = _overlaid(source.settings, run.settings, given)
    for name in said:
        if name not in SETTINGS:
            raise ConfigError(f"setting {name!r} is unknown; {nearest(name, SETTINGS)}")
    assumed = [*source.assumed, *run.assumed]
    if run.accumulation and "global_batch_size" not in {**run.settings, **given}:
        said.pop("global_batch_size", None)  # the model's belongs to another run
    _accumulate(said, run.accumulation or source.accumulation)
    if "seq_length" not in said:
        if model.max_seq_length is None:
            raise ConfigError(f"{model.name} has no context length: set --seq-length")
        said["seq_length"] = model.max_seq_length
        why = "the model's context length"
        assumed.append(Assumption("seq_length", said["seq_length"], why))
    if "micro_batch_size" not in said:
        assumed.append(Assumption("micro_batch_size", 1))
    if "tp" not in said:
        assumed.append(Assumption("tp", 1))
    if "precision" not in said:
        assumed.append(Assumption("precision", "bf16"))
    assumed += _shard(said)
    if said.get("zero") and "dp" not in said:
        assumed.append(Assumption("dp", 1))
    if "environment" in said or "versions" in said:
        there = environment(said.get("environment", {}))
        said["environment"] = replace(there, **versions(said.get("versions", "")))
    implementation = kernels.chosen(said, model.family)
    if "implementation" not in said:
        why = _other_layers(model, source.framework, str(said.get("sharder")))
        place = 0 if why else len(assumed)  # what leads to other numbers comes first
        assumed.insert(place, Assumption("implementation", implementation.name, why))
    if implementation.holds_logits and "holds_logits" not in said:
        assumed.append(Assumption("holds_logits", None, HELD))
    chosen: dict[str, Any] = {name: said[name] for name in RUN_SETTINGS if name in said}
    if "recompute" in said:
        chosen["recompute"] = _words(said["recompute"])
    parallel = Parallel(**{name: said[name] for name in PARALLEL_SETTINGS if name in said})
    model = _with_vocabulary(model, said, parallel.tp, assumed)
    return Config(
        _with_dropout(model, said.get("dropout")),
        parallel,
        Run(**chosen, implementation=implementation),
        tuple(assumed),
        (*source.unmodelled, *run.unmodelled),
    )


def _other_layers(model: Model, framework: str, sharder: str) -> str:
    """How to count Hugging Face's layers, where a run is likely to have them.

    Args:
        model: The model.
        framework: That of the model's file.
        sharder: Who shards.
    """
    of_file = framework in FRAMEWORKS and FRAMEWORKS[framework].whole_models
    theirs = of_file or (sharder in SHARDERS and SHARDERS[sharder].any_model)
    if not (theirs and model.family):
        return ""
    try:
        require_layer(model.family, "transformers-sdpa")
        name = "transformers-sdpa"
    except NoLayerError:
        name = "transformers-eager"
    return f"for Hugging Face's layers: --implementation {name}"


def _overlaid(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Settings over settings; a new setting also removes those that belong to the old one.

    A new recomputation removes its number of layers, a new pipeline size how layers were split, a
    new schedule the model chunks, and a new sharding who did it.
    """
    said: dict[str, Any] = {}
    for settings in layers:
        schedule = pipeline.SCHEDULES.get(str(settings.get("schedule", pipeline.SEVERAL_CHUNKS)))
        if schedule is None or schedule.chunks is not None:
            said.pop("vpp", None)
            said.pop("microbatch_group_size", None)
        for name, forgotten in REPLACED.items():
            if name in settings:
                said = {key: value for key, value in said.items() if key not in forgotten}
        if said.get("pp") != settings.get("pp", said.get("pp")):
            for name in OF_A_SPLIT:
                said.pop(name, None)
        if "recompute" in settings:
            said.pop("recompute_method", None)
            said.pop("recompute_layers", None)
        said |= settings
    return said


def _accumulate(said: dict[str, Any], accumulation: int | None) -> None:
    """Derive the missing one of global batch = micro-batch x accumulation steps x DP size."""
    if accumulation is None:
        return
    fields.whole("gradient accumulation steps", accumulation, 2**31)
    replicas, batch = said.get("dp", 1), said.get("global_batch_size")
    if type(replicas) is not int:
        return  # an error of Parallel
    if batch is None and type(said.get("micro_batch_size", 1)) is int:
        said["global_batch_size"] = said.get("micro_batch_size", 1) * accumulation * replicas
    elif "micro_batch_size" not in said and type(batch) is int:
        fields.divides(
            ("gradient accumulation steps x --dp", max(1, accumulation * replicas)),
            ("--global-batch-size", batch),
        )
        said["micro_batch_size"] = batch // max(1, accumulation * replicas)


def _shard(said: dict[str, Any]) -> list[Assumption]:
    """Complete the settings of sharding, and return what is assumed."""
    assumed = []
    distributed = said.pop("distributed_optimizer", None)
    if distributed is not None:
        fields.flag("distributed_optimizer", distributed)
    meant = DISTRIBUTED_OPTIMIZER
    if distributed and any(said.get(name, value) != value for name, value in meant.items()):
        raise ConfigError(
            f"--distributed-optimizer means --zero {meant['zero']} --sharder {meant['sharder']}, "
            "and contradicts any other"
        )
    if distributed:
        said |= meant
    if "sharder" not in said:
        usual = (name for name, each in SHARDERS.items() if said.get("zero") in each.default_for)
        name = next(usual, Parallel().sharder)
        if name != Parallel().sharder:
            said["sharder"] = name
            why = f"the default for ZeRO stage {said['zero']}"
            assumed.append(Assumption("sharder", name, why))
    sharder = SHARDERS.get(str(said.get("sharder")))
    if sharder and sharder.default_stage is not None and "zero" not in said:
        said["zero"] = sharder.default_stage
        assumed.append(Assumption("zero", said["zero"], f"the default of {said['sharder']}"))
    if sharder and sharder.weights_dtype and "main_grads" not in said:
        narrow = {"fp32": "fp32", "fp16": "fp16"}.get(str(said.get("precision")), "bf16")
        said["main_grads"] = narrow
        if narrow == "bf16" and not said.get("zero"):
            assumed.append(Assumption("main_grads", "bf16", sharder.since))
    return assumed


def _words(value: Any) -> tuple[str, ...]:
    """``"attention,mlp"`` or a list of words as a tuple of words."""
    words = value.split(",") if isinstance(value, str) else value
    if not isinstance(words, (list, tuple)) or not all(isinstance(w, str) for w in words):
        raise ConfigError("--recompute must be a policy, or regions separated by commas")
    return tuple(word.strip() for word in words)


def _with_vocabulary(
    model: Model, said: Mapping[str, Any], tp: int, assumed: list[Assumption]
) -> Model:
    """The model with another vocabulary size, padded where the run's framework pads it."""
    size = said.get("vocab_size")
    if size is None:
        return model
    if model.classes is not None:
        raise ConfigError(f"{model.name} is a classifier and has no vocabulary: drop --vocab-size")
    fields.whole("vocab_size", size, 2**31)
    multiple = said.get("vocab_multiple")
    if multiple is not None:
        fields.whole("vocab_multiple", multiple, 2**31)
        size = fields.padded(size, multiple, tp, assumed)
    return replace(model, vocab_size=size)


def _with_dropout(model: Model, dropout: float | None) -> Model:
    if dropout is None:
        return model
    fields.probability("dropout", dropout)
    return replace(
        model,
        attention_dropout=dropout,
        hidden_dropout=dropout,
        embedding_dropout=dropout,
    )
