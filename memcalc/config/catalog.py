"""The catalog of models that ship with memcalc, and ``load``, which reads all kinds of models."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from memcalc import resources
from memcalc.config import readers
from memcalc.config.config import Config
from memcalc.config.merge import configure
from memcalc.config.readers import hub, native
from memcalc.config.source import Source
from memcalc.errors import ConfigError, InputError, nearest

# Other names of models in the catalog.
ALIASES = {
    **dict.fromkeys(("gpt3", "gpt-3", "gpt3-175b", "gpt-3-175b", "gpt-175b"), "175b"),
    **dict.fromkeys(("mt-nlg", "mt-nlg-530b", "megatron-turing", "megatron-530b"), "530b"),
    **dict.fromkeys(("megatron-1t", "gpt-1t"), "1t"),
    **dict.fromkeys(("megatron-22b", "gpt-22b"), "22b"),
}


def names() -> list[str]:
    """The names of the catalog's models.

    >>> "llama-3-70b" in names()
    True
    """
    return list(resources.names("models", ".json"))


def named(target: str) -> str | None:
    """The catalog's name of a model, from its name or an alias; None if there is neither.

    >>> named("GPT-3"), named("Llama-3-8B"), named("model.json")
    ('175b', 'llama-3-8b', None)
    """
    name = target.lower()
    return name if name in names() else ALIASES.get(name)


def entries() -> Iterator[Source]:
    """The catalog's models with the settings of their runs."""
    return (_entry(name) for name in names())


def load(
    target: str | os.PathLike[str], run: str | os.PathLike[str] | None = None, **settings: Any
) -> Config:
    """A model with its parallelism and run, from a catalog name, a path or the Hub.

    Args:
        target: A name of the catalog or an alias; the path of a file in memcalc's own JSON or in
            a format that ``memcalc.config.readers`` reads, or of a folder that holds a
            ``config.json``; or ``hf:org/name`` of the Hugging Face Hub, with an ``@revision``.
        run: The path of a file whose parallelism and run settings replace the target's; a model in
            it is ignored.
        settings: Settings that replace those of the files, or memcalc's defaults: ``seq_length``,
            ``micro_batch_size``, ``global_batch_size``, ``precision``, ``recompute``,
            ``implementation``, ``attention``, ``expert_products``, ``dropout``,
            ``vocab_size``, ``gpu``, ``tp``, ``sp``, ``pp``,
            ``vpp``, ``dp``, ``cp``, ``cp_kind``, ``ep``, ``etp``, ``imbalance``, and the other
            fields of ``Parallel`` and ``Run``.

    Raises:
        ConfigError: The target is unknown, or a setting is invalid.
        InputError: The file cannot be read or downloaded.
        UsageError: ``hf:`` needs huggingface_hub, which is not installed.

    >>> load("175b", sp=True).parallel.pp
    8
    """
    source, overlay = sources(target, run)
    return configure(source, settings, overlay)


def sources(
    target: str | os.PathLike[str], run: str | os.PathLike[str] | None = None
) -> tuple[Source, Source | None]:
    """The target's model and settings, and the settings of ``run``, before they are combined.

    Args:
        target: As in ``load``.
        run: As in ``load``.

    Raises:
        ConfigError: The target is unknown.
        InputError: A file cannot be read or downloaded.
        UsageError: As in ``load``.

    >>> sources("175b")[0].settings["pp"], sources("175b")[1]
    (8, None)
    """
    if not isinstance(target, str | os.PathLike):
        raise ConfigError(f"MODEL must be a name or a path, not a {type(target).__name__}")
    if run is not None and not isinstance(run, str | os.PathLike):
        raise ConfigError(f"run must be a path, not a {type(run).__name__}")
    overlay = None if run is None else readers.read_run(Path(run))
    return _source(os.fspath(target)), overlay


def content(target: str) -> Mapping[str, Any] | None:
    """The Hugging Face ``config.json`` of a target; None for a catalog name.

    Raises:
        ConfigError: The target is unknown.
        InputError: The file cannot be read, or is of another format.
        UsageError: As in ``load``.

    >>> content("llama-3-8b") is None
    True
    """
    if named(target):
        return None
    if target.startswith(hub.PREFIX):
        return readers.content(hub.fetch(target)[0], target)
    if not _is_path(target):
        raise _unknown(target)
    _of_hub(target)
    return readers.content(Path(target))


def _source(target: str) -> Source:
    if name := named(target):
        return _entry(name)
    if target.startswith(hub.PREFIX):
        path, repository = hub.fetch(target)
        return readers.read(path, repository, target)
    if _is_path(target):
        _of_hub(target)
        return readers.read(Path(target))
    raise _unknown(target)


def _of_hub(target: str) -> None:
    """Refuse the name of a repository of the Hub that is no path, with what it may stand for.

    Raises:
        InputError: It is one.
    """
    match = re.fullmatch(r"[A-Za-z0-9][\w.-]{0,95}/([A-Za-z0-9][\w.-]{0,95})", target)
    if match and not os.path.exists(target) and not target.lower().endswith(readers.SUFFIXES):
        known = named(match[1])
        near = f"the catalog has {known}" if known else nearest(match[1], names())
        raise InputError(f"{target}: no such file; for the Hub, hf:{target}; {near}")


def _is_path(target: str) -> bool:
    said = "/" in target or "\\" in target or target.lower().endswith(readers.SUFFIXES)
    return said or os.path.exists(target)


def _unknown(target: str) -> ConfigError:
    hint = nearest(target, (*names(), *ALIASES), "`memcalc models`")
    return ConfigError(f"{target[:60]!r} is neither a model of the catalog nor a file; {hint}")


def _entry(name: str) -> Source:
    path = f"models/{name}.json"
    return native.read(readers.parse(resources.read(path), path), name)
