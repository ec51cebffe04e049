"""One iteration of a training step: what is allocated and reserved, event by event."""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, groupby, pairwise
from math import ceil
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from memcalc.analysis import timeline
from memcalc.analysis.moments import EMBEDDING_BACKWARD
from memcalc.analysis.rank import EMBEDDING, HEAD
from memcalc.analysis.timeline import STATES, STEP
from memcalc.analysis.walk import RECOMPUTED, SAVED, WEIGHT, WORKING, Event
from memcalc.answers.memory import memory
from memcalc.answers.notes import recomputation, whole_setting
from memcalc.config import Config
from memcalc.config.gpus import gpu
from memcalc.errors import UsageError
from memcalc.figures import style
from memcalc.units import common_scale, in_scale

# What is allocated -> its label, its color, and its hatch for print without color; from below.
WEIGHTS, OPTIMIZER, GRADIENTS, LOGITS = "weights", "optimizer", "gradients", "logits"
TEMPORARY, BUFFERS, ROUNDED = "temporary", "buffers", "rounded"
KINDS = {
    WEIGHTS: ("weights", style.GREY, ""),
    OPTIMIZER: ("optimizer states", style.BLUE, ""),
    BUFFERS: ("buffers", style.PURPLE, "xxx"),
    GRADIENTS: ("gradients", style.SKY, "///"),
    SAVED: ("saved for backward", style.ORANGE, "\\\\\\"),
    RECOMPUTED: ("recomputed", style.ORANGE, "+++"),
    LOGITS: ("last norm, logits\nand loss", style.VERMILION, "..."),
    TEMPORARY: ("temporary", style.GREEN, "---"),
    ROUNDED: ("rounding and unsplit\nremainders of blocks", style.PURPLE, ""),
}
# The kind of an event -> that of its storage; the others are buffers.
OF = {"weights": WEIGHTS, "optimizer": OPTIMIZER, STATES: OPTIMIZER, WEIGHT: GRADIENTS}
OF |= {SAVED: SAVED, RECOMPUTED: RECOMPUTED, WORKING: TEMPORARY, STEP: TEMPORARY}

HEAD_BACKWARD = "head backward"  # one of the phases of ``memory``
MOST_POINTS = 1000  # that are drawn: about one per pixel
NARROWEST = 0.06  # a phase with few events, as a share of the width
AXES_WIDTH = 310  # about, in points


class Point(NamedTuple):
    """What PyTorch's allocator has given out after an event, and what it holds.

    Attributes:
        place: The event's number in the iteration.
        phase: The phase, as ``memory`` names it.
        event: The event.
        sizes: The allocated bytes of each of ``KINDS``.
        reserved: The bytes that the allocator holds from the driver.
    """

    place: int
    phase: str
    event: Event
    sizes: tuple[int, ...]
    reserved: int

    @property
    def allocated(self) -> int:
        """All allocated bytes."""
        return sum(self.sizes)


class Curve(NamedTuple):
    """The last iteration that the timeline has.

    Attributes:
        phases: Each phase in order, with its number of events.
        points: Points in order: of neighbors, the highest.
    """

    phases: tuple[tuple[str, int], ...]
    points: tuple[Point, ...]

    @property
    def peak(self) -> Point:
        """The first point with most allocated bytes."""
        return max(self.points, key=lambda point: point.allocated)


def draw(config: Config) -> Figure:
    """Stacked areas, one per kind; lines for reserved bytes and for the GPU's memory."""
    (found, answer), title = numbers(config, None)
    config = config.padded
    room = None if config.run.gpu is None else gpu(config.run.gpu)
    most = max(point.reserved for point in found.points)
    most = max(most, room.usable_bytes if room else 0)
    unit, scale = common_scale("bytes", [most])
    figure, axes = style.single(height=4.6)
    places = _phases(axes, found)
    _areas(axes, found, places, scale)
    reserved = [point.reserved / scale for point in found.points]
    axes.step(places, [*reserved, reserved[-1]], "k", where="post", lw=1.2, label="reserved")
    peak = found.peak
    said = f"peak: {in_scale(peak.allocated, (unit, scale))}"
    at = found.points.index(peak)
    axes.plot(
        (places[at] + places[at + 1]) / 2,
        peak.allocated / scale,
        label="\n".join(dict.fromkeys([said, peak.phase, peak.event.op])),
        **style.PUBLISHED | {"marker": "v", "markersize": 6},
    )
    if room is not None:
        size = room.usable_bytes / scale
        label = f"{room.name}: {size:,.4g} {unit}"
        axes.axhline(size, color="black", linestyle="--", linewidth=1, label=label)
    axes.set_ylim(0, 1.05 * most / scale)
    axes.set_ylabel(f"{unit} allocated and reserved")
    walked = sum(name == "forward" for name, _ in found.phases)
    some = f"; {walked} of {config.microbatches} micro-batches" * (walked < config.microbatches)
    total = sum(number for _, number in found.phases)
    axes.set_xlabel(f"{total:,} allocations and frees in order{some}", fontsize=9)
    style.heading(figure, title, answer)
    style.legend(axes, reverse=True)
    return figure


def numbers(config: Config, accounting: str | None) -> tuple[tuple[Curve, str], str]:
    """What the figure shows, and its title."""
    found, setting = curve(config.padded), whole_setting(config.padded)
    title = f"One iteration of {setting}, {recomputation(config.padded)}"
    return (found, memory(config).answer), title


