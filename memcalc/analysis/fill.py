"""Micro-batch-level recomputation: as many micro-batches as fit are not recomputed.

Korthikanti et al. 2022, appendix C: of the micro-batches that a stage has in flight, some keep all
their activations and the others are recomputed; the window moves on. Later stages have fewer in
flight, and often recompute none.
"""

from bisect import bisect_left
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import NamedTuple

from memcalc.analysis import flops
from memcalc.analysis.stages import in_flight, recomputed_on, stage
from memcalc.blocks.layer import layer_graph
from memcalc.config import Config
from memcalc.config.recompute import POLICIES
from memcalc.errors import UsageError


class Filled(NamedTuple):
    """Which passes of one stage are not recomputed.

    Attributes:
        window: The most passes in flight, over all its model chunks.
        whole: How many of each window keep all activations.
        bytes: What they add to its peak, per rank.
        recomputed: FLOPs recomputed per iteration if no pass kept all, over all ranks.
        share: The share of its passes that keep all activations.
    """

    window: int
    whole: int
    bytes: int
    recomputed: int
    share: Fraction

    @property
    def saved(self) -> int:
        """The part of ``recomputed`` that is saved."""
        return round(self.recomputed * self.share)


def fill(config: Config, number: int, free: int) -> Filled:
    """How many micro-batches in flight a stage need not recompute.

    Args:
        config: A run that recomputes something.
        number: The stage, counted from 0.
        free: Free bytes at its peak, per rank.

    Raises:
        UsageError: Nothing is recomputed.

    >>> from memcalc.config import load
    >>> config = load("530b", sp=True, recompute="selective", vpp=1)
    >>> first, last = fill(config, 0, 2**34), fill(config, 34, 2**34)
    >>> (first.whole, first.window), (last.whole, last.window)
    ((17, 35), (1, 1))
    """
    if config.run.recompute_layers == 0:
        raise UsageError("--fill skips recomputation, and --recompute-layers 0 recomputes nothing")
    if config.run.policy == POLICIES["none"]:
        raise UsageError("--fill needs --recompute: it skips recomputation where memory is free")
    window = in_flight(config, number)
    base = stage(config, number, "exact").total

    @cache
    def more(whole: int) -> int:
        return stage(config, number, "exact", whole=whole).total - base if whole else 0

    whole = _most(window, free, more)
    parallel, policy = config.parallel, config.run.policy
    micro = config.microbatches // parallel.copies  # per model chunk
    layers = recomputed_on(config, number).items()
    again = sum(n * flops.recomputed(layer_graph(config, kind=kind), policy) for kind, n in layers)
    again *= micro * parallel.dp
    passes = micro * parallel.chunks_per_rank
    turns, rest = divmod(passes, window)
    kept = turns * whole + min(rest, whole)
    return Filled(window, whole, more(whole), again, Fraction(kept, passes))


def _most(window: int, free: int, more: Callable[[int], int]) -> int:
    """The largest number up to a window that adds at most what is free.

    The added bytes are nearly proportional to the number, so a proportional guess is tried first.

    If micro-batches add no bytes, all are kept, even on a stage that does not fit:

    >>> _most(10, 69, lambda whole: 10 * whole), _most(10, 1000, lambda whole: 10 * whole)
    (6, 10)
    >>> _most(10, -1, lambda whole: 0), _most(10, -1, lambda whole: whole)
    (10, 0)
    """
    if (whole := more(window)) <= max(0, free):
        return window
    guess = max(0, free) * window // whole
    first, last = (guess + 1, window) if more(guess) <= free else (1, guess)
    if more(first) > free:
        return first - 1
    return first - 1 + bisect_left(range(first, last + 1), free + 1, key=more)
