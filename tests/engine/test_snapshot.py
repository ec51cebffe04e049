"""Memory snapshots: read without running code, and replayed."""

import os
import pickle
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalc.analysis.allocator import Allocator
from memcalc.checks.snapshot import _plain, read_snapshot, replay
from memcalc.errors import InputError
from memcalc.units import MIB

VARIABLE = "MEMCALC_MEASURED_RUNS"


class Recorder(Allocator):
    """An allocator that records what PyTorch's would; requests are whole 512 bytes."""

    def __init__(self):
        super().__init__()
        self.trace = []

    def record(self, action, address, size, stream=0):
        row = {"action": action, "addr": address, "size": size, "stream": stream, "frames": []}
        self.trace.append(row)

    def _address(self, size):
        address = super()._address(size) // 2**12  # fits the 64 bits of a real one
        self.record("segment_alloc", address, size)
        return address

    def _release(self, block):
        self.record("segment_free", block.address, block.size)
        super()._release(block)

    def request(self, size, stream=0):
        block = self.malloc(size, stream)
        self.record("alloc", block.address, size, stream)
        return block

    def give(self, block):
        self.record("free_requested", block.address, block.requested)
        if not block.streams:
            self.record("free_completed", block.address, block.requested)
        self.free(block)

    def snapshot(self, blocks, since=0):
        """What ``_snapshot`` returns; the trace begins after some events."""
        firsts = {}
        for block in (*self.free_blocks(), *blocks):
            while block.before is not None:
                block = block.before
            firsts[block.address] = block
        segments = []
        for first in firsts.values():
            inside = [first]
            while inside[-1].after is not None:
                inside.append(inside[-1].after)
            segments.append(
                {
                    "device": 0,
                    "address": first.address,
                    "total_size": sum(block.size for block in inside),
                    "stream": first.pool.key[1],
                    "segment_type": "small" if first.pool.small else "large",
                    "segment_pool_id": (0, 0),
                    "is_expandable": False,
                    "blocks": [
                        {
                            "address": block.address,
                            "size": block.size,
                            "requested_size": block.requested,
                            "state": "active_allocated" if block.allocated else "inactive",
                        }
                        for block in inside
                    ],
                }
            )
        return {"segments": segments, "device_traces": [self.trace[since:]]}


def recorded(seed, cached=False):
    """A recorder after a random trace, its blocks, and the events at half of it."""
    draw = random.Random(seed)
    recorder, blocks, half = Recorder(), [], 0
    for step in range(300):
        if step == 150:
            half = len(recorder.trace)
        if draw.random() < 0.55 or not blocks:
            size = draw.choice((draw.randrange(1, 2048) * 512, draw.randrange(1, 30) * MIB))
            blocks.append(recorder.request(size, draw.choice((0, 0, 7))))
        else:
            recorder.give(blocks.pop(draw.randrange(len(blocks))))
        if cached and step % 70 == 0:
            recorder.empty_cache()
    return recorder, blocks, half


def written(tmp_path, content, protocol=4):
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(content, protocol))
    return path


class TestReplay:
    @pytest.mark.parametrize("cached", [False, True])
    @pytest.mark.parametrize("protocol", [2, 4, 5])
    @pytest.mark.parametrize("seed", range(3))
    def test_a_trace_gives_the_same_blocks_and_segments(self, seed, protocol, cached, tmp_path):
        recorder, blocks, _ = recorded(seed, cached)
        snapshot = read_snapshot(written(tmp_path, recorder.snapshot(blocks), protocol))
        found = replay(snapshot)
        assert found.requests == sum(row["action"] == "alloc" for row in recorder.trace)
        assert (found.elsewhere, found.other_segments) == (0, 0)
        assert found.allocator.memory_stats() == recorder.memory_stats()
        assert found.allocator.reserved == snapshot.reserved

    @pytest.mark.parametrize("seed", range(8))
    def test_a_trace_may_begin_late(self, seed, tmp_path):
        """The sizes of blocks before it are inferred."""
        recorder, blocks, half = recorded(seed)
        snapshot = read_snapshot(written(tmp_path, recorder.snapshot(blocks, half)))
        found = replay(snapshot)
        assert found.allocator.reserved == snapshot.reserved
        assert found.allocator.requested == recorder.requested

    def test_a_block_waits_for_another_stream_as_long_as_in_the_trace(self, tmp_path):
        recorder = Recorder()
        first = recorder.request(20 * MIB)
        recorder.record_stream(first, 7)
        recorder.give(first)
        second = recorder.request(20 * MIB)
        recorder.synchronize()
        recorder.record("free_completed", first.address, 20 * MIB)
        third = recorder.request(20 * MIB)
        assert third.address == first.address
        found = replay(read_snapshot(written(tmp_path, recorder.snapshot([second, third]))))
        assert (found.requests, found.elsewhere, found.segments) == (3, 0, 2)

    def test_a_segment_that_the_trace_made_for_no_request_is_counted(self, tmp_path):
        recorder = Recorder()
        block = recorder.request(20 * MIB)
        recorder.give(block)
        recorder.record("segment_alloc", 2**45, 20 * MIB)
        recorder.record("alloc", 2**45, 20 * MIB)
        content = recorder.snapshot([])
        found = replay(read_snapshot(written(tmp_path, content)))
        assert (found.elsewhere, found.other_segments) == (1, 1)

    def test_a_trace_of_which_the_start_is_lost_is_refused(self, tmp_path):
        recorder = Recorder()
        recorder.record("free_requested", 2**40, MIB)
        with pytest.raises(InputError, match="event 0 frees what is not there"):
            replay(read_snapshot(written(tmp_path, recorder.snapshot([]))))


