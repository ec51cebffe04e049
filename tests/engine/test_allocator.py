"""PyTorch's caching allocator, by traces whose numbers follow from its source.

The source is c10/cuda/CUDACachingAllocator.cpp, and for the settings c10/core/AllocatorConfig.cpp,
of PyTorch 2.13.
"""

import random
import re
from itertools import pairwise, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalc.analysis.allocator import (
    Allocator,
    AllocatorConf,
    OutOfMemory,
    reserved_bounds,
    rounded,
)
from memcalc.config.allocator import expandable, settings
from memcalc.errors import ConfigError
from memcalc.units import MIB

EXPANDABLE = "expandable_segments:True"
OVERSIZE = "max_split_size_mb:24"
COLLECT = "garbage_collection_threshold:0.5,per_process_memory_fraction:0.9"


def replay(trace, conf="", capacity=None, taken=0):
    """The allocator after a trace, and its blocks by their names.

    ``a=5`` requests 5 MiB, ``a=5B`` bytes, ``a=5@1`` on stream 1; ``-a`` frees; ``a>1`` is used by
    stream 1; ``!a=5`` does not fit. ``sync``, ``sync1``, ``empty`` and ``reset`` are as they say.
    """
    allocator = Allocator(
        AllocatorConf.parse(conf), None if capacity is None else capacity * MIB, taken * MIB
    )
    blocks = {}
    for word in trace.split():
        if match := re.fullmatch(r"(!?)(\w+)=([0-9.]+)(B?)(?:@(\d))?", word):
            fails, name, number, unit, stream = match.groups()
            size = int(float(number) * (1 if unit else MIB))
            if fails:
                with pytest.raises(OutOfMemory):
                    allocator.malloc(size, int(stream or 0))
            else:
                blocks[name] = allocator.malloc(size, int(stream or 0))
        elif word.startswith("-"):
            allocator.free(blocks[word[1:]])
        elif ">" in word:
            name, stream = word.split(">")
            allocator.record_stream(blocks[name], int(stream))
        elif word.startswith("sync"):
            allocator.synchronize(int(word[4:]) if word[4:] else None)
        else:
            {"empty": allocator.empty_cache, "reset": allocator.reset_peaks}[word]()
    return allocator, blocks


