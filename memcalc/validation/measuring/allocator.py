"""What PyTorch's caching allocator counts as allocated for storages of given sizes.

The rules are those of ``memcalc.analysis.allocator``; expandable segments are always split.
"""

from collections.abc import Iterable, Mapping

from memcalc.analysis.allocator import SMALL, rounded
from memcalc.config.allocator import AllocatorConf, said


def allocated(sizes: Iterable[int], expandable: bool) -> tuple[int, int]:
    """The least and the most that the allocator counts for storages of these sizes.

    Args:
        sizes: Bytes of each storage.
        expandable: Whether segments expand (``expandable_segments:True``). Then both numbers are
            equal: they do not depend on earlier allocations.

    >>> allocated([24, 2**21], expandable=True), allocated([24, 2**21], expandable=False)
    ((2097664, 2097664), (2097664, 3146240))
    """
    blocks = [rounded(size) for size in sizes]
    unsplit = 0 if expandable else sum(SMALL for block in blocks if block > SMALL)
    return sum(blocks), sum(blocks) + unsplit


def unknown(environment: Mapping[str, str]) -> list[str]:
    """Settings under which the allocator follows other rules than these.

    >>> unknown({"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"})
    ['backend']
    """
    found = AllocatorConf.parse(said(environment))
    return [
        name
        for name in ("backend", "roundup_power2_divisions")
        if getattr(found, name) != getattr(AllocatorConf(), name)
    ]
