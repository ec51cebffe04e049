"""The MLP: (s, b, h) -> (s, b, h)."""

from memcalc.blocks.spec import Spec
from memcalc.graph import ops
from memcalc.graph.graph import Graph, Tensor


def mlp(g: Graph, x: Tensor, m: Spec) -> Tensor:
    """x (s, b, h) -> (s, b, h), through a width of f, gated or not.

    Korthikanti et al. 2022, section 4.1; with tensor parallelism, section 4.2.
    """
    with g.region("mlp"):
        x = ops.enter_tensor_parallel(g, "mlp_enter", x, m.kernels.keeps_gathered)
        y = gated(g, x, m) if m.model.gated else plain(g, x, m)
        out = {"fc2_output": (m.h,)}
        (y,) = ops.linear(g, "fc2", y, out, ops.ROW, bias=m.model.mlp_bias)
        y = ops.leave_tensor_parallel(g, "mlp_leave", y)
        return ops.dropout(g, "mlp_dropout", y, m.model.hidden_dropout)


def plain(g: Graph, x: Tensor, m: Spec) -> Tensor:
    """x (s, b, h) -> (s, b, f): an activation."""
    (y,) = ops.linear(g, "fc1", x, {"fc1_output": (m.f,)}, ops.COLUMN, bias=m.model.mlp_bias)
    if m.model.activation == "silu":
        return ops.silu(g, "silu", y)
    if m.model.activation == "gelu_new" and not m.kernels.fused_gelu:
        return ops.gelu_chain(g, "gelu", y)
    return ops.gelu(g, "gelu", y)


def gated(g: Graph, x: Tensor, m: Spec) -> Tensor:
    """x (s, b, h) -> (s, b, f): an activated gate times an up projection."""
    bias = m.model.mlp_bias
    if m.kernels.fused_gate:
        packed = {"gate_up": (m.f.times(2),)}
        (gate_up,) = ops.linear(g, "fc1", x, packed, ops.COLUMN, bias=bias)
        return ops.gated_activation(g, m.model.activation, gate_up, g.mesh.tensor(m.f))
    halves = {"gate": (m.f,), "up": (m.f,)}
    gate, up = ops.linear(g, "fc1", x, halves, ops.COLUMN, bias=bias)
    if m.model.activation == "swiglu":
        gate = ops.silu(g, "silu", gate)
    else:
        gate = ops.gelu(g, "gelu", gate)
    return ops.multiply(g, m.model.activation, gate, up)
