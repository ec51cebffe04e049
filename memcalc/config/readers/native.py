"""memcalc's own JSON: ``{"memcalc": 1, "model": {...}, "parallel": {...}, "run": {...}}``.

The keys of ``model`` are those of ``Model.of``; those of ``parallel`` and ``run`` are the settings
of ``Parallel`` and ``Run``, with ``attention`` and ``dropout`` as on the command line.
``unmodelled`` lists what these fields cannot express; each line becomes a warning.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from memcalc.config import fields
from memcalc.config.model import FACTS, Model
from memcalc.config.source import OTHER_SETTINGS, PARALLEL_SETTINGS, RUN_SETTINGS, Source
from memcalc.errors import InputError, nearest

VERSION = 1
_REQUIRED = ("layers", "hidden_size", "heads")


def read(content: Mapping[str, Any], name: str) -> Source:
    """Read memcalc's own JSON, with or without a model; ``name`` is the model's default name.

    Raises:
        InputError: A key is unknown or missing, or the version is unsupported.
        ConfigError: A value is out of range.

    >>> model = {"layers": 2, "hidden_size": 64, "heads": 4}
    >>> read({"memcalc": 1, "model": model, "parallel": {"tp": 2}}, "toy").settings
    {'tp': 2}
    """
    if type(content["memcalc"]) is not int or content["memcalc"] != VERSION:
        raise InputError(f'"memcalc" must be {VERSION}, the version of the format')
    _known("the file", content, ("memcalc", "model", "parallel", "run", "unmodelled"))
    parallel = _section(content, "parallel", PARALLEL_SETTINGS)
    run = _section(content, "run", (*RUN_SETTINGS, *OTHER_SETTINGS))
    if "model" not in content:
        return Source(None, {**parallel, **run})
    model = _section(content, "model", FACTS)
    for key in _REQUIRED:
        if key not in model:
            raise InputError(f"model needs {key!r}")
    lines = content.get("unmodelled", [])
    if not isinstance(lines, list) or len(lines) > 100:
        raise InputError("'unmodelled' must be a list of at most 100 lines of text")
    for line in lines:
        fields.text("unmodelled", line)
    return Source(Model.of(**{"name": name, **model}), {**parallel, **run}, (), tuple(lines))


def _section(content: Mapping[str, Any], key: str, known: Iterable[str]) -> dict[str, Any]:
    """A section without its nulls."""
    section = content.get(key, {})
    if not isinstance(section, dict):
        raise InputError(f"{key!r} must be an object")
    _known(key, section, known)
    return {name: value for name, value in section.items() if value is not None}


def _known(where: str, section: Mapping[str, Any], known: Iterable[str]) -> None:
    known = list(known)
    for key in section:
        if key not in known:
            raise InputError(f"{where} has an unknown key {key[:40]!r}; {nearest(key[:40], known)}")
