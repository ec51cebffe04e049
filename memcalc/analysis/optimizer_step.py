"""What an optimizer's step holds on a rank while it runs, beside weights, gradients and states."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

from memcalc.analysis.parts import Part
from memcalc.analysis.rank import Rank
from memcalc.analysis.states import of_weights, recipe, shard_ranks
from memcalc.config import Config
from memcalc.config.optimizers import (
    BF16,
    FP32,
    MOMENT,
    OPTIMIZERS,
    WEIGHT,
    WIDE_MASTER,
    WIDE_MOMENT,
    WIDE_WEIGHT,
    Step,
)
from memcalc.frameworks.record import ESTIMATED, READ

NAME = "temporary tensors of the optimizer's step"


class Tensor(NamedTuple):
    """A tensor that an optimizer updates.

    Attributes:
        shape: Its shape.
        alike: How many like it follow one another.
        shards: Over how many ranks each is sharded.
    """

    shape: Sequence[int]
    alike: int = 1
    shards: int = 1

    @property
    def elements(self) -> int:
        """The elements of this rank's shard."""
        return -(-prod(self.shape) // self.shards)


def form(config: Config) -> str:
    """The form of the step: what was asked for, else the framework's, else the first there is.

    >>> from memcalc.config import load
    >>> form(load("gpt2", implementation="torch")), form(load("gpt2"))
    ('foreach', 'fused')
    >>> form(load("gpt2", implementation="torch", optimizer="adafactor"))
    'loop'
    """
    steps = OPTIMIZERS[config.run.optimizer].steps
    usual = config.framework.optimizer_step
    return config.run.optimizer_step or (usual if usual in steps else next(iter(steps)))


def steps(config: Config) -> tuple[Step, ...]:
    """What the step of a run holds: its parts, of which one runs after the other."""
    return OPTIMIZERS[config.run.optimizer].steps[form(config)]


def temporary(rank: Rank) -> Iterator[Part]:
    """What a rank's optimizer holds during its step, sharded as its states are.

    >>> from memcalc.config import load
    >>> rank = Rank(load("gpt2", implementation="torch"), 0)
    >>> [part.bytes for part in temporary(rank)] == [4 * rank.parameters.total()]
    True
    """
    config = rank.config
    sizes, decay = element_bytes(config), config.run.weight_decay > 0
    found = [(0, "")]
    for step in steps(config):
        copies = any(sizes[dtype] for dtype in (*step.all, *step.now, *step.before))
        if copies or step.more or (decay and step.decay):
            found.append((held(step, _updated(rank, step), sizes, decay), step.source))
    size, source = max(found)
    if size:
        yield Part(NAME, size, "buffers", ESTIMATED if form(config) == "loop" else READ, source)


def counters(rank: Rank) -> Iterator[Part]:
    """The step counters of a fused Adam, one per weight: optimizer states, but for their number.

    >>> from memcalc.config import load
    >>> run = {"implementation": "torch", "optimizer_step": "fused"}
    >>> [part.bytes for part in counters(Rank(load("gpt2", **run), 0))]
    [592]
    """
    config = rank.config
    counts = config.framework.counts_steps and config.run.optimizer == "adam"
    if counts and form(config) == "fused":
        # Hugging Face's experts are one tensor
        stacked = config.run.implementation.maker.whole_models
        weights = [(kind.expert, alike) for kind, _, alike in rank.weights() if kind.trained]
        number = sum(1 if expert and stacked else alike for expert, alike in weights)
        yield Part(
            "step counters", 4 * number, "optimizer", READ, OPTIMIZERS["adam"].moments[0].source
        )


def held(
    step: Step, tensors: Iterable[Tensor], sizes: Mapping[str, int], decay: bool = False
) -> int:
    """The most bytes that a step holds at once while it updates some tensors, in their order.

    Args:
        step: What it holds.
        tensors: What it updates.
        sizes: Bytes per element of each dtype that ``step`` names.
        decay: Whether a weight decay is added to the gradients.

    >>> loop = OPTIMIZERS["adam"].steps["loop"][0]
    >>> held(loop, [Tensor((8, 4)), Tensor((4, 4))], {MOMENT: 4})  # sqrt and denom of the first
    256
    >>> held(loop, [Tensor((8, 4), alike=2)], {MOMENT: 4})  # and those of the first of two
    384
    """
    extra = {name: sizes[WEIGHT] if decay and step.decay == name else 0 for name in ("all", "now")}
    of_all = sum(sizes[dtype] for dtype in step.all) + extra["all"]
    of_now = sum(sizes[dtype] for dtype in step.now) + extra["now"]
    of_before = sum(sizes[dtype] for dtype in step.before)
    total = most = before = 0
    for tensor in tensors:
        total += tensor.alike * tensor.elements
        now = of_now * tensor.elements
        if step.more:
            number, dtype = step.more
            now += sizes[dtype] * number(tensor.shape)
        if tensor.alike > 1:
            before = max(before, tensor.elements)
        most = max(most, now + of_before * before)
        before = tensor.elements
    return of_all * total + most


def element_bytes(config: Config) -> dict[str, int]:
    """Bytes per element of each dtype of what a step holds; 0 where no copy is made."""
    each = recipe(config.run)
    weight, widens = each.master or each.weight, config.framework.widens_states
    return {
        MOMENT: each.moment,
        WEIGHT: weight,
        FP32: 4,
        BF16: 2,
        WIDE_WEIGHT: 4 if weight < 4 else 0,
        WIDE_MOMENT: 4 if widens and each.moment < 4 else 0,
        WIDE_MASTER: 4 if widens and config.run.main_params == "fp16" and each.master else 0,
    }


def _updated(rank: Rank, step: Step) -> Iterator[Tensor]:
    """The tensors that a rank's optimizer updates in a step: its shards of them, or all as one."""
    parallel = rank.config.parallel
    found = [
        Tensor(shape, alike, shard_ranks(rank.config, kind.expert) if parallel.zero else 1)
        for kind, shape, alike in rank.shapes()
        if kind.trained and of_weights(kind, step.weights)
    ]
    if parallel.zero and parallel.sharding.flat:
        found = [Tensor((sum(each.alike * each.elements for each in found),))]
    return iter(found)
