"""Stacks of recurrent cells: (s, b, i) -> (s, b, h), step by step and within a step layer by layer.

A cell is its forward pass, as every block is. Every step reads the states of the step before, and
all steps share their weights. What they keep is what backpropagation through time needs.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TypeAlias

from memcalc.config.recurrent import KERNELS, Recurrent
from memcalc.graph import ops
from memcalc.graph.graph import Graph, Tensor
from memcalc.graph.mesh import Axis, Mesh, Size

SEGMENT = "segment"  # the region of the steps between two checkpoints
RECURRENT = "recurrent"  # in the name of a GEMM with a state

State: TypeAlias = tuple[Tensor, ...]


def vanilla(g: Graph, name: str, x: Tensor, state: State, fused: bool, shared: bool) -> State:
    """x (b, i) and a state (b, h) -> the next state: tanh(Wx + Uh). Elman 1990."""
    input_, recurrent = _gemms(g, name, x, state[0], 1, shared)
    return (ops.vanilla_cell(g, name, input_, recurrent),)


def gru(g: Graph, name: str, x: Tensor, state: State, fused: bool, shared: bool) -> State:
    """x (b, i) and a state (b, h) -> the next state, by three gates. Cho et al. 2014."""
    input_, recurrent = _gemms(g, name, x, state[0], 3, shared)
    run = ops.fused_gru_cell if fused else ops.gru_cell
    return (run(g, name, input_, recurrent, state[0]),)


def lstm(g: Graph, name: str, x: Tensor, state: State, fused: bool, shared: bool) -> State:
    """x (b, i), hidden and cell state (b, h) -> the next two, by four gates. Gers et al. 2000."""
    input_, recurrent = _gemms(g, name, x, state[0], 4, shared)
    run = ops.fused_lstm_cell if fused else ops.lstm_cell
    return run(g, name, input_, recurrent, state[1])


Cell = Callable[[Graph, str, Tensor, State, bool, bool], State]

# For each cell, its step, and the names of the tensors in its state.
CELLS: dict[str, tuple[Cell, tuple[str, ...]]] = {
    "vanilla": (vanilla, ("state",)),
    "gru": (gru, ("state",)),
    "lstm": (lstm, ("state", "cell_state")),
}


def rnn_graph(
    config: Recurrent,
    steps: int,
    every: int | None = None,
    sizes: Mapping[str, Size] | None = None,
) -> Graph:
    """The graph of a stack of cells over some time steps.

    Args:
        config: The cells.
        steps: How many time steps.
        every: Steps between checkpoints. Each segment is then a region; None is no checkpoints.
        sizes: Sizes by letter, b, h and i (the first layer's input), instead of the config's own:
            ints, Fractions or symbols.

    >>> graph = rnn_graph(Recurrent(hidden_size=8, batch_size=2), steps=3)
    >>> [op.kind.name for op in graph.ops[:4]]
    ['time_step', 'linear', 'linear', 'vanilla_cell']
    """
    if sizes is None:
        sizes = {"b": config.batch_size, "h": config.hidden_size, "i": config.layer_inputs[0]}
    b, h, i = (Axis.whole(letter, sizes[letter]) for letter in "bhi")
    g = Graph(Mesh(), config.activation_bytes)
    cell, kept = CELLS[config.cell]
    inputs = g.input("input", (Axis.whole("s", steps), b, i))
    layers = [f"layer{number}" for number in range(1, config.layers + 1)]
    states = [tuple(g.input(f"{layer}_{name}", (b, h)) for name in kept) for layer in layers]
    for first in range(0, steps, every or steps):
        with g.region(SEGMENT) if every else nullcontext():
            for step in range(first, min(first + (every or steps), steps)):
                x = ops.time_step(g, f"step{step + 1}_input", inputs)
                for number, layer in enumerate(layers):
                    name = f"{layer}_step{step + 1}"
                    fused = KERNELS[config.kernels].fused
                    states[number] = cell(g, name, x, states[number], fused, step > 0)
                    x = states[number][0]
    return g


def _gemms(
    g: Graph, name: str, x: Tensor, state: Tensor, gates: int, shared: bool
) -> tuple[Tensor, Tensor]:
    """The outputs of a cell's two GEMMs, of its input and of its state, for all its gates."""
    h = state.axes[-1]
    width = h if gates == 1 else h.times(gates)
    input_ = ops.gates(g, f"{name}_input", x, width, shared)
    return input_, ops.gates(g, f"{name}_{RECURRENT}", state, width, shared)
