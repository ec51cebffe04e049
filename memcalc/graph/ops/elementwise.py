"""Operations element by element: dropout, sums, casts and activation functions."""

from collections.abc import Sequence

from memcalc.graph.graph import (
    OVER_INPUT,
    OVER_INPUT_OF_ADD,
    PASSED_ON,
    Graph,
    OpKind,
    Save,
    Tensor,
    plain,
)
from memcalc.graph.mesh import Axis
from memcalc.graph.ops.sources import (
    HF_GPT_OSS,
    KORTHIKANTI,
    MEGATRON_EXPERTS,
    MEGATRON_GATE,
    TORCH_CHAIN,
)

SCALE = plain("scale", output=OVER_INPUT)
CAST = plain("cast", output=OVER_INPUT)
DROPOUT = plain("dropout", output=OVER_INPUT_OF_ADD)
ADD = plain("add", gradient=PASSED_ON)
HALVES = plain("halves", output=OVER_INPUT, gradient=PASSED_ON)
CONCATENATE = plain("concatenate")
TANH = plain("tanh")
WEIGH = plain("weigh")
MULTIPLY = plain("multiply")
GELU = plain("gelu")
SILU = plain("silu")
RELU = plain("relu")
SQUARE = plain("square")
GELU_CHAIN = plain("gelu_chain")
GELU_FAST_CHAIN = plain("gelu_fast_chain")
CLAMPED_SWIGLU = plain("clamped_swiglu")
GATED_ACTIVATION = plain("gated_activation")


def concatenate(
    g: Graph, name: str, output: str, parts: Sequence[Tensor], axes: tuple[Axis, ...]
) -> Tensor:
    """Parts concatenated along their last axis by a copy. Saves nothing."""
    out = Tensor(output, axes, parts[0].dtype_bytes)
    g.record(name, CONCATENATE, tuple(parts), (out,))
    return out


def scale(g: Graph, name: str, x: Tensor) -> Tensor:
    """A multiplication by a constant. Saves nothing."""
    return elementwise(g, name, SCALE, x)


def cast(g: Graph, name: str, x: Tensor, dtype_bytes: int) -> Tensor:
    """A copy in another dtype, or the same tensor if the dtype is the same. Saves nothing."""
    if x.dtype_bytes == dtype_bytes:
        return x
    out = Tensor(name, x.axes, dtype_bytes)
    g.record(name, CAST, (x,), (out,))
    return out


def dropout(g: Graph, name: str, x: Tensor, probability: float) -> Tensor:
    """Dropout, if its probability is not 0. Saves its mask, one byte per element."""
    if not probability:
        return x
    drop_mask = Tensor(f"{name}_mask", x.axes, 1)
    out = Tensor(f"{name}_output", x.axes, x.dtype_bytes)
    save = Save(drop_mask, "mask, one byte per element", KORTHIKANTI)
    g.record(name, DROPOUT, (x,), (out,), saves=(save,))
    return out


def tanh(g: Graph, name: str, x: Tensor) -> Tensor:
    """A soft cap: tanh of the scaled input. Saves the tanh, from which its gradient is computed."""
    out = Tensor(f"{name}_output", x.axes, x.dtype_bytes)
    save = Save(out, "output of tanh: its gradient is computed from it", TORCH_CHAIN)
    g.record(name, TANH, (x,), (out,), saves=(save,))
    return scale(g, f"{name}_scale", out)


def add(g: Graph, name: str, x: Tensor, y: Tensor) -> Tensor:
    """A sum, as of a residual connection. Saves nothing."""
    out = Tensor(f"{name}_output", x.axes, x.dtype_bytes)
    g.record(name, ADD, (x, y), (out,))
    return out


def weigh(g: Graph, name: str, x: Tensor, weights: Tensor) -> Tensor:
    """Routed tokens (routed tokens, f), each times its weight. Saves both factors."""
    out = Tensor(f"{name}_output", x.axes, x.dtype_bytes)
    reason = "factor: needed for the other factor's gradient"
    saves = (
        Save(x, reason, MEGATRON_EXPERTS),
        Save(weights, reason, MEGATRON_EXPERTS, small=True),
    )
    g.record(name, WEIGH, (x, weights), (out,), saves=saves)
    return out


def multiply(g: Graph, name: str, x: Tensor, y: Tensor) -> Tensor:
    """An element-wise product. Saves both factors."""
    out = Tensor(f"{name}_output", x.axes, x.dtype_bytes)
    reason = "factor: needed for the other factor's gradient"
    saves = (Save(x, reason, TORCH_CHAIN), Save(y, reason, TORCH_CHAIN))
    g.record(name, MULTIPLY, (x, y), (out,), saves=saves)
    return out


def gelu(g: Graph, name: str, x: Tensor) -> Tensor:
    """GeLU in one kernel. Saves its input."""
    return _activation(g, name, GELU, x, KORTHIKANTI)


def silu(g: Graph, name: str, x: Tensor) -> Tensor:
    """SiLU in one kernel. Saves its input."""
    return _activation(g, name, SILU, x, TORCH_CHAIN)


