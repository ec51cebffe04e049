"""What a GPU needs beyond allocated bytes: estimated, and never mixed with them.

PyTorch's allocator reserves more than it hands out, because its free memory is fragmented. The CUDA
context and NCCL's buffers come on top of that; no allocator counts them.
"""

import re
from fractions import Fraction
from typing import NamedTuple

from memcalc.analysis.parts import Part
from memcalc.analysis.timeline import replay
from memcalc.config import Config
from memcalc.errors import UsageError
from memcalc.units import MIB, parse_bytes

RESERVED = (
    "measured: 2.8 to 9.3 % more reserved than allocated at the peaks of twelve Megatron-LM runs "
    "on B200, 4.4 % in the median (SimuMax v1.2, docs/b200)"
)
REPLAYED = (
    "PyTorch c10/cuda/CUDACachingAllocator.cpp: two iterations of the step, replayed allocation by "
    "allocation"
)
CONTEXT = (
    "measured: 426 MiB of a process that has only initialized CUDA, with PyTorch 2.10 "
    "(unslothai/unsloth-zoo pull request 1053); about 400 (pytorch/pytorch issue 109888)"
)
COMMUNICATORS = (
    "measured: 544 MB per communicator of two ranks and 688 MB per larger one, on A100s with "
    "NVLink (NVIDIA/nccl issue 964)"
)
MARGIN = "given: --margin, instead of the estimate"

FRAGMENTED = Fraction(44, 1000)
CONTEXT_BYTES = 426 * MIB
PAIR, GROUP = 544 * 10**6, 688 * 10**6

VERDICTS = {
    "fits": "what the GPU needs beyond allocated bytes fits too",
    "allocated_only": "allocated bytes alone fit",
    "does_not_fit": "allocated bytes alone do not fit",
}


class Headroom(NamedTuple):
    """What a GPU needs beyond the bytes that are allocated at its peak.

    Attributes:
        reserved: Bytes reserved and not allocated, as a share of the allocated ones.
        fixed: The other parts, whose bytes do not depend on the allocated ones.
        source: What the share was measured on, or who gave it.
        name: All of it in words.

    >>> room = Headroom(Fraction(1, 10), (), "", "reserved memory")
    >>> room.needed(100), room.allocatable(110), room.verdict(100, 105)
    (110, 100, 'allocated_only')
    """

    reserved: Fraction
    fixed: tuple[Part, ...]
    source: str
    name: str

    def needed(self, allocated: int) -> int:
        """Bytes that a GPU needs for so many allocated bytes."""
        return self.allocator(allocated) + sum(part.bytes for part in self.fixed)

    def allocator(self, allocated: int) -> int:
        """Bytes that PyTorch's allocator reserves for so many allocated bytes."""
        return allocated + round(self.reserved * allocated)

    def allocatable(self, capacity: int) -> int:
        """The most bytes that may be allocated so that what they need fits; may be below 0."""
        free = capacity - sum(part.bytes for part in self.fixed)
        found = int(free / (1 + self.reserved))
        while self.allocator(found + 1) <= free:
            found += 1
        while self.allocator(found) > free:
            found -= 1
        return found

    def verdict(self, allocated: int, capacity: int) -> str:
        """A word of ``VERDICTS``, for so many allocated bytes on a GPU with this capacity."""
        if self.needed(allocated) <= capacity:
            return "fits"
        return "allocated_only" if allocated <= capacity else "does_not_fit"

    def parts(self, allocated: int) -> list[Part]:
        """Each part of it, for so many allocated bytes, with what it was measured on."""
        free = self.allocator(allocated) - allocated
        name = "margin" if self.source == MARGIN else "reserved but unallocated"
        found = [_estimated(name, free, self.source), *self.fixed]
        return [part for part in found if part.bytes]


def headroom(config: Config, margin: str | None = None) -> Headroom:
    """What a GPU of a run needs beyond allocated bytes.

    Args:
        config: The run, whose parallelism tells its NCCL communicators.
        margin: A size, or a percentage of the allocated bytes, instead of the estimate.

    Raises:
        UsageError: The margin is neither.

    >>> from memcalc.config import load
    >>> [part.name for part in headroom(load("22b", pp=2)).parts(2**30)]
    ['reserved but unallocated', 'CUDA context', 'NCCL communicators']
    >>> headroom(load("22b"), "10%").needed(1000), headroom(load("22b"), "2GB").needed(10**9)
    (1100, 3000000000)
    """
    if margin is not None:
        return _margin(margin)
    degrees = (config.parallel.tp, config.parallel.pp, config.parallel.replicas, config.parallel.ep)
    groups = sum(PAIR if degree == 2 else GROUP for degree in degrees if degree > 1)
    fixed = [_estimated("CUDA context", CONTEXT_BYTES, CONTEXT)]
    if groups:
        fixed.append(_estimated("NCCL communicators", groups, COMMUNICATORS))
    others = ", CUDA context and NCCL" if groups else " and CUDA context"
    if replayed := replay(config):
        share = Fraction(replayed.reserved - replayed.allocated, replayed.allocated)
        return Headroom(share, tuple(fixed), REPLAYED, f"the replayed reserved memory{others}")
    return Headroom(FRAGMENTED, tuple(fixed), RESERVED, f"the estimated reserved memory{others}")


def _margin(text: str) -> Headroom:
    percent = re.fullmatch(r"([0-9]{1,4}(?:\.[0-9]{1,9})?) ?%", text.strip())
    if percent:
        return Headroom(Fraction(percent[1]) / 100, (), MARGIN, "the margin")
    size = parse_bytes(text)
    if size is None:
        raise UsageError(
            f"--margin {text[:40]!r} is neither a size with its unit, such as 6GiB, nor a "
            "percentage of the allocated bytes, such as 10%"
        )
    return Headroom(Fraction(0), (_estimated("margin", size, MARGIN),), MARGIN, "the margin")


def _estimated(name: str, size: int, source: str) -> Part:
    return Part(name, size, "buffers", "estimated", source)
