"""What PyTorch's caching allocator counts as allocated for storages of given sizes.

Rules of c10/cuda/CUDACachingAllocator.cpp: a request is rounded up to 512 bytes. A block that is
larger is split, but for one case: a request of more than 1 MiB, out of a segment that does not
expand, takes the whole block where less than 1 MiB would be left of it.
"""

from collections.abc import Iterable, Mapping

ROUND = 512  # kMinBlockSize
SMALL = 2**20  # kSmallSize: the largest request of the small pool, and the rest that is not split


def rounded(size: int) -> int:
    """Bytes of a block that is split to a request.

    >>> rounded(0), rounded(1), rounded(1024)
    (0, 512, 1024)
    """
    return -(-size // ROUND) * ROUND


def allocated(sizes: Iterable[int], expandable: bool) -> tuple[int, int]:
    """The least and the most that the allocator counts for storages of these sizes.

    Args:
        sizes: Bytes of each storage.
        expandable: Whether its segments expand (``expandable_segments:True``); then the two are the
            same, whatever was allocated before.

    >>> allocated([24, 2**21], expandable=True), allocated([24, 2**21], expandable=False)
    ((2097664, 2097664), (2097664, 3146240))
    """
    blocks = [rounded(size) for size in sizes]
    unsplit = 0 if expandable else sum(SMALL for block in blocks if block > SMALL)
    return sum(blocks), sum(blocks) + unsplit


def unknown(environment: Mapping[str, str]) -> list[str]:
    """Settings of the allocator under which the rules here are not its own.

    >>> unknown({"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"})
    ['backend:cudaMallocAsync']
    """
    options = [
        option.strip()
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
        for option in environment.get(name, "").split(",")
    ]
    others = ("roundup_power2_divisions", "backend:cudaMallocAsync")
    return [option for option in options if option.startswith(others)]


def expandable(environment: Mapping[str, str]) -> bool | None:
    """Whether an environment asks for expandable segments; None where it says nothing.

    >>> expandable({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    True
    >>> expandable({}) is None
    True
    """
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        for option in environment.get(name, "").split(","):
            key, _, value = option.partition(":")
            if key.strip() == "expandable_segments":
                return value.strip().lower() == "true"
    return None