def relu(g: Graph, name: str, x: Tensor) -> Tensor:
    """ReLU. Saves its output, since the gradient needs only its sign."""
    out = Tensor(f"{name}_output", x.axes, x.dtype_bytes)
    save = Save(out, "output: the gradient needs its sign", TORCH_CHAIN)
    g.record(name, RELU, (x,), (out,), saves=(save,))
    return out


def square(g: Graph, name: str, x: Tensor) -> Tensor:
    """The square of each element. Saves its input."""
    return _activation(g, name, SQUARE, x, TORCH_CHAIN)


def gelu_chain(g: Graph, name: str, x: Tensor) -> Tensor:
    """GeLU's tanh form, 0.5x * (1 + tanh(c(x + c'x^3))), operation by operation.

    Saves x (for the power), the tanh (for its own gradient), and both factors of the last product.
    """
    inner, half, factor = (
        Tensor(f"{name}_{part}", x.axes, x.dtype_bytes) for part in ("tanh", "half", "factor")
    )
    out = Tensor(f"{name}_output", x.axes, x.dtype_bytes)
    saves = (
        Save(x, "input: needed for the gradient of the power", TORCH_CHAIN),
        Save(inner, "tanh: its gradient is computed from it", TORCH_CHAIN),
        Save(half, "factor: needed for the other factor's gradient", TORCH_CHAIN),
        Save(factor, "factor: needed for the other factor's gradient", TORCH_CHAIN),
    )
    g.record(name, GELU_CHAIN, (x,), (out,), saves=saves)
    return out


def gelu_fast_chain(g: Graph, name: str, x: Tensor) -> Tensor:
    """GeLU's tanh form as 0.5x * (1 + tanh(cx * (1 + c'x * x))), operation by operation.

    Saves both factors of its three products, x among them, and the tanh.
    """
    cubic, scaled, rest, inner, half, factor = (
        Tensor(f"{name}_{part}", x.axes, x.dtype_bytes)
        for part in ("cubic", "scaled", "rest", "tanh", "half", "factor")
    )
    out = Tensor(f"{name}_output", x.axes, x.dtype_bytes)
    reason = "factor: needed for the other factor's gradient"
    saves = [Save(each, reason, TORCH_CHAIN) for each in (x, cubic, scaled, rest, half, factor)]
    saves.append(Save(inner, "tanh: its gradient is computed from it", TORCH_CHAIN))
    g.record(name, GELU_FAST_CHAIN, (x,), (out,), saves=saves)
    return out


def clamped_swiglu(g: Graph, name: str, gate: Tensor, up: Tensor) -> Tensor:
    """(up + 1) * gate * sigmoid(c gate) of a clamped gate and up (..., f), operation by operation.

    Saves gate and up for their clamps, and both factors of its two products: the clamped gate and
    its sigmoid, then the gated product and up + 1.
    """
    clamped, sigmoid, gated, raised = (
        Tensor(f"{name}_{part}", gate.axes, gate.dtype_bytes)
        for part in ("clamped", "sigmoid", "gated", "raised")
    )
    out = Tensor(f"{name}_output", gate.axes, gate.dtype_bytes)
    saves = [
        Save(each, "input: decides where the clamp passes the gradient", HF_GPT_OSS)
        for each in (gate, up)
    ]
    reason = "factor: needed for the other factor's gradient"
    saves += [Save(each, reason, HF_GPT_OSS) for each in (clamped, sigmoid, gated, raised)]
    g.record(name, CLAMPED_SWIGLU, (gate, up), (out,), saves=saves)
    return out


def halves(g: Graph, name: str, packed: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """(..., 2f) -> gate and up (..., f), which are views of it. Saves nothing."""
    axes = (*packed.axes[:-1], axis)
    gate, up = (Tensor(f"{name}_{part}", axes, packed.dtype_bytes) for part in ("gate", "up"))
    g.record(name, HALVES, (packed,), (gate, up))
    return gate, up


def gated_activation(g: Graph, name: str, packed: Tensor, axis: Axis) -> Tensor:
    """(..., 2f) -> (..., f): act(gate) * up in one kernel. Saves its packed input.

    ``axis`` is the output features f on one rank.
    """
    out = Tensor(f"{name}_output", (*packed.axes[:-1], axis), packed.dtype_bytes)
    save = Save(packed, "packed gate and up: needed for both gradients", MEGATRON_GATE)
    g.record(name, GATED_ACTIVATION, (packed,), (out,), saves=(save,))
    return out


def elementwise(g: Graph, name: str, kind: OpKind, x: Tensor) -> Tensor:
    """An operation whose output has the shape of its input, and which saves nothing."""
    out = Tensor(f"{name}_output", x.axes, x.dtype_bytes)
    g.record(name, kind, (x,), (out,))
    return out


def _activation(g: Graph, name: str, kind: OpKind, x: Tensor, source: str) -> Tensor:
    out = Tensor(f"{name}_output", x.axes, x.dtype_bytes)
    save = Save(x, "input: needed for the activation's gradient", source)
    g.record(name, kind, (x,), (out,), saves=(save,))
    return out