# What must hold, the function of the source that says so, a trace, and counters in MiB after it.
TRACES = [
    # Sizes of blocks
    ("a byte takes 512", "round_size: kMinBlockSize", "a=1B", {"allocated": 512 / MIB}),
    ("513 bytes take 1024", "round_size", "a=513B", {"allocated": 1024 / MIB}),
    ("0 bytes take nothing", "NativeCachingAllocator::allocate", "a=0", {"reserved": 0}),
    ("requests are counted unrounded", "alloc_found_block", "a=1B", {"requested": 1 / MIB}),
    # Segments
    ("1 MiB is small: a segment has 2 MiB", "get_allocation_size", "a=1", {"reserved": 2}),
    ("so is what rounds to 1 MiB", "get_pool: rounded", "a=1048065B", {"reserved": 2}),
    ("a byte more is large: 20 MiB", "get_allocation_size", "a=1048577B", {"reserved": 20}),
    ("just below 10 MiB: 20", "get_allocation_size: kMinLargeAlloc", "a=9.9", {"reserved": 20}),
    ("10 MiB: a segment of that size", "get_allocation_size", "a=10", {"reserved": 10}),
    ("13 MiB: whole 2 MiB", "get_allocation_size: kRoundLarge", "a=13", {"reserved": 14}),
    # Splits
    ("a rest of 1 MiB stays", "should_split: > kSmallSize", "a=11", {"allocated": 12}),
    ("a rest of more is split off", "should_split", "a=10.9", {"allocated": 10.9}),
    (
        "a rest of 512 bytes of a small block is split off",
        "should_split: kMinBlockSize",
        "a=1 b=0.5 c=523776B d=512B",  # 1 MiB, 0.5 MiB, 0.5 MiB less 512, and 512
        {"allocated": 2, "reserved": 2},
    ),
    ("what is split off serves others", "get_free_block", "a=9 b=9 c=2", {"reserved": 20}),
    ("a full segment needs another", "alloc_block", "a=1 b=1 c=1B", {"reserved": 4}),
    (
        "the rest of a reused block counts too",  # 20 - 9 = 11 for 10
        "alloc_found_block: block->size",
        "a=9 b=10",
        {"allocated": 20, "reserved": 20, "requested": 19},
    ),
    # Which free block
    (
        "the smallest free block that holds it",  # 11.5 gets the 12, whose rest stays
        "get_free_block: lower_bound",
        "a=14 b=12 -a -b c=11.5",
        {"allocated": 12, "reserved": 26},
    ),
    ("however large", "get_free_block", "a=100 -a b=12", {"allocated": 12, "reserved": 100}),
    ("no free block holds it", "malloc", "a=12 -a b=13", {"allocated": 14, "reserved": 26}),
    ("large free blocks serve no small", "get_pool", "a=1.5 -a b=1", {"reserved": 22}),
    ("small ones serve no large", "get_pool", "a=1 b=1 -a -b c=1.5", {"reserved": 22}),
    # Merges
    ("free neighbors merge", "try_merge_blocks", "a=5 b=5 c=5 -a -b d=9", {"reserved": 20}),
    ("with the rest, too", "free_block", "a=5 b=5 -b -a c=20", {"reserved": 20}),
    ("not across segments", "try_merge_blocks: next", "a=10 b=10 -a -b c=20", {"reserved": 40}),
    ("a hole stays a hole", "get_free_block", "a=5 b=5 c=5 -b d=6", {"reserved": 40}),
    # Streams
    ("a stream has its own large blocks", "BlockComparatorSize", "a=5 -a b=5@1", {"reserved": 40}),
    ("and its own small ones", "BlockComparatorSize", "a=1 -a b=1@1", {"reserved": 4}),
    ("which it uses again", "get_free_block", "a=5@1 -a b=5@1", {"reserved": 20}),
    (
        "a block waits for another stream that used it",
        "free: insert_events",
        "a=20 a>1 -a b=20",
        {"allocated": 20, "active": 40, "requested": 40, "reserved": 40},
    ),
    ("until it is done", "process_events", "a=20 a>1 -a sync b=20", {"active": 20, "reserved": 20}),
    ("and then until the next request", "malloc", "a=20 a>1 -a sync", {"active": 20}),
    ("for all that used it", "event_count", "a=20 a>1 a>2 -a sync1 b=20", {"reserved": 40}),
    ("for each", "event_count", "a=20 a>1 a>2 -a sync1 sync2 b=20", {"reserved": 20}),
    ("not for its own", "recordStream", "a=20@1 a>1 -a b=20@1", {"reserved": 20}),
    ("once, however often", "stream_uses", "a=20 a>1 a>1 -a sync1 b=20", {"reserved": 20}),
    (
        "a block that waits does not merge",  # free are 5 and 10, not 20
        "try_merge_blocks: event_count",
        "a=5 b=5 b>1 -a -b c=16",
        {"reserved": 36, "active": 21},
    ),
    ("its last use is over", "insert_events", "a=20 a>1 -a sync b=20 -b c=20", {"reserved": 20}),
    # empty_cache
    ("free segments are freed", "release_blocks", "a=5 b=20 -b empty", {"reserved": 20}),
    ("small ones, too", "release_cached_blocks: small_blocks", "a=1B -a empty", {"reserved": 0}),
    ("used ones are not", "release_blocks: prev, next", "a=5 b=5 -a empty", {"reserved": 20}),
    ("it waits for streams", "synchronize_and_free_events", "a=20 a>1 -a empty", {"reserved": 0}),
    ("peaks stay", "emptyCache", "a=20 -a empty", {"most_reserved": 20, "most_allocated": 20}),
    # Peaks
    ("a peak is the most", "Stat.peak", "a=20 b=20 -a c=10", {"most_allocated": 40}),
    (
        "a peak begins again at what there is",
        "resetPeakStats",
        "a=20 b=20 -b reset",
        {"most_allocated": 20, "most_reserved": 40, "most_requested": 20, "most_active": 20},
    ),
    ("a block that waits is active", "active_bytes", "a=20 a>1 -a reset", {"most_active": 20}),
    ("parts of used segments", "inactive_split_bytes", "a=5 b=12 -b", {"inactive_split": 15}),
]  # fmt: skip

