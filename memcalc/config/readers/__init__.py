"""Readers: one file a format, each turning what lies on a disk into a Source.

A file is hostile until proven otherwise: it is opened only if it is a regular file, read up to a
bound, parsed without evaluating anything, and its depth is bounded too. Its format is told by what
it holds; its name only says which of JSON, YAML and shell to try first.
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from memcalc.config.config import RunSource, Source
from memcalc.errors import ConfigError, InputError
from memcalc.lazy import resolve

MAX_BYTES = 4 * 2**20
MAX_DEPTH = 32
SUFFIXES = (".json", ".sh", ".yaml", ".yml")

# A format is told by keys that only its files have; of several, by the first. Its reader is
# imported when a file needs it.
READERS = {
    "memcalc": (("memcalc",), "native:read"),
    "Hugging Face": (("model_type", "architectures"), "huggingface:read"),
    "Megatron-LM": (("MODEL_ARGS",), "megatron:read_yaml"),
    "nanotron": (("parallelism", "tokens"), "nanotron:read"),
    "gpt-neox": (
        tuple(
            spelling
            for key in (
                *("pipe_parallel_size", "model_parallel_size", "num_layers"),
                "checkpoint_activations",
            )
            for spelling in (key, key.replace("_", "-"))
        ),
        "neox:read",
    ),
    "DeepSpeed": (
        (
            *("train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization"),
            *("gradient_accumulation_steps", "activation_checkpointing"),
        ),
        "deepspeed:read",
    ),
}

_ARGUMENT = re.compile(r"(?:^|\s)--[A-Za-z][\w-]*(?=[\s=\\\"']|$)", re.MULTILINE)
_KEY = re.compile(r"^[{\s]*[\"']?[\w.-]+[\"']?\s*:(?:\s|$)", re.MULTILINE)
_MODEL_ARGS = re.compile(r"^MODEL_ARGS:", re.MULTILINE)


def read(path: Path, name: str = "", where: str = "") -> Source:
    """The model, and what is said of its run, from a file or a folder with a config.json.

    Args:
        path: The file or the folder.
        name: What to call the model, if not after the file or its folder.
        where: What to call the file in an error, if not by its path.

    Raises:
        InputError: The file cannot be read, or is of no format that memcalc knows.
        ConfigError: It can be read, but what it says cannot be, or it holds no model.
    """
    source = _read(path, name, where)
    if isinstance(source, RunSource):
        raise ConfigError(
            f"{where or path}: a run without a model; name a model, and give this file with --run"
        )
    return source


def read_run(path: Path) -> RunSource:
    """What a file says of parallelism and run; of a model in it, nothing is taken.

    Raises:
        InputError: The file cannot be read, or is of no format that memcalc knows.
        ConfigError: It can be read, but what it says cannot be.
    """
    source = _read(path)
    if isinstance(source, RunSource):
        return source
    ignored = f"of {_name(path)} only parallelism and run, not its model"
    return RunSource(
        source.settings, (*source.assumed, ignored), source.unmodelled, source.accumulation
    )


def content(path: Path, where: str = "") -> Mapping[str, Any]:
    """What a Hugging Face ``config.json`` says, as it stands; the path may be its folder's.

    Raises:
        InputError: The file cannot be read, or is of another format.
    """
    path = path / "config.json" if os.path.isdir(path) else path
    found = parse(read_bytes(path), where or str(path))
    if not isinstance(found.get("model_type"), str):
        raise InputError(f"{where or path}: no config.json of Hugging Face: it has no model_type")
    return found


def _read(path: Path, name: str = "", where: str = "") -> Source | RunSource:
    if os.path.isdir(path):
        folder, path = path, path / "config.json"
        if not os.path.exists(path):
            raise InputError(f"{folder}: the folder has no config.json")
    where = where or str(path)
    reader = _reader(read_bytes(path), path.suffix.lower(), where)
    try:
        return reader(name or _name(path))
    except (ConfigError, InputError) as error:
        kind = ConfigError if isinstance(error, ConfigError) else InputError
        raise kind(f"{where}: {error}") from error


def _name(path: Path) -> str:
    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    return "".join(c if c.isprintable() else "?" for c in name)[:200] or path.stem


def _reader(data: bytes, suffix: str, where: str) -> Callable[[str], Source | RunSource]:
    """The reader of the format that the bytes are of, which still needs a name."""
    if suffix == ".json":
        return _told(parse(data, where), where)
    text = _text(data, where)
    if _is_script(text, suffix):
        return partial(_reads("megatron:read_script"), text)
    if suffix not in (".yaml", ".yml") and text.lstrip().startswith("{"):
        try:
            return _told(parse(data, where), where)
        except InputError:
            if suffix:
                raise
    content = _reads("yaml:parse")(text, where, MAX_DEPTH)
    if not isinstance(content, dict):
        raise InputError(f"{where}: neither keys with values nor a script with arguments")
    return _told(content, where)


def _is_script(text: str, suffix: str) -> bool:
    if text.startswith("#!") or _MODEL_ARGS.search(text):
        return text.startswith("#!")
    if suffix == ".sh":
        return True
    return bool(_ARGUMENT.search(text)) and not _KEY.search(text)


def _reads(reader: str) -> Callable[..., Any]:
    """A function of one of the readers."""
    found: Callable[..., Any] = resolve(f"{__name__}.{reader}")
    return found


def _told(content: Mapping[str, Any], where: str) -> Callable[[str], Source | RunSource]:
    for keys, reader in READERS.values():
        if any(key in content for key in keys):
            return partial(_reads(reader), content)
    known = ", ".join(f"{name} ({' or '.join(keys[:2])})" for name, (keys, _) in READERS.items())
    raise InputError(f"{where}: no key tells its format; known are {known}")


def _text(data: bytes, where: str) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8 text") from error
    if "\0" in text or "\1" in text:
        raise InputError(f"{where}: not text")
    return text


def parse(data: bytes, where: str) -> Mapping[str, Any]:
    """A JSON object, from bytes, with its depth and its numbers bounded.

    >>> parse(b'{"memcalc": 1}', "x.json")
    {'memcalc': 1}

    Raises:
        InputError: The bytes are not UTF-8, not JSON, not an object, or nested too deeply.
    """
    try:
        content = json.loads(_text(data, where), object_pairs_hook=_unique)
    except InputError:
        raise
    except json.JSONDecodeError as error:
        at = f"line {error.lineno}, column {error.colno}"
        raise InputError(f"{where}: not JSON: {error.msg} at {at}") from error
    except RecursionError as error:
        raise InputError(f"{where}: nested more than {MAX_DEPTH} levels deep") from error
    except _TwiceError as error:
        raise InputError(f"{where}: {error}") from error
    except ValueError as error:
        raise InputError(f"{where}: a number has thousands of digits") from error
    if not isinstance(content, dict):
        raise InputError(f"{where}: a JSON object is needed, not a {type(content).__name__}")
    if _deeper(content, MAX_DEPTH):
        raise InputError(f"{where}: nested more than {MAX_DEPTH} levels deep")
    return content


def read_bytes(path: Path, most: int = MAX_BYTES) -> bytes:
    """What a regular file holds, up to so many bytes.

    Raises:
        InputError: It cannot be read, or holds more, or nothing.
    """
    if not os.path.isfile(path):
        problem = "not a regular file" if os.path.exists(path) else "no such file"
        raise InputError(f"{path}: {problem}")
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    if len(data) > most:
        raise InputError(f"{path}: larger than {most // 2**20} MiB")
    if not data.strip():
        raise InputError(f"{path}: the file is empty")
    return data


class _TwiceError(ValueError):
    """A key of an object stands twice, with two values."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content and content[key] != value:
            raise _TwiceError(f"the key {key[:40]!r} stands twice, with two values")
        content[key] = value
    return content


def _deeper(value: Any, levels: int) -> bool:
    """Whether a parsed value is nested deeper than so many levels."""
    if not isinstance(value, (dict, list)):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_deeper(item, levels - 1) for item in inner)
