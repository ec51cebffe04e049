"""What readers of keys and values share: checks of a section, and the lines about its keys."""

from collections.abc import Iterable, Mapping
from typing import Any

from memcalc.config.readers.shell import shown
from memcalc.errors import ConfigError, InputError, nearest


def section(content: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A section without what says nothing: nulls, and DeepSpeed's ``"auto"``.

    >>> section({"run": {"a": 1, "b": None, "c": "auto"}}, "run")
    {'a': 1}

    Raises:
        InputError: It is not keys with values.
    """
    found = content.get(key)
    if found is None or found == "auto":
        return {}
    if not isinstance(found, dict):
        raise InputError(f"{key} must hold keys with values")
    return {name: value for name, value in found.items() if value is not None and value != "auto"}


def count(content: Mapping[str, Any], key: str) -> int | None:
    """A whole number, or None where the key says nothing.

    Raises:
        InputError: It is another kind of value.
    """
    value = content.get(key)
    if value is not None and type(value) is not int:
        raise InputError(f"{key} must be a whole number, not {str(value)[:40]!r}")
    return value


def flag(content: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """True or false, or the default where the key says nothing.

    Raises:
        InputError: It is another kind of value.
    """
    value = content.get(key)
    if value is None:
        return default
    if type(value) is not bool:
        raise InputError(f"{key} must be true or false, not {str(value)[:40]!r}")
    return value


def word(content: Mapping[str, Any], key: str, known: Mapping[str, Any], default: str) -> Any:
    """What a word stands for; that of the default where the key says nothing.

    Raises:
        InputError: It is none of the known words.
    """
    value = content.get(key)
    chosen = default if value is None else value
    if not isinstance(chosen, str) or chosen not in known:
        shown = str(chosen)[:40]
        raise InputError(f"{key} {shown!r} is not modelled; {nearest(shown, known)}")
    return known[chosen]


def lines(
    content: Mapping[str, Any], unmodelled: Mapping[str, str], known: Iterable[str]
) -> list[str]:
    """A line for each key that is set and not modelled, and one for all that are not known."""
    known = {*known, *unmodelled}
    met = [key for key in unmodelled if content.get(key)]
    found = [f"{key} is not modelled: {unmodelled[key]}" for key in met]
    unknown = sorted(shown(key) for key, value in content.items() if value and key not in known)
    if unknown:
        found.append(f"not used, for memcalc does not know it: {', '.join(unknown[:32])}")
    return found


def off(value: Any) -> bool:
    """Whether a value is a section that is turned off.

    >>> off({"enabled": False, "x": 1}), off({"x": 1})
    (True, False)
    """
    return isinstance(value, dict) and value.get("enabled") is False


def precision(content: Mapping[str, Any]) -> str | None:
    """The precision that DeepSpeed's sections ``bf16`` (or ``bfloat16``) and ``fp16`` enable.

    >>> precision({"bf16": {"enabled": True}, "fp16": {"enabled": "auto"}})
    'bf16'

    Raises:
        ConfigError: Both are enabled.
    """
    names = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16"}
    chosen = {names[key] for key in names if flag(section(content, key), "enabled") is True}
    if len(chosen) > 1:
        raise ConfigError("bf16 and fp16 are both enabled, and contradict each other")
    return next(iter(chosen), None)


def zero(content: Mapping[str, Any]) -> list[str]:
    """What is assumed of DeepSpeed's ``zero_optimization``, which splits no activation."""
    stage = section(content, "zero_optimization").get("stage")
    return [f"ZeRO stage {str(stage)[:10]} leaves activations as they are"] if stage else []


def sharding(content: Mapping[str, Any]) -> dict[str, Any]:
    """How DeepSpeed's ``zero_optimization`` splits states, and in what type it sums gradients.

    >>> sharding({"zero_optimization": {"stage": 2}, "data_types": {"grad_accum_dtype": "fp32"}})
    {'sharder': 'deepspeed', 'zero': 2, 'main_grads': 'fp32'}

    Raises:
        InputError: A value is of another kind than its key's.
    """
    zero_ = section(content, "zero_optimization")
    found: dict[str, Any] = {"sharder": "deepspeed"}
    if stage := count(zero_, "stage"):
        found["zero"] = stage
    types = section(content, "data_types")
    if "grad_accum_dtype" in types:
        found["main_grads"] = word(types, "grad_accum_dtype", _TYPES, "fp32")
    size = zero_.get("reduce_bucket_size")
    if stage and isinstance(size, (int, float)) and 1 <= size < 2**40:
        found["bucket"] = int(size)
    return found


_TYPES = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}
_OPTIMIZERS = {"adam": "adam", "adamw": "adam", "fusedadam": "adam", "sgd": "sgd", "muon": "muon"}


def optimizer(name: Any, unmodelled: list[str]) -> dict[str, Any]:
    """The optimizer of a name; of another, a line says that it is counted as Adam.

    >>> optimizer("AdamW", []), optimizer(None, [])
    ({'optimizer': 'adam'}, {})
    """
    if name is None:
        return {}
    found = _OPTIMIZERS.get(str(name).lower())
    if found is None:
        unmodelled.append(
            f"optimizer {shown(str(name))} is not modelled: Adam's states are counted"
        )
    return {"optimizer": found or "adam"}


def batch(
    micro: int | None, accumulation: int | None, total: int | None
) -> tuple[dict[str, Any], int | None]:
    """Batch settings, and the accumulation where it is still to be used.

    The total is micro-batch x accumulation x data parallel; of three that are said, the fourth
    follows.

    >>> batch(4, 2, 64)
    ({'micro_batch_size': 4, 'global_batch_size': 64, 'dp': 8}, None)
    >>> batch(4, 2, None)
    ({'micro_batch_size': 4}, 2)

    Raises:
        ConfigError: They contradict one another, or one is less than 1.
    """
    said = {"micro-batch size": micro, "accumulation": accumulation, "total batch size": total}
    for name, value in said.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, not {value}")
    settings: dict[str, Any] = {}
    if micro is not None:
        settings["micro_batch_size"] = micro
    if total is not None:
        settings["global_batch_size"] = total
    if micro is None or accumulation is None or total is None:
        return settings, accumulation
    if total % (micro * accumulation):
        raise ConfigError(
            f"total batch size {total} is no multiple of micro-batch size {micro} x accumulation "
            f"{accumulation}"
        )
    settings["dp"] = total // (micro * accumulation)
    return settings, None
