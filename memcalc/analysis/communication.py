"""Communication: the collectives that a pass contains, and what a rank sends for each.

Bytes are those of the ring algorithms: of a tensor of V bytes over n ranks, an all-gather or a
reduce-scatter sends (n-1)/n V from each rank, and an all-reduce is one of each.
"""

from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

from memcalc.analysis.parameters import parameters
from memcalc.analysis.states import RECIPES
from memcalc.blocks.layer import layer_graph
from memcalc.config import Config
from memcalc.graph.graph import Graph, Move
from memcalc.graph.mesh import Size

STEPS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


class Traffic(NamedTuple):
    """Collectives of one kind.

    Attributes:
        collective: ``all_reduce``, ``all_gather``, ``reduce_scatter`` or ``send``.
        phase: ``forward``, ``backward``, or ``recompute`` for what backward runs again.
        times: How many.
        bytes: What one rank sends in all of them.
        overlapped_with: The computation that hides them, or nothing.
    """

    collective: str
    phase: str
    times: int
    bytes: Size
    overlapped_with: str


def ring_bytes(move: Move) -> Size:
    """What each rank sends for a collective, by the ring algorithm.

    >>> ring_bytes(Move("all_reduce", "forward", 800, 8))
    Fraction(1400, 1)
    """
    degree = Fraction(move.degree) if isinstance(move.degree, int) else move.degree
    return STEPS[move.collective] * (degree - 1) / degree * move.bytes


def of_graph(graph: Graph, regions: frozenset[str] = frozenset()) -> list[Traffic]:
    """The collectives of a pass and of its backward, those of one kind together.

    Args:
        graph: The pass.
        regions: What backward recomputes; their forward collectives run once more.

    >>> from memcalc.config import load
    >>> [(t.collective, t.phase, t.times) for t in of_graph(layer_graph(load("22b")))]
    [('all_reduce', 'backward', 2), ('all_reduce', 'forward', 2)]
    """
    found: dict[tuple[str, str, str], list[Size]] = {}
    for move, phase in _moves(graph, regions):
        key = (move.collective, phase, move.overlapped_with)
        found.setdefault(key, []).append(ring_bytes(move))
    return [Traffic(c, p, len(sizes), sum(sizes), w) for (c, p, w), sizes in found.items()]


def of_iteration(config: Config) -> list[Traffic]:
    """What one rank of a middle pipeline stage sends in an iteration.

    Its layers' collectives for every micro-batch; its outputs forward and their gradients backward;
    and the ring all-reduce of its gradients over the data-parallel ranks, in fp32.
    """
    parallel, micro = config.parallel, config.microbatches
    layers = Fraction(config.model.layers, parallel.pp)
    rows = [
        row._replace(times=int(row.times * layers * micro), bytes=row.bytes * layers * micro)
        for row in of_graph(layer_graph(config), config.run.regions)
    ]
    if parallel.pp > 1:
        run = config.run
        hidden = run.seq_length * run.micro_batch_size * config.model.hidden_size
        sent = run.activation_bytes * hidden // (parallel.tp if parallel.sp else 1)
        times = micro * parallel.vpp
        rows += [
            Traffic("send", phase, times, times * sent, "") for phase in ("forward", "backward")
        ]
    if parallel.dp > 1:
        gradients = Fraction(RECIPES["paper"].gradient * parameters(config))
        share = gradients / (parallel.tp * parallel.pp)
        move = Move("all_reduce", "backward", share, parallel.dp)
        rows.append(Traffic("all_reduce", "backward", 1, ring_bytes(move), ""))
    return rows


def _moves(graph: Graph, regions: frozenset[str]) -> Iterator[tuple[Move, str]]:
    for op in graph.ops:
        again = any(region.name in regions for region in op.regions)
        for move in op.moves:
            yield move, move.phase
            if again and move.phase == "forward":
                yield move, "recompute"
