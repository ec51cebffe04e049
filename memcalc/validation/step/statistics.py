"""What ``torch.cuda`` says of its memory while a tracker follows a fake device."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memcalc.validation.step.tracker import Tracker


def statistics(tracker: "Tracker") -> dict[str, Callable[..., Any]]:
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
