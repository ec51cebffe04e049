"""Backpropagation through time: what a recurrent network keeps, with and without checkpoints.

Every further step keeps as much as the one before, so that what one and two steps keep gives any
number of them, in numbers or symbols.
"""

from collections.abc import Mapping
from typing import NamedTuple

from memcalc.analysis import flops
from memcalc.analysis.activations import kept, total
from memcalc.analysis.parameters import owned
from memcalc.blocks.rnn import SEGMENT, rnn_graph
from memcalc.config.recompute import Policy
from memcalc.config.recurrent import Recurrent
from memcalc.graph.mesh import Size

CHECKPOINTED = Policy(frozenset({SEGMENT}))


class Costs(NamedTuple):
    """Bytes that time steps keep, of all layers.

    Attributes:
        input: Of a step's input.
        first: Of a first step, with the states that it starts from and without its input.
        step: Of every further one, without its input.
        state: Of a checkpoint: the states that a segment starts from.
    """

    input: Size
    first: Size
    step: Size
    state: Size

    def segment(self, steps: Size) -> Size:
        """What some steps keep, without their inputs."""
        return self.first + (steps - 1) * self.step

    def whole(self, steps: Size) -> Size:
        """What all steps keep, nothing recomputed."""
        return steps * self.input + self.segment(steps)

    def checkpointed(self, steps: Size, segments: Size) -> Size:
        """What is kept after the forward pass of checkpointed segments."""
        return steps * self.input + segments * self.state

    def peak(self, steps: int, every: int) -> int:
        """The most that backward keeps: the checkpoints, and the steps of one segment made again.

        It is while the last segment is made again, unless that is short, and the one before, whose
        successor's checkpoint is gone, is longer.
        """
        segments = -(-steps // every)
        last = self.checkpointed(steps, segments - 1) + self.segment(steps - every * (segments - 1))
        if segments == 1:
            return int(last)
        return int(max(last, self.checkpointed(steps, segments - 2) + self.segment(every)))

    def even_peak(self, steps: Size, every: Size) -> Size:
        """The same where checkpoints are evenly spaced, in numbers or symbols."""
        return self.checkpointed(steps, steps / every - 1) + self.segment(every)

    def best(self, steps: int) -> int:
        """The steps between checkpoints whose peak is least; of several the most, to keep less.

        >>> vanilla = Costs(0, 2, 1, 1)  # a vanilla cell's, in units of a state
        >>> vanilla.peak(100, 10), vanilla.peak(100, 13)  # 9 + 11, 6 + 14
        (20, 20)
        >>> vanilla.best(100)
        13
        """
        return min(range(steps, 0, -1), key=lambda every: self.peak(steps, every))


def costs(config: Recurrent, sizes: Mapping[str, Size] | None = None) -> Costs:
    """The bytes of a network's steps; ``sizes`` are those of ``memcalc.blocks.rnn.rnn_graph``.

    >>> costs(Recurrent(cell="lstm", hidden_size=1, batch_size=1))  # 4 gates, tanh, state, memory
    Costs(input=4, first=28, step=28, state=8)
    """

    def bytes_of(steps: int, every: int | None) -> Size:
        policy = CHECKPOINTED if every else Policy()
        return total(kept(rnn_graph(config, steps, every, sizes), policy))

    input_ = bytes_of(2, 2) - bytes_of(1, 1)  # one checkpoint either way
    first = bytes_of(1, None) - input_
    return Costs(
        input_,
        first,
        bytes_of(2, None) - 2 * input_ - first,
        bytes_of(1, 1) - input_,
    )


def forward_flops(config: Recurrent, steps: Size, sizes: Mapping[str, Size] | None = None) -> Size:
    """FLOPs of the forward pass, which checkpoints add once more.

    >>> forward_flops(Recurrent(hidden_size=8, batch_size=2), 3) == 3 * 2 * 2 * (8 * 8 + 8 * 8)
    True
    """
    return steps * flops.forward(rnn_graph(config, 1, None, sizes))


def parameters(config: Recurrent, sizes: Mapping[str, Size] | None = None) -> Size:
    """The weights and biases of all layers.

    >>> h = 8
    >>> parameters(Recurrent(cell="gru", hidden_size=h)) == 3 * (2 * h**2 + 2 * h)
    True
    """
    return owned(rnn_graph(config, 1, None, sizes))
