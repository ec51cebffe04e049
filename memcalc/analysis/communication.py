"""Communication: the collectives of a pass, and what a rank sends in each.

Bytes are those of ring algorithms. For a tensor of V bytes over n ranks, each rank sends (n-1)/n V
in an all-gather or a reduce-scatter, and twice that in an all-reduce.
"""

from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

from memcalc.analysis.activations import NOTHING, outermost
from memcalc.analysis.parameters import partly_used
from memcalc.analysis.rank import EMBEDDING, Rank, stages_with_table, table
from memcalc.analysis.schedule import places
from memcalc.analysis.stages import chunks, output_bytes, recomputed_on
from memcalc.analysis.states import recipe, shard_ranks, weight_bytes
from memcalc.blocks.embedding import embedding_graph
from memcalc.blocks.head import head_graph
from memcalc.blocks.layer import kinds, layer_graph
from memcalc.config import Config
from memcalc.config.recompute import Policy
from memcalc.graph.graph import Graph, Move
from memcalc.graph.mesh import Size

STEPS = {
    "all_reduce": 2,
    "all_gather": 1,
    "reduce_scatter": 1,
    "all_to_all": 1,
    "send_receive": 1,
}

PHASES = ("forward", "backward", "recompute", "step")
PARTS = ("table", "head", "stages", "partial", "weights", "experts")  # of an iteration, not layers


class Traffic(NamedTuple):
    """Collectives of one kind.

    Attributes:
        collective: One of ``STEPS``, or ``send`` of a pipeline.
        phase: ``forward``, ``backward``, or ``recompute`` for a forward collective that backward
            repeats.
        times: How many.
        bytes: What one rank sends in all of them.
        overlapped_with: The computation that overlaps with them, or nothing.
        part: In an iteration, what they are of: ``layers`` (or a kind of them), ``table`` (the
            embedding's), ``head``, ``stages``; once, of gradients: ``partial`` ones, ``table``,
            ``weights``, ``experts``.
    """

    collective: str
    phase: str
    times: int
    bytes: Size
    overlapped_with: str = ""
    part: str = ""

    def of_part(self, part: str, repeats: int) -> "Traffic":
        """The same, repeated in a part of an iteration."""
        return self._replace(times=self.times * repeats, bytes=self.bytes * repeats, part=part)


def ring_bytes(move: Move) -> Size:
    """What each rank sends in a collective under the ring algorithm.

    >>> ring_bytes(Move("all_reduce", "forward", 800, 8))
    Fraction(1400, 1)
    """
    degree = Fraction(move.degree) if isinstance(move.degree, int) else move.degree
    return STEPS[move.collective] * (degree - 1) / degree * move.bytes


def of_graph(graph: Graph, policy: Policy = NOTHING) -> list[Traffic]:
    """The collectives of a pass and of its backward, those of one kind together.

    Args:
        graph: The pass.
        policy: What backward recomputes; their forward collectives run once more.

    >>> from memcalc.config import load
    >>> [(t.collective, t.phase, t.times) for t in of_graph(layer_graph(load("22b")))]
    [('all_reduce', 'backward', 2), ('all_reduce', 'forward', 2)]
    """
    found: dict[tuple[str, str, str], list[Size]] = {}
    for move, phase in _moves(graph, policy):
        key = (move.collective, phase, move.overlapped_with)
        found.setdefault(key, []).append(ring_bytes(move))
    return [Traffic(c, p, len(sizes), sum(sizes), w) for (c, p, w), sizes in found.items()]


def of_iteration(config: Config) -> list[Traffic]:
    """What one rank of ``busiest_stage`` sends in an iteration.

    These are: for every micro-batch the collectives of its layers, embedding and heads; its outputs
    sent forward and their gradients sent backward; and all-reduces of gradients over the ranks that
    hold the same parameters. Parameters replicated over tensor-parallel ranks are reduced over
    these, copies of the embedding's table over their stages, all parameters over data- and
    context-parallel ranks, and experts over the ranks of a stage that hold the same experts. Where
    ``Parallel.zero`` shards states, gradients are scattered and weights gathered instead.

    Raises:
        ConfigError: A stage's ranks do not divide over the experts'.
    """
    stage = busiest_stage(config)
    micro = config.microbatches // config.parallel.copies  # through each chunk
    parts = list(_parts(config, stage))
    rows = [
        row.of_part(part.name, number * part.runs * micro)
        for part in parts
        for row in of_graph(part.graph, config.run.policy)
        if (number := part.recomputed if row.phase == "recompute" else part.held)
    ]
    rows += [row for row in _sends(config, stage, micro) if row.times]
    partly = sum(part.held * partly_used(part.graph, config.run.frozen) for part in parts)
    rows += [row for row in _of_states(config, stage, micro, partly) if row.bytes]
    return rows


