"""Readers of files: a module or a folder per format, each of which returns a Source.

A file is hostile until proven otherwise. Only regular files are opened, the bytes read and the
depth of nesting are bounded, and nothing is evaluated. The format is recognized by the content;
the suffix only decides whether JSON, YAML or shell is tried first.
"""

import json
import os
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from memcalc.config import fields
from memcalc.config.assumption import Assumption
from memcalc.config.source import Source
from memcalc.errors import ConfigError, InputError
from memcalc.lazy import resolve

MAX_BYTES = 4 * 2**20
MAX_DEPTH = 32
SUFFIXES = (".json", ".sh", ".yaml", ".yml")

# A format is recognized by keys that only its files have; the first match wins. Its reader is
# imported when a file needs it.
READERS = {
    "memcalc": (("memcalc",), "native:read"),
    "Hugging Face": (("model_type", "architectures"), "huggingface:read"),
    "Megatron-LM": (("MODEL_ARGS",), "megatron.model_args:read_yaml"),
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
# Spaces and tabs only: \s also matches newlines, so each line would be searched to the end.
_KEY = re.compile(r"^[{ \t]*[\"']?[\w.-]+[\"']?[ \t]*:(?:\s|$)", re.MULTILINE)
_MODEL_ARGS = re.compile(r"^MODEL_ARGS:", re.MULTILINE)


def read(path: Path, name: str = "", where: str = "") -> Source:
    """Read a model, with the settings of its run, from a file or a folder with a config.json.

    Args:
        path: The file or the folder.
        name: The model's name; by default that of the file or of its folder.
        where: The file's name in errors; by default its path.

    Raises:
        InputError: The file cannot be read, or its format is unknown.
        ConfigError: Its settings are invalid, or it holds no model.
    """
    source = _read(path, name, where)
    if source.model is None:
        raise ConfigError(
            f"{where or place(path)}: the file has run settings but no model: name a MODEL, and "
            "pass this file with --run"
        )
    return source


def read_run(path: Path) -> Source:
    """Read parallelism and run settings from a file; a model in it is ignored.

    Raises:
        InputError: The file cannot be read, or its format is unknown.
        ConfigError: Its settings are invalid.
    """
    source = _read(path)
    if source.model is None:
        return source
    ignored = f"only parallelism and run settings are read from {_name(path)}, not its model"
    assumed = (*source.assumed, Assumption("model", None, ignored))
    return replace(source, model=None, assumed=assumed)


def content(path: Path, where: str = "") -> Mapping[str, Any]:
    """Read a Hugging Face ``config.json`` as it is; the path may be that of its folder.

    Raises:
        InputError: The file cannot be read, or is of another format.
    """
    path = path / "config.json" if os.path.isdir(path) else path
    where = where or place(path)
    found = parse(read_bytes(path), where)
    if not isinstance(found.get("model_type"), str):
        raise InputError(f"{where}: not a Hugging Face config.json: it has no model_type")
    return found


def _read(path: Path, name: str = "", where: str = "") -> Source:
    if os.path.isdir(path):
        folder, path = path, path / "config.json"
        if not os.path.exists(path):
            raise InputError(f"{place(folder)}: the folder has no config.json")
    where = where or place(path)
    reader = _reader(read_bytes(path), path.suffix.lower(), where)
    try:
        return reader(name or _name(path))
    except (ConfigError, InputError) as error:
        kind = ConfigError if isinstance(error, ConfigError) else InputError
        raise kind(f"{where}: {error}") from error


def place(path: Path) -> str:
    """A path as a message shows it: on one line, and of a long one the end.

    >>> place(Path("a" * 5000 + ".json"))[-8:], len(place(Path("a" * 5000)))
    ('aaa.json', 203)
    """
    text = str(path)
    short = text if len(text) <= 200 else f"...{text[-200:]}"
    return fields.printable(short)


def _name(path: Path) -> str:
    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    return fields.printable(name)[:200] or path.stem


def _reader(data: bytes, suffix: str, where: str) -> Callable[[str], Source]:
    """The reader of the bytes' format; it takes the model's name."""
    if suffix == ".json":
        return _recognized(parse(data, where), where)
    text = _text(data, where)
    if _is_script(text, suffix):
        return partial(_reads("megatron.script:read_script"), text)
    if suffix not in (".yaml", ".yml") and text.lstrip().startswith("{"):
        try:
            return _recognized(parse(data, where), where)
        except InputError:
            if suffix:
                raise
    content = _reads("yaml:parse")(text, where, MAX_DEPTH)
    if not isinstance(content, dict):
        raise InputError(
            f"{where}: must be YAML, or a launch script with arguments such as --num-layers"
        )
    return _recognized(content, where)


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


def _recognized(content: Mapping[str, Any], where: str) -> Callable[[str], Source]:
    for keys, reader in READERS.values():
        if any(key in content for key in keys):
            return partial(_reads(reader), content)
    known = ", ".join(f"{name} ({' or '.join(keys[:2])})" for name, (keys, _) in READERS.items())
    raise InputError(f"{where}: unknown format; known formats and their keys: {known}")


def _text(data: bytes, where: str) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8 text") from error
    if "\0" in text or "\1" in text:
        raise InputError(f"{where}: not text")
    return text


def parse(data: bytes, where: str) -> Mapping[str, Any]:
    """Parse a JSON object, of bounded depth and with bounded numbers.

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
        raise InputError(f"{where}: must be a JSON object, not a {type(content).__name__}")
    if _deeper(content, MAX_DEPTH):
        raise InputError(f"{where}: nested more than {MAX_DEPTH} levels deep")
    return content


def read_bytes(path: Path, most: int = MAX_BYTES) -> bytes:
    """Read a regular file of at most so many bytes.

    It never waits for data: the kernel's own files, which are regular ones too, have no size and
    count as empty.

    Raises:
        InputError: The file cannot be read, is larger, or is empty.
    """
    where = place(path)
    if not os.path.isfile(path):
        problem = "not a regular file" if os.path.exists(path) else "no such file"
        raise InputError(f"{where}: {problem}")
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(handle, "rb") as file:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode):
                raise InputError(f"{where}: not a regular file")
            data = file.read(most + 1) if found.st_size else b""
    except OSError as error:
        raise InputError(f"{where}: {error.strerror}") from error
    if len(data) > most:
        raise InputError(f"{where}: larger than {most // 2**20} MiB")
    if not data.strip():
        raise InputError(f"{where}: the file is empty")
    return data


class _TwiceError(ValueError):
    """A key of an object is given twice, with two values."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content and content[key] != value:
            raise _TwiceError(f"the key {key[:40]!r} is given twice, with different values")
        content[key] = value
    return content


def _deeper(value: Any, levels: int) -> bool:
    """Whether a parsed value is nested deeper than so many levels."""
    if not isinstance(value, (dict, list)):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_deeper(item, levels - 1) for item in inner)