GROWING = [
    ("a page of the large pool has 20 MiB", "ExpandableSegment", "a=5", {"reserved": 20}),
    ("one of the small pool has 2", "find_expandable_block", "a=1B", {"reserved": 2}),
    ("as many as it takes", "map: segmentRight", "a=41", {"reserved": 60}),
    ("every rest of 512 bytes is split off", "should_split", "a=19.5 b=0.5", {"allocated": 20}),
    ("even of large blocks", "should_split", "a=11", {"allocated": 11}),
    ("the free end grows", "try_allocate_expandable_block", "a=15 b=15", {"reserved": 40}),
    ("by what is missing", "map_block: remaining", "a=15 b=15 c=10", {"reserved": 40}),
    ("a free block comes first", "malloc", "a=15 b=15 -a c=15", {"reserved": 40}),
    ("streams have segments of their own", "find_expandable_block", "a=5 b=5@1", {"reserved": 40}),
    ("so have small requests", "get_pool", "a=5 b=1", {"reserved": 22}),
    (
        "empty_cache unmaps whole pages",  # 50 are free, [0, 40) is 2 pages; b lies in [40, 60)
        "unmap_block",
        "a=50 b=5 -a empty",
        {"reserved": 20},
    ),
    (
        "unmapped pages are mapped again, with the free block after them",
        "find_expandable_block: lowest address",
        "a=50 b=5 -a empty c=35 d=15",
        {"reserved": 60, "allocated": 55},
    ),
    (
        "but not for more than there",  # 5 of 60 are free at the end: 3 pages more
        "has_available_address_space",
        "a=50 b=5 -a empty c=60",
        {"reserved": 80},
    ),
    ("a free segment is forgotten", "release_expandable_segment", "a=50 -a empty", {"reserved": 0}),
    (
        "a block that waits is not unmapped before it is free",
        "find_expandable_block: allocatable",
        "a=20 a>1 -a b=20",
        {"reserved": 40},
    ),
    ("rests are no inactive split", "free_block", "a=5 b=5 -a", {"inactive_split": 0}),
    ("it has no segment that counts", "alloc_block", "a=5", {"segments": 0}),
]  # fmt: skip

# A block of at least 24 MiB is oversize.
LIMITED = [
    ("an oversize block is not split", "should_split", "a=40 -a b=30", {"allocated": 40}),
    ("nor used for 20 MiB less", "get_free_block", "a=50 -a b=30", {"reserved": 80}),
    ("nor for a request that is not oversize", "get_free_block", "a=40 -a b=12", {"reserved": 52}),
    ("others are split", "should_split", "a=22 -a b=12", {"allocated": 12, "reserved": 22}),
]  # fmt: skip

