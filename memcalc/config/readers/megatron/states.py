"""The optimizer, the dtypes of gradients and optimizer states, and how they are sharded."""

import re
from typing import Any

from memcalc.config.optimizers import NAMES
from memcalc.config.readers.megatron.arguments import Arguments
from memcalc.config.readers.megatron.names import RESHARDING, SHARDING
from memcalc.config.run import MOMENTS
from memcalc.frameworks.megatron import MEGATRON


def states(said: Arguments, precision: str | None) -> dict[str, Any]:
    """The optimizer, the dtypes of its states, and how they are sharded.

    Gradients accumulate in fp32 under bf16, and in fp16 under fp16, unless an argument says
    otherwise. The dtypes of a precision-aware optimizer need its flag.
    """
    settings: dict[str, Any] = {
        "optimizer": said.word("optimizer", NAMES),
        "momentum": said.number("sgd-momentum"),
        "distributed_optimizer": said.flag("use-distributed-optimizer") or None,
        "shard_copies": said.count("num-distributed-optimizer-instances"),
        "fp8_params": said.flag("fp8-param-gather") or None,
    }
    if said.flag("use-megatron-fsdp") or said.flag("use-custom-fsdp"):
        strategy = said.word("data-parallel-sharding-strategy", SHARDING)
        settings |= {"distributed_optimizer": None, "zero": int(strategy or 0)}
        settings["sharder"] = "megatron-fsdp"
    if said.flag("use-torch-fsdp2"):
        settings |= {"shard_copies": None, "zero": _resharding(said), "sharder": "fsdp2"}
        if settings["momentum"] is None:
            settings["momentum"] = MEGATRON.momentum
        return settings | {"optimizer_step": MEGATRON.optimizer_step}  # its own optimizer's
    if settings["shard_copies"] is not None and not (
        settings["distributed_optimizer"] or settings.get("zero")
    ):
        settings["shard_copies"] = None
    if said.flag("grad-reduce-in-bf16"):
        settings["main_grads"] = "bf16"
    elif precision == "fp16" and not said.flag("accumulate-allreduce-grads-in-fp32"):
        settings["main_grads"] = "fp16"
    if not said.flag("use-precision-aware-optimizer"):
        return settings
    main = said.text("main-params-dtype") or "fp32"
    moments = {said.text(f"exp-avg{which}-dtype") or "fp32" for which in ("", "-sq")}
    if len(moments) > 1:
        said.unmodelled.append(
            "moments of two dtypes are not modeled: both are counted in the wider one"
        )
    remainder = main == "fp32" and precision == "bf16"  # stored as the bits that bf16 lacks
    return settings | {
        "main_grads": said.text("main-grads-dtype") or "fp32",
        "main_params": "remainder" if remainder else main,
        "moments": max(moments, key=lambda name: MOMENTS.get(name, 0)),
    }


def _resharding(said: Arguments) -> int:
    """The ZeRO stage of PyTorch's FSDP2: 2 where gathered weights stay after forward."""
    if said.flag("torch-fsdp2-no-reshard-after-forward"):
        return 2
    name = "torch-fsdp2-reshard-after-forward"
    if re.fullmatch(r"[0-9]{1,9}", said.text(name) or ""):
        said.unmodelled.append(
            f"--{name} {said.text(name)} is not modeled: actual memory is higher (weights "
            "are sharded over fewer ranks after forward)"
        )
        return 3
    return int(said.word(name, RESHARDING) or 3)
