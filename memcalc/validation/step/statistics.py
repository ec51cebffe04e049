"""What ``torch.cuda`` says of its memory while a tracker follows a fake device."""

from collections.abc import Callable
from typing import Any, Protocol

from memcalc.analysis.allocator import Allocator
from memcalc.validation.step.storages import Peak


class Followed(Protocol):
    """What is asked of a tracker (``memcalc.validation.step.tracker.Tracker``)."""

    allocated: int

    def peak(self) -> Peak:
        """The moment at which most bytes are allocated."""

    def replay(self) -> Allocator:
        """PyTorch's allocator after the log."""


def statistics(tracker: Followed) -> dict[str, Callable[..., Any]]:
    """Functions of ``torch.cuda`` by name; the peaks are those since the tracker's were reset."""

    def nothing(device: Any = None) -> None:
        pass

    return {
        "memory_allocated": lambda device=None: tracker.allocated,
        "max_memory_allocated": lambda device=None: tracker.peak().bytes,
        "memory_reserved": lambda device=None: tracker.replay().reserved,
        "max_memory_reserved": lambda device=None: tracker.replay().most_reserved,
        "memory_stats": lambda device=None: tracker.replay().memory_stats(),
        "reset_peak_memory_stats": nothing,
        "reset_accumulated_memory_stats": nothing,
    }
