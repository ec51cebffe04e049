"""Parallel sizes, and how layers are split over pipeline stages."""

import math
from collections.abc import Mapping
from typing import Any

from memcalc.config import fields, pipeline
from memcalc.config.readers.megatron.arguments import Arguments
from memcalc.config.readers.megatron.names import CONTEXT_KINDS
from memcalc.errors import ConfigError


def parallel(said: Arguments, world: int | None) -> dict[str, Any]:
    """Parallel sizes; the data-parallel one follows from the number of GPUs."""
    settings: dict[str, Any] = {
        "tp": said.run(said.count, "tensor-model-parallel-size"),
        "pp": said.run(said.count, "pipeline-model-parallel-size"),
        "cp": said.run(said.count, "context-parallel-size"),
        "cp_kind": said.run(said.word, "cp-comm-type", CONTEXT_KINDS),
        "ep": said.run(said.count, "expert-model-parallel-size"),
        "etp": said.run(said.count, "expert-tensor-parallel-size"),
        "sp": said.flag("sequence-parallel") or None,
        "dp": None,
    }
    size = math.prod(settings[degree] or 1 for degree in ("tp", "pp", "cp"))
    if world and size > 0 and world % size == 0:
        settings["dp"] = world // size
    elif world:
        said.unmodelled.append(
            f"the file's {world} GPUs are not a multiple of TP x PP x CP = {size}: counted with "
            "--dp 1"
        )
    return settings


def spread(said: Arguments) -> dict[str, Any]:
    """How the layers are split over the pipeline stages."""
    return {
        "first_stage_layers": said.count("decoder-first-pipeline-num-layers"),
        "last_stage_layers": said.count("decoder-last-pipeline-num-layers"),
        "layout": said.text("pipeline-model-parallel-layout"),
        "embedding_as_layer": said.flag("account-for-embedding-in-pipeline-split") or None,
        "loss_as_layer": said.flag("account-for-loss-in-pipeline-split") or None,
        "microbatch_group_size": said.count("microbatch-group-size-per-virtual-pipeline-stage"),
    }


def chunks(said: Arguments, layers: int | None, settings: Mapping[str, Any]) -> int | None:
    """Model chunks per pipeline rank."""
    stages = settings["pp"] or 1
    virtual = said.count("num-virtual-stages-per-pipeline-rank")
    each = said.count("num-layers-per-virtual-pipeline-stage")
    if settings.get("layout") is not None and stages > 0:
        chunks = len(pipeline.layout(settings["layout"]))
        fields.divides(("--pipeline-model-parallel-size", stages), ("chunks of the layout", chunks))
        return chunks // stages
    if each is not None and virtual is not None:
        raise ConfigError(
            "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank "
            "are mutually exclusive"
        )
    if each is None or layers is None:
        return virtual
    layers += bool(settings.get("embedding_as_layer")) + bool(settings.get("loss_as_layer"))
    if min(each, stages) < 1 or layers % (each * stages):
        raise ConfigError(
            f"--num-layers-per-virtual-pipeline-stage {each} x --pipeline-model-parallel-size "
            f"{stages} must divide layers {layers}"
        )
    return layers // (each * stages)
