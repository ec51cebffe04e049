"""PyTorch's CUDA caching allocator, replayed: which memory it reserves for a list of requests.

The rules are those of ``DeviceCachingAllocator`` in c10/cuda/CUDACachingAllocator.cpp of PyTorch
2.13; names in backquotes in this file are of functions there. Not replayed are CUDA graphs and
memory pools of the user.

All rules are methods of one class, as in PyTorch, and refer to each other: hence one long file.

Three things are the driver's, and are assumed here. New segments lie at rising addresses; a rule
that prefers the lowest address among blocks of one size depends on it. ``cudaMalloc`` fails when,
and only when, the capacity is exceeded. Kernels of a stream are done when ``synchronize`` says so.

``memcalc.checks.snapshot`` replays memory snapshots. In 25 public ones of training and inference on
a GPU, with usual segments and one stream, all 84,348 requests get the block that they got there;
with rising addresses, too, the same segments are made.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Hashable, Iterable, Iterator
from math import gcd, inf
from typing import NamedTuple

from memcalc.config.allocator import MIN_BLOCK, MIN_LARGE_ALLOC, AllocatorConf
from memcalc.errors import MemcalcError
from memcalc.units import GIB, MIB

__all__ = [
    "Allocator",
    "AllocatorConf",
    "Block",
    "Bounds",
    "OutOfMemory",
    "reserved_bounds",
    "rounded",
]

SOURCE = "PyTorch c10/cuda/CUDACachingAllocator.cpp"
SMALL = MIB  # kSmallSize: the largest request of the small pool, and the largest unsplit rest
SMALL_SEGMENT = 2 * MIB  # kSmallBuffer
ROUND_LARGE = 2 * MIB  # kRoundLarge: segments of their own size are a multiple of this
APART = 2**50  # between the addresses of two segments: no segment is as large


class OutOfMemory(MemcalcError, MemoryError):  # noqa: N818 - the API's name
    """``cudaMalloc`` fails although all cached blocks were freed."""


def rounded(size: int) -> int:
    """The bytes that a request is rounded up to by default; a request of 0 bytes takes no block.

    >>> rounded(0), rounded(1), rounded(1024)
    (0, 512, 1024)
    """
    return _whole(size, MIN_BLOCK)


class Block:
    """A block of a segment.

    Attributes:
        address: Where it begins.
        size: Its bytes.
        requested: The bytes that it was requested for.
        allocated: Whether it is given out.
        before: The block before it in its segment, or None.
        after: The block after it, or None.
        pool: The pool of its segment.
    """

    __slots__ = (
        "address", "after", "allocated", "base", "before", "birth", "events", "free", "mapped",
        "pool", "requested", "size", "streams",
    )  # fmt: skip

    def __init__(self, address: int, size: int, pool: "Pool", base: int = 0) -> None:
        self.address = address
        self.size = size
        self.pool = pool
        self.base = base  # the address of its expandable segment, or 0
        self.requested = 0
        self.allocated = self.free = False
        self.mapped = True
        self.before: Block | None = None
        self.after: Block | None = None
        self.streams: set[int] | None = None  # the other streams that use it
        self.events = 0  # those that it waits for after it was freed
        self.birth = 0  # the pool's number of searches when it was freed


class Pool:
    """The blocks of one stream, of small requests (at most 1 MiB) or of large ones.

    Attributes:
        free: Its free blocks as ``(size, address, block)``, sorted.
        unmapped: The parts of its expandable segments without memory, as ``(address, block)``.
    """

    __slots__ = ("free", "key", "page", "small", "split_below", "unmapped", "unsplit")

    def __init__(self, small: bool, stream: int, conf: AllocatorConf) -> None:
        self.small = small
        self.key = small, stream
        self.free: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, Block]] = []
        self.page = SMALL_SEGMENT if small else conf.large_segment_size
        # should_split: the largest rest that stays with a block, and the requests that split one
        always = small or conf.expandable_segments
        self.unsplit = MIN_BLOCK - 1 if always else SMALL
        self.split_below = inf if always or conf.max_split_size is None else conf.max_split_size


class Allocator:
    """The memory of one GPU.

    Counters in bytes, each with its most since ``reset_peaks``. ``torch.cuda.memory_stats`` calls
    them ``requested_bytes.all.current`` and ``.peak``, and so on.

    Attributes:
        requested, most_requested: Requests of blocks that are given out or wait for a stream.
        allocated, most_allocated: Blocks that are given out; a block that was not split counts
            whole (``torch.cuda.memory_allocated``).
        active, most_active: These and the blocks that were freed, but wait for a stream.
        reserved, most_reserved: Segments (``torch.cuda.memory_reserved``).
        segments: Number of segments that are not expandable.
        retries: Requests for which all cached blocks were freed (``num_alloc_retries``).

    Args:
        conf: The settings.
        capacity: Bytes of the GPU; None is unlimited.
        taken: Bytes of the GPU that others hold: the CUDA context, NCCL.

    >>> allocator = Allocator()
    >>> block = allocator.malloc(3 * 2**20)
    >>> allocator.allocated / 2**20, allocator.reserved / 2**20
    (3.0, 20.0)
    >>> allocator.free(block)
    >>> allocator.allocated, allocator.most_allocated / 2**20, allocator.reserved / 2**20
    (0, 3.0, 20.0)
    """

    def __init__(
        self,
        conf: AllocatorConf = AllocatorConf(),  # noqa: B008 - it cannot change
        capacity: int | None = None,
        taken: int = 0,
    ) -> None:
        self.conf = conf
        self.requested = self.allocated = self.reserved = 0
        self.most_requested = self.most_allocated = self.most_reserved = 0
        self.segments = self.retries = 0
        self._waiting = self._most_waiting = 0  # see active and most_active
        self._limit = inf if capacity is None else capacity - taken
        fraction = conf.per_process_memory_fraction
        self._allowed = inf if fraction == 1 or capacity is None else int(fraction * capacity)
        self._space = APART if capacity is None else capacity + capacity // 8
        self._end = 0  # of all addresses
        self._pools: dict[tuple[bool, int], Pool] = {}
        self._small: dict[int, Pool] = {}
        self._large: dict[int, Pool] = {}
        self._events: list[tuple[int, Block]] = []  # of streams that still run
        self._done: list[Block] = []  # of streams that are done, once for each
        self._max_split = inf if conf.max_split_size is None else conf.max_split_size
        rounding = conf.max_non_split_rounding
        self._rounding = conf.large_segment_size if rounding is None else rounding
        self._rounds = any(each > 1 for each in conf.roundup_power2_divisions)
        self._collects = self._allowed < inf and conf.garbage_collection_threshold > 0
        self._searches = [0, 0]  # get_free_blocks_call_count of the large and the small pools
        self._best_fit = self._max_split == inf and not conf.expandable_segments

    def malloc(self, size: int, stream: int = 0) -> Block:
        """Give out a block for a request of some bytes on a stream (``malloc``).

        Raises:
            OutOfMemory: The GPU has no memory for it.
            ValueError: The size is negative.
        """
        if self._done:
            self._process_events()
        request = size
        size = self.conf.roundup(size) if self._rounds else -(-size // MIN_BLOCK) * MIN_BLOCK
        if request <= 0:
            return _nothing(request)
        pool = (self._small if size <= SMALL else self._large).get(stream)
        if pool is None:
            pool = self._pool(size <= SMALL, stream)
        if self._collects:
            self._searches[pool.small] += 1
        free = pool.free
        place = bisect_left(free, (size,))
        if place < len(free) and (self._best_fit or (place := self._fit(free, place, size)) >= 0):
            block = free.pop(place)[2]
            block.free = False
        else:
            block = self._new(pool, size)
        rest = block.size - size
        if rest > pool.unsplit and size < pool.split_below:
            after = block.after
            other = Block(block.address + size, rest, pool, block.base)
            other.before = block
            other.after = after
            if after is not None:
                after.before = other
            block.after = other
            block.size = size
            self._put(other)
        block.allocated = True
        block.requested = request
        self._count(block)
        return block

    def free(self, block: Block) -> None:
        """Take a block back (``free``).

        Once the kernels of all streams that use it are done, it merges with its free neighbors.

        Raises:
            ValueError: It is not given out.
        """
        if not block.allocated:
            if not block.size:  # of a request of 0 bytes
                return
            raise ValueError("the block is free already")
        block.allocated = False
        self.allocated -= block.size
        if block.streams:
            self._waiting += block.size
            block.events = len(block.streams)
            self._events += ((stream, block) for stream in sorted(block.streams))
            block.streams = None
        else:
            self.requested -= block.requested
            self._merge(block)

    def record_stream(self, block: Block, stream: int) -> None:
        """Let another stream use a block: once freed, it waits for that stream's kernels.

        >>> allocator = Allocator()
        >>> block = allocator.malloc(2**20)
        >>> allocator.record_stream(block, 7)
        >>> allocator.free(block)
        >>> allocator.allocated, allocator.active
        (0, 1048576)

        Raises:
            ValueError: The block is not given out.
        """
        if block.size and not block.allocated:
            raise ValueError("the block is free already")
        if block.size and stream != block.pool.key[1]:
            block.streams = (block.streams or set()) | {stream}

    def synchronize(self, stream: int | None = None) -> None:
        """The kernels so far of a stream, or of all, are done.

        The blocks that waited for them are free from the next ``malloc`` on (``process_events``).
        """
        events, self._events = self._events, []
        for each, block in events:
            if stream is None or each == stream:
                self._done.append(block)
            else:
                self._events.append((each, block))

    def empty_cache(self) -> None:
        """Free all segments without a used block, and all such pages of expandable segments.

        It waits for all streams (``release_cached_blocks``).
        """
        self.synchronize()
        self._process_events()
        for small in (False, True):
            expandable: list[Block] = []
            for pool in self._of(small):
                for _, _, block in pool.free.copy():
                    if block.base:
                        expandable.append(block)
                    elif block.before is None and block.after is None:
                        self._release(block)
            for block in expandable:
                self._unmap(block)

    def reset_peaks(self) -> None:
        """Set the most of each counter to what it is now (``resetPeakStats``)."""
        self.most_requested, self.most_allocated = self.requested, self.allocated
        self._most_waiting, self.most_reserved = self.active, self.reserved

    @property
    def active(self) -> int:
        """Bytes of blocks that are given out or wait for a stream."""
        return self.allocated + self._waiting

    @property
    def most_active(self) -> int:
        """The most ``active`` since ``reset_peaks``."""
        return max(self._most_waiting, self.most_allocated)

    @property
    def inactive_split(self) -> int:
        """Bytes of free blocks that ``empty_cache`` cannot free, as parts of used segments.

        Those of expandable segments are not counted (``inactive_split_bytes``).
        """
        return sum(
            block.size
            for block in self.free_blocks()
            if not block.base and (block.before is not None or block.after is not None)
        )

    def add_segment(
        self,
        address: int,
        blocks: Iterable[tuple[int, int | None]],
        stream: int = 0,
        small: bool = False,
    ) -> list[Block]:
        """Add a segment as a snapshot shows it.

        Args:
            address: Where it begins: at no address of another segment.
            blocks: Bytes of each block, and of its request, or None if it is free.
            stream: Its stream.
            small: Whether it is of the pool of small requests.

        Returns:
            Its blocks.

        >>> used, free = Allocator().add_segment(2**40, [(2**20, 2**20), (19 * 2**20, None)])
        >>> used.allocated, free.free
        (True, True)
        """
        pool = self._pool(small, stream)
        found: list[Block] = []
        for size, requested in blocks:
            block = Block(address, size, pool)
            _splice(block, found[-1] if found else None, None)
            found.append(block)
            address += size
            if requested is None:
                self._put(block)
            else:
                block.allocated, block.requested = True, requested
                self._count(block)
        self.segments += 1
        self._reserve(sum(block.size for block in found))
        return found

    def memory_stats(self) -> dict[str, int]:
        """The counters by their names in ``torch.cuda.memory_stats``.

        >>> Allocator().memory_stats()["reserved_bytes.all.peak"]
        0
        """
        counters = {
            "requested_bytes": (self.requested, self.most_requested),
            "allocated_bytes": (self.allocated, self.most_allocated),
            "active_bytes": (self.active, self.most_active),
            "reserved_bytes": (self.reserved, self.most_reserved),
        }
        return {
            **{
                f"{name}.all.{when}": value
                for name, values in counters.items()
                for when, value in zip(("current", "peak"), values, strict=True)
            },
            "inactive_split_bytes.all.current": self.inactive_split,
            "segment.all.current": self.segments,
            "num_alloc_retries": self.retries,
        }

    def pools(self) -> Iterable[Pool]:
        """All pools that had a request."""
        return self._pools.values()

    def free_blocks(self) -> Iterator[Block]:
        """The free blocks, pool by pool, in the order in which requests try them."""
        for pool in self.pools():
            yield from (block for _, _, block in pool.free)

    def _pool(self, small: bool, stream: int) -> Pool:
        """The pool of a stream."""
        pools = self._small if small else self._large
        if stream not in pools:
            pools[stream] = self._pools[small, stream] = Pool(small, stream, self.conf)
        return pools[stream]

    def _count(self, block: Block) -> None:
        """Count a block that is given out."""
        self.requested += block.requested
        if self.requested > self.most_requested:
            self.most_requested = self.requested
        self.allocated += block.size
        if self.allocated > self.most_allocated:
            self.most_allocated = self.allocated
        if self._waiting:
            self._most_waiting = max(self._most_waiting, self.active)

    def _of(self, small: bool) -> list[Pool]:
        """The pools of small or of large requests, in the order of their streams."""
        return [pool for key, pool in sorted(self._pools.items()) if key[0] == small]

    def _fit(self, free: list[tuple[int, int, Block]], place: int, size: int) -> int:
        """The place of the block for a request, or -1 (``get_free_block``)."""
        block = free[place][2]
        # What an expandable segment can grow by counts, too: a larger block that cannot is better.
        while block.base and place + 1 < len(free):
            other = free[place + 1][2]
            if _grown(other) >= _grown(block):
                break
            block, place = other, place + 1
        if size < self._max_split:
            return place if block.size < self._max_split else -1
        return place if block.size < size + self._rounding else -1

    def _new(self, pool: Pool, size: int) -> Block:
        """A block of new memory, if need be after cached blocks are freed."""
        if self._collects:
            self._collect()
        block = self._segment(pool, size)
        if block is None and self._release_oversize(pool, size):
            block = self._segment(pool, size)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._segment(pool, size)
        if block is not None:
            return block
        raise OutOfMemory(
            f"CUDA out of memory: a request of {size / MIB:,.2f} MiB on stream {pool.key[1]} with "
            f"{self.allocated / GIB:,.2f} GiB allocated, {self.reserved / GIB:,.2f} GiB reserved, "
            f"of {min(self._limit, self._allowed) / GIB:,.2f} GiB"
        )

    def _segment(self, pool: Pool, size: int) -> Block | None:
        """A new segment, or a part of an expandable one; None if there is no memory for it.

        ``alloc_block`` and ``get_allocation_size``.
        """
        whole = pool.page if size < MIN_LARGE_ALLOC else _whole(size, ROUND_LARGE)
        if self.reserved + whole > self._allowed:
            return None
        if self.conf.expandable_segments:
            return self._expand(pool, size)
        if self.reserved + whole > self._limit:
            return None
        self.segments += 1
        self._reserve(whole)
        return Block(self._address(whole), whole, pool)

    def _reserve(self, size: int) -> None:
        self.reserved += size
        if self.reserved > self.most_reserved:
            self.most_reserved = self.reserved

    def _address(self, size: int) -> int:
        """The address of a new segment: no two have a common end, so that they never merge."""
        self._end += size + APART
        return self._end - size

    def _put(self, block: Block) -> None:
        """Add a block to the free ones of its pool."""
        block.free = True
        pool = block.pool
        if self._collects:
            block.birth = self._searches[pool.small]
        insort(pool.free, (block.size, block.address, block))

    @staticmethod
    def _remove(block: Block) -> None:
        """Take a block from the free ones of its pool."""
        block.free = False
        free = block.pool.free
        del free[bisect_left(free, (block.size, block.address))]

    def _merge(self, block: Block) -> None:
        """Merge a block with its free neighbors, and add it to the free ones (``free_block``)."""
        free = block.pool.free
        before, after = block.before, block.after
        if after is not None and after.free:
            del free[bisect_left(free, (after.size, after.address))]
            block.size += after.size
            block.after = after = after.after
            if after is not None:
                after.before = block
        if before is not None and before.free:
            del free[bisect_left(free, (before.size, before.address))]
            before.size += block.size
            before.after = after
            if after is not None:
                after.before = before
            block = before
        self._put(block)

    def _process_events(self) -> None:
        done, self._done = self._done, []
        for block in done:
            block.events -= 1
            if not block.events:
                self._waiting -= block.size
                self.requested -= block.requested
                self._merge(block)

    def _release(self, block: Block) -> None:
        """Free a whole segment (``release_block``)."""
        self._remove(block)
        self.segments -= 1
        self.reserved -= block.size

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Free one block of at least ``max_split_size`` that is enough, or else the largest ones.

        ``release_available_cached_blocks``: whether so much was freed.
        """
        if self._max_split == inf:
            return False
        need = max(size, self._max_split)
        place = bisect_left(pool.free, (need,))
        if place < len(pool.free) and not pool.free[place][2].base:
            self._release(pool.free[place][2])
            return True
        released = 0
        for _, _, block in reversed(pool.free[:place]):
            if released >= need or block.size < self._max_split:
                break
            if not block.base:
                released += block.size
                self._release(block)
        return released >= need

    def _collect(self) -> None:
        """Free unused segments, the longest unused first (``garbage_collect_cached_blocks``)."""
        target = self.reserved - int(self.conf.garbage_collection_threshold * self._allowed)
        if target <= 0:
            return
        blocks = [
            (self._searches[False] - block.birth, block)
            for pool in self._of(False)
            for _, _, block in pool.free
            if block.before is None and block.after is None
        ]
        ages, number = sum(age for age, _ in blocks), len(blocks)
        while target > 0 and number:
            least, freed = ages / number, 0
            for age, block in blocks:
                if block.free and not block.base and age >= least:
                    freed += block.size
                    ages -= age
                    number -= 1
                    self._release(block)
            if not freed:
                break
            target -= freed

    def _expand(self, pool: Pool, size: int) -> Block | None:
        """A free block for a request, after pages were mapped (``try_allocate_expandable_block``).

        It begins where address space is free: at an unmapped part, or at the free block before it.
        """
        block = self._room(pool, size)
        while not block.mapped or block.size < size:
            grows = block if not block.mapped else block.after
            assert grows is not None
            need = size - (block.size if block.mapped else 0)
            if (mapped := self._map(pool, grows, min(need, grows.size))) is None:
                return None
            block = mapped
        self._remove(block)
        return block

    def _room(self, pool: Pool, size: int) -> Block:
        """The first block of enough free address space (``find_expandable_block``)."""
        for _, block in pool.unmapped:
            first = block.before if block.before is not None and block.before.free else block
            room, each = 0, first
            while room < size and each is not None and (each.free or not each.mapped):
                room += each.size
                each = each.after  # type: ignore[assignment]
            if room >= size:
                return first
        space = _whole(max(self._space, size), pool.page)
        base = self._address(space)
        block = Block(base, space, pool, base)
        block.mapped = False
        insort(pool.unmapped, (block.address, block))
        return block

    def _map(self, pool: Pool, block: Block, size: int) -> Block | None:
        """Map pages at the start of an unmapped block (``map_block``); None without memory."""
        mapped = _whole(size, pool.page)
        if self.reserved + mapped > self._limit:
            return None
        del pool.unmapped[bisect_left(pool.unmapped, (block.address,))]
        block.mapped = True
        if mapped < block.size:
            rest = Block(block.address + mapped, block.size - mapped, pool, block.base)
            rest.mapped = False
            _splice(rest, block, block.after)
            insort(pool.unmapped, (rest.address, rest))
            block.size = mapped
        before = block.before
        grown = before if before is not None and before.free else block
        self._merge(block)
        self._reserve(mapped)
        return grown

    def _unmap(self, block: Block) -> None:
        """Unmap the whole pages of a free block (``unmap_block``)."""
        pool = block.pool
        end = block.address + block.size
        first = block.address + (block.base - block.address) % pool.page
        last = end - (end - block.base) % pool.page
        if first >= last:
            return
        self._remove(block)
        if block.address < first:
            start = Block(block.address, first - block.address, pool, block.base)
            _splice(start, block.before, block)
            self._put(start)
        if last < end:
            tail = Block(last, end - last, pool, block.base)
            _splice(tail, block, block.after)
            self._put(tail)
        block.address, block.size, block.mapped = first, last - first, False
        for other in (block.before, block.after):
            if other is not None and not other.mapped:
                del pool.unmapped[bisect_left(pool.unmapped, (other.address,))]
                block.address = min(block.address, other.address)
                block.size += other.size
                if other is block.before:
                    _splice(block, other.before, block.after)
                else:
                    _splice(block, block.before, other.after)
        self.reserved -= last - first
        if block.before is not None or block.after is not None:
            insort(pool.unmapped, (block.address, block))


