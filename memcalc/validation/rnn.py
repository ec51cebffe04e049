"""Own recurrent cells, which keep what PyTorch's keep: op by op, or in one kernel as on CUDA.

On the CPU PyTorch has no fused cells, and ``FusedGru`` and ``FusedLstm`` stand in for them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from memcalc.config.recurrent import Recurrent
from memcalc.validation.modules import TYPES

GATES = {"vanilla": 1, "gru": 3, "lstm": 4}

State = tuple[Tensor, ...]


class Network(nn.Module):
    """A stack of cells over time: (s, b, i) -> the last state of the uppermost (b, h).

    Args:
        config: The cells; batch and steps are those of what it is given.
        every: Steps between checkpoints; None recomputes nothing.
        device: Where its weights lie.

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
        """x (s, b, i), a step after the other."""
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
        """Some steps of x, from the states of all cells to those after them."""
        held = list(states)
        for step in range(x.shape[0]):
            y = x[step]
            for number, cell in enumerate(self.cells):
                own = slice(number * self.states, (number + 1) * self.states)
                held[own] = cell(y, *held[own])
                y = held[own.start]
        return held


class Cell(nn.Module):
    """One cell: x (b, i) and its state, (b, h) or two of them -> the next state."""

    def __init__(self, config: Recurrent, inputs: int, device: str | torch.device) -> None:
        super().__init__()
        cell, hidden, dtype = config.cell, config.hidden_size, TYPES[config.precision]
        rows = GATES[cell] * hidden

        def drawn(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, device=device, dtype=dtype) / hidden**0.5)

        self.weight_ih, self.weight_hh = drawn(rows, inputs), drawn(rows, hidden)
        self.bias_ih, self.bias_hh = drawn(rows), drawn(rows)
        self.fused = config.kernels == "torch-cuda" and cell in FUSED
        self.step = FUSED[cell] if self.fused else CHAINS[cell]

    def forward(self, x: Tensor, *state: Tensor) -> State:
        """One step; a fused kernel adds the biases itself."""
        if self.fused:
            products = linear(x, self.weight_ih), linear(state[0], self.weight_hh)
            return self.step(*products, *state[-1:], self.bias_ih, self.bias_hh)
        input_ = linear(x, self.weight_ih, self.bias_ih)
        return self.step(input_, linear(state[0], self.weight_hh, self.bias_hh), *state[-1:])


def vanilla_chain(input_: Tensor, recurrent: Tensor, state: Tensor) -> State:
    """The next state, operation by operation."""
    return (recurrent.add_(input_).tanh(),)


def gru_chain(input_: Tensor, recurrent: Tensor, state: Tensor) -> State:
    """The next state, operation by operation and in place where PyTorch is."""
    of_input, of_state = input_.unsafe_chunk(3, 1), recurrent.unsafe_chunk(3, 1)
    reset = of_state[0].add_(of_input[0]).sigmoid_()
    update = of_state[1].add_(of_input[1]).sigmoid_()
    new = of_input[2].add(of_state[2].mul_(reset)).tanh_()
    return ((state - new).mul_(update).add_(new),)


def lstm_chain(input_: Tensor, recurrent: Tensor, memory: Tensor) -> State:
    """The next state and memory, operation by operation and in place where PyTorch is."""
    gates = recurrent.add_(input_).unsafe_chunk(4, 1)
    in_, forget, cell, out = (
        gates[0].sigmoid_(),
        gates[1].sigmoid_(),
        gates[2].tanh_(),
        gates[3].sigmoid_(),
    )
    next_ = (forget * memory).add_(in_ * cell)
    return out * next_.tanh(), next_


class FusedGru(Function):
    """Both products (b, 3h), the state and both biases -> the next state, in one kernel.

    Keeps its inputs and a workspace: reset, update and new gate, the state, and the new gate's part
    of the recurrent product, as ``_thnn_fused_gru_cell``.
    """

    @staticmethod
    def forward(
        ctx: Any, input_: Tensor, recurrent: Tensor, state: Tensor, *biases: Tensor
    ) -> Tensor:
        """The next state."""
        of_input = (input_ + biases[0]).chunk(3, 1)
        of_state = (recurrent + biases[1]).chunk(3, 1)
        reset = torch.sigmoid(of_input[0] + of_state[0])
        update = torch.sigmoid(of_input[1] + of_state[1])
        new = torch.tanh(of_input[2] + reset * of_state[2])
        workspace = torch.cat((reset, update, new, state, of_state[2]), 1)
        ctx.save_for_backward(input_, recurrent, state, workspace)
        return new + update * (state - new)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        """By the chain rule, from the workspace alone."""
        reset, update, new, state, candidate = ctx.saved_tensors[3].chunk(5, 1)
        dy = grads[0]
        d_new = dy * (1 - update) * (1 - new**2)
        d_update = dy * (state - new) * update * (1 - update)
        d_reset = d_new * candidate * reset * (1 - reset)
        d_input = torch.cat((d_reset, d_update, d_new), 1)
        d_recurrent = torch.cat((d_reset, d_update, d_new * reset), 1)
        return d_input, d_recurrent, dy * update, d_input.sum(0), d_recurrent.sum(0)


class FusedLstm(Function):
    """Both products (b, 4h), the memory and both biases -> next state and memory, in one kernel.

    Keeps its products, both memories and a workspace of the gates, as ``_thnn_fused_lstm_cell``.
    """

    @staticmethod
    def forward(
        ctx: Any, input_: Tensor, recurrent: Tensor, memory: Tensor, *biases: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The next state and memory."""
        gates = (input_ + recurrent + biases[0] + biases[1]).chunk(4, 1)
        in_, forget, out = (torch.sigmoid(gates[each]) for each in (0, 1, 3))
        cell = torch.tanh(gates[2])
        next_ = forget * memory + in_ * cell
        workspace = torch.cat((in_, forget, cell, out), 1)
        ctx.save_for_backward(input_, recurrent, memory, next_, workspace)
        return out * torch.tanh(next_), next_

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        """By the chain rule, from the memories and the workspace."""
        memory, next_, workspace = ctx.saved_tensors[2:]
        in_, forget, cell, out = workspace.chunk(4, 1)
        dy, d_next = grads
        tanh_ = torch.tanh(next_)
        d_next = d_next + dy * out * (1 - tanh_**2)
        d_gates = torch.cat(
            (
                d_next * cell * in_ * (1 - in_),
                d_next * memory * forget * (1 - forget),
                d_next * in_ * (1 - cell**2),
                dy * tanh_ * out * (1 - out),
            ),
            1,
        )
        d_bias = d_gates.sum(0)
        return d_gates, d_gates, d_next * forget, d_bias, d_bias


def fused_gru(*inputs: Tensor) -> State:
    """PyTorch's own kernel on CUDA, its stand-in elsewhere."""
    if inputs[0].is_cuda:
        return (torch.ops.aten._thnn_fused_gru_cell(*inputs)[0],)
    return (FusedGru.apply(*inputs),)


def fused_lstm(*inputs: Tensor) -> State:
    """PyTorch's own kernel on CUDA and on meta, its stand-in elsewhere."""
    if inputs[0].is_cuda or inputs[0].is_meta:
        state, memory, _ = torch.ops.aten._thnn_fused_lstm_cell(*inputs)
        return state, memory
    found: State = FusedLstm.apply(*inputs)
    return found


CHAINS: dict[str, Callable[..., State]] = {
    "vanilla": vanilla_chain,
    "gru": gru_chain,
    "lstm": lstm_chain,
}
FUSED: dict[str, Callable[..., State]] = {"gru": fused_gru, "lstm": fused_lstm}
