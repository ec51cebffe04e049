"""Weights, gradients and optimizer states of every stage.

Parameters are read off the graphs of a stage's chunks. A recipe says how many bytes each parameter
takes, and ``Parallel.zero`` which of these bytes are sharded.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from math import prod
from typing import NamedTuple

from memcalc.analysis.parts import Part
from memcalc.analysis.rank import Rank, WeightKind
from memcalc.analysis.segments import SOURCE as SEGMENTS
from memcalc.analysis.segments import Segments
from memcalc.config import PRECISION_BYTES, Config, Run, fields
from memcalc.config.optimizers import ALL, MATRICES, OPTIMIZERS, Moments, whole
from memcalc.config.run import MAIN_GRADS, MAIN_PARAMS, MOMENTS
from memcalc.errors import ConfigError
from memcalc.frameworks.record import ESTIMATED, READ
from memcalc.graph.graph import OF_WEIGHT
from memcalc.lazy import resolve

GRADIENTS = "gradients"  # the group of their parts
EMA = "PyTorch optim/swa_utils.py: AveragedModel"
AVERAGE = "moving average of the weights"
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


def states(rank: Rank) -> list[Part]:
    """What a rank always holds: weights, gradients, optimizer states.

    Raises:
        ConfigError: The experts' ranks or the shards do not divide the ranks of a stage.

    >>> from memcalc.config import load
    >>> config = load("22b", dp=4, zero=1, global_batch_size=16)
    >>> n = Rank(config, 0).parameters.total()
    >>> {part.name: part.bytes / n for part in states(Rank(config, 0))}
    {'weights': 2.0, 'gradients': 4.0, 'master weights': 1.0, "Adam's moments": 2.0}
    """
    config, held = rank.config, rank.parameters
    run, each, sharder = config.run, recipe(config.run), config.parallel.sharding
    trained = [kind for kind in held if kind.trained]
    own = each.master or each.weight
    fp8 = {kind: 1 if run.fp8_params else 2 for kind in held if kind.gemm == OF_WEIGHT}
    found: list[Part] = []

    def add(
        name: str, group: str, zero: int, sizes: dict[WeightKind, int], source: str = ""
    ) -> None:
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
    add("gradients", GRADIENTS, 2, dict.fromkeys(trained, each.gradient))
    if not sharder.own_master:
        add("master weights", "optimizer", 1, dict.fromkeys(trained, each.master))
    for kept in moments(config):
        if kept.layout is whole:
            mine = [kind for kind in trained if of_weights(kind, kept.weights)]
            sizes = dict.fromkeys(mine, kept.number * each.moment)
            add(kept.name, "optimizer", 1, sizes, kept.source)
        else:
            found.append(_of_shapes(rank, kept))
    if run.ema:
        size = each.master or each.weight if sharder.own_master else each.weight
        stage = 2 if sharder.own_master else 3
        add(AVERAGE, "weights", stage, dict.fromkeys(held, size), EMA)
    return [part for part in found if part.bytes]


def moments(config: Config) -> list[Moments]:
    """The moments that a run's optimizer keeps; some only with a momentum.

    >>> from memcalc.config import load
    >>> [kept.name for kept in moments(load("gpt2", optimizer="sgd"))]
    ['momentum']
    >>> moments(load("gpt2", optimizer="sgd", implementation="torch"))
    []
    """
    momentum = config.run.momentum
    if momentum is None:
        momentum = config.framework.momentum
    every = OPTIMIZERS[config.run.optimizer].moments
    return [kept for kept in every if momentum or not kept.of_momentum]


def of_weights(kind: WeightKind, weights: str) -> bool:
    """Whether a kind of weight is among ``ALL``, the layers' ``MATRICES`` or all ``OTHERS``."""
    return weights == ALL or bool(kind.gemm) == (weights == MATRICES)


