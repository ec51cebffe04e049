"""The arguments of one command, by name: each is asked for as the kind of value that it has."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from memcalc.config.assumption import Assumption
from memcalc.config.readers.keys import listed
from memcalc.config.readers.shell.marks import opened
from memcalc.errors import ConfigError, InputError, nearest

Answer = TypeVar("Answer")


class OpenError(InputError):
    """The value of an argument is known only to a running shell."""


@dataclass
class Arguments:
    """Arguments by name, without their dashes, with what is assumed and not modeled."""

    words: Mapping[str, Sequence[str]]
    loose: Sequence[str] = ()  # open values that may hold further arguments
    assumed: list[Assumption] = field(default_factory=list)
    unmodelled: list[str] = field(default_factory=list)

    def text(self, name: str) -> str | None:
        """The one value of an argument, or None where it is missing."""
        if name not in self.words:
            return None
        values = self.words[name]
        self.closed(name, values[:1])
        known = [value for value in values if not opened(value)]
        if len(known) != 1:
            raise ConfigError(f"--{name} takes one value, not {len(known)}")
        return known[0]

    def count(self, name: str) -> int | None:
        """A whole number."""
        value = self.text(name)
        if value is not None and not re.fullmatch(r"[-+]?[0-9]{1,18}", value):
            raise InputError(f"--{name} must be a whole number, not {value[:40]!r}")
        return None if value is None else int(value)

    def number(self, name: str) -> float | None:
        """A number."""
        value = self.text(name)
        if value is not None and not re.fullmatch(r"-?[0-9.]{1,20}(e[-+]?[0-9]{1,2})?", value):
            raise InputError(f"--{name} must be a number, not {value[:40]!r}")
        try:
            return None if value is None else float(value)
        except ValueError as error:
            raise InputError(f"--{name} must be a number, not {value!r}") from error

    def word(self, name: str, known: Mapping[str, str]) -> str | None:
        """The meaning of a word."""
        value = self.text(name)
        if value is not None and value not in known:
            shown = value[:40]
            raise InputError(f"--{name} {shown!r} is not modeled; {nearest(shown, known)}")
        return None if value is None else known[value]

    def flag(self, name: str) -> bool:
        """Whether an argument is given."""
        return name in self.words

    def several(self, name: str) -> list[str]:
        """All values of an argument, given as words or as a list: ``[a b]``, ``a,b``."""
        values = self.words.get(name, ())
        self.closed(name, values)
        return re.sub(r"[\[\]'\",]", " ", " ".join(values)).split()

    def run(self, ask: Callable[..., Answer], *given: Any) -> Answer | None:
        """A setting of parallelism or run: None, with a warning, where its value is open."""
        try:
            return ask(*given)
        except OpenError as error:
            self.unmodelled.append(f"{error}; set it on the command line")
            return None

    def defaulted(self, value: Answer | None, default: Answer, fact: str) -> Answer:
        """A value, or Megatron's default, which is listed as assumed."""
        if value is not None:
            return value
        self.assumed.append(Assumption(fact, default, "Megatron's default"))
        return default

    def closed(self, name: str, values: Iterable[str]) -> None:
        """Refuse values that the file does not determine."""
        names = [each for value in values for each in opened(value)]
        if names:
            raise OpenError(f"--{name} has no known value: the file does not set {listed(names)}")
