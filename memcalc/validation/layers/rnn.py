"""Recurrent cells that save what PyTorch's cells save, unfused or as CUDA's fused kernels.

PyTorch has no fused cells on the CPU; stand-ins replace them there.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from memcalc.config.recurrent import KERNELS, Recurrent
from memcalc.validation.layers.modules import TYPES
from memcalc.validation.measuring.kernels import State, fused_gru, fused_lstm

GATES = {"vanilla": 1, "gru": 3, "lstm": 4}


class Network(nn.Module):
    """A stack of cells over time: (s, b, i) -> the last state (b, h) of the top cell.

    Args:
        config: The cells; the batch size and the steps are those of the input.
        every: Steps between checkpoints; None for no recomputation.
        device: The device of the weights.

    >>> network = Network(Recurrent(cell="gru", hidden_size=8))
    >>> network(torch.randn(3, 2, 8)).shape
    torch.Size([2, 8])
    """

    def __init__(
        self, config: Recurrent, every: int | None = None, device: str | torch.device = "cpu"
    ) -> None:
        super().__init__()
        self.every = every
        self.early_stop = True
        self.states = 2 if config.cell == "lstm" else 1
        self.hidden = config.hidden_size
        self.cells = nn.ModuleList(Cell(config, width, device) for width in config.layer_inputs)

    def forward(self, x: Tensor) -> Tensor:
        """x (s, b, i), step by step."""
        steps, b, _ = x.shape
        states = [x.new_zeros(b, self.hidden) for _ in range(self.states * len(self.cells))]
        every = self.every or steps
        for first in range(0, steps, every):
            part = x[first : first + every]
            if self.every is None:
                states = self._segment(part, *states)
            else:
                states = checkpoint(
                    self._segment, part, *states, use_reentrant=False, early_stop=self.early_stop
                )
        return states[-self.states]

    def _segment(self, x: Tensor, *states: Tensor) -> list[Tensor]:
        """Some steps of x: the states of all cells before them -> those after them."""
        held = list(states)
        for step in range(x.shape[0]):
            y = x[step]
            for number, cell in enumerate(self.cells):
                own = slice(number * self.states, (number + 1) * self.states)
                held[own] = cell(y, *held[own])
                y = held[own.start]
        return held


class Cell(nn.Module):
    """One cell: x (b, i) and its states, one or two of (b, h) -> the next states."""

    def __init__(self, config: Recurrent, inputs: int, device: str | torch.device) -> None:
        super().__init__()
        cell, hidden, dtype = config.cell, config.hidden_size, TYPES[config.precision]
        rows = GATES[cell] * hidden

        def drawn(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, device=device, dtype=dtype) / hidden**0.5)

        self.weight_ih, self.weight_hh = drawn(rows, inputs), drawn(rows, hidden)
        self.bias_ih, self.bias_hh = drawn(rows), drawn(rows)
        self.fused = KERNELS[config.kernels].fused and cell in FUSED
        self.step = FUSED[cell] if self.fused else CHAINS[cell]

    def forward(self, x: Tensor, *state: Tensor) -> State:
        """One step; a fused kernel adds the biases itself."""
        if self.fused:
            products = linear(x, self.weight_ih), linear(state[0], self.weight_hh)
            return self.step(*products, *state[-1:], self.bias_ih, self.bias_hh)
        input_ = linear(x, self.weight_ih, self.bias_ih)
        return self.step(input_, linear(state[0], self.weight_hh, self.bias_hh), *state[-1:])


def vanilla_chain(input_: Tensor, recurrent: Tensor, state: Tensor) -> State:
    """The next state, unfused."""
    return (recurrent.add_(input_).tanh(),)


def gru_chain(input_: Tensor, recurrent: Tensor, state: Tensor) -> State:
    """The next state, unfused, with in-place operations where PyTorch has them."""
    of_input, of_state = input_.unsafe_chunk(3, 1), recurrent.unsafe_chunk(3, 1)
    reset = of_state[0].add_(of_input[0]).sigmoid_()
    update = of_state[1].add_(of_input[1]).sigmoid_()
    new = of_input[2].add(of_state[2].mul_(reset)).tanh_()
    return ((state - new).mul_(update).add_(new),)


def lstm_chain(input_: Tensor, recurrent: Tensor, cell_state: Tensor) -> State:
    """The next state and cell state, unfused, with in-place operations where PyTorch has them."""
    gates = recurrent.add_(input_).unsafe_chunk(4, 1)
    in_, forget, cell, out = (
        gates[0].sigmoid_(),
        gates[1].sigmoid_(),
        gates[2].tanh_(),
        gates[3].sigmoid_(),
    )
    next_ = (forget * cell_state).add_(in_ * cell)
    return out * next_.tanh(), next_


CHAINS: dict[str, Callable[..., State]] = {
    "vanilla": vanilla_chain,
    "gru": gru_chain,
    "lstm": lstm_chain,
}
FUSED: dict[str, Callable[..., State]] = {"gru": fused_gru, "lstm": fused_lstm}