# Capacity in MiB, settings.
FULL = [
    ("the last byte can be reserved", 50, "", "a=20 b=30", {"reserved": 50, "retries": 0}),
    ("cached blocks are freed first", 50, "", "a=20 -a b=40", {"reserved": 40, "retries": 1}),
    ("of all streams", 50, "", "a=20@1 -a b=40", {"reserved": 40}),
    ("of small requests", 40, "", "a=1B -a b=40", {"reserved": 40}),
    ("after waiting for streams", 50, "", "a=20 a>1 -a b=40", {"reserved": 40}),
    ("or there is no memory", 50, "", "a=20 !b=40", {"reserved": 20, "retries": 1}),
    ("a used segment stays", 50, "", "a=5 b=5 -b !c=40", {"reserved": 20, "allocated": 5}),
    (
        "pages of another stream are unmapped",  # 40 MiB of stream 0, 60 of stream 1
        60,
        EXPANDABLE,
        "a=30 -a b=50@1",
        {"reserved": 60, "retries": 1},
    ),
    (
        "oversize blocks are freed first, the largest first, until it is enough",
        100,
        OVERSIZE,
        "a=30 b=30 x=12 -a -b -x c=50",  # 72 + 50 do not fit; 30 + 30 are at least 50
        {"reserved": 62, "retries": 0},
    ),
    (
        "if these are too little, all are",  # 30 are less than 60
        90,
        OVERSIZE,
        "a=30 x=12 -a -x b=60",
        {"reserved": 60, "retries": 1},
    ),
    (
        "one oversize block that is enough is freed alone",  # 50 is too large to be used for 28
        90,
        OVERSIZE,
        "a=30 b=50 -b c=28",
        {"reserved": 58, "retries": 0},
    ),
    (
        "a fraction of the memory is allowed",
        100,
        "per_process_memory_fraction:0.5",
        "a=40 !b=12 c=10",
        {"reserved": 50},
    ),
    (
        "from the threshold on, blocks unused for longer than the average are freed",
        # 50 > 0.5 x 90; a was freed 2 searches ago, b 1
        100,
        COLLECT,
        "a=20 -a b=30 -b c=40",
        {"reserved": 70, "retries": 0},
    ),
    (
        "and again, until it is enough",  # 50 - 9 = 41 are wanted, a has 20
        100,
        COLLECT.replace("0.5", "0.1"),
        "a=20 -a b=30 -b c=40",
        {"reserved": 40, "retries": 0},
    ),
    ("below it none is", 100, COLLECT, "a=20 -a b=22", {"reserved": 42}),
    ("no part of a used segment is", 100, COLLECT, "a=5 x=5 b=40 -a c=25", {"reserved": 86}),
    (
        "without a fraction nothing is collected",
        100,
        "garbage_collection_threshold:0.5",
        "a=20 -a b=30 -b c=40",
        {"reserved": 90},
    ),
]  # fmt: skip


def check(found, expected):
    """Compare counters: sizes in MiB, numbers as they are."""
    for name, value in expected.items():
        unit = 1 if name in ("retries", "segments") else MIB
        assert getattr(found, name) == rounded_mib(value, unit, name), name


def rounded_mib(value, unit, name):
    """Bytes of a size in MiB, rounded as blocks are, unless it counts requests."""
    size = int(value * unit)
    return size if "requested" in name or unit == 1 else rounded(size)