def _nothing(request: int) -> Block:
    """The block of a request of 0 bytes: NativeCachingAllocator.allocate asks for none."""
    if request:
        raise ValueError(f"a size must not be negative: {request}")
    return Block(0, 0, _NOWHERE)


_NOWHERE = Pool(True, 0, AllocatorConf())


def _grown(block: Block) -> int:
    """A block's size with the unmapped memory after it (``expandable_size``)."""
    after = block.after
    return block.size if after is None or after.mapped else block.size + after.size


def _splice(block: Block, before: Block | None, after: Block | None) -> None:
    """Put a block between two."""
    block.before, block.after = before, after
    if before is not None:
        before.after = block
    if after is not None:
        after.before = block


class Bounds(NamedTuple):
    """What the allocator reserves at the most of a timeline lies between these.

    Attributes:
        least: Bytes that it reserves at least.
        most: Bytes that it reserves at most.
    """

    least: int
    most: int


def reserved_bounds(
    events: Iterable[tuple[Hashable, int, int]],
    conf: AllocatorConf = AllocatorConf(),  # noqa: B008 - it cannot change
) -> Bounds:
    """Bounds of the most reserved bytes of a timeline, without a replay.

    They hold whichever of the free blocks that are large enough a request gets, and wherever
    segments lie, as long as no segment is freed. Each pool of a stream is counted alone, as its
    segments serve no other:

    - At least: its largest sum of rounded requests, in whole segments of 2 MiB, or pages.
    - At most, with usual segments: a segment is made for a request only where no free block holds
      it. Free neighbors are one block. So each segment of its size has a used block, which is no
      larger than the segment, and no two have the same. Hence there are at most as many segments
      of one size as there are blocks of at most that size at the time of such a request, and at
      most one more than before it.
    - At most, with expandable segments: pages are mapped only where each free block is smaller
      than the request. Before each of these, except the one that grows, lies a used block or the
      start, and behind it a used one. So there are at most as many as used blocks. Nothing else
      is mapped but used blocks, the request, and less than a page; nor more pages than hold the
      request.

    The least is near: replays of training steps are 2 to 18 % above it, with expandable segments 0
    to 5 %. The most is not: 1.2 to 4 times the replays. No useful bound can be read off peaks
    alone: requests of 16, 32, 64 MiB and so on, where each size is freed before the next, reserve
    as much as their peak for each size.

    Args:
        events: For each request a key, its bytes and its stream; for its end the key and 0 bytes.
        conf: The settings; ``max_split_size`` must be None, as it makes requests refuse blocks.

    Raises:
        ValueError: Blocks have a largest size that is split.

    >>> reserved_bounds([("a", 3 * 2**20, 0), ("a", 0, 0), ("b", 5 * 2**20, 0)])
    Bounds(least=6291456, most=20971520)
    """
    if conf.max_split_size is not None:
        raise ValueError("reserved bytes have no bounds with max_split_size")
    unit = gcd(ROUND_LARGE, conf.large_segment_size)
    pools: dict[tuple[bool, int], _Bounded] = {}
    requests: dict[Hashable, tuple[_Bounded, int]] = {}
    for key, request, stream in events:
        if request > 0:
            size = conf.roundup(request)
            pool = pools.setdefault((size <= SMALL, stream), _Bounded())
            page = SMALL_SEGMENT if size <= SMALL else conf.large_segment_size
            if conf.expandable_segments:
                pool.expand(size, page)
            else:
                pool.add_segment(page if size < MIN_LARGE_ALLOC else _whole(size, ROUND_LARGE))
            insort(pool.sizes, size)
            pool.used += size
            pool.peak = max(
                pool.peak, _whole(pool.used, page if conf.expandable_segments else unit)
            )
            requests[key] = pool, size
        elif key in requests:
            pool, size = requests.pop(key)
            del pool.sizes[bisect_left(pool.sizes, size)]
            pool.used -= size
    return Bounds(
        sum(pool.peak for pool in pools.values()), sum(pool.most() for pool in pools.values())
    )


class _Bounded:
    """The bounds of one pool."""

    def __init__(self) -> None:
        self.sizes: list[int] = []  # of the used blocks' requests, sorted
        self.used = self.peak = self.mapped = 0
        self.segments: dict[int, int] = {}  # the most segments of each size

    def add_segment(self, size: int) -> None:
        """A request may make a segment of a size."""
        before = self.segments.get(size, 0)
        fit = bisect_right(self.sizes, size)
        self.segments[size] = max(before, min(before, fit) + 1)

    def expand(self, size: int, page: int) -> None:
        """A request may map pages."""
        holes = len(self.sizes) * (size - MIN_BLOCK)
        filled = self.used + size + holes + page - MIN_BLOCK
        self.mapped = max(self.mapped, min(self.mapped + _whole(size, page), filled))

    def most(self) -> int:
        return self.mapped + sum(size * number for size, number in self.segments.items())


def _whole(size: int, unit: int) -> int:
    """A size rounded up to a multiple."""
    return -(-size // unit) * unit
