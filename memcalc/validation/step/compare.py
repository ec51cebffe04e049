"""A real training step against the timeline: bytes of each phase, and what is there at the peak."""

from collections import Counter
from typing import Any, NamedTuple

from memcalc.analysis import timeline
from memcalc.analysis.rank import Rank
from memcalc.analysis.timeline import LAST_ITERATION
from memcalc.analysis.walk import Event
from memcalc.answers.notes import whole_setting
from memcalc.config import Config
from memcalc.errors import UsageError
from memcalc.report import Column, Report
from memcalc.units import common_scale, in_scale
from memcalc.validation.match import MATCHED, MISSING, UNEXPLAINED
from memcalc.validation.step import hugging_face
from memcalc.validation.step.storages import Storage
from memcalc.validation.step.tracker import Tracker

WEIGHTS, STATES, OTHERS = "weights", "optimizer states", "activations, gradients and buffers"
PHASES = ("forward", "backward", "step")
MOST_NAMED = 6  # storages that a note names

COLUMNS = (
    Column("phase", "text", choices=(*PHASES, "peak")),
    Column("kind", "text", description="What is compared: all bytes, or those of a kind."),
    Column("timeline_bytes", "bytes"),
    Column("measured_bytes", "bytes"),
    Column("difference_bytes", "bytes", least=float("-inf")),
    Column("status", "text", choices=(MATCHED, MISSING, UNEXPLAINED)),
)


class Peaks(NamedTuple):
    """The most bytes of each phase of an iteration, and what is there at the largest of them.

    Attributes:
        phases: For each phase the most bytes.
        bytes: The largest of them.
        at: The operation that runs then.
        kinds: The bytes of each kind at that time.
        storages: The bytes of each storage at that time.
    """

    phases: dict[str, int]
    bytes: int
    at: str
    kinds: dict[str, int]
    storages: "Counter[int]"


def step(config: Config) -> Report:
    """A real step on fake CUDA tensors against the timeline of ``memory``.

    Args:
        config: The run; its implementation is one of Hugging Face's.

    Raises:
        UsageError: The step has something that is not run here, or its timeline is not known.
    """
    config = config.padded
    hugging_face.require(config)
    if not timeline.covers(config):
        raise UsageError(
            "--step compares gradients that autograd makes: pass --main-grads in the dtype of the "
            "weights (bf16), and --main-params none"
        )
    tracker = hugging_face.run(config)
    ours, theirs = expected(config), measured(tracker)
    # a phase in which nothing is allocated, as in a fused step, has no most of its own
    phases = [phase for phase in PHASES if theirs.phases[phase]]
    rows = [_row(phase, "all", ours.phases[phase], theirs.phases[phase]) for phase in phases]
    rows += [
        _row("peak", kind, ours.kinds.get(kind, 0), theirs.kinds.get(kind, 0))
        for kind in (WEIGHTS, STATES, OTHERS)
    ]
    difference = ours.bytes - theirs.bytes
    replayed, allocator = timeline.replay(config), tracker.replay()
    notes = [
        "the step ran on fake CUDA tensors: no memory was allocated, no kernel ran; kernels' own "
        "workspaces are not compared",
        "bytes are those of the storages, not rounded to the allocator's 512 bytes",
        *_named(tracker, ours.storages - theirs.storages, theirs.storages - ours.storages),
    ]
    if replayed is not None:
        unit = common_scale("bytes", [allocator.most_reserved])
        notes.append(
            f"reserved, both replayed: {in_scale(replayed.reserved, unit)} by the timeline, "
            f"{in_scale(allocator.most_reserved, unit)} by the step"
        )
    failures = [
        f"{phase}: the timeline has {row[4]:+,} bytes"
        for row in rows
        if row[4] and (phase := f"{row[0]}, {row[1]}")
    ]
    return Report(
        "validate",
        f"A step of {whole_setting(config)} against the timeline",
        COLUMNS,
        tuple(rows),
        {},
        tuple(notes),
        tuple(failures) if difference else (),
        _answer(ours, theirs, difference),
    )


