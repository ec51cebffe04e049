"""What ``validate`` and ``derive`` refuse to run, and what to choose instead."""

import torch

from memcalc.config import Config
from memcalc.errors import UsageError
from memcalc.validation import ranks
from memcalc.validation.against import AGAINST
from memcalc.validation.layers import hugging_face
from memcalc.validation.layers.modules import TYPES
from memcalc.validation.measuring import cuda


def require(
    config: Config, device: str, against: str, instead: str = "--against transformers"
) -> None:
    """Refuse a layer that memcalc cannot run, and a device that this machine does not have.

    Args:
        config: The layer.
        device: The device.
        against: Whose layer runs.
        instead: What to choose where memcalc's own layer lacks something.

    Raises:
        UsageError: With what to choose instead.
    """
    layer, kernels, t = AGAINST[against], config.run.implementation, config.parallel.tp
    require_precision(config.run.precision)
    if device == "cuda":
        if device not in layer.devices:
            raise UsageError("--device cuda runs memcalc's own layer only (--against own)")
        if not cuda.available():
            raise UsageError("PyTorch finds no GPU here; choose --device meta or --device cpu")
        if not ranks.launched() and torch.cuda.device_count() < t:
            raise UsageError(
                f"--tp {t} needs {t} GPUs, and this machine has {torch.cuda.device_count()}; "
                "choose a smaller --tp or --device meta, or start memcalc with torchrun"
            )
        if kernels.attention == "flash" and config.run.precision == "fp32":
            raise UsageError(
                "CUDA's flash attention needs --precision bf16 or fp16; choose one, or "
                "--attention unfused"
            )
    caches = "selective_op" in config.run.policy.cached
    if caches and (t > 1 or (device == "meta" and kernels.attention == "flash")):
        raise UsageError(
            "--recompute selective_op needs --tp 1, and with flash attention also "
            "--device cpu or cuda"
        )
    lacks = layer.lacking(config)
    if lacks:
        raise UsageError(
            f"memcalc's PyTorch layer does not support {lacks}{_way_out(config, instead)}"
        )
    layer.require(config, device)


def require_precision(precision: str) -> None:
    """Refuse a precision in which no layer can run.

    Raises:
        UsageError: With those that can.
    """
    if precision not in TYPES:
        raise UsageError(f"--precision {precision} cannot run here; choose from {', '.join(TYPES)}")


def _way_out(config: Config, instead: str) -> str:
    """What to choose where memcalc's own layer lacks something, if that has it."""
    _, different = hugging_face.nearest(config)
    if different:
        return ", and no known Hugging Face layer matches the model"
    return f"; try {instead}" + (" and --cp 1" if config.parallel.cp > 1 else "")
