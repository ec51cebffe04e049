"""The MLP: (s, b, h) -> (s, b, h)."""

from memcalc.blocks.spec import Spec
from memcalc.graph import ops
from memcalc.graph.graph import Graph, Tensor
from memcalc.graph.mesh import Axis

# Forms of GeLU that a model's own code computes by a chain of operations.
GELU_CHAINS = {"gelu_new": ops.gelu_chain, "gelu_fast": ops.gelu_fast_chain}


def mlp(g: Graph, x: Tensor, m: Spec) -> Tensor:
    """x (s, b, h) -> (s, b, h), through a width of f, gated or not.

    Korthikanti et al. 2022, section 4.1; with tensor parallelism, section 4.2.
    """
    with g.region("mlp"):
        y = through(g, "", x, m.f, m)
        return ops.dropout(g, "mlp_dropout", y, m.model.hidden_dropout)


def through(g: Graph, prefix: str, x: Tensor, width: Axis, m: Spec) -> Tensor:
    """x (s, b, h) -> (s, b, h): up to a width, activated, and down; names begin with a prefix."""
    start = f"{prefix}_" if prefix else ""
    bias = m.model.mlp_bias
    x = ops.enter_tensor_parallel(g, f"{prefix or 'mlp'}_enter", x, m.kernels.keeps_gathered)
    local = g.mesh.tensor(width)
    if m.model.gated and m.kernels.fused_gate:
        outputs = {f"{start}gate_up": (width.times(2),)}
        (packed,) = ops.linear(g, f"{start}fc1", x, outputs, ops.COLUMN, bias=bias)
        y = activated(g, prefix, packed, local, m)
    elif m.model.gated:
        halves = {f"{start}gate": (width,), f"{start}up": (width,)}
        separate = m.separate("gate")
        gate, up = ops.linear(g, f"{start}fc1", x, halves, ops.COLUMN, bias=bias, separate=separate)
        y = gated(g, start, gate, up, m)
    else:
        outputs = {f"{start}fc1_output": (width,)}
        (y,) = ops.linear(g, f"{start}fc1", x, outputs, ops.COLUMN, bias=bias)
        y = activated(g, prefix, y, local, m)
    inner = m.model.hidden_dropout if m.model.drops_activation else 0.0
    y = ops.dropout(g, f"{start}activation_dropout", y, inner)
    down = {f"{start}fc2_output": (m.h,)}
    (y,) = ops.linear(g, f"{start}fc2", y, down, ops.ROW, bias=bias)
    return ops.leave_tensor_parallel(g, f"{prefix or 'mlp'}_leave", y)


def activated(g: Graph, prefix: str, y: Tensor, width: Axis, m: Spec) -> Tensor:
    """y (..., f) -> (..., f), or packed gate and up (..., 2f) -> (..., f)."""
    start = f"{prefix}_" if prefix else ""
    kind = m.model.activation
    if m.model.gated and m.kernels.fused_gate:
        return ops.gated_activation(g, f"{start}{kind}", y, width)
    if m.model.gated:
        gate, up = ops.halves(g, f"{start}halves", y, width)
        return gated(g, start, gate, up, m)
    if kind == "silu":
        return ops.silu(g, f"{start}silu", y)
    if kind in ("relu", "squared_relu"):
        y = ops.relu(g, f"{start}relu", y)
        return ops.square(g, f"{start}square", y) if kind == "squared_relu" else y
    if kind in GELU_CHAINS and not m.kernels.fused_gelu:
        return GELU_CHAINS[kind](g, f"{start}gelu", y)
    return ops.gelu(g, f"{start}gelu", y)


def gated(g: Graph, start: str, gate: Tensor, up: Tensor, m: Spec) -> Tensor:
    """gate and up (..., f) -> (..., f): the activated gate times up, operation by operation."""
    if m.model.activation == "clamped_swiglu":
        return ops.clamped_swiglu(g, f"{start}clamped_swiglu", gate, up)
    if m.model.activation == "swiglu":
        gate = ops.silu(g, f"{start}silu", gate)
    elif m.model.activation == "geglu_new" and not m.kernels.fused_gelu:
        gate = ops.gelu_chain(g, f"{start}gelu", gate)
    else:
        gate = ops.gelu(g, f"{start}gelu", gate)
    return ops.multiply(g, f"{start}{m.model.activation}", gate, up)
