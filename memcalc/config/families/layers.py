"""Which layers of a ``config.json`` are MoE layers or have a window: a 0 or 1 per layer."""

from collections.abc import Callable
from typing import Any

from memcalc.config import fields
from memcalc.config.families.content import Content
from memcalc.errors import ConfigError, InputError, nearest


def flag(said: Content, key: str, default: bool) -> bool:
    """A flag, or the default where it is missing or null."""
    value = said.get(key, default)
    fields.flag(key, value)
    return bool(value)


def moe_layers(said: Content) -> tuple[int, ...] | None:
    """A 1 per MoE layer and a 0 per dense layer, or None where all are MoE layers."""
    found = _moe_layers(said)
    return None if all(found) else found


def _moe_layers(said: Content) -> tuple[int, ...]:
    """The MoE layers, as they are listed, or by all rules together."""
    layers = said.fact("layers")
    frequency = said.size("moe_layer_freq", 1)
    first = said.fact("first_dense") or 0
    only = said.get("mlp_only_layers", [])
    types = said.get("mlp_layer_types")
    steps = {key: said.size(key, 1) for key in ("decoder_sparse_step", "interleave_moe_layer_step")}
    if types is not None:
        return _pattern("mlp_layer_types", types, {"dense": 0, "sparse": 1})
    if isinstance(frequency, (list, str)):
        return fields.pattern("moe_layer_freq", frequency, layers)
    for key, step in {"moe_layer_freq": frequency, **steps}.items():
        fields.whole(key, step, 100_000)
    if type(first) is not int or first < 0:
        raise ConfigError("first_k_dense_replace must be a whole number of at least 0")
    if not isinstance(only, list) or not all(type(layer) is int for layer in only):
        raise ConfigError("mlp_only_layers must be a list of layer numbers")
    dense = set(only)
    return tuple(
        int(
            layer >= first
            and layer % frequency == 0
            and layer not in dense
            and all((layer + 1) % step == 0 for step in steps.values())
        )
        for layer in range(layers)
    )


def windows(said: Content, every: int = 1) -> dict[str, Any]:
    """The window and its layers: all, all but every ``every``-th, or those of ``layer_types``."""
    window, listed = said.optional("sliding_window"), _listed(said)
    layers = said.fact("layers")
    if window in (None, 0):
        if listed is not None and any(listed):
            raise ConfigError("layer_types has sliding_attention but sliding_window is missing")
        return {}
    if listed is None and every > 1:
        listed = tuple(int((layer + 1) % every != 0) for layer in range(layers))
    if listed is not None and not any(listed):
        return {}
    return {"sliding_window": window, "window_layers": listed}


def qwen_windows(said: Content, rule: Callable[[int, int], bool]) -> dict[str, Any]:
    """Qwen's window, which a flag enables, in the layers that the family's rule selects.

    Args:
        said: The config.
        rule: Whether a layer has a window, given its number and ``max_window_layers``.
    """
    on = flag(said, "use_sliding_window", False)
    most, layers = said.size("max_window_layers", 28), said.fact("layers")
    if not on:
        said.read |= {"sliding_window", "layer_types"}
        return {}
    fields.whole("max_window_layers", most, 100_000)
    found = windows(said)
    if found and found["window_layers"] is None:
        found["window_layers"] = tuple(int(rule(layer, most)) for layer in range(layers))
    return found if found and any(found["window_layers"]) else {}


def _listed(said: Content) -> tuple[int, ...] | None:
    types = said.get("layer_types")
    if types is None:
        return None
    return _pattern("layer_types", types, {"full_attention": 0, "sliding_attention": 1})


def gpt_neo_windows(said: Content) -> tuple[int, ...]:
    """GPT-Neo's local layers: a list, or ``[[["global", "local"], 12]]``, or every second."""
    layers = said.fact("layers")
    listed, types = said.get("attention_layers"), said.get("attention_types")
    if listed is None and types is not None:
        listed = _repeated(types)
    if listed is None:
        return tuple(layer % 2 for layer in range(layers))
    return _pattern("attention_layers", listed, {"global": 0, "local": 1})


def _repeated(types: Any) -> list[Any]:
    found: list[Any] = []
    for group in types if isinstance(types, list) else [types]:
        match group:
            case [list(names), int(times)] if 0 <= times * len(names) <= 100_000:
                found += names * times
            case _:
                raise InputError(
                    "attention_types must be a list such as [[['global', 'local'], 12]]"
                )
        if len(found) > 100_000:
            raise InputError("attention_types has more than 100000 layers")
    return found


def _pattern(key: str, names: Any, known: dict[str, int]) -> tuple[int, ...]:
    """A 0 or 1 per layer, from a list of words."""
    if not isinstance(names, list):
        raise InputError(f"{key} must be a list with one word per layer")
    for name in names:
        if not isinstance(name, str) or name not in known:
            shown = str(name)[:40]
            raise InputError(f"{key} {shown!r} is not modeled; {nearest(shown, known)}")
    return tuple(known[name] for name in names)
