"""Readers: one file a format, each turning what lies on a disk into a Source.

A file is hostile until proven otherwise: it is opened only if it is a regular file, read up to a
bound, parsed without evaluating anything, and its depth is bounded too.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from memcalc.config.config import Source
from memcalc.config.readers import huggingface, native
from memcalc.errors import ConfigError, InputError

MAX_BYTES = 4 * 2**20
MAX_DEPTH = 32

# A format is told by a key that only its files have.
READERS: dict[str, tuple[tuple[str, ...], Callable[[Mapping[str, Any], str], Source]]] = {
    "memcalc": (("memcalc",), native.read),
    "Hugging Face": (("model_type", "architectures"), huggingface.read),
}


def read(path: Path, name: str = "", where: str = "") -> Source:
    """The model, and what is said of its run, from a JSON file or a folder with a config.json.

    Args:
        path: The file or the folder.
        name: What to call the model, if not after the file or its folder.
        where: What to call the file in an error, if not by its path.

    Raises:
        InputError: The file cannot be read, or is of no format that memcalc knows.
        ConfigError: It can be read, but what it says cannot be.
    """
    if os.path.isdir(path):
        folder, path = path, path / "config.json"
        if not os.path.exists(path):
            raise InputError(f"{folder}: the folder has no config.json")
    where = where or str(path)
    content = parse(_bytes(path), where)
    for keys, reader in READERS.values():
        if any(key in content for key in keys):
            try:
                return reader(content, name or _name(path))
            except (ConfigError, InputError) as error:
                raise type(error)(f"{where}: {error}") from error
    known = ", ".join(f"{format_} ({' or '.join(keys)})" for format_, (keys, _) in READERS.items())
    raise InputError(f"{where}: no key tells its format; known are {known}")


def _name(path: Path) -> str:
    """What a model is called after its file, or after the folder of a config.json."""
    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    return "".join(c if c.isprintable() else "?" for c in name) or path.stem


def parse(data: bytes, where: str) -> Mapping[str, Any]:
    """A JSON object, from bytes, with its depth and its numbers bounded.

    >>> parse(b'{"memcalc": 1}', "x.json")
    {'memcalc': 1}

    Raises:
        InputError: The bytes are not UTF-8, not JSON, not an object, or nested too deeply.
    """
    try:
        content = json.loads(data.decode("utf-8-sig"), object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8 text") from error
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


def _bytes(path: Path) -> bytes:
    if not os.path.isfile(path):
        problem = "not a regular file" if os.path.exists(path) else "no such file"
        raise InputError(f"{path}: {problem}")
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    if len(data) > MAX_BYTES:
        raise InputError(f"{path}: larger than {MAX_BYTES // 2**20} MiB")
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