class Evil:
    def __reduce__(self):
        return os.system, ("false",)


class TestHostileFiles:
    @pytest.mark.parametrize(
        "content",
        [Evil(), [Evil()], {"segments": Evil()}, Path, print, b"", {1}, {1: 2}, {(): 1}, 2**3000],
    )  # fmt: skip
    @pytest.mark.parametrize("protocol", range(6))
    def test_only_plain_values_are_read(self, content, protocol, tmp_path):
        with pytest.raises(InputError, match="not a pickle of numbers, texts and lists"):
            read_snapshot(written(tmp_path, content, protocol))

    @pytest.mark.parametrize(
        "content",
        [
            [], {}, 3, "device_traces", {"device_traces": [], "segments": [{}]},
            {"device_traces": [[{"action": "alloc"}]], "segments": []},
            {"device_traces": [[{"action": ["alloc"]}]], "segments": []},
            {"device_traces": {"a": 1}, "segments": 3},
            {"device_traces": [3], "segments": []},
            {"device_traces": [], "segments": [{"device": 0, "address": -1, "blocks": []}]},
        ],
    )  # fmt: skip
    def test_what_is_no_snapshot_is_refused(self, content, tmp_path):
        with pytest.raises(InputError, match="not a snapshot of torch"):
            read_snapshot(written(tmp_path, content))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"is_expandable": True}, "expandable segments are not replayed"),
            ({"segment_pool_id": (0, 1)}, "memory pools of CUDA graphs are not replayed"),
            ({"total_size": 1}, "the blocks of a segment do not fill it"),
        ],
    )
    def test_what_is_not_replayed_is_said(self, change, message, tmp_path):
        recorder = Recorder()
        content = recorder.snapshot([recorder.request(MIB)])
        content["segments"][0] |= change
        with pytest.raises(InputError, match=message):
            read_snapshot(written(tmp_path, content))

    def test_a_file_that_is_cut_off_is_refused(self, tmp_path):
        recorder = Recorder()
        path = written(tmp_path, recorder.snapshot([recorder.request(MIB)]))
        data = path.read_bytes()
        for end in range(1, len(data)):
            path.write_bytes(data[:end])
            with pytest.raises(InputError):
                read_snapshot(path)

    @given(st.binary(max_size=80))
    def test_any_bytes_are_read_or_refused(self, data):
        for each in (data, b"\x80\x04" + data + b".", b"]}(" + data + b"u."):
            try:
                _plain(each)
            except (IndexError, KeyError, TypeError, ValueError):
                continue

    def test_a_large_index_of_the_memo_takes_no_memory(self):
        assert _plain(b"\x80\x02Nr\xff\xff\xff\xff.") is None

    def test_a_length_beyond_the_file_takes_no_memory(self):
        with pytest.raises(ValueError):  # noqa: PT011 - the reader of files says more
            _plain(b"\x80\x02X\xff\xff\xff\xffabc.")


@pytest.mark.measured
def test_snapshots_of_real_steps_give_every_block_and_segment():
    """Training and inference on GPUs.

    Sources on GitHub: Wedsonlin/assignment2-systems, kkaitlyn111/cs336-a2-systems,
    silmont2000/assignment2-systems, cranberrii/ftcourse, JasperSolt/EoR_NN.
    """
    folder = Path(os.environ.get(VARIABLE, "")) / "snapshots"
    files = sorted(folder.glob("*.pickle")) if VARIABLE in os.environ else []
    if not files:
        pytest.skip(f"{VARIABLE} names no folder with snapshots")
    for path in files:
        snapshot = read_snapshot(path)
        found = replay(snapshot)
        assert (found.elsewhere, found.other_segments) == (0, 0), path.name
        assert found.allocator.reserved == snapshot.reserved
        blocks = [block for segment in snapshot.segments for block in segment.blocks]
        assert found.allocator.active == sum(size for _, size, _ in blocks)
        assert found.allocator.requested == sum(requested for *_, requested in blocks)
