"""Mixtures of experts: (s, b, h) -> (s, b, h)."""

from collections.abc import Sequence

from memcalc.blocks.mlp import activated, through
from memcalc.blocks.spec import ExpertAxes, Spec
from memcalc.config import Experts
from memcalc.graph import ops
from memcalc.graph.graph import Graph, Tensor
from memcalc.graph.mesh import Axis


def moe(g: Graph, x: Tensor, m: Spec) -> Tensor:
    """x (s, b, h) -> (s, b, h): each token through r of n experts, and through the shared ones.

    Tokens stay sharded as between the tensor-parallel regions (Megatron-core,
    transformer/moe/moe_layer.py).
    """
    axes, facts = m.experts, m.model.experts
    assert axes is not None
    assert facts is not None
    width, gate = axes.shared, facts.shared_gate
    with g.region("moe"):
        first = shared(g, x, m, width, gate) if width and m.kernels.shared_first else None
        y, underway = routed(g, x, m, axes, facts)
        if width:
            y = ops.add(g, "shared_sum", y, first or shared(g, x, m, width, gate))
        if m.kernels.holds_routed and not m.kernels.gathers_tokens:
            g.hold(underway)
        return ops.dropout(g, "mlp_dropout", y, m.model.hidden_dropout)


def routed(
    g: Graph, x: Tensor, m: Spec, axes: ExpertAxes, facts: Experts
) -> tuple[Tensor, Sequence[Tensor]]:
    """x (s, b, h) -> (s, b, h): router, dispatch, experts, combine.

    Also returns the tokens as they are sent, and as they are received.
    """
    experts, chosen, width = axes.number, axes.per_token, axes.width
    model = m.model
    fp32 = facts.router_dtype == "fp32" and not m.kernels.copies_router
    weights = ops.router(
        g,
        "router",
        x,
        experts,
        chosen,
        "scores" if fp32 else facts.router_dtype,
        facts.router_bias,
        facts.router_norm,
    )
    kernels, bias = m.kernels, model.mlp_bias
    batched = kernels.expert_products == "batched"
    sorts = kernels.sorts_routes and not batched
    chunks = kernels.sorts_chunks
    before = len(g.ops)
    tokens = ops.dispatch(g, "dispatch", x, axes.routed, chosen, experts, chunks, sorts, bias)
    sent = 1 + (g.mesh.e != 1)
    underway = [op.outputs[0] for op in g.ops[before : before + sent]]
    packed = width.times(2) if model.gated else width
    y = ops.grouped_linear(g, "experts_fc1", tokens, experts, packed, ops.COLUMN, bias, batched)
    with g.region("expert_act"):
        y = activated(g, "experts", y, g.mesh.expert_tensor(width), m)
        if kernels.weighs_activations and not (model.gated and kernels.fused_gate):
            y = ops.weigh(g, "experts_weigh", y, weights)
    y = ops.grouped_linear(g, "experts_fc2", y, experts, m.h, ops.ROW, bias, batched)
    keeps = kernels.weighs_outputs
    y = ops.combine(g, "combine", y, weights, x, chosen, experts, chunks, keeps)
    return y, underway


def shared(g: Graph, x: Tensor, m: Spec, width: Axis, gated: bool) -> Tensor:
    """x (s, b, h) -> (s, b, h): an MLP as wide as all shared experts, gated by the token or not."""
    with g.region("shared_experts"):
        y = through(g, "shared", x, width, m)
        if gated:
            one = {"shared_gate_output": (Axis.whole("1", 1),)}
            (gate,) = ops.linear(g, "shared_gate", x, one, ops.REPLICATED)
            y = ops.multiply(g, "shared_scale", y, gate)
        return y
