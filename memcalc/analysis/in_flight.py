"""What a pipeline stage has in flight: no formula says it, the steps of its schedule are walked."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import NamedTuple

from memcalc.analysis.schedule import (
    BACKWARD,
    BACKWARD_INPUTS,
    BACKWARD_WEIGHTS,
    FORWARD,
    Step,
)


class InFlight(NamedTuple):
    """What a stage holds for one of its model chunks.

    Attributes:
        whole: Micro-batches in flight, with all that their backward needs.
        waiting: Micro-batches that lack only their weight gradients.
    """

    whole: int = 0
    waiting: int = 0


def holdings(steps: Iterable[Step]) -> Iterator[dict[int, InFlight]]:
    """After each step, what a stage holds of each of its chunks.

    >>> from memcalc.analysis.schedule import zb_h1
    >>> [held[0].waiting for held in holdings(zb_h1(1, 2, 2))]
    [0, 1, 1, 2, 1, 0]
    """
    held: dict[int, InFlight] = {}
    for phase, _, chunk in steps:
        whole, waiting = _CHANGE[phase]
        before = held.get(chunk, InFlight())
        held[chunk] = InFlight(before.whole + whole, before.waiting + waiting)
        yield dict(held)


# What a step changes: micro-batches in flight, and those that wait for their weight gradients.
_CHANGE = {
    FORWARD: InFlight(whole=1),
    BACKWARD: InFlight(whole=-1),
    BACKWARD_INPUTS: InFlight(whole=-1, waiting=1),
    BACKWARD_WEIGHTS: InFlight(waiting=-1),
}


def peak(
    steps: Iterable[Step],
    weight: Callable[[int], int],
    waiting: Callable[[int], int] = lambda chunk: 0,
) -> dict[int, InFlight]:
    """What a stage holds of each chunk when it holds the most bytes.

    Args:
        steps: The stage's order.
        weight: The bytes of one micro-batch of a chunk until its backward pass.
        waiting: Its bytes after that, until its weight gradients are computed.

    >>> from memcalc.analysis.schedule import one_f_one_b
    >>> peak(one_f_one_b(0, 4, 100), lambda chunk: 1)
    {0: InFlight(whole=4, waiting=0)}
    """
    work, sizes = _changes(steps, weight, waiting)
    most = max(accumulate(map(sizes.__getitem__, work)), default=0)
    totals = enumerate(accumulate(map(sizes.__getitem__, work)), 1)
    until = next((number for number, total in totals if total == most), 0)
    return _in_flight(Counter(work[:until]))


def worst_starts(
    steps: Iterable[Step],
    weight: Callable[[int], int],
    waiting: Callable[[int], int] = lambda chunk: 0,
) -> dict[tuple[str, int], dict[int, InFlight]]:
    """For each phase and chunk, what a stage holds of each chunk before the pass that starts worst.

    All passes of a phase of a chunk need as much memory. The one that starts when the stage holds
    the most bytes is their peak. For the arguments, see ``peak``.

    >>> from memcalc.analysis.schedule import one_f_one_b
    >>> before = worst_starts(one_f_one_b(0, 4, 100), lambda chunk: 1)
    >>> before["forward", 0], before["backward", 0]
    ({0: InFlight(whole=3, waiting=0)}, {0: InFlight(whole=4, waiting=0)})
    """
    work, sizes = _changes(steps, weight, waiting)
    most: dict[tuple[str, int], int] = {}
    until: dict[tuple[str, int], int] = {}
    total = 0
    for number, key in enumerate(work):
        if key not in most or total > most[key]:
            most[key], until[key] = total, number
        total += sizes[key]
    found, done, counts = {}, 0, Counter[tuple[str, int]]()
    for key, number in sorted(until.items(), key=lambda item: item[1]):
        counts.update(work[done:number])
        done = number
        found[key] = _in_flight(counts)
    return found


def _changes(
    steps: Iterable[Step], weight: Callable[[int], int], waiting: Callable[[int], int]
) -> tuple[list[tuple[str, int]], dict[tuple[str, int], int]]:
    """The phase and chunk of each step, and the bytes by which each such pass changes the sum."""
    keys: dict[tuple[str, int], tuple[str, int]] = {}  # one tuple per kind of step, shared
    work = [keys.setdefault(key := (phase, chunk), key) for phase, _, chunk in steps]
    sizes = {
        (phase, chunk): _CHANGE[phase].whole * weight(chunk)
        + _CHANGE[phase].waiting * waiting(chunk)
        for phase, chunk in keys
    }
    return work, sizes


def _in_flight(done: "Counter[tuple[str, int]]") -> dict[int, InFlight]:
    """What a stage holds of each chunk after so many passes of each phase of each chunk."""
    held: dict[int, InFlight] = {}
    for (phase, chunk), times in done.items():
        change, before = _CHANGE[phase], held.get(chunk, InFlight())
        whole = before.whole + times * change.whole
        held[chunk] = InFlight(whole, before.waiting + times * change.waiting)
    return held