def _answer(ours: Peaks, theirs: Peaks, difference: int) -> str:
    if not difference:
        return f"matches: the peak of {theirs.bytes:,} bytes in {theirs.at} is equal to the byte"
    return (
        f"differs: the timeline's peak is {ours.bytes:,} bytes in {ours.at}, the step's "
        f"{theirs.bytes:,} in {theirs.at}: {difference:+,}"
    )


def _row(phase: str, kind: str, ours: int, theirs: int) -> tuple[Any, ...]:
    status = MATCHED if ours == theirs else MISSING if ours > theirs else UNEXPLAINED
    return phase, kind, ours, theirs, ours - theirs, status


def expected(config: Config) -> Peaks:
    """The peaks of the timeline's last iteration.

    >>> from memcalc.config import load
    >>> run = {"seq_length": 128, "implementation": "transformers-sdpa", "main_grads": "bf16"}
    >>> peaks = expected(load("gpt2", **run))
    >>> peaks.bytes == max(peaks.phases.values())
    True
    """
    alive: dict[Any, Event] = {}
    total, phase, last = 0, "", False
    phases = dict.fromkeys(PHASES, 0)
    best, at, there = 0, "", dict[Any, Event]()
    for event in timeline.events(Rank(config, 0)):
        if event.storage is None:
            last = last or event.op == LAST_ITERATION
            phase = event.op
            continue
        total += event.bytes
        if event.bytes > 0:
            alive[event.storage] = event
        else:
            del alive[event.storage]
        if last and phase in phases:
            phases[phase] = max(phases[phase], total)
            if total > best:
                best, at, there = total, f"{phase} ({event.op})", dict(alive)
    kinds: Counter[str] = Counter()
    for event in there.values():
        kinds[event.kind if event.kind in (WEIGHTS, STATES) else OTHERS] += event.bytes
    return Peaks(phases, best, at, dict(kinds), Counter(e.bytes for e in there.values()))


def measured(tracker: Tracker) -> Peaks:
    """The peaks of the tracker's last iteration."""
    peak = tracker.peak(rounded=False)
    phases, total, last = dict.fromkeys(PHASES, 0), 0, False
    phase = ""
    for event in tracker.log:
        if event.storage is None:
            last = last or event.what == "reset_peaks"
            continue
        total += event.storage.bytes if event.what == "birth" else -event.storage.bytes
        if event.what == "birth":
            phase = event.storage.phase
        if last and phase in phases:
            phases[phase] = max(phases[phase], total)
    kinds: Counter[str] = Counter()
    for storage in peak.storages:
        kind = {"weights": WEIGHTS, "optimizer": STATES}.get(tracker.kind(storage), OTHERS)
        kinds[kind] += storage.bytes
    at = f"{peak.phase} ({peak.op})"
    return Peaks(phases, peak.bytes, at, dict(kinds), Counter(s.bytes for s in peak.storages))


def _named(tracker: Tracker, missing: "Counter[int]", unexplained: "Counter[int]") -> list[str]:
    """A note on storages of the peak that only one side has, without those whose sums are equal."""
    sums = (
        sum(size * n for size, n in missing.items()),
        sum(size * n for size, n in unexplained.items()),
    )
    if sums[0] == sums[1]:
        return []
    found: list[Storage] = []
    left = Counter(unexplained)
    for storage in tracker.peak(rounded=False).storages:
        if left[storage.bytes] > 0 and tracker.kind(storage) not in ("weights", "optimizer"):
            left[storage.bytes] -= 1
            found.append(storage)
    found.sort(key=lambda each: -each.bytes)
    names = [f"{s.bytes:,} bytes of {s.op} in {s.module or 'the loop'}" for s in found]
    return (
        ["at the step's peak, not in the timeline: " + "; ".join(names[:MOST_NAMED])]
        if names
        else []
    )