@lru_cache(2)  # a figure and its title ask for the same
def curve(config: Config) -> Curve:
    """What is drawn of the last iteration that the timeline has.

    >>> from memcalc.config import load
    >>> found = curve(load("gpt2", implementation="transformers-sdpa", precision="fp32"))
    >>> [name for name, _ in found.phases]
    ['forward', 'loss', 'head backward', 'backward', 'embedding backward', 'step', 'zero_grad']
    >>> found.peak.phase, found.peak.event.op
    ('head backward', 'loss_log_softmax')
    """
    found = points(config)
    phases = [(name, len(list(group))) for name, group in groupby(point.phase for point in found)]
    return Curve(tuple(phases), tuple(thinned(found, phases)))


def points(config: Config) -> list[Point]:
    """The events of the last iteration, through PyTorch's caching allocator.

    Raises:
        UsageError: The order of the run's allocations is not known, or they are too many.
    """
    if timeline.replay(config) is None:
        raise UsageError(_refusal(config))
    allocator = timeline.allocator_of(config)
    before: dict[Hashable, Event] = {}
    steps: list[tuple[str, Event, int, int]] = []
    phase = ""
    for event in timeline.played(config, allocator):
        if event.op == timeline.LAST_ITERATION:
            phase = "forward"
        elif event.storage is None and phase:
            phase = HEAD_BACKWARD if event.op == "backward" else event.op
        elif phase:
            phase = _phase(event, phase)
            steps.append((phase, event, allocator.allocated, allocator.reserved))
        elif event.bytes > 0:
            before[event.storage] = event
        elif event.storage is not None:
            del before[event.storage]
    # what a layer hands on is saved by the next one: the last event of a storage knows what it is
    kinds = {event.storage: kind(event) for event in before.values()}
    kinds |= {event.storage: kind(event) for _, event, _, _ in steps}
    sizes = Counter[str]()
    for event in before.values():
        sizes[kinds[event.storage]] += event.bytes
    found = []
    for place, (phase, event, allocated, reserved) in enumerate(steps):
        sizes[kinds[event.storage]] += event.bytes
        sizes[ROUNDED] += allocated - sizes.total()
        held = tuple(sizes[name] for name in KINDS)
        found.append(Point(place, phase, event, held, reserved))
    return found


def thinned(points: Sequence[Point], phases: Sequence[tuple[str, int]]) -> Iterator[Point]:
    """At most about ``MOST_POINTS``, by the widths of phases: of neighbors, the highest."""
    done = 0
    for (_, number), width in zip(phases, widths(phases), strict=True):
        step = ceil(number / (MOST_POINTS * width))
        for first in range(done, done + number, step):
            group = points[first : min(first + step, done + number)]
            yield max(group, key=lambda point: point.allocated)
        done += number


def widths(phases: Sequence[tuple[str, int]]) -> list[float]:
    """The width of each phase, by its number of events, as shares of 1."""
    spare = (1 - NARROWEST * len(phases)) / sum(number for _, number in phases)
    return [NARROWEST + spare * number for _, number in phases]


def kind(event: Event) -> str:
    """What of ``KINDS`` a storage is."""
    found = OF.get(event.kind, BUFFERS)
    return LOGITS if found != GRADIENTS and graph_of(event) == HEAD else found


def graph_of(event: Event) -> Hashable:
    """The layer or the end of the model to which an activation or a gradient belongs, or None."""
    owner = event.storage[0] if isinstance(event.storage, tuple) else None
    return owner[-1] if isinstance(owner, tuple) else None


def _phase(event: Event, phase: str) -> str:
    """The phase of an event after one of this phase, as ``memory`` names it."""
    graph = graph_of(event) if event.bytes > 0 else None
    if phase == "forward" and graph == HEAD:
        return "loss"
    if phase == HEAD_BACKWARD and graph not in (HEAD, None):
        phase = "backward"
    return EMBEDDING_BACKWARD if phase == "backward" and graph == EMBEDDING else phase


def _refusal(config: Config) -> str:
    if timeline.covers(config):
        return f"plot step draws at most {timeline.MOST_EVENTS:,} allocations and frees"
    dtype = config.run.precision if config.run.precision in ("fp16", "fp32") else "bf16"
    return (
        "plot step needs gradients that autograd makes, and nothing sharded: pass --implementation "
        f"transformers-sdpa (or torch) --main-grads {dtype} --main-params none --moments {dtype}, "
        "and leave out --tp, --pp, --cp and --zero"
    )


def _phases(axes: Axes, curve: Curve) -> list[float]:
    """The phases on the horizontal axis, by their numbers of events; where each point is."""
    edges = [0, *accumulate(widths(curve.phases))]
    names = [name.replace(" ", "\n") for name, _ in curve.phases]
    for edge in edges[1:-1]:
        axes.axvline(edge, color=style.BLACK, linewidth=0.6, linestyle=":")
    axes.set_xticks([(left + right) / 2 for left, right in pairwise(edges)], names, fontsize=8)
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(0, 1)
    each = zip(names, widths(curve.phases), strict=True)
    if any(style.width(name, 8) > AXES_WIDTH * width for name, width in each):
        for label in axes.get_xticklabels():
            label.set(rotation=90, multialignment="right")
    firsts = [0, *accumulate(number for _, number in curve.phases)]
    places = np.interp([*(point.place for point in curve.points), firsts[-1]], firsts, edges)
    return [float(place) for place in places]


def _areas(axes: Axes, curve: Curve, places: list[float], scale: float) -> None:
    """The kinds, stacked, each from one point to the next."""
    low = [0.0] * len(places)
    for i, (label, color, hatch) in enumerate(KINDS.values()):
        sizes = [point.sizes[i] / scale for point in curve.points]
        high = [below + size for below, size in zip(low, [*sizes, sizes[-1]], strict=True)]
        look = style.filled(color, hatch) | {"linewidth": 0}
        if any(sizes):
            axes.fill_between(places, low, high, step="post", label=label, **look)
        low = high
