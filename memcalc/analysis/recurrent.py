"""Backpropagation through time: what a recurrent network keeps, with and without checkpoints.

Every step after the first keeps equally much. The bytes of any number of steps therefore follow
from those of one and of two steps, in numbers or symbols.
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
    """Bytes that time steps keep, summed over all layers.

    Attributes:
        input: Bytes of one step's input.
        first: Bytes of the first step, with its initial states and without its input.
        step: Bytes of every later step, without its input.
        state: Bytes of a checkpoint: the initial states of a segment.
    """

    input: Size
    first: Size
    step: Size
    state: Size

    def segment(self, steps: Size) -> Size:
        """What consecutive steps keep, without their inputs."""
        return self.first + (steps - 1) * self.step

    def whole(self, steps: Size) -> Size:
        """What all steps keep if nothing is recomputed."""
        return steps * self.input + self.segment(steps)

    def checkpointed(self, steps: Size, segments: Size) -> Size:
        """What checkpointed segments keep after the forward pass."""
        return steps * self.input + segments * self.state

    def peak(self, steps: int, every: int) -> int:
        """The most bytes kept during backward: the checkpoints and one recomputed segment.

        The peak is in the last segment or, if that one is short, in the segment before, when the
        last checkpoint is freed.
        """
        segments = -(-steps // every)
        last = self.checkpointed(steps, segments - 1) + self.segment(steps - every * (segments - 1))
        if segments == 1:
            return int(last)
        return int(max(last, self.checkpointed(steps, segments - 2) + self.segment(every)))

    def even_peak(self, steps: Size, every: Size) -> Size:
        """The same if all segments are equally long, in numbers or symbols."""
        return self.checkpointed(steps, steps / every - 1) + self.segment(every)

    def best(self, steps: int) -> int:
        """The steps between checkpoints with the lowest peak; of several, the most steps.

        >>> vanilla = Costs(0, 2, 1, 1)  # a vanilla cell's, in units of a state
        >>> vanilla.peak(100, 10), vanilla.peak(100, 13)  # 9 + 11, 6 + 14
        (20, 20)
        >>> vanilla.best(100)
        13
        """
        return min(range(steps, 0, -1), key=lambda every: self.peak(steps, every))


def costs(config: Recurrent, sizes: Mapping[str, Size] | None = None) -> Costs:
    """The bytes that steps keep; ``sizes`` are as in ``memcalc.blocks.rnn.rnn_graph``.

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
    """FLOPs of the forward pass, which checkpoints run a second time.

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
