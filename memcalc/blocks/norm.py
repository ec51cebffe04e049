"""Norms: (s, b, h) -> (s, b, h)."""

from memcalc.blocks.spec import Spec
from memcalc.graph import ops
from memcalc.graph.graph import Graph, Tensor


def norm(g: Graph, name: str, x: Tensor, m: Spec) -> Tensor:
    """x (s, b, h) -> (s, b, h): the model's norm, over h."""
    with g.region("norm"):
        if m.model.norm == "layernorm":
            return ops.layer_norm(g, name, x, 4 if m.kernels.fp32_statistics else x.dtype_bytes)
        if m.kernels.fused_rmsnorm:
            return ops.rms_norm(g, name, x)
        return ops.rms_norm_chain(g, name, x)
