"""Memory snapshots of PyTorch (``torch.cuda.memory._dump_snapshot``), replayed.

A snapshot has the segments at its end, and, where ``_record_memory_history`` was on, a trace of the
allocator's actions (torch/cuda/memory.py, torch/csrc/cuda/memory_snapshot.cpp). The trace is undone
from its end to its start, and done again by ``memcalc.analysis.allocator``.

A snapshot is a pickle, and a pickle can run any code. So it is not given to ``pickle``: numbers,
texts, tuples, lists and dictionaries are read here, and nothing else is.
"""

import struct
from bisect import bisect_left
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from memcalc.analysis.allocator import SMALL, Allocator, Block, rounded
from memcalc.config.readers import place, read_bytes
from memcalc.errors import InputError

MAX_BYTES = 128 * 2**20
MOST = 2**63 - 1
ACTIONS = ("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free")


class Event(NamedTuple):
    """An action of the allocator.

    Attributes:
        action: What was done.
        address: Where the block or the segment begins.
        size: The bytes that were requested, or of the segment.
        stream: The stream of the block.
    """

    action: str
    address: int
    size: int
    stream: int


class Segment(NamedTuple):
    """A segment at the end of the trace.

    Attributes:
        address: Where it begins.
        size: Its bytes.
        stream: Its stream.
        small: Whether it is of the pool of small requests.
        blocks: Its used blocks: address, bytes, and bytes that were requested.
    """

    address: int
    size: int
    stream: int
    small: bool
    blocks: tuple[tuple[int, int, int], ...]


class Snapshot(NamedTuple):
    """The memory of one GPU.

    Attributes:
        events: The trace.
        segments: The segments at its end.
    """

    events: list[Event]
    segments: list[Segment]

    @property
    def reserved(self) -> int:
        """Bytes of all segments."""
        return sum(segment.size for segment in self.segments)


class Replay(NamedTuple):
    """What became of a trace.

    Attributes:
        requests: Number of requests.
        elsewhere: Number of these whose block lies at another address.
        segments: Number of segments that were made.
        other_segments: Number of requests that made a segment only here, or only there.
        allocator: The allocator at the end.
    """

    requests: int
    elsewhere: int
    segments: int
    other_segments: int
    allocator: Allocator


def read_snapshot(path: Path, device: int = 0) -> Snapshot:
    """Read the snapshot of a GPU.

    Raises:
        InputError: The file cannot be read, is no snapshot, or has expandable segments or memory
            pools of CUDA graphs, which are not replayed.
    """
    where = place(path)
    try:
        found = _plain(read_bytes(path, MAX_BYTES))
    except (IndexError, KeyError, TypeError, ValueError):
        raise InputError(f"{where}: not a pickle of numbers, texts and lists") from None
    try:
        traces = found["device_traces"]
        events = [_event(each) for each in traces[device]] if device < len(traces) else []
        segments = [_segment(each) for each in found["segments"] if each["device"] == device]
    except (KeyError, TypeError, AttributeError, IndexError):
        raise InputError(f"{where}: not a snapshot of torch.cuda.memory") from None
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    return Snapshot([event for event in events if event is not None], segments)


def replay(snapshot: Snapshot) -> Replay:
    """Do what a trace did, from the memory at its start.

    A trace does not say how large a block is that it frees, but did not give out. It ends where its
    request does, or where at most 1 MiB later the next block, or the first one that is given out
    behind it, begins.

    Raises:
        InputError: The trace frees a block that is not there.
    """
    events = snapshot.events
    allocator = _Allocator([event.address for event in events if event.action == "segment_alloc"])
    blocks = _start(allocator, snapshot)
    requests = elsewhere = others = made = 0
    for index, event in enumerate(events):
        match event.action:
            case "alloc":
                requests += 1
                before = allocator.made
                block = allocator.malloc(event.size, event.stream)
                elsewhere += block.address != event.address
                others += allocator.made - before != made
                blocks[event.address], made = block, 0
            case "free_requested":
                if (found := blocks.pop(event.address, None)) is None:
                    raise InputError(f"event {index} frees what is not there")
                following = events[index + 1] if index + 1 < len(events) else None
                if following is None or following[:2] != ("free_completed", event.address):
                    allocator.record_stream(found, -event.address - 1)  # it waits for a stream
                allocator.free(found)
            case "free_completed":
                allocator.synchronize(-event.address - 1)
            case "segment_alloc":
                made += 1
            case "segment_free" if index == 0 or events[index - 1].action != "segment_free":
                allocator.empty_cache()
    return Replay(requests, elsewhere, allocator.made, others, allocator)


