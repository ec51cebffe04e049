"""A rank of a pipeline stage, and what it holds of the model: layers, weights and their sizes."""

from collections import Counter
from collections.abc import Iterator
from functools import cached_property, lru_cache
from math import prod
from typing import NamedTuple

from memcalc.analysis.schedule import places
from memcalc.analysis.stages import chunks, output_bytes
from memcalc.blocks.embedding import embedding_graph
from memcalc.blocks.head import head_graph
from memcalc.blocks.layer import MOE_KINDS, MTP, layer_graph
from memcalc.config import Config
from memcalc.graph.graph import Graph
from memcalc.graph.ops.ends import EMBEDDING as LOOKUP

EMBEDDING, HEAD = "embedding", "head"


class WeightKind(NamedTuple):
    """What the bytes of a parameter depend on.

    Attributes:
        expert: Whether it belongs to an expert, and so to expert-parallel ranks.
        gemm: What the GEMM that uses it multiplies (``OpKind.gemm``), if it is a matrix of a layer;
            else None.
        trained: Whether it is trained.
    """

    expert: bool
    gemm: str | None
    trained: bool


class Rank:
    """One rank of a pipeline stage. What it holds is read once, when it is first asked for.

    Attributes:
        config: The model, its parallelism and its run.
        stage: The stage, counted from 0.

    >>> from memcalc.config import load
    >>> rank = Rank(load("22b", pp=4), 0)
    >>> len(rank.layers), rank.embedding, rank.head
    (12, True, False)
    """

    def __init__(self, config: Config, stage: int) -> None:
        self.config = config
        self.stage = stage

    @cached_property
    def places(self) -> list[int]:
        """The positions of its chunks in the pipeline, counted from the embedding's."""
        return places(self.config.parallel, self.stage)

    @cached_property
    def chunks(self) -> list[list[str]]:
        """The kinds of the layers of each of its chunks, in order."""
        return chunks(self.config, self.stage)

    @cached_property
    def layers(self) -> list[str]:
        """The kinds of all its layers, in the order of its chunks."""
        return [kind for names in self.chunks for kind in names]

    @cached_property
    def embedding(self) -> bool:
        """Whether it has the embedding."""
        return 0 in self.places

    @cached_property
    def head(self) -> bool:
        """Whether it has the head."""
        return self.config.parallel.chunks - 1 in self.places

    @cached_property
    def experts(self) -> bool:
        """Whether one of its layers has experts."""
        return any(kind in MOE_KINDS for kind in self.layers)

    @cached_property
    def output_bytes(self) -> int:
        """The bytes that it sends to the next stage for one micro-batch."""
        return output_bytes(self.config)

    @cached_property
    def steps_itself(self) -> bool:
        """Whether the framework of its layers also runs the step."""
        return self.config.framework is self.config.run.implementation.maker

    @cached_property
    def graphs(self) -> dict[str, Graph]:
        """The forward passes of each kind of its layers, and of its head."""
        found = {kind: layer_graph(self.config, kind=kind) for kind in sorted(set(self.layers))}
        return found | ({HEAD: head_graph(self.config)} if self.head else {})

    @cached_property
    def copies(self) -> list[str]:
        """Why it has a copy of the embedding's table: for the head, or for MTP layers."""
        model = self.config.model
        if self.embedding:
            return []
        tied = self.head and model.tied_embeddings and model.classes is None
        return [HEAD] * tied + [EMBEDDING] * (MTP in self.layers)

    @cached_property
    def units(self) -> list[str]:
        """What it gathers at once under ZeRO stage 3: the embedding, each layer, the head."""
        return [EMBEDDING] * self.embedding + self.layers + [HEAD] * self.head

    @cached_property
    def parameters(self) -> "Counter[WeightKind]":
        """Its parameters, before they are sharded over data-parallel ranks.

        A stage without the embedding has a copy of its table if it has a tied head or multi-token
        prediction layers, which embed tokens.

        >>> from memcalc.config import load
        >>> h, v, s, t = 6144, 51200, 2048, 8
        >>> layers = 48 * ((12 * h**2 + 7 * h) // t + 6 * h)
        >>> Rank(load("22b"), 0).parameters.total() == layers + v * h // t + s * h + 2 * h
        True
        """
        found: Counter[WeightKind] = Counter()
        for name, number in Counter(self.units).items():
            for kind, size in _of_graph(self.config, name):
                found[kind] += number * size
        for part in self.copies:
            found[self._copy(part)] += table(self.config)
        return found

    @cached_property
    def trained(self) -> int:
        """The number of its trained parameters, before data-parallel ranks shard them."""
        return sum(number for kind, number in self.parameters.items() if kind.trained)

    @cached_property
    def root_size(self) -> int:
        """The number of parameters of its embedding and head."""
        return self.parameters.total() - self.layer_sizes

    @cached_property
    def root_trained(self) -> int:
        """The number of these that are trained."""
        return self.trained - sum(
            n for name in self.layers for kind, n in self.unit(name) if kind.trained
        )

    @cached_property
    def layer_sizes(self) -> int:
        """The number of parameters of all its layers."""
        return sum(n for name in self.layers for _, n in self.unit(name))

    @cached_property
    def layer_size(self) -> int:
        """The number of parameters of its largest layer."""
        sizes = {name: sum(n for _, n in self.unit(name)) for name in set(self.layers)}
        return max(sizes.values(), default=0)

    def unit(self, name: str) -> "tuple[tuple[WeightKind, int], ...]":
        """The parameters of one of its units: their kinds, each with its number."""
        return _of_graph(self.config, name)

    def unit_sizes(self, trained: bool = False) -> list[int]:
        """The parameters of each of its units, all of them or only the trained ones."""
        sizes = {
            name: sum(n for kind, n in _of_graph(self.config, name) if kind.trained or not trained)
            for name in set(self.units)
        }
        return [sizes[name] for name in self.units] or [0]

    def weights(self) -> Iterator[tuple[WeightKind, int, int]]:
        """Its weights in the order of its passes: kind, elements, and how many are alike."""
        for kind, shape, alike in self.shapes():
            yield kind, prod(shape), alike

    def shapes(self) -> Iterator[tuple[WeightKind, tuple[int, ...], int]]:
        """Its weights in the order of its passes: kind, shape, and how many are alike."""
        for name in self.units:
            yield from _weights(self.config, name)
        width = self.config.model.hidden_size
        for part in self.copies:
            yield self._copy(part), (table(self.config) // width, width), 1

    def _copy(self, part: str) -> WeightKind:
        """The kind of a copy of the table."""
        return WeightKind(False, None, part not in self.config.run.frozen)


def stages_with_table(config: Config) -> list[int]:
    """The stages that hold the embedding's table and all-reduce its gradients.

    None under a schedule with two copies of all weights (DualPipe): there the table's gradients
    are reduced with those of the other weights.

    >>> from memcalc.config import load
    >>> stages_with_table(load("22b", pp=4)), stages_with_table(load("llama-3-8b", pp=4))
    ([0, 3], [0])
    """
    if config.parallel.copies > 1:
        return []
    return [
        stage
        for stage in range(config.parallel.pp)
        if (rank := Rank(config, stage)).embedding or rank.copies
    ]


def table(config: Config) -> int:
    """The elements of the embedding table on a rank; 0 for a patch embedding, which has none."""
    tables = (op.weights[0] for op in embedding_graph(config).ops if op.kind is LOOKUP)
    return next((prod(axis.local for axis in table.axes) for table in tables), 0)


@lru_cache(1024)
def _of_graph(config: Config, name: str) -> tuple[tuple[WeightKind, int], ...]:
    """The parameters of one graph that a rank holds, by their kinds."""
    found: Counter[WeightKind] = Counter()
    for kind, shape, number in _weights(config, name):
        found[kind] += number * prod(shape)
    return tuple(found.items())


@lru_cache(1024)
def _weights(config: Config, name: str) -> tuple[tuple[WeightKind, tuple[int, ...], int], ...]:
    """The weights of one graph on a rank: kind, shape of each, and how many are alike.

    Every expert has a weight of its own. A matrix has the shape that its GEMM sees.
    """
    ends = {EMBEDDING: embedding_graph, HEAD: head_graph}
    graph = ends[name](config) if name in ends else layer_graph(config, kind=name)
    found = []
    for op in graph.ops:
        trained = not op.is_in(config.run.frozen)
        for weight in (each for each in op.weights if not each.shared):
            matrix = name not in ends and weight.name.endswith(".weight") and op.kind.gemm
            kind = WeightKind(op.kind.of_experts, op.kind.gemm if matrix else None, trained)
            axes = [axis.local for axis in weight.axes]
            number = axes.pop(0) if kind.expert else 1
            shape = (axes[0], prod(axes[1:])) if len(axes) > 1 else tuple(axes)
            found.append((kind, shape, number))
    return tuple(found)
