"""Recurrent cells."""

from memcalc.graph.graph import Graph, Save, Tensor, Weight, plain
from memcalc.graph.mesh import Axis, elements
from memcalc.graph.ops.products import LINEAR
from memcalc.graph.ops.sources import DIFFERENTIABLE, TORCH_FUSED_RNN, TORCH_RNN

TIME_STEP = plain("time_step")
VANILLA_CELL = plain("vanilla_cell")
GRU_CELL = plain("gru_cell")
LSTM_CELL = plain("lstm_cell")
FUSED_GRU_CELL = plain("fused_gru_cell")
FUSED_LSTM_CELL = plain("fused_lstm_cell")


def time_step(g: Graph, name: str, x: Tensor) -> Tensor:
    """x (s, b, ...) -> (b, ...): the input of one time step, a view of x. Saves nothing."""
    out = Tensor(name, x.axes[1:], x.dtype_bytes, kept_as=x)
    g.record(name, TIME_STEP, (x,), (out,))
    return out


def gates(g: Graph, name: str, x: Tensor, width: Axis, shared: bool) -> Tensor:
    """x (b, in) -> (b, width): one GEMM, with a weight and a bias, for all gates of a cell.

    Saves its input, which the weight gradient needs. ``shared`` says whether the weight is that of
    an earlier step and so is not counted again.
    """
    b, features = x.axes
    out = Tensor(f"{name}_output", (b, width), x.dtype_bytes)
    weights = (Weight(f"{name}.weight", (width, features)), Weight(f"{name}.bias", (width,)))
    g.record(
        name,
        LINEAR,
        (x,),
        (out,),
        saves=(Save(x, "input: needed for the weight gradient", TORCH_RNN),),
        flops=2 * elements((b, features)) * width.size,
        weights=() if shared else weights,
    )
    return out


def vanilla_cell(g: Graph, name: str, input_: Tensor, recurrent: Tensor) -> Tensor:
    """The outputs of both GEMMs (b, h) -> the next state (b, h), the tanh of their sum.

    Saves its output, from which the gradient of tanh is computed.
    """
    state = Tensor(f"{name}_state", input_.axes, input_.dtype_bytes)
    save = Save(state, "output of tanh: its gradient is computed from it", TORCH_RNN)
    g.record(name, VANILLA_CELL, (input_, recurrent), (state,), saves=(save,))
    return state


def gru_cell(g: Graph, name: str, input_: Tensor, recurrent: Tensor, state: Tensor) -> Tensor:
    """The outputs of both GEMMs (b, 3h) and the state (b, h) -> the next state, op by op.

    Saves the output of the recurrent GEMM, in which the reset and update gates have overwritten
    the first two parts; a copy of its third part from before the reset gate scales it in place;
    the new gate, an output of tanh; and the difference of the old state and the new gate, from
    before the update gate scales it in place.
    """
    candidate, new, less, out = (
        Tensor(f"{name}_{part}", state.axes, state.dtype_bytes)
        for part in ("candidate", "new_gate", "difference", "state")
    )
    saves = (
        Save(recurrent, "reset and update gates, in place: outputs of sigmoid", TORCH_RNN),
        Save(candidate, "factor: needed for the reset gate's gradient", TORCH_RNN),
        Save(new, "output of tanh: its gradient is computed from it", TORCH_RNN),
        Save(less, "factor: needed for the update gate's gradient", TORCH_RNN),
    )
    g.record(name, GRU_CELL, (input_, recurrent, state), (out,), saves=saves)
    return out


def lstm_cell(
    g: Graph, name: str, input_: Tensor, recurrent: Tensor, cell: Tensor
) -> tuple[Tensor, Tensor]:
    """The outputs of both GEMMs (b, 4h), the cell state (b, h) -> hidden and cell state, op by op.

    Saves the four gates, which overwrite the output of the recurrent GEMM; the cell state, which
    the forget gate scales; and the tanh of the next cell state.
    """
    out, next_, tanh_ = _lstm_made(name, cell)
    saves = (
        Save(recurrent, "gates, in place: outputs of sigmoid and tanh, factors", TORCH_RNN),
        Save(cell, "factor: needed for the forget gate's gradient", TORCH_RNN),
        Save(tanh_, "output of tanh, a factor: needed for both gradients", TORCH_RNN),
    )
    g.record(name, LSTM_CELL, (input_, recurrent, cell), (out, next_), saves=saves)
    return out, next_


def fused_gru_cell(g: Graph, name: str, input_: Tensor, recurrent: Tensor, state: Tensor) -> Tensor:
    """The same as ``gru_cell`` in one CUDA kernel.

    Saves a workspace (b, 5h) for backward and, for double backward, all its inputs.
    """
    b, h = state.axes
    work = Tensor(f"{name}_workspace", (b, h.times(5)), state.dtype_bytes)
    out = Tensor(f"{name}_state", state.axes, state.dtype_bytes)
    saves = (
        Save(work, "workspace: the kernel's backward computes from it", TORCH_FUSED_RNN),
        *(Save(x, DIFFERENTIABLE, TORCH_FUSED_RNN) for x in (input_, recurrent, state)),
    )
    g.record(name, FUSED_GRU_CELL, (input_, recurrent, state), (out,), saves=saves)
    return out


def fused_lstm_cell(
    g: Graph, name: str, input_: Tensor, recurrent: Tensor, cell: Tensor
) -> tuple[Tensor, Tensor]:
    """The same as ``lstm_cell`` in one CUDA kernel.

    Saves a workspace (b, 4h), the cell state and the next one for backward and, for double
    backward, the outputs of both GEMMs.
    """
    out, next_, _ = _lstm_made(name, cell)
    work = Tensor(f"{name}_workspace", recurrent.axes, recurrent.dtype_bytes)
    reason = "the kernel's backward computes from it"
    saves = (
        *(Save(x, reason, TORCH_FUSED_RNN) for x in (work, cell, next_)),
        *(Save(x, DIFFERENTIABLE, TORCH_FUSED_RNN) for x in (input_, recurrent)),
    )
    g.record(name, FUSED_LSTM_CELL, (input_, recurrent, cell), (out, next_), saves=saves)
    return out, next_


def _lstm_made(name: str, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The next hidden state, the next cell state, and the tanh of the next cell state."""
    state, next_, tanh_ = (
        Tensor(f"{name}_{part}", cell.axes, cell.dtype_bytes)
        for part in ("state", "cell_state", "cell_state_tanh")
    )
    return state, next_, tanh_
