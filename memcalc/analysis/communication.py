"""Communication: the collectives that a pass contains, and what a rank sends for each.

Bytes are those of the ring algorithms: of a tensor of V bytes over n ranks, an all-gather or a
reduce-scatter sends (n-1)/n V from each rank, and an all-reduce is one of each.
"""

from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

from memcalc.analysis.activations import NOTHING, outermost
from memcalc.analysis.parameters import held, held_of_experts, partly_used
from memcalc.analysis.schedule import places
from memcalc.analysis.stages import chunks, output_bytes
from memcalc.analysis.states import recipe, stages_with_table, table
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


class Traffic(NamedTuple):
    """Collectives of one kind.

    Attributes:
        collective: One of ``STEPS``, or ``send`` of a pipeline.
        phase: ``forward``, ``backward``, or ``recompute`` for what backward runs again.
        times: How many.
        bytes: What one rank sends in all of them.
        overlapped_with: The computation that hides them, or nothing.
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
        """The same, so many times in a part of an iteration."""
        return self._replace(times=self.times * repeats, bytes=self.bytes * repeats, part=part)


def ring_bytes(move: Move) -> Size:
    """What each rank sends for a collective, by the ring algorithm.

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

    Its layers' collectives for every micro-batch, and its ends', a head for every token that is
    predicted; its outputs forward and their gradients backward; and the ring all-reduces of its
    gradients over the ranks that hold the same parameters: of what every tensor-parallel rank
    holds whole, and computes with a part; of the embedding's table on several stages; of all over
    those of data and context parallelism, and of experts over what is left of a stage's ranks
    beside their own parallelism.

    Raises:
        ConfigError: A stage's ranks do not divide over the experts'.
    """
    parallel, stage = config.parallel, busiest_stage(config)
    micro = config.microbatches // parallel.copies  # through each chunk
    parts = list(_parts(config, stage))
    rows = [
        row.of_part(part.name, part.held * part.runs * micro)
        for part in parts
        for row in of_graph(part.graph, config.run.policy)
    ]
    if parallel.pp > 1:
        times = micro * parallel.chunks_per_rank
        sent = times * output_bytes(config)
        rows += [
            Traffic("send", way, times, sent, part="stages") for way in ("forward", "backward")
        ]

    def reduce(part: str, parameters: Size, ranks: int) -> None:
        """The all-reduce of gradients, once an iteration."""
        if parameters and ranks > 1:
            move = Move("all_reduce", "backward", recipe(config.run).gradient * parameters, ranks)
            rows.append(Traffic("all_reduce", "backward", 1, ring_bytes(move), part=part))

    tables = stages_with_table(config)
    experts = sum(part.held * held_of_experts(part.graph) for part in parts)
    dense = sum(part.held * held(part.graph) for part in parts) - experts
    partly = sum(part.held * partly_used(part.graph) for part in parts)
    reduce("partial", partly, parallel.tp)
    reduce("table", table(config) if stage in tables else 0, len(tables))
    reduce("weights", dense, parallel.dp * parallel.cp * parallel.copies)
    reduce("experts", experts, parallel.expert_replicas * parallel.copies)
    return rows


def busiest_stage(config: Config) -> int:
    """A stage that sends both ways, if there is one; else the first.

    >>> from memcalc.config import load
    >>> busiest_stage(load("530b")), busiest_stage(load("22b"))
    (1, 0)
    """
    return 1 if config.parallel.pp > 2 else 0


class _Part(NamedTuple):
    """Layers of a kind, or an end: how many a rank holds, and the runs of each a micro-batch."""

    name: str
    held: int
    runs: int
    graph: Graph


def _parts(config: Config, stage: int) -> Iterator[_Part]:
    at = places(config.parallel, stage)
    several = len(kinds(config)) > 1
    layers = Counter(kind for names in chunks(config, stage) for kind in names)
    for kind, number in layers.items():
        yield _Part(kind if several else "layers", number, 1, layer_graph(config, kind=kind))
    if 0 in at:
        yield _Part("table", 1, 1, embedding_graph(config))
    if config.parallel.chunks - 1 in at:
        yield _Part("head", 1, 1 + config.model.mtp_layers, head_graph(config))


def _moves(graph: Graph, policy: Policy) -> Iterator[tuple[Move, str]]:
    for op in graph.ops:
        again = outermost(op, policy) is not None
        for move in op.moves:
            yield move, move.phase
            if again and move.phase == "forward":
                yield move, "recompute"
