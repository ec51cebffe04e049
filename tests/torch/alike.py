"""Models of the catalogue that differ in sizes alone, of which one stands for all."""

import json
import os
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

from memcalc.config import Model, load

CONFIGS = json.loads((Path(__file__).parents[1] / "configs.json").read_text())


def one_of_each(names: Iterable[str]) -> list[str]:
    """The first of every set of models that have the same facts and code, in other sizes.

    No code in memcalc or transformers tells them apart: it asks whether a size is there, whether
    heads share keys, and whether they are as wide together as the hidden size. With
    ``MEMCALC_EVERY_MODEL`` in the environment every model stands for itself.
    """
    if "MEMCALC_EVERY_MODEL" in os.environ:
        return list(names)
    first: dict[tuple[object, ...], str] = {}
    for name in names:
        first.setdefault(_facts(name), name)
    return list(first.values())


def _facts(name: str) -> tuple[object, ...]:
    model = load(name).model
    values = [getattr(model, x.name) for x in fields(Model) if x.name not in ("name", "source")]
    return (
        CONFIGS.get(name, {}).get("model_type"),
        model.kv_heads < model.heads,
        model.kv_heads == 1,
        model.heads * model.head_size == model.hidden_size,
        *(value if isinstance(value, str) else _there(value) for value in values),
    )


def _there(value: object) -> bool:
    return any(value) if isinstance(value, tuple) else bool(value)
