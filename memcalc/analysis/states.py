"""Weights, gradients and optimizer states of every stage.

Parameters are read off the graphs of a stage's chunks. A recipe says how many bytes each parameter
takes, and ``Parallel.zero`` which of these bytes are sharded.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from math import prod
from typing import NamedTuple

from memcalc.analysis.parts import Part
from memcalc.analysis.schedule import places
from memcalc.analysis.segments import SOURCE as SEGMENTS
from memcalc.analysis.segments import Segments
from memcalc.analysis.stages import chunks
from memcalc.blocks.embedding import embedding_graph
from memcalc.blocks.head import head_graph
from memcalc.blocks.layer import MTP, layer_graph
from memcalc.config import PRECISION_BYTES, Config, Run, fields
from memcalc.config.optimizers import ALL, MATRICES, OPTIMIZERS, OTHERS
from memcalc.config.run import MAIN_GRADS, MAIN_PARAMS, MOMENTS
from memcalc.errors import ConfigError
from memcalc.frameworks.record import ESTIMATED, READ
from memcalc.graph.graph import OF_WEIGHT
from memcalc.graph.ops.ends import EMBEDDING as LOOKUP

EMBEDDING, HEAD = "embedding", "head"

TE_COPIES = "Transformer Engine module/base.py: get_weight_workspace, by rows and by columns"
# The most weights of a rank that are laid out; all of DeepSeek-V3 on one rank has 50,000.
MOST_WEIGHTS = 2**18


class Recipe(NamedTuple):
    """Bytes that one parameter takes while training, before sharding.

    Attributes:
        weight: The weight that forward and backward use.
        gradient: Its gradient, accumulated over micro-batches.
        master: The master weight.
        moment: One of the optimizer's moments.
        moments: The number of moments that most weights have.
    """

    weight: int
    gradient: int
    master: int
    moment: int
    moments: int = 2

    @property
    def optimizer(self) -> int:
        """The optimizer states."""
        return self.master + self.moments * self.moment

    @property
    def total(self) -> int:
        """All of it.

        >>> RECIPES["paper"].total
        18
        """
        return self.weight + self.gradient + self.optimizer


RECIPES = {
    # 16-bit weights, fp32 gradients, fp32 master weights and Adam's two moments
    "paper": Recipe(weight=2, gradient=4, master=4, moment=4),
}


def recipe(run: Run) -> Recipe:
    """The recipe of a run; fp32 weights have no master weights.

    >>> recipe(Run(seq_length=1)) == RECIPES["paper"]
    True
    >>> recipe(Run(seq_length=1, precision="fp32")).total
    16
    """
    weight = PRECISION_BYTES[run.precision]
    master = 0 if weight == 4 else MAIN_PARAMS[run.main_params]
    moments = OPTIMIZERS[run.optimizer].moments[0].number
    return Recipe(weight, MAIN_GRADS[run.main_grads], master, MOMENTS[run.moments], moments)


class Kind(NamedTuple):
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


def parameters(config: Config, stage: int) -> "Counter[Kind]":
    """The parameters that a rank of a stage holds, before sharding over data-parallel ranks.

    A stage without the embedding has a copy of its table if it has a tied head or multi-token
    prediction layers, which embed tokens.

    >>> from memcalc.config import load
    >>> h, v, s, t = 6144, 51200, 2048, 8
    >>> layers = 48 * ((12 * h**2 + 7 * h) // t + 6 * h)
    >>> parameters(load("22b"), 0).total() == layers + v * h // t + s * h + 2 * h
    True
    """
    found: Counter[Kind] = Counter()
    for name, number in _graphs(config, stage).items():
        for kind, size in _of_graph(config, name):
            found[kind] += number * size
    for part in copies(config, stage):
        found[Kind(False, None, part not in config.run.frozen)] += table(config)
    return found


def copies(config: Config, stage: int) -> Iterator[str]:
    """Why a stage without the embedding has a copy of its table: for the head, or MTP layers."""
    graphs = _graphs(config, stage)
    if EMBEDDING in graphs:
        return
    if HEAD in graphs and config.model.tied_embeddings and config.model.classes is None:
        yield HEAD
    if MTP in graphs:
        yield EMBEDDING


def states(config: Config, stage: int) -> list[Part]:
    """What a rank of a stage always holds: weights, gradients, optimizer states.

    Raises:
        ConfigError: The experts' ranks or the shards do not divide the ranks of a stage.

    >>> from memcalc.config import load
    >>> config = load("22b", dp=4, zero=1, global_batch_size=16)
    >>> n = parameters(config, 0).total()
    >>> {part.name: part.bytes / n for part in states(config, 0)}
    {'weights': 2.0, 'gradients': 4.0, 'master weights': 1.0, "Adam's moments": 2.0}
    """
    run, each, sharder = config.run, recipe(config.run), config.parallel.sharding
    held = parameters(config, stage)
    trained = [kind for kind in held if kind.trained]
    own = each.master or each.weight
    fp8 = {kind: 1 if run.fp8_params else 2 for kind in held if kind.gemm == OF_WEIGHT}
    found: list[Part] = []

    def add(name: str, group: str, zero: int, sizes: dict[Kind, int], source: str = "") -> None:
        """Add a part for experts and one for all else, sharded from ZeRO stage ``zero`` on."""
        for expert in (False, True):
            shards = shard_ranks(config, expert) if config.parallel.zero >= zero else 1
            mine = [kind for kind in sizes if kind.expert == expert]
            size = sum(sizes[kind] * -(-held[kind] // shards) for kind in mine)
            if size:
                label = f"{name} of experts" if expert else name
                found.append(Part(label, size, group, "exact", source or sharder.source))

    if sharder.own_master:
        add("weights", "weights", 2, dict.fromkeys(held, own))
    else:
        add("weights", "weights", 3, {kind: weight_bytes(run, kind) for kind in held})
    if run.precision == "fp8":
        size = sum(bytes_ * held[kind] for kind, bytes_ in fp8.items())
        name = "fp8 copies of linear weights"
        found.append(Part(name, size, "weights", "framework-dependent", TE_COPIES))
    add("gradients", "gradients", 2, dict.fromkeys(trained, each.gradient))
    if not sharder.own_master:
        add("master weights", "optimizer", 1, dict.fromkeys(trained, each.master))
    weights = {
        ALL: trained,
        MATRICES: [kind for kind in trained if kind.gemm],
        OTHERS: [kind for kind in trained if not kind.gemm],
    }
    for name, of, number, source in OPTIMIZERS[run.optimizer].moments:
        add(name, "optimizer", 1, dict.fromkeys(weights[of], number * each.moment), source)
    return found


def unsplit(config: Config, stage: int) -> Iterator[Part]:
    """Bytes of unsplit blocks beyond weights, gradients and master weights, on the last rank.

    Megatron-core allocates these first, in this order: the weights; the buffers of weights and
    gradients, in which the model's last parameter comes first; the master weights or their shards.

    Raises:
        ConfigError: A rank holds too many weights.

    >>> from memcalc.config import load
    >>> [part.name for part in unsplit(load("gpt2"), 0)]
    ['allocator blocks not split: states']
    """
    parallel = config.parallel
    if not parallel.sharding.known_order or config.run.environment.expandable_segments:
        return
    shards = tuple(shard_ranks(config, expert) for expert in (False, True)) if parallel.zero else ()
    weights = tuple(_in_order(config, stage))
    if (number := sum(alike for _, _, alike in weights)) > MOST_WEIGHTS:
        raise ConfigError(
            f"a rank of stage {stage} holds {number} weight tensors, more than the "
            f"{MOST_WEIGHTS} that memcalc can lay out: use a larger --ep or --pp"
        )
    size = _unsplit(weights, recipe(config.run), shards)
    if size:
        yield Part(
            "allocator blocks not split: states", size, "buffers", "framework-dependent", SEGMENTS
        )


@lru_cache(256)
def _unsplit(
    weights: tuple[tuple[Kind, int, int], ...], each: Recipe, shards: tuple[int, ...]
) -> int:
    """The bytes for these weights; ``shards``: numbers of shards of all else and of experts."""
    segments = Segments()
    blocks = []
    for kind, size, number in weights:
        if shards and kind.trained:  # freed once they are copied to a buffer
            blocks += [segments.take(each.weight * size) for _ in range(number)]
        else:
            segments.repeat(number, partial(segments.take, each.weight * size))
    masters: list[tuple[int, int]] = []
    for expert in (False, True):
        mine = [(size, n) for kind, size, n in weights if kind.expert == expert and kind.trained]
        whole = sum(size * n for size, n in mine)
        if shards:
            segments.take(each.weight * whole)
            sizes = [size for size, n in mine for _ in range(n)]
            mine = [(size, 1) for size in _last_shard(sizes, shards[expert])]
        segments.take(each.gradient * whole)
        masters += mine
    for block in blocks:
        segments.give(block)

    def master(size: int) -> None:
        copy = segments.take(each.weight * size)
        segments.take(each.master * size)
        segments.give(copy)

    for size, number in masters:
        segments.repeat(number, partial(master, size))
    return segments.unsplit


def _last_shard(sizes: Sequence[int], shards: int) -> list[int]:
    """What the last shard has of each weight, if the buffer begins with the last weight."""
    rest, found = -(-sum(sizes) // shards), []
    for size in sizes:
        found.append(min(size, rest))
        rest -= found[-1]
    return found


def _in_order(config: Config, stage: int) -> Iterator[tuple[Kind, int, int]]:
    """The weights that a rank of a stage holds, in the order of its passes."""
    at = places(config.parallel, stage)
    if 0 in at:
        yield from _weights(config, EMBEDDING)
    for names in chunks(config, stage):
        for name in names:
            yield from _weights(config, name)
    if config.parallel.chunks - 1 in at:
        yield from _weights(config, HEAD)
    for part in copies(config, stage):
        yield Kind(False, None, part not in config.run.frozen), table(config), 1


def buckets(config: Config, stage: int, phase: str) -> list[Part]:
    """Buffers of a rank for gathering weights and reducing gradients.

    Megatron-LM needs none: it gathers and reduces in its buffers of weights and gradients.

    Args:
        config: The model, its parallelism and its run.
        stage: The stage, counted from 0.
        phase: ``forward``, ``backward`` or ``step``, the optimizer's.

    >>> from memcalc.config import load
    >>> sharded = load("llama-3-8b", dp=8, sharder="fsdp2")
    >>> [part.name for part in buckets(sharded, 0, "forward")]
    ['gathered weights of one layer and the next']
    """
    run, parallel, each = config.run, config.parallel, recipe(config.run)
    sharder, found = parallel.sharding, []

    def add(name: str, size: int, certainty: str, source: str) -> None:
        found.append(Part(name, size, "buffers", certainty, source))

    if phase == "step":
        number = _stepped(config, stage)
        optimizer = OPTIMIZERS[run.optimizer]
        if optimizer.step_bytes:
            size, source = optimizer.step_bytes * number, optimizer.moments[0].source
            add("optimizer's step", size, "estimated", source)
        if each.master == 4 and each.gradient < 4 and not sharder.own_master:
            certainty, at_once = READ, sharder.step_elements if parallel.zero == 3 else None
            if at_once is not None and number > at_once:  # and the rest of its last parameter
                number, certainty = at_once, ESTIMATED
            name = "fp32 gradients for the master weights"
            add(name, 4 * number, certainty, sharder.source)
        return found
    if parallel.zero == sharder.gathered_at:
        size = each.weight * parameters(config, stage).total()
        add("gathered weights", size, READ, sharder.source)
    elif parallel.zero == 3:
        units = _units(config, stage)
        pairs = zip(units, [*units[1:], 0], strict=True)
        name, certainty = "gathered weights of one layer and the next", sharder.gathers_certainty
        add(name, each.weight * max(map(sum, pairs)), certainty, sharder.source)
    if phase == "backward" and sharder.reduce_buffer:
        size = (each.weight + each.gradient) * max(_units(config, stage, trained=True))
        add(
            "gradients of one layer, unsharded and in the reduce buffer",
            size,
            READ,
            sharder.reduce_buffer,
        )
    elif phase == "backward" and sharder.bucket is not None and parallel.zero:
        elements = run.bucket or sharder.bucket
        size = sharder.buckets[parallel.zero] * each.weight * elements
        add("gradient reduction buckets", size, READ, sharder.bucket_source)
    return found


def _stepped(config: Config, stage: int) -> int:
    """The parameters that a rank's optimizer updates: the trained ones, or its shard of them."""
    return sum(
        -(-number // (shard_ranks(config, kind.expert) if config.parallel.zero else 1))
        for kind, number in parameters(config, stage).items()
        if kind.trained
    )


def weight_bytes(run: Run, kind: Kind) -> int:
    """The bytes of one parameter of a kind, in the dtype that the passes use."""
    return 1 if run.fp8_params and kind.gemm == OF_WEIGHT else recipe(run).weight


def shard_ranks(config: Config, expert: bool) -> int:
    """The ranks that shard the states of experts, or of all else, if they are sharded."""
    parallel = config.parallel
    ranks = parallel.expert_replicas if expert else parallel.replicas
    if parallel.replicas == 1:
        return ranks
    copies_ = "--shard-copies", parallel.shard_copies
    fields.divides(copies_, ("ranks with the same experts", ranks))
    return ranks // parallel.shard_copies


def _graphs(config: Config, stage: int) -> "Counter[str]":
    """How many layers of each kind, embeddings and heads a stage has."""
    at = places(config.parallel, stage)
    found = Counter(kind for names in chunks(config, stage) for kind in names)
    found[EMBEDDING] = int(0 in at)
    found[HEAD] = int(config.parallel.chunks - 1 in at)
    return +found


def _units(config: Config, stage: int, trained: bool = False) -> list[int]:
    """Parameters, or trained ones, of each unit that is gathered: embedding, each layer, head."""
    layers = [kind for names in chunks(config, stage) for kind in names]
    there = _graphs(config, stage)
    names = [EMBEDDING] * there[EMBEDDING] + layers + [HEAD] * there[HEAD]
    sizes = {
        name: sum(n for kind, n in _of_graph(config, name) if kind.trained or not trained)
        for name in set(names)
    }
    return [sizes[name] for name in names] or [0]


@lru_cache(1024)
def _of_graph(config: Config, name: str) -> tuple[tuple[Kind, int], ...]:
    """The parameters of one graph that a rank holds, by their kinds."""
    found: Counter[Kind] = Counter()
    for kind, size, number in _weights(config, name):
        found[kind] += number * size
    return tuple(found.items())


@lru_cache(1024)
def _weights(config: Config, name: str) -> tuple[tuple[Kind, int, int], ...]:
    """The weights of one graph on a rank: kind, elements of each, and how many are alike.

    Every expert has a weight of its own.
    """
    ends = {EMBEDDING: embedding_graph, HEAD: head_graph}
    graph = ends[name](config) if name in ends else layer_graph(config, kind=name)
    found = []
    for op in graph.ops:
        trained = not op.is_in(config.run.frozen)
        for weight in (each for each in op.weights if not each.shared):
            matrix = name not in ends and weight.name.endswith(".weight") and op.kind.gemm
            kind = Kind(op.kind.of_experts, op.kind.gemm if matrix else None, trained)
            first, *others = (axis.local for axis in weight.axes)
            size, number = (prod(others), first) if kind.expert else (first * prod(others), 1)
            found.append((kind, size, number))
    return tuple(found)


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
        if EMBEDDING in _graphs(config, stage) or any(copies(config, stage))
    ]


def table(config: Config) -> int:
    """The elements of the embedding's table on a rank; a patch embedding has no table."""
    tables = (op.weights[0] for op in embedding_graph(config).ops if op.kind is LOOKUP)
    return next((prod(axis.local for axis in table.axes) for table in tables), 0)
