"""Pipeline schedules: the order in which a stage works, and what is in flight when.

A schedule is a generator of steps, written as the framework runs it. What a stage holds is never a
formula here: it is found by walking the order.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

FORWARD = "forward"
BACKWARD = "backward"


class Step(NamedTuple):
    """One pass of one micro-batch through one of a stage's chunks of layers."""

    phase: str
    microbatch: int
    chunk: int = 0


def one_f_one_b(stage: int, stages: int, microbatches: int) -> Iterator[Step]:
    """1F1B (Narayanan et al. 2021, figure 4): forwards until the pipeline is full, then in turns.

    >>> [step.phase[0] + str(step.microbatch) for step in one_f_one_b(0, 2, 3)]
    ['f0', 'f1', 'b0', 'f2', 'b1', 'b2']
    """
    warmup = min(stages - stage - 1, microbatches)
    forwards = (Step(FORWARD, i) for i in range(microbatches))
    backwards = (Step(BACKWARD, i) for i in range(microbatches))
    return _in_turns(warmup, forwards, backwards)


def interleaved(stage: int, stages: int, microbatches: int, chunks: int) -> Iterator[Step]:
    """Interleaved 1F1B: of several chunks, groups of p micro-batches run through each in turn.

    Narayanan et al. 2021, section 2.2; the warm-up is Megatron-core's (pipeline_parallel/
    schedules.py): ``2(p - S - 1) + (m - 1)p`` chunks at stage S, counted from 0. (Versions before
    2024 warm up with all chunks where there are just p micro-batches.)

    >>> order = [f"{s.phase[0]}{s.microbatch}.{s.chunk}" for s in interleaved(1, 2, 2, 2)]
    >>> order
    ['f0.0', 'f1.0', 'f0.1', 'b0.1', 'f1.1', 'b1.1', 'b0.0', 'b1.0']
    """

    def chunked(phase: str, order_: Sequence[int]) -> Iterator[Step]:
        for first in range(0, microbatches, stages):
            for chunk in order_:
                for i in range(first, min(first + stages, microbatches)):
                    yield Step(phase, i, chunk)

    warmup = min(2 * (stages - stage - 1) + (chunks - 1) * stages, chunks * microbatches)
    forwards = chunked(FORWARD, range(chunks))
    return _in_turns(warmup, forwards, chunked(BACKWARD, range(chunks)[::-1]))


def order(stage: int, stages: int, microbatches: int, chunks: int) -> Iterator[Step]:
    """The order of a stage: interleaved where it has several chunks, else plain 1F1B.

    A steady pipeline repeats itself, so of many micro-batches only as many are walked as change
    what a stage holds: some rounds of the pipeline, and the rest of the last one.
    """
    rounds = 4
    walked = min(microbatches, rounds * stages + microbatches % stages)
    if chunks > 1:
        return interleaved(stage, stages, walked, chunks)
    return one_f_one_b(stage, stages, walked)


def holdings(steps: Iterable[Step]) -> Iterator[dict[int, int]]:
    """After each step, how many micro-batches of each chunk a stage holds activations of."""
    held: dict[int, int] = {}
    for phase, _, chunk in steps:
        held[chunk] = held.get(chunk, 0) + (1 if phase == FORWARD else -1)
        yield dict(held)


def peak(steps: Iterable[Step], weight: Callable[[int], int]) -> dict[int, int]:
    """What a stage holds of each chunk when it holds most, a chunk weighing ``weight(chunk)``.

    >>> peak(one_f_one_b(0, 4, 100), lambda chunk: 1)
    {0: 4}
    """
    weights: dict[int, int] = {}
    held: dict[int, int] = {}
    total, most, at_most = 0, -1, {}
    for phase, _, chunk in steps:
        if chunk not in held:
            held[chunk], weights[chunk] = 0, weight(chunk)
        sign = 1 if phase == FORWARD else -1
        held[chunk] += sign
        total += sign * weights[chunk]
        if total > most:
            most, at_most = total, dict(held)
    return at_most


def _in_turns(warmup: int, forwards: Iterator[Step], backwards: Iterator[Step]) -> Iterator[Step]:
    """So many forwards, then one forward and one backward in turns, then the rest backward."""
    yield from islice(forwards, warmup)
    for forward in forwards:
        yield forward
        yield next(backwards)
    yield from backwards