class _Allocator(Allocator):
    """An allocator whose segments lie where a trace has them."""

    def __init__(self, addresses: list[int]) -> None:
        super().__init__()
        self.addresses = addresses
        self.made = 0

    def _address(self, size: int) -> int:
        self.made += 1
        if self.made > len(self.addresses):
            return super()._address(size)
        return self.addresses[self.made - 1]


def _start(allocator: Allocator, snapshot: Snapshot) -> dict[int, Block]:
    """Add the segments at the start of the trace; returns the blocks that are used, by address."""
    segments = {each.address: each[:4] for each in snapshot.segments}
    used = {block[0]: block for segment in snapshot.segments for block in segment.blocks}
    given: dict[int, int] = {}  # the first event that gives out a block at an address
    freed: dict[int, int] = {}  # the first event that frees one
    for index, event in reversed([*enumerate(snapshot.events)]):
        match event.action:
            case "alloc":
                used.pop(event.address, None)
                given[event.address] = index
            case "free_requested":
                used[event.address] = event.address, 0, event.size
                freed[event.address] = index
            case "segment_alloc":
                segments.pop(event.address, None)
            case "segment_free":
                small = event.size <= 2 * SMALL
                segments[event.address] = event.address, event.size, event.stream, small
    starts, later = sorted(used), sorted(given)
    found: dict[int, Block] = {}
    for address, whole, stream, small in segments.values():
        inside = starts[bisect_left(starts, address) : bisect_left(starts, address + whole)]
        blocks: list[tuple[int, int | None]] = []
        end = address
        for start, following in zip(inside, [*inside[1:], address + whole], strict=False):
            _, size, requested = used[start]
            blocks += [(start - end, None)] * (start > end)
            end = start + size
            if not size:
                end = start + rounded(requested)
                if not small and following - end <= SMALL:
                    end = following
                elif not small:
                    near = later[bisect_left(later, end) : bisect_left(later, end + SMALL + 1)]
                    near = [each for each in near if given[each] < freed[start]]
                    end = min(near, key=given.__getitem__, default=end)
            blocks.append((end - start, requested))
        blocks += [(address + whole - end, None)] * (address + whole > end)
        added = allocator.add_segment(address, blocks, stream, small)
        found |= {block.address: block for block in added if block.allocated}
    return found


def _event(row: Mapping[str, Any]) -> Event | None:
    """An event of a trace, or None for one that changes nothing (``snapshot``, ``oom``)."""
    action = row["action"]
    if type(action) is not str:
        raise TypeError
    if action in ("segment_map", "segment_unmap"):
        raise InputError("expandable segments are not replayed")
    if action not in ACTIONS:
        return None
    return Event(action, _number(row["addr"]), _number(row["size"]), _number(row["stream"]))


def _segment(row: Mapping[str, Any]) -> Segment:
    if row.get("is_expandable"):
        raise InputError("expandable segments are not replayed")
    if row.get("segment_pool_id", (0, 0)) != (0, 0):
        raise InputError("memory pools of CUDA graphs are not replayed")
    address = at = _number(row["address"])
    blocks = []
    for block in row["blocks"]:
        size = _number(block["size"])
        if block["state"] != "inactive":
            blocks.append((at, size, _number(block.get("requested_size", size))))
        at += size
    whole = _number(row["total_size"])
    if at != address + whole:
        raise InputError("the blocks of a segment do not fill it")
    small = row["segment_type"] == "small"
    return Segment(address, whole, _number(row["stream"]), small, tuple(blocks))


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MOST:
        raise TypeError
    return value


