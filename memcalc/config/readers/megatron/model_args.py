"""A YAML file that maps arguments to values under ``MODEL_ARGS``."""

import re
from collections.abc import Mapping
from typing import Any

from memcalc.config.readers.megatron.arguments import Arguments
from memcalc.config.readers.megatron.names import VALUES
from memcalc.config.readers.megatron.source import source
from memcalc.config.readers.shell.marks import shown, unknown
from memcalc.config.source import Source
from memcalc.errors import InputError


def read_yaml(
    content: Mapping[str, Any], name: str, world: int | None = None, program: str = ""
) -> Source:
    """Read a YAML file with ``MODEL_ARGS``.

    Args:
        content: The YAML.
        name: The model's name.
        world: The number of GPUs, where it is known.
        program: The file name of the program that receives the arguments.

    Raises:
        InputError: ``MODEL_ARGS`` is not an object of arguments.
        ConfigError: As ``read_script``.

    >>> sizes = {"--num-layers": 2, "--hidden-size": 64, "--num-attention-heads": 4}
    >>> arguments = {**sizes, "--swiglu": True, "--sequence-parallel": False}
    >>> read_yaml({"MODEL_ARGS": arguments}, "x").model.activation
    'swiglu'
    """
    given = content["MODEL_ARGS"]
    if not isinstance(given, dict):
        raise InputError("MODEL_ARGS must map arguments to values")
    words = {
        argument: _yaml_words(key, value)
        for key, value in given.items()
        if (argument := key.lstrip("-").replace("_", "-"))
        if value is not False and (value is not None or argument in VALUES)
    }
    return source(Arguments(words), name, world, {program})


def _yaml_words(key: str, value: Any) -> list[str]:
    if value is True or value is None:
        return []
    values = value if isinstance(value, list) else [value]
    if any(isinstance(each, (dict, list)) for each in values):
        raise InputError(f"{shown(key)} must be a value or a list of values")
    texts = [str(each).replace("\0", " ") for each in values]
    return [re.sub(r"\$\{?(\w+)\}?", lambda m: unknown(f"${m[1]}"), text) for text in texts]
