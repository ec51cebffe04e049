"""What a GPU needs for what a tracker saw, and whether it holds that."""

from typing import NamedTuple

from memcalc.analysis.allocator import OutOfMemory
from memcalc.analysis.headroom import CONTEXT_BYTES
from memcalc.config.allocator import AllocatorConf
from memcalc.validation.step.storages import Peak
from memcalc.validation.step.tracker import Tracker


class Need(NamedTuple):
    """What a GPU needs for the steps.

    Attributes:
        allocated: Bytes of the storages at the peak.
        blocks: Bytes that the allocator counts as allocated then: with what it did not split off.
        reserved: Bytes that it reserves at most, without a limit.
        limit: The bytes of the GPU, or None.
        verdict: One of ``headroom.VERDICTS``; None without a limit.
        retries: How often the allocator freed its cached blocks to fit.
        stopped: Why the steps do not fit, by the allocator.
    """

    allocated: int
    blocks: int
    reserved: int
    limit: int | None = None
    verdict: str | None = None
    retries: int = 0
    stopped: str = ""

    @property
    def bytes(self) -> int:
        """With the CUDA context."""
        return self.reserved + CONTEXT_BYTES

    @property
    def fits(self) -> bool | None:
        """Whether the verdict is fits; None without a limit."""
        return None if self.verdict is None else self.verdict == "fits"

    @classmethod
    def of(cls, tracker: Tracker, peak: Peak, conf: AllocatorConf, limit: int | None) -> "Need":
        """The need of what a tracker saw, and whether it fits."""
        free = tracker.replay(conf)
        need = cls(peak.bytes, free.most_allocated, free.most_reserved, limit)
        if limit is None:
            return need
        if need.bytes <= limit:
            return need._replace(verdict="fits")
        if limit <= CONTEXT_BYTES:
            return need._replace(verdict="does_not_fit")
        try:
            found = tracker.replay(conf, limit, CONTEXT_BYTES)
        except OutOfMemory as error:
            verdict = "allocated_only" if need.allocated <= limit else "does_not_fit"
            return need._replace(verdict=verdict, stopped=str(error))
        return need._replace(verdict="fits", retries=found.retries, reserved=found.most_reserved)
