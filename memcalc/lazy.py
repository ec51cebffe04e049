"""Objects named by a string, imported when they are first used.

Tables of commands, renderers and public names hold ``"module:attribute"`` strings, so that
start-up pays only for what a question needs.
"""

from importlib import import_module
from typing import Any


def resolve(reference: str) -> Any:
    """The object behind ``"module:attribute"``.

    >>> resolve("memcalc.units:GIB")
    1073741824
    """
    module, attribute = reference.split(":")
    return getattr(import_module(module), attribute)