def _plain(data: bytes) -> Any:
    """The content of a pickle that has plain values alone (pickletools.py describes the opcodes).

    >>> import pickle
    >>> _plain(pickle.dumps({"a": [1, -2.5, (True, None)]}))
    {'a': [1, -2.5, (True, None)]}
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    at = 0
    while True:
        code = data[at]
        at += 1
        if code == 0x6A:  # LONG_BINGET
            stack.append(memo[int.from_bytes(data[at : at + 4], "little")])
            at += 4
        elif code == 0x68:  # BINGET
            stack.append(memo[data[at]])
            at += 1
        elif code == 0x94:  # MEMOIZE
            memo[len(memo)] = stack[-1]
        elif code == 0x28:  # MARK
            marks.append(len(stack))
        elif code in _SIZED:  # a number or a text after its length or value
            size, read = _SIZED[code]
            if size < 0:  # so many bytes have the length
                length = int.from_bytes(data[at : at - size], "little")
                at, size = at - size, length
            if at + size > len(data):
                raise ValueError
            stack.append(read(data[at : at + size]))
            at += size
        elif code in (0x75, 0x65):  # SETITEMS, APPENDS
            first = marks.pop()
            _fill(stack[first - 1], stack[first:])
            del stack[first:]
        elif code in (0x73, 0x61):  # SETITEM, APPEND
            count = 2 if code == 0x73 else 1
            _fill(stack[-count - 1], stack[-count:])
            del stack[-count:]
        elif code in (0x85, 0x86, 0x87):  # TUPLE1, TUPLE2, TUPLE3
            count = code - 0x84
            stack[-count:] = [(*stack[-count:],)]
        elif code == 0x74:  # TUPLE
            first = marks.pop()
            stack[first:] = [(*stack[first:],)]
        elif code in _EMPTY:
            stack.append(_EMPTY[code]())
        elif code in (0x71, 0x72):  # BINPUT, LONG_BINPUT
            width = 1 if code == 0x71 else 4
            memo[int.from_bytes(data[at : at + width], "little")] = stack[-1]
            at += width
        elif code in (0x80, 0x95):  # PROTO, FRAME
            at += 1 if code == 0x80 else 8
        elif code == 0x2E:  # STOP
            return stack.pop()
        else:
            raise ValueError


def _fill(target: Any, items: list[Any]) -> None:
    """Add items to a list, or keys and values to a dictionary; a key is a text."""
    if type(target) is list:
        target += items
    elif type(target) is dict and all(type(key) is str for key in items[::2]):
        target.update(zip(items[::2], items[1::2], strict=True))
    else:
        raise TypeError


def _signed(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def _unsigned(data: bytes) -> int:
    return int.from_bytes(data, "little")


_SIZED: dict[int, tuple[int, Any]] = {
    0x4B: (1, _unsigned),  # BININT1
    0x4D: (2, _unsigned),  # BININT2
    0x4A: (4, _signed),  # BININT
    0x8A: (-1, _signed),  # LONG1
    0x47: (8, lambda data: struct.unpack(">d", data)[0]),  # BINFLOAT
    0x8C: (-1, bytes.decode),  # SHORT_BINUNICODE
    0x58: (-4, bytes.decode),  # BINUNICODE
}
_EMPTY: dict[int, Any] = {
    0x7D: dict,  # EMPTY_DICT
    0x5D: list,  # EMPTY_LIST
    0x29: tuple,  # EMPTY_TUPLE
    0x4E: lambda: None,  # NONE
    0x88: lambda: True,  # NEWTRUE
    0x89: lambda: False,  # NEWFALSE
}
