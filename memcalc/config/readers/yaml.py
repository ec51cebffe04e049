"""YAML of launch files: plain values only, bounded, and nothing evaluated.

PyYAML's safe loader finds the events, and this module makes the values: only text, numbers, true,
false and null, whatever a tag asks for. Anchors are refused: no launch file needs them.
"""

import re
from importlib import import_module
from typing import Any

from memcalc.errors import InputError

MAX_CHARACTERS = 2**18  # PyYAML takes seconds per 2**20; launch files have some thousands
MAX_VALUES = 20_000


def parse(text: str, where: str, levels: int) -> Any:
    """Parse a YAML document that is nested at most so many levels deep.

    A key that is given twice with two values is refused, unless the first one is null.

    Raises:
        InputError: The text is not YAML, or has anchors, or is too large.

    >>> parse("{'a': [1, 1.0e-3, True,], 'b': null, 'b': 2-3}", "x.yml", 32)
    {'a': [1, 0.001, True], 'b': '2-3'}
    """
    if len(text) > MAX_CHARACTERS:
        raise InputError(f"{where}: YAML of more than {MAX_CHARACTERS} characters is not read")
    yaml: Any = import_module("yaml")  # not needed at start-up
    try:
        return _Document(yaml, text, levels).read()
    except _RefusedError as error:
        raise InputError(f"{where}: {error}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = " ".join(str(getattr(error, "problem", None) or "a character").split())
        raise InputError(f"{where}: not YAML: {problem[:80]}{at}") from error


class _RefusedError(ValueError):
    """Valid YAML that memcalc does not accept."""


class _Document:
    """The events of one document, as values."""

    def __init__(self, yaml: Any, text: str, levels: int) -> None:
        self.yaml = yaml
        self.loader = yaml.SafeLoader(text)
        self.levels = levels
        self.values = 0

    def read(self) -> Any:
        loader, yaml = self.loader, self.yaml
        loader.get_event()
        if not loader.check_event(yaml.DocumentStartEvent):
            return None
        loader.get_event()
        value = self._value(self.levels)
        loader.get_event()
        if not loader.check_event(yaml.StreamEndEvent):
            raise _RefusedError("more than one YAML document")
        return value

    def _value(self, levels: int) -> Any:
        event = self.loader.get_event()
        self.values += 1
        if self.values > MAX_VALUES:
            raise _RefusedError(f"YAML of more than {MAX_VALUES} values is not read")
        if isinstance(event, self.yaml.AliasEvent) or event.anchor is not None:
            raise _RefusedError(f"YAML anchors are not accepted (line {event.start_mark.line + 1})")
        if isinstance(event, self.yaml.ScalarEvent):
            return self._scalar(event)
        if levels == 0:
            raise _RefusedError(f"nested more than {self.levels} levels deep")
        if isinstance(event, self.yaml.SequenceStartEvent):
            return self._sequence(levels - 1)
        return self._mapping(levels - 1)

    def _sequence(self, levels: int) -> list[Any]:
        found = []
        while not self.loader.check_event(self.yaml.SequenceEndEvent):
            found.append(self._value(levels))
        self.loader.get_event()
        return found

    def _mapping(self, levels: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while not self.loader.check_event(self.yaml.MappingEndEvent):
            key = str(self._value(levels))
            value = self._value(levels)
            if found.get(key) is not None and found[key] != value:
                raise _RefusedError(f"the key {key[:40]!r} is given twice, with different values")
            found[key] = value
        self.loader.get_event()
        return found

    def _scalar(self, event: Any) -> Any:
        if not event.implicit[0]:
            return event.value
        tag = self.loader.resolve(self.yaml.ScalarNode, event.value, event.implicit)
        return _made(tag.rpartition(":")[2], event.value)


def _made(kind: str, text: str) -> Any:
    """The value of a plain scalar, given the kind that YAML resolves it to."""
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() in ("true", "yes", "on")
    if kind == "int" and re.fullmatch(r"[-+]?(0|[1-9][0-9]{0,17})", text):
        return int(text)
    if kind == "float" and re.fullmatch(r"[-+]?[0-9.]+([eE][-+]?[0-9]+)?", text):
        return float(text)
    return text
