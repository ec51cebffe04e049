"""Recomputation: its granularity, its method and its modules."""

from collections.abc import Iterable
from typing import Any

from memcalc.config import fields, recompute
from memcalc.config.readers.keys import listed
from memcalc.config.readers.megatron.arguments import Arguments
from memcalc.errors import InputError


def recomputation(said: Arguments) -> dict[str, Any]:
    """The settings of recomputation."""
    granularity = said.text("recompute-granularity")
    if said.flag("recompute-activations") or said.flag("moe-layer-recompute"):
        granularity = "selective"
    if said.flag("checkpoint-activations") or (
        granularity is None and said.flag("activations-checkpoint-method")
    ):
        granularity = "full"
    if granularity in (None, "none"):
        return {}
    if granularity == "full":
        return _full(said)
    if granularity != "selective":
        raise InputError(
            f"--recompute-granularity {granularity[:40]!r} is unknown; "
            "choose from 'full', 'selective'"
        )
    modules = said.several("recompute-modules")
    modules += ["moe"] * (said.flag("moe-layer-recompute") and "moe" not in modules)
    words = _selective(said, modules or ["core_attn"])
    return {"recompute": words} if words else {}


def _full(said: Arguments) -> dict[str, Any]:
    number = said.count("recompute-num-layers")
    method = said.text("recompute-method")
    settings: dict[str, Any] = {"recompute": "full"}
    if number is not None:
        settings["recompute_layers"] = number
    if method is not None:
        fields.word("--recompute-method", method, recompute.METHODS)
        settings["recompute_method"] = method
    return settings


def _selective(said: Arguments, modules: Iterable[str]) -> str | None:
    """Megatron's names of modules, of which ``recompute`` knows most."""
    modules = list(dict.fromkeys(modules))
    known = [module for module in modules if module in recompute.WORDS]
    if other := [module for module in modules if module not in recompute.WORDS]:
        said.unmodelled.append(
            f"--recompute-modules {listed(other)} is not modeled: actual memory is lower"
        )
    return ",".join(known) or None
