"""What readers of keys and values share: checks of a section, and warnings about its keys."""

from collections.abc import Iterable, Mapping
from typing import Any

from memcalc.config.optimizers import NAMES
from memcalc.config.readers.shell.marks import shown
from memcalc.errors import ConfigError, InputError, nearest

OFFLOADED = "actual GPU memory is lower"  # why an option is not modeled
MOST_NAMED = 32  # names in one line
MOST = 10**18  # a whole number in a file


def listed(names: Iterable[str]) -> str:
    """Names in one line; of many, the first and how many more there are.

    >>> listed(["a", "b", "a"]), listed(str(n) for n in range(100, 1000))[-16:]
    ('a, b', '131 and 868 more')
    """
    names = list(dict.fromkeys(shown(name) for name in names))
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def section(content: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A section without the values that say nothing: null, and DeepSpeed's ``"auto"``.

    >>> section({"run": {"a": 1, "b": None, "c": "auto"}}, "run")
    {'a': 1}

    Raises:
        InputError: It is not an object of keys and values.
    """
    found = content.get(key)
    if found is None or found == "auto":
        return {}
    if not isinstance(found, dict):
        raise InputError(f"{key} must be a section of keys and values")
    return {name: value for name, value in found.items() if value is not None and value != "auto"}


def count(content: Mapping[str, Any], key: str) -> int | None:
    """A whole number, or None where the key is missing.

    Raises:
        InputError: The value is of another kind, or has more than 18 digits.
    """
    value = content.get(key)
    if value is not None and type(value) is not int:
        raise InputError(f"{key} must be a whole number, not {str(value)[:40]!r}")
    if value is not None and abs(value) >= MOST:
        raise InputError(f"{key} must have at most 18 digits")
    return value


def flag(content: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """True or false, or the default where the key is missing.

    Raises:
        InputError: The value is of another kind.
    """
    value = content.get(key)
    if value is None:
        return default
    if type(value) is not bool:
        raise InputError(f"{key} must be true or false, not {str(value)[:40]!r}")
    return value


def word(content: Mapping[str, Any], key: str, known: Mapping[str, Any], default: str) -> Any:
    """The meaning of a word, or of the default where the key is missing.

    Raises:
        InputError: The word is unknown.
    """
    value = content.get(key)
    chosen = default if value is None else value
    if not isinstance(chosen, str) or chosen not in known:
        shown = str(chosen)[:40]
        raise InputError(f"{key} {shown!r} is not modeled; {nearest(shown, known)}")
    return known[chosen]


def lines(
    content: Mapping[str, Any], unmodelled: Mapping[str, str], known: Iterable[str]
) -> list[str]:
    """A line for each key that is set and not modeled, and one for all unknown keys."""
    known = {*known, *unmodelled}
    met = [key for key in unmodelled if content.get(key)]
    found = [f"{key} is not modeled: {unmodelled[key]}" for key in met]
    unknown = sorted(key for key, value in content.items() if value and key not in known)
    if unknown:
        found.append(f"unknown to memcalc, ignored: {listed(unknown)}")
    return found


def off(value: Any) -> bool:
    """Whether a value is a section that is disabled.

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
        raise ConfigError("bf16 and fp16 are both enabled: enable one")
    return next(iter(chosen), None)


def sharding(content: Mapping[str, Any]) -> dict[str, Any]:
    """What DeepSpeed's ``zero_optimization`` shards, and the gradient accumulation dtype.

    >>> sharding({"zero_optimization": {"stage": 2}, "data_types": {"grad_accum_dtype": "fp32"}})
    {'sharder': 'deepspeed', 'zero': 2, 'main_grads': 'fp32'}

    Raises:
        InputError: A value is of the wrong kind.
    """
    zero_ = section(content, "zero_optimization")
    found: dict[str, Any] = {"sharder": "deepspeed"}
    if stage := count(zero_, "stage"):
        found["zero"] = stage
    types = section(content, "data_types")
    if "grad_accum_dtype" in types:
        found["main_grads"] = word(types, "grad_accum_dtype", _TYPES, "fp32")
    size = zero_.get("reduce_bucket_size")
    if size is None:
        return found
    if type(size) not in (int, float) or not 1 <= size < 2**40:
        raise InputError(
            f"reduce_bucket_size must be a number from 1 to {2**40 - 1:,}, not {str(size)[:40]!r}"
        )
    return {**found, "bucket": int(size)} if stage else found


_TYPES = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}


def optimizer(said: Mapping[str, Any], unmodelled: list[str]) -> dict[str, Any]:
    """DeepSpeed's section ``optimizer``; a line says where another one is counted as Adam.

    >>> optimizer({"type": "AdamW"}, []), optimizer({}, [])
    ({'optimizer': 'adam'}, {})
    >>> optimizer({"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, [])
    {'optimizer': 'sgd', 'momentum': 0.9}

    Raises:
        InputError: A value is of the wrong kind.
    """
    found = named_optimizer(said.get("type"), unmodelled)
    params = section(said, "params")
    if found.get("optimizer") in ("sgd", "rmsprop") and "momentum" in params:
        momentum = params["momentum"]
        if type(momentum) not in (int, float):
            raise InputError(f"momentum must be a number, not {str(momentum)[:40]!r}")
        found["momentum"] = momentum
    if found.get("optimizer") == "adam" and flag(params, "torch_adam"):
        found["optimizer_step"] = "foreach"
    return found


def named_optimizer(name: Any, unmodelled: list[str]) -> dict[str, Any]:
    """The optimizer of a name; a line says where another one is counted as Adam.

    >>> named_optimizer("adamw_torch_fused", [])
    {'optimizer': 'adam', 'optimizer_step': 'fused'}
    """
    if name is None:
        return {}
    said = str(name).lower()
    found = NAMES.get(said)
    if found is None:
        unmodelled.append(f"optimizer {shown(str(name))} is not modeled: counted as Adam")
    fused = {"optimizer_step": "fused"} if found and said.endswith("_fused") else {}
    return {"optimizer": found or "adam"} | fused


def batch(
    micro: int | None, accumulation: int | None, total: int | None
) -> tuple[dict[str, Any], int | None]:
    """Batch settings, and the accumulation steps where they are still needed.

    The global batch is micro-batch x accumulation steps x data-parallel size; three of them give
    the fourth.

    >>> batch(4, 2, 64)
    ({'micro_batch_size': 4, 'global_batch_size': 64, 'dp': 8}, None)
    >>> batch(4, 2, None)
    ({'micro_batch_size': 4}, 2)

    Raises:
        ConfigError: They contradict each other, or one is less than 1.
    """
    said = {
        "micro-batch size": micro,
        "gradient accumulation steps": accumulation,
        "global batch size": total,
    }
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
            f"global batch size {total} must be a multiple of micro-batch size {micro} x gradient "
            f"accumulation steps {accumulation}"
        )
    settings["dp"] = total // (micro * accumulation)
    return settings, None