class TestTraces:
    @pytest.mark.parametrize(
        ("source", "trace", "expected"), [row[1:] for row in TRACES], ids=[row[0] for row in TRACES]
    )
    def test_by_default(self, source, trace, expected):
        check(replay(trace)[0], expected)

    @pytest.mark.parametrize(
        ("source", "trace", "expected"), [row[1:] for row in GROWING], ids=[r[0] for r in GROWING]
    )
    def test_with_expandable_segments(self, source, trace, expected):
        check(replay(trace, EXPANDABLE)[0], expected)

    @pytest.mark.parametrize(
        ("source", "trace", "expected"), [row[1:] for row in LIMITED], ids=[r[0] for r in LIMITED]
    )
    def test_with_a_largest_block_that_is_split(self, source, trace, expected):
        check(replay(trace, OVERSIZE)[0], expected)

    @pytest.mark.parametrize(
        ("capacity", "conf", "trace", "expected"), [r[1:] for r in FULL], ids=[r[0] for r in FULL]
    )
    def test_of_a_gpu_that_is_full(self, capacity, conf, trace, expected):
        check(replay(trace, conf, capacity)[0], expected)

    def test_an_unsplit_block_may_be_as_much_larger_as_is_set(self):
        """``get_free_block``: 50 < 30 + 21."""
        found, _ = replay("a=50 -a b=30", f"{OVERSIZE},max_non_split_rounding_mb:21")
        check(found, {"allocated": 50, "reserved": 50})

    def test_segments_for_requests_below_10_mib_can_have_another_size(self):
        """``get_allocation_size`` and ``find_expandable_block``: large_segment_size."""
        check(replay("a=5 b=10", "large_segment_size_mb:12")[0], {"reserved": 22})
        check(replay("a=5", f"{EXPANDABLE},large_segment_size_mb:12")[0], {"reserved": 12})

    def test_what_others_hold_cannot_be_reserved(self):
        replay("a=30 !b=12", capacity=50, taken=9)

    def test_a_request_too_large_for_the_gpu_leaves_everything_as_it_was(self):
        for conf in ("", EXPANDABLE):
            found, blocks = replay("a=5 !b=60 c=5", conf, 50)
            check(found, {"allocated": 10, "reserved": 20})
            assert blocks["c"].address == blocks["a"].address + 5 * MIB

    @pytest.mark.parametrize("conf", ["", EXPANDABLE])
    @pytest.mark.parametrize("order", [*permutations("abcd")])
    def test_the_order_of_frees_does_not_matter(self, order, conf):
        """``free_block`` merges with both neighbors: the segment is one block again."""
        found, _ = replay("a=5 b=5 c=5 d=5 " + " ".join(f"-{name}" for name in order), conf)
        assert [block.size for block in found.free_blocks()] == [20 * MIB]


class TestAddresses:
    def test_of_equal_blocks_the_lowest_is_taken(self):
        """``BlockComparatorSize``: size, then address."""
        _, blocks = replay("a=12 b=12 c=12 -c -a -b d=12")
        assert blocks["d"] is blocks["a"]

    def test_a_block_is_split_from_its_start(self):
        """``alloc_found_block``: the rest lies behind."""
        _, blocks = replay("a=5 b=5")
        assert blocks["b"].address == blocks["a"].address + 5 * MIB

    def test_a_block_that_cannot_grow_comes_before_one_that_can(self):
        """``get_free_block``: expandable_size; the free end has 10 MiB, the hole 25."""
        _, blocks = replay("a=25 b=5 -a c=8", EXPANDABLE)
        assert blocks["c"].address == blocks["b"].address - 25 * MIB

    def test_unmapped_pages_are_the_first_to_be_mapped(self):
        """``find_expandable_block``: the lowest address."""
        _, blocks = replay("a=50 b=5 -a empty c=35", EXPANDABLE)
        assert blocks["c"].address == blocks["b"].address - 50 * MIB


class TestMistakes:
    def test_a_block_is_freed_once(self):
        with pytest.raises(ValueError, match="free already"):
            replay("a=5 -a -a")

    def test_a_free_block_is_used_by_no_stream(self):
        with pytest.raises(ValueError, match="free already"):
            replay("a=5 -a a>1")

    def test_a_block_of_nothing_is_freed_as_often_as_one_likes(self):
        check(replay("a=0 a>1 -a -a")[0], {"active": 0})

    def test_a_size_is_not_negative(self):
        with pytest.raises(ValueError, match="negative"):
            Allocator().malloc(-1)

    def test_a_lack_of_memory_is_said_in_one_line_with_its_numbers(self):
        with pytest.raises(MemoryError) as error:
            Allocator(capacity=50 * MIB).malloc(60 * MIB, 3)
        assert str(error.value) == (
            "CUDA out of memory: a request of 60.00 MiB on stream 3 with 0.00 GiB allocated, "
            "0.00 GiB reserved, of 0.05 GiB"
        )