def _sends(config: Config, stage: int, micro: int) -> Iterator[Traffic]:
    """What a stage's chunks send to other ranks: outputs forward, gradients backward."""
    parallel = config.parallel
    at = places(parallel, stage)
    here = at if parallel.copies == 1 else ()  # a copy's next chunk is on another rank
    onward = [place for place in at if place + 1 < parallel.chunks and place + 1 not in here]
    back = [place for place in at if place > 0 and place - 1 not in here]
    for phase, chunks_ in (("forward", onward), ("backward", back)):
        times = micro * len(chunks_)
        yield Traffic("send", phase, times, times * output_bytes(config), part="stages")


def _of_states(config: Config, stage: int, micro: int, partly: Size) -> Iterator[Traffic]:
    """Gradients that are reduced and weights that are gathered, over ranks that hold the same.

    Without ZeRO, gradients are all-reduced once per iteration. With it they are reduce-scattered:
    once per iteration by Megatron's and nanotron's optimizers and DeepSpeed's stage 1, and with
    every micro-batch where gradients are sharded too. Weights are gathered after the optimizer
    step, or, where they are sharded, in every forward and backward pass.
    """
    parallel, each = config.parallel, recipe(config.run)
    sharder = parallel.sharding
    size = each.weight if sharder.weights_dtype and parallel.zero else each.gradient
    tables = stages_with_table(config)
    yield _over("all_reduce", "backward", "partial", each.gradient * partly, parallel.tp)
    if stage in tables and EMBEDDING not in config.run.frozen:
        size_ = each.gradient * table(config)
        yield _over("all_reduce", "backward", "table", size_, len(tables))
    for expert, part in ((False, "weights"), (True, "experts")):
        held = {
            kind: n for kind, n in Rank(config, stage).parameters.items() if kind.expert == expert
        }
        gradients = size * sum(n for kind, n in held.items() if kind.trained)
        ranks = parallel.expert_replicas if expert else parallel.dp * parallel.cp
        ranks *= parallel.copies
        if not parallel.zero:
            yield _over("all_reduce", "backward", part, gradients, ranks)
            continue
        split = shard_ranks(config, expert)
        times = micro if parallel.zero > 1 else 1
        yield _over("reduce_scatter", "backward", part, gradients, split, times)
        yield _over(
            "all_reduce", "backward", part, Fraction(gradients, split), ranks // split, times
        )
        weights = sum(n * weight_bytes(config.run, kind) for kind, n in held.items())
        for phase in sharder.gathers[parallel.zero]:
            times = 1 if phase == "step" else micro
            yield _over("all_gather", phase, part, weights, split, times)


def _over(
    collective: str, phase: str, part: str, size: Size, ranks: int, times: int = 1
) -> Traffic:
    """A collective over some ranks, with its bytes."""
    sent = ring_bytes(Move(collective, phase, size, ranks))
    return Traffic(collective, phase, times, times * sent, part=part)


def busiest_stage(config: Config) -> int:
    """A stage that sends both forward and backward, if there is one, else the first.

    >>> from memcalc.config import load
    >>> busiest_stage(load("530b")), busiest_stage(load("22b"))
    (1, 0)
    """
    return 1 if config.parallel.pp > 2 else 0


class _Part(NamedTuple):
    """Layers of a kind, or the embedding or head: how many, and the runs per micro-batch."""

    name: str
    graph: Graph
    held: int = 1
    recomputed: int = 0
    runs: int = 1


def _parts(config: Config, stage: int) -> Iterator[_Part]:
    at = places(config.parallel, stage)
    several = len(kinds(config)) > 1
    again = recomputed_on(config, stage)
    layers = Counter(kind for names in chunks(config, stage) for kind in names)
    for kind, number in layers.items():
        name = kind if several else "layers"
        yield _Part(name, layer_graph(config, kind=kind), number, again[kind])
    if 0 in at:
        yield _Part("table", embedding_graph(config))
    if config.parallel.chunks - 1 in at:
        yield _Part("head", head_graph(config), runs=1 + config.model.mtp_layers)


def _moves(graph: Graph, policy: Policy) -> Iterator[tuple[Move, str]]:
    for op in graph.ops:
        again = outermost(op, policy) is not None
        for move in op.moves:
            yield move, move.phase
            if again and move.phase == "forward":
                yield move, "recompute"
