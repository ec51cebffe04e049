"""Norms: (..., h) -> (..., h), over the last axis."""

from memcalc.blocks.spec import Spec
from memcalc.graph import ops
from memcalc.graph.graph import Graph, Tensor


def norm(g: Graph, name: str, x: Tensor, m: Spec) -> Tensor:
    """x (..., h) -> (..., h): the model's norm."""
    if m.model.norm == "layernorm":
        if m.model.norm_scale == "fp32" and not m.kernels.fused_norms:
            return ops.layer_norm_chain(g, name, x, m.model.norm_bias)
        statistic_bytes = 4 if m.kernels.fp32_statistics else x.dtype_bytes
        return ops.layer_norm(g, name, x, statistic_bytes, m.model.norm_bias)
    if m.kernels.fused_norms:
        return ops.rms_norm(g, name, x)
    if m.model.norm_keeps_input:
        return ops.rms_norm_chain_of_both(g, name, x)
    return ops.rms_norm_chain(g, name, x, m.model.norm_scale)