def test_counters_have_the_names_of_memory_stats():
    """torch/cuda/memory.py, memory_stats: its docstring lists them."""
    found, _ = replay("a=5 b=1 -a")
    assert found.memory_stats() == {
        "requested_bytes.all.current": MIB,
        "requested_bytes.all.peak": 6 * MIB,
        "allocated_bytes.all.current": MIB,
        "allocated_bytes.all.peak": 6 * MIB,
        "active_bytes.all.current": MIB,
        "active_bytes.all.peak": 6 * MIB,
        "reserved_bytes.all.current": 22 * MIB,
        "reserved_bytes.all.peak": 22 * MIB,
        "inactive_split_bytes.all.current": MIB,
        "segment.all.current": 2,
        "num_alloc_retries": 0,
    }


class TestSettings:
    def test_divisions_are_those_of_pytorchs_own_test(self):
        """c10/test/core/AllocatorConfig_test.cpp, allocator_config_test."""
        found = AllocatorConf.parse(
            "max_split_size_mb:40,max_non_split_rounding_mb:30,garbage_collection_threshold:0.5,"
            "roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1],expandable_segments:True,"
            "pinned_use_background_threads:True"
        )
        assert (found.max_split_size, found.max_non_split_rounding) == (40 * MIB, 30 * MIB)
        assert found.garbage_collection_threshold == 0.5
        assert found.expandable_segments
        of = [found.roundup_power2_divisions[each] for each in range(5, 13)]
        assert of == [8, 8, 2, 4, 2, 4, 1, 1]  # from 32 MiB to 4 GiB

    @pytest.mark.parametrize(
        ("size", "divisions", "expected"),
        [
            (1200, 4, 1536),  # at most 512 x 4: whole 512 bytes
            (2049, 4, 2560),  # between 2048 and 4096 in steps of 512
            (4 * MIB, 4, 4 * MIB),  # a power of two
            (5 * MIB, 4, 5 * MIB),  # a step
            (5 * MIB + 1, 4, 6 * MIB),
            (5 * MIB + 1, 1, 5 * MIB + 512),  # one part is none
        ],
    )
    def test_requests_are_rounded_up_to_a_part_of_a_power_of_two(self, size, divisions, expected):
        """``roundup_power2_next_division``."""
        conf = AllocatorConf.parse(f"roundup_power2_divisions:{divisions}")
        assert conf.roundup(size) == expected
        assert Allocator(conf).malloc(size).size >= expected

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("", {}),
            ("expandable_segments : True ,", {"expandable_segments": True}),
            ("max_split_size_mb:32,max_split_size_mb:64", {"max_split_size": 64 * MIB}),
            ("backend:native,pinned_num_register_threads:8", {"backend": "native"}),
            ("roundup_power2_divisions:8", {"roundup_power2_divisions": (8,) * 16}),
            ("roundup_power2_divisions:[]", {"roundup_power2_divisions": (0,) * 16}),
            ("roundup_power2_divisions:[2:4]", {"roundup_power2_divisions": (4, 4, *[0] * 14)}),
        ],
    )  # fmt: skip
    def test_a_text_says_this(self, text, expected):
        assert settings(text) == expected

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("expandable_segment:True", "has no key 'expandable_segment'; did you mean 'expan"),
            ("expandable_segments:true", "expandable_segments must be True or False, not 'true'"),
            ("expandable_segments=True", "must be key:value pairs with commas between them"),
            (",", "must be key:value pairs"),
            ("max_split_size_mb", "must be key:value pairs"),
            ("max_split_size_mb:-1", "max_split_size_mb must be a whole number, not '-1'"),
            ("max_split_size_mb:19", "max_split_size must be at least 20971520 bytes, not 19"),
            ("large_segment_size_mb:32,max_split_size_mb:31", "must be at least 33554432 bytes"),
            ("large_segment_size_mb:10", "large_segment_size must be at least 10485761 bytes"),
            ("garbage_collection_threshold:1.5", "must be a number from 0 to 1, not 1.5"),
            ("garbage_collection_threshold:1", "garbage_collection_threshold must be less than 1"),
            ("per_process_memory_fraction:x", "must be a number from 0 to 1, not 'x'"),
            ("roundup_power2_divisions:3", "each 0 or a power of two, not (3, 3"),
            ("roundup_power2_divisions:[3:4]", "must start intervals at powers of two, not at 3"),
            ("roundup_power2_divisions:[4]", "must be a whole number, not ''"),
            ("backend:mine", "backend must be native or cudaMallocAsync, not 'mine'"),
            ("a:" * 3000, "must have at most 4096 characters"),
        ],
    )  # fmt: skip
    def test_a_wrong_text_is_refused_in_one_line(self, text, message):
        with pytest.raises(ConfigError, match=re.escape(message)) as error:
            AllocatorConf.parse(text)
        assert "\n" not in str(error.value)

    @given(st.text(max_size=60) | st.text("abmx_:,[]>0123456789 \n", max_size=60))
    def test_any_text_is_read_or_refused_in_one_line(self, text):
        for each in (text, f"max_split_size_mb:{text}", f"roundup_power2_divisions:[{text}]"):
            try:
                AllocatorConf.parse(each)
            except ConfigError as error:
                message = str(error)
            else:
                message = ""
            assert message.isprintable()

    def test_the_first_variable_that_is_set_is_read(self):
        """``AcceleratorAllocatorConfig::instance``."""
        both = {"PYTORCH_CUDA_ALLOC_CONF": EXPANDABLE, "PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}
        assert expandable(both) is None
        assert expandable({"PYTORCH_HIP_ALLOC_CONF": "expandable_segments:False"}) is False


CONFS = [
    "", EXPANDABLE, OVERSIZE, COLLECT, f"{EXPANDABLE},{OVERSIZE},{COLLECT}",
    "roundup_power2_divisions:[2:4,>:8],large_segment_size_mb:12",
]  # fmt: skip


def random_size(draw):
    """Bytes of a request: of both pools, whole and odd."""
    return draw.choice(
        (draw.randrange(2 * MIB), draw.randrange(40) * MIB, int(2 ** draw.uniform(0, 27)))
    )


def at_random(seed, conf, capacity=None, steps=200):
    """An allocator at every step of a random trace, with the blocks that are given out."""
    draw = random.Random(seed)
    allocator, blocks = Allocator(AllocatorConf.parse(conf), capacity), []
    for _ in range(steps):
        action = draw.choice(["malloc"] * 6 + ["free"] * 5 + ["use", "sync", "empty"])
        if action == "malloc":
            try:
                blocks.append(allocator.malloc(random_size(draw), draw.choice((0, 0, 3))))
            except OutOfMemory:
                assert capacity is not None
        elif action == "free" and blocks:
            allocator.free(blocks.pop(draw.randrange(len(blocks))))
        elif action == "use" and blocks:
            allocator.record_stream(draw.choice(blocks), draw.choice((0, 3, 5)))
        elif action == "sync":
            allocator.synchronize(draw.choice((None, 3, 5)))
        elif action == "empty" and draw.random() < 0.1:
            allocator.empty_cache()
        yield allocator, blocks


def segments_of(allocator, blocks):
    """The blocks of each segment that has a free block or one of ``blocks``."""
    firsts = {}
    for block in (*allocator.free_blocks(), *blocks):
        while block.before is not None:
            block = block.before
        if block.size:
            firsts[block.address] = block
    for first in firsts.values():
        found = [first]
        while found[-1].after is not None:
            found.append(found[-1].after)
        yield found


@pytest.mark.parametrize("conf", CONFS)
@pytest.mark.parametrize("seed", range(8))
class TestRandomTraces:
    def test_counters_are_in_order(self, seed, conf):
        for found, blocks in at_random(seed, conf, 300 * MIB):
            assert found.allocated == sum(block.size for block in blocks)
            assert 0 <= found.allocated <= found.active <= found.reserved <= 300 * MIB
            assert 0 <= found.requested <= found.active
            assert found.active + sum(b.size for b in found.free_blocks()) == found.reserved
            assert found.allocated <= found.most_allocated <= found.most_active
            assert found.most_active <= found.most_reserved

    def test_blocks_tile_segments_and_free_neighbors_are_one(self, seed, conf):
        for found, blocks in at_random(seed, conf):
            end = 0
            for segment in sorted(segments_of(found, blocks), key=lambda each: each[0].address):
                assert segment[0].address > end  # segments do not touch
                for block, other in pairwise(segment):
                    assert block.address + block.size == other.address
                    assert other.before is block
                    assert not (block.free and other.free)
                    assert block.mapped or other.mapped
                end = segment[-1].address + segment[-1].size

    def test_without_blocks_nothing_is_left(self, seed, conf):
        *_, (found, blocks) = at_random(seed, conf, 500 * MIB)
        for block in blocks:
            found.free(block)
        assert found.allocated == 0
        found.empty_cache()
        assert (found.active, found.requested, found.reserved, found.segments) == (0, 0, 0, 0)
        assert not [*found.free_blocks()]

    def test_a_trace_gives_the_same_again(self, seed, conf):
        *_, (found, _) = at_random(seed, conf)
        *_, (again, _) = at_random(seed, conf)
        assert found.memory_stats() == again.memory_stats()


def events_at_random(seed, nested):
    """Requests and frees of random blocks; nested ones are freed in the order of a stack."""
    draw, live, events = random.Random(seed), [], []
    for key in range(draw.choice((20, 100, 400))):
        events.append(
            (key, draw.choice((random_size(draw), 20 * MIB, 5 * MIB)), draw.choice((0, 3)))
        )
        live.append(key)
        while live and draw.random() < 0.49:
            events.append((live.pop(-1 if nested else draw.randrange(len(live))), 0, 0))
    return events


def most_reserved(events, conf):
    allocator, blocks = Allocator(conf), {}
    for key, size, stream in events:
        if size or key not in blocks:
            blocks[key] = allocator.malloc(size, stream)
        else:
            allocator.free(blocks.pop(key))
    return allocator.most_reserved


class TestBounds:
    @pytest.mark.parametrize("conf", ["", EXPANDABLE, CONFS[-1], f"{EXPANDABLE},{CONFS[-1]}"])
    @pytest.mark.parametrize("nested", [False, True])
    @pytest.mark.parametrize("seed", range(25))
    def test_a_replay_lies_between_them(self, seed, nested, conf):
        conf, events = AllocatorConf.parse(conf), events_at_random(seed, nested)
        least, most = reserved_bounds(events, conf)
        assert 0 < least <= most_reserved(events, conf) <= most

    @pytest.mark.parametrize("conf", ["", EXPANDABLE])
    def test_they_are_equal_where_nothing_is_freed_and_segments_are_full(self, conf):
        events = [(key, 20 * MIB, 0) for key in range(10)]
        assert reserved_bounds(events, AllocatorConf.parse(conf)) == (200 * MIB, 200 * MIB)

    def test_growing_requests_reserve_their_peak_for_each_size(self):
        """So no factor of the peak is a bound: 5 sizes of 256 MiB in all, one after another."""
        events = []
        for size in (16, 32, 64, 128, 256):
            number = 256 // size
            events += [((size, key), size * MIB, 0) for key in range(number)]
            events += [((size, key), 0, 0) for key in range(number)]
        assert most_reserved(events, AllocatorConf()) == 5 * 256 * MIB
        assert reserved_bounds(events) == (256 * MIB, 5 * 256 * MIB)
        assert most_reserved(events, AllocatorConf.parse(EXPANDABLE)) == 260 * MIB

    def test_blocks_that_are_not_split_may_have_none(self):
        with pytest.raises(ValueError, match="no bounds with max_split_size"):
            reserved_bounds([], AllocatorConf.parse(OVERSIZE))
