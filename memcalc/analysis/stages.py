"""The activations of every pipeline stage: the bytes of its chunks, and its schedule walked."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from memcalc.analysis import activations
from memcalc.analysis.in_flight import InFlight, peak, worst_starts
from memcalc.analysis.layers import layer_bytes, layer_waiting
from memcalc.analysis.schedule import FORWARD, MOST_FILLED, MOST_PASSES, kept_whole, order, places
from memcalc.blocks.embedding import embedding_graph
from memcalc.blocks.head import head_graph
from memcalc.blocks.layer import MTP, kind_of, kinds
from memcalc.blocks.layer import layers as layers_of
from memcalc.config import Config, Parallel
from memcalc.config.pipeline import MOST_STAGES
from memcalc.graph.graph import Graph


@dataclass(frozen=True, slots=True)
class Held:
    """What one rank of a stage holds when it holds most activations, in bytes.

    Attributes:
        stage: The stage, counted from 0.
        microbatches: Micro-batches in flight through each of its chunks.
        waiting: Those of which only the weight gradients are still to be computed.
        layers: Of the transformer layers.
        embedding: Of the embedding, on the first stage; for an encoder-decoder, with the end of the
            encoder.
        head: Of the last norm, the logits and the loss, on the last stage.
        outputs: Of the stage's outputs, if they are not deallocated once they are sent.
    """

    stage: int
    microbatches: dict[int, int]
    waiting: dict[int, int]
    layers: int
    embedding: int
    head: int
    outputs: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.layers + self.embedding + self.head + self.outputs


def stages(config: Config, accounting: str = "paper", frees_outputs: bool = True) -> list[Held]:
    """What a rank of each stage holds at its own peak; the arguments are those of ``stage``.

    >>> from memcalc.config import load
    >>> [held.microbatches[0] for held in stages(load("1t"))][:3]
    [64, 63, 62]
    """
    return [
        stage(config, number, accounting, frees_outputs) for number in range(config.parallel.pp)
    ]


def stage(
    config: Config,
    number: int,
    accounting: str = "paper",
    frees_outputs: bool = True,
    whole: int = 0,
) -> Held:
    """What a rank of one stage holds at its peak.

    Args:
        config: The model, its parallelism and its run.
        number: The stage, counted from 0.
        accounting: ``paper`` or ``exact``.
        frees_outputs: Whether a stage frees its output once it is sent, which is the next stage's
            input (Korthikanti et al. 2022, appendix B).
        whole: Of as many consecutive passes as are in flight at once, how many keep all activations
            and are not recomputed (the same, appendix C).

    Raises:
        ConfigError: The vocabulary is unknown, or the schedule cannot run the micro-batches.

    >>> from memcalc.config import load
    >>> stage(load("530b"), 0).layers / 2**20 / 840
    139.0
    """
    parallel = config.parallel
    weights = chunk_weights(config, number, accounting, frees_outputs)
    window = 0
    if whole:
        window = in_flight(config, number)
        weights += chunk_weights(recomputing_nothing(config), number, accounting, frees_outputs)
    sizes = tuple((sum(until), sum(late)) for until, late in weights)
    counts = _peak(parallel, number, config.microbatches, sizes, whole, window)
    return _held(parallel, number, weights, counts)


def passes(config: Config, number: int, accounting: str) -> dict[tuple[str, int], Held]:
    """The passes of a stage: for each phase and model chunk, what a rank holds when one is done.

    All such passes need as much memory, so only the one is kept that starts when the rank holds the
    most activations. A forward pass adds its own to them; those of a backward pass are still whole.

    >>> from memcalc.config import load
    >>> held = passes(load("22b", pp=4, global_batch_size=16), 1, "exact")
    >>> {key: each.microbatches for key, each in held.items()}
    {('forward', 0): {0: 3}, ('backward', 0): {0: 3}}
    """
    weights = chunk_weights(config, number, accounting)
    sizes = tuple((sum(until), sum(late)) for until, late in weights)
    found = {}
    for (phase, chunk), before in _starts(
        config.parallel, number, config.microbatches, sizes
    ).items():
        own = before.get(chunk, InFlight())
        done = own._replace(whole=own.whole + 1) if phase == FORWARD else own
        found[phase, chunk] = _held(config.parallel, number, weights, before | {chunk: done})
    return found


@lru_cache(2 * MOST_STAGES)
def _starts(
    parallel: Parallel, number: int, microbatches: int, sizes: tuple[tuple[int, int], ...]
) -> dict[tuple[str, int], dict[int, InFlight]]:
    """What a stage holds before the worst pass of each phase of each chunk."""
    steps = order(parallel, number, microbatches)
    return worst_starts(steps, lambda chunk: sizes[chunk][0], lambda chunk: sizes[chunk][1])


def _held(
    parallel: Parallel,
    number: int,
    weights: "Sequence[tuple[ChunkBytes, ChunkBytes]]",
    counts: dict[int, InFlight],
) -> Held:
    """The bytes of so many micro-batches of each chunk.

    With ``whole``, chunks that keep all activations are numbered after the others.
    """
    parts = [
        sum(
            count.whole * weights[chunk][0][part] + count.waiting * weights[chunk][1][part]
            for chunk, count in counts.items()
        )
        for part in range(4)
    ]
    microbatches: Counter[int] = Counter()
    waiting: Counter[int] = Counter()
    for chunk, count in counts.items():
        microbatches[chunk % parallel.chunks_per_rank] += count.whole
        waiting[chunk % parallel.chunks_per_rank] += count.waiting
    return Held(number, dict(+microbatches), dict(+waiting), *parts)


@lru_cache(2 * MOST_STAGES)  # answers ask again, for other GPUs
def _peak(
    parallel: Parallel,
    number: int,
    microbatches: int,
    sizes: tuple[tuple[int, int], ...],
    whole: int,
    window: int,
) -> dict[int, InFlight]:
    """What a stage holds of each chunk at its peak, by the bytes of one micro-batch of each."""
    steps = order(parallel, number, microbatches, MOST_FILLED if whole else MOST_PASSES)
    if whole:
        steps = kept_whole(steps, whole, window, len(sizes) // 2)
    return peak(steps, lambda chunk: sizes[chunk][0], lambda chunk: sizes[chunk][1])


def in_flight(config: Config, number: int) -> int:
    """The most passes, of all chunks, that a stage has in flight at once.

    >>> from memcalc.config import load
    >>> in_flight(load("530b", vpp=1), 0), in_flight(load("530b"), 0)
    (35, 139)
    """
    return _in_flight(config.parallel, number, config.microbatches)


@lru_cache(2 * MOST_STAGES)
def _in_flight(parallel: Parallel, number: int, microbatches: int) -> int:
    held = peak(order(parallel, number, microbatches), lambda chunk: 1)
    return sum(each.whole for each in held.values())


class ChunkBytes(NamedTuple):
    """What one micro-batch holds of a chunk, in bytes: the parts of ``Held``."""

    layers: int
    embedding: int = 0
    head: int = 0
    outputs: int = 0


def chunk_weights(
    config: Config, number: int, accounting: str, frees_outputs: bool = True
) -> list[tuple[ChunkBytes, ChunkBytes]]:
    """What one micro-batch holds of each of a stage's chunks.

    Returns:
        For each chunk, what is held until its backward, and what is held from there until its
        weight gradients are computed, if the schedule computes them later.
    """
    last = config.parallel.chunks - 1
    return [
        _chunk_weights(config, names, place == 0, place == last, accounting, frees_outputs)
        for place, names in zip(
            places(config.parallel, number), _of_stage(config, number), strict=True
        )
    ]


@lru_cache(256)
def _chunk_weights(
    config: Config,
    names: tuple[str, ...],
    first: bool,
    last: bool,
    accounting: str,
    frees_outputs: bool,
) -> tuple[ChunkBytes, ChunkBytes]:
    """The same of one chunk: its layers, and whether it has the embedding or the head."""
    splits = config.parallel.scheduling.splits_backward
    heads = (1 + config.model.mtp_layers) if last else 0
    head = head_graph(config) if last else None
    output = 0 if frees_outputs or last else output_bytes(config)
    whole = ChunkBytes(
        chunk_bytes(config, names, accounting),
        _bytes(embedding_graph(config), accounting) if first else 0,
        heads * _bytes(head, accounting) if head else 0,
        output,
    )
    late = ChunkBytes(
        sum(layer_waiting(config, kind) for kind in names) if splits else 0,
        head=heads * activations.waiting(head) if head and splits else 0,
    )
    return whole, late


def chunks(config: Config, stage: int) -> list[list[str]]:
    """The kinds of the layers of each of a stage's chunks, in order.

    >>> from memcalc.config import load
    >>> chunks(load("175b"), 0)[0]
    ['dense', 'dense', 'dense', 'dense']
    >>> uneven = load("22b", pp=4, layout="6,12,12,18")
    >>> [len(names) for stage in range(4) for names in chunks(uneven, stage)]
    [6, 12, 12, 18]
    """
    return [list(names) for names in _of_stage(config, stage)]


def _of_stage(config: Config, stage: int) -> list[tuple[str, ...]]:
    found = _all_chunks(config)
    return [found[place] for place in places(config.parallel, stage)]


@lru_cache(16)
def _all_chunks(config: Config) -> tuple[tuple[str, ...], ...]:
    """The kinds of the layers of every chunk of the pipeline, in its order."""
    layers = layers_of(config.model)
    kinds_ = [kind_of(config, number) for number in range(layers)]
    spread = config.parallel.spread(layers, config.model.mtp_layers)
    ends = list(accumulate(chunk.layers for chunk in spread))
    return tuple(
        (*kinds_[end - chunk.layers : end], *[MTP] * chunk.further)
        for chunk, end in zip(spread, ends, strict=True)
    )


def chunk_bytes(config: Config, names: Sequence[str], accounting: str) -> int:
    """The bytes that the layers of a chunk save per micro-batch; their kinds are in order."""
    return sum(layer_sizes(config, names, accounting))


def layer_sizes(config: Config, names: Sequence[str], accounting: str) -> list[int]:
    """The bytes that each layer of a chunk saves per micro-batch; their kinds are in order.

    Under full recomputation with the block method the layers after the first N keep all. With the
    uniform method the first of every N layers keeps their common input.

    >>> from memcalc.config import load
    >>> settings = {"recompute": "full", "recompute_method": "uniform", "recompute_layers": 2}
    >>> [size // 2**20 for size in layer_sizes(load("175b", **settings), ["dense"] * 3, "paper")]
    [48, 0, 48]
    """
    run, number = config.run, config.run.recompute_layers or 1
    everything = recomputing_nothing(config)
    by_blocks = run.recompute_method == "block" and run.recompute_layers is not None
    each = {kind: layer_bytes(config, accounting, kind) for kind in set(names)}
    if by_blocks:
        whole = {kind: layer_bytes(everything, accounting, kind) for kind in set(names)}
        return [(each if place < number else whole)[kind] for place, kind in enumerate(names)]
    # with number 1 every layer is a block of its own
    return [0 if place % number else each[kind] for place, kind in enumerate(names)]


@lru_cache(16)
def recomputing_nothing(config: Config) -> Config:
    """The same run without recomputation."""
    return replace(config, run=config.run.recomputing("none"))


def recomputed_layers(config: Config) -> dict[str, int]:
    """How many layers of each kind the run recomputes in backward.

    >>> from memcalc.config import load
    >>> settings = {"recompute": "full", "recompute_method": "block", "recompute_layers": 1}
    >>> recomputed_layers(load("175b", **settings))
    {'dense': 24}
    """
    run, there = config.run, kinds(config)
    if run.recompute_method != "block" or run.recompute_layers is None:
        return there
    found = Counter(dict.fromkeys(there, 0))
    for number in range(config.parallel.pp):
        found.update(recomputed_on(config, number))
    return {kind: times // config.parallel.copies for kind, times in found.items()}


def recomputed_on(config: Config, number: int) -> "Counter[str]":
    """How many layers of each kind one stage recomputes in backward, in all of its chunks."""
    run = config.run
    some = run.recompute_layers if run.recompute_method == "block" else None
    return Counter(kind for names in chunks(config, number) for kind in names[:some])


def output_bytes(config: Config) -> int:
    """The bytes of a stage's output for one micro-batch, as a rank holds and sends it."""
    run, parallel = config.run, config.parallel
    hidden = run.activation_bytes * run.seq_length * run.micro_batch_size * config.model.hidden_size
    return hidden // (parallel.cp * (parallel.tp if parallel.sp else 1))


def _bytes(graph: Graph, accounting: str) -> int:
    kept = activations.kept(graph)
    size: int = activations.total(activations.counted(kept, accounting))
    return size
