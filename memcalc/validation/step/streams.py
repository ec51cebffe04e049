"""CUDA's streams and events for tensors without values: work is done as soon as it is issued.

Only a stream's number matters: PyTorch's allocator has pools of its own for every stream.
"""

from itertools import count
from typing import Any

_numbers = count(1)


class Event:
    """An event that has already happened. The arguments are those of ``torch.cuda.Event``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        """Do nothing."""

    def wait(self, stream: Any = None) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """It has happened."""
        return True

    def elapsed_time(self, end: Any) -> float:
        """A millisecond: no time passes."""
        return 1.0


class Stream:
    """A stream. The arguments are those of ``torch.cuda.Stream``.

    Attributes:
        number: 0 is the default stream.
    """

    current: "Stream"
    default: "Stream"

    def __init__(self, *args: Any, number: int | None = None, **kwargs: Any) -> None:
        self.number = next(_numbers) if number is None else number
        self._before: list[Stream] = []

    def wait_stream(self, stream: Any) -> None:
        """Do nothing."""

    def wait_event(self, event: Any) -> None:
        """Do nothing."""

    def record_event(self, event: Any = None) -> Any:
        """An event that has happened."""
        return event or Event()

    def synchronize(self) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """All its work is done."""
        return True

    def __enter__(self) -> "Stream":
        self._before.append(Stream.current)
        Stream.current = self
        return self

    def __exit__(self, *exception: object) -> None:
        Stream.current = self._before.pop()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.number == self.number

    def __hash__(self) -> int:
        return hash(self.number)


Stream.default = Stream.current = Stream(number=0)