def _of_shapes(rank: Rank, kept: Moments) -> Part:
    """Moments whose bytes depend on the shape of each weight, sharded evenly.

    An optimizer that updates one flat tensor per rank sees vectors only.
    """
    parallel, size = rank.config.parallel, recipe(rank.config.run).moment
    flat = bool(parallel.zero) and parallel.sharding.flat
    total = 0
    for kind, shape, alike in rank.shapes():
        if kind.trained and of_weights(kind, kept.weights):
            shards = shard_ranks(rank.config, kind.expert) if parallel.zero else 1
            each = kept.layout([prod(shape)] if flat else shape, size)
            total += alike * kept.number * -(-each // shards)
    certainty = "estimated" if parallel.zero else "exact"
    return Part(kept.name, total, "optimizer", certainty, kept.source)


def unit_gradients(rank: Rank, name: str) -> int:
    """The bytes of the gradients of one of a rank's units: a kind of layer, or an end.

    >>> from memcalc.config import load
    >>> rank = Rank(load("llama-3-8b"), 0)
    >>> sum(unit_gradients(rank, name) for name in rank.units) == 4 * rank.parameters.total()
    True
    """
    each, zero, size = recipe(rank.config.run), rank.config.parallel.zero, 0
    for kind, number in rank.unit(name):
        shards = shard_ranks(rank.config, kind.expert) if zero >= 2 else 1
        size += each.gradient * -(-number // shards) if kind.trained else 0
    return size


def weight_dtype(run: Run) -> int:
    """The bytes per element of the weights that the passes use, and of autograd's gradients."""
    return recipe(run).weight


def unsplit_states(rank: Rank) -> Iterator[Part]:
    """Bytes of unsplit blocks beyond weights, gradients and master weights, on the last rank.

    Megatron-core allocates these first, in this order: the weights; the buffers of weights and
    gradients, in which the model's last parameter comes first; the master weights or their shards.

    Raises:
        ConfigError: A rank holds too many weights.

    >>> from memcalc.config import load
    >>> [part.name for part in unsplit_states(Rank(load("gpt2"), 0))]
    ['unsplit remainders of allocator blocks: states']
    """
    config, parallel = rank.config, rank.config.parallel
    if not parallel.sharding.known_order or config.run.environment.expandable_segments:
        return
    shards = tuple(shard_ranks(config, expert) for expert in (False, True)) if parallel.zero else ()
    weights = tuple(rank.weights())
    if (number := sum(alike for _, _, alike in weights)) > MOST_WEIGHTS:
        raise ConfigError(
            f"a rank of stage {rank.stage} holds {number} weight tensors, more than the "
            f"{MOST_WEIGHTS} that memcalc can lay out: use a larger --ep or --pp"
        )
    size = _unsplit(weights, recipe(config.run), shards)
    if size:
        yield Part(
            "unsplit remainders of allocator blocks: states",
            size,
            "buffers",
            "framework-dependent",
            SEGMENTS,
        )


@lru_cache(256)
def _unsplit(
    weights: tuple[tuple[WeightKind, int, int], ...], each: Recipe, shards: tuple[int, ...]
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


def buckets(rank: Rank, phase: str) -> list[Part]:
    """Buffers of a rank for gathering weights and reducing gradients.

    Megatron-LM needs none: it gathers and reduces in its buffers of weights and gradients.

    Args:
        rank: The rank.
        phase: ``forward``, ``backward`` or ``step``, the optimizer's.

    >>> from memcalc.config import load
    >>> sharded = load("llama-3-8b", dp=8, sharder="fsdp2")
    >>> [part.name for part in buckets(Rank(sharded, 0), "forward")]
    ['gathered weights of one layer and the next']
    """
    run, parallel, each = rank.config.run, rank.config.parallel, recipe(rank.config.run)
    sharder, found = parallel.sharding, []

    def add(name: str, size: int, certainty: str, source: str) -> None:
        found.append(Part(name, size, "buffers", certainty, source))

    if phase == "step":
        number = _stepped(rank)
        if each.master == 4 and each.gradient < 4 and not sharder.own_master:
            certainty, at_once = READ, sharder.step_elements if parallel.zero == 3 else None
            if at_once is not None and number > at_once:  # and the rest of its last parameter
                number, certainty = at_once, ESTIMATED
            name = "fp32 gradients for the master weights"
            add(name, 4 * number, certainty, sharder.source)
        return found
    if parallel.zero == sharder.gathered_at:
        size = each.weight * rank.parameters.total()
        add("gathered weights", size, READ, sharder.source)
    elif parallel.zero == 3:
        units = rank.unit_sizes()
        pairs = zip(units, [*units[1:], 0], strict=True)
        name, certainty = "gathered weights of one layer and the next", sharder.gathers_certainty
        add(name, each.weight * max(map(sum, pairs)), certainty, sharder.source)
    if phase == "backward" and sharder.reduce_buffer:
        size = (each.weight + each.gradient) * max(rank.unit_sizes(trained=True))
        add(
            "gradients of the largest unit, unsharded and in the reduce buffer",
            size,
            READ,
            sharder.reduce_buffer,
        )
    elif phase == "backward" and sharder.bucket is not None and parallel.zero:
        elements = run.bucket or sharder.bucket
        size = sharder.buckets[parallel.zero] * each.weight * elements
        add("gradient reduction buckets", size, READ, sharder.bucket_source)
    return found


def root_parts(rank: Rank, moment: str) -> list[Part]:
    """The same of FSDP2 at a moment of a pass, where the embedding and the head are in the root.

    >>> from memcalc.config import load
    >>> config = load("llama-3-8b", dp=8, sharder="fsdp2", implementation="torch")
    >>> [part.name for part in root_parts(Rank(config, 0), "loss")]
    ['gathered weights that stay']
    """
    each, function = recipe(rank.config.run), rank.config.parallel.sharding.around_root
    found = resolve(function)(rank, moment, each.weight, each.gradient)
    return [Part(b.name, b.bytes, "buffers", READ, b.source) for b in found if b.bytes]


def in_root(config: Config) -> bool:
    """Whether the embedding and the head are FSDP2's root, which stays gathered in a pass."""
    sharded = config.parallel.sharding.around_root and config.parallel.zero > 0
    return bool(sharded) and config.run.implementation.maker.ends_in_root


def _stepped(rank: Rank) -> int:
    """The parameters that a rank's optimizer updates: the trained ones, or its shard of them."""
    return sum(
        -(-number // (shard_ranks(rank.config, kind.expert) if rank.config.parallel.zero else 1))
        for kind, number in rank.parameters.items()
        if kind.trained
    )


def weight_bytes(run: Run, kind: WeightKind) -> int:
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
