"""GEMMs of an activation with a weight, and of two activations."""

from collections.abc import Mapping
from math import prod

from memcalc.graph.graph import (
    NEW,
    OF_ACTIVATIONS,
    OF_WEIGHT,
    Graph,
    OpKind,
    Save,
    Tensor,
    Weight,
    plain,
)
from memcalc.graph.mesh import Axis, Size, elements
from memcalc.graph.ops.sources import KORTHIKANTI, KORTHIKANTI_SP

COLUMN = "column"
ROW = "row"
REPLICATED = "replicated"
LINEAR = OpKind(
    name="linear",
    gemm=OF_WEIGHT,
    output=NEW,
    gradient=NEW,
    cached={"save_linear": 1, "selective_op": 2},
    of_experts=False,
)
MATMUL = plain("matmul", gemm=OF_ACTIVATIONS)


def linear(
    g: Graph,
    name: str,
    x: Tensor,
    outputs: Mapping[str, tuple[Axis, ...]],
    split: str,
    bias: bool = False,
    shared: bool = False,
    packed: bool = False,
    separate: bool = False,
) -> list[Tensor]:
    """x (s, b, in...) -> one tensor (s, b, out...) for each of ``outputs``, by one GEMM.

    Saves its input: the weight's gradient is x^T dy. A bias saves nothing more.

    Args:
        g: The graph.
        name: The name of the operation.
        x: The input; the features of a row-parallel linear's input are sharded already.
        outputs: The features of each output, over all ranks.
        split: ``COLUMN`` (the first axis of the features of each output is sharded), ``ROW`` (the
            output is a partial sum) or ``REPLICATED``.
        bias: Whether it has a bias.
        shared: Whether its weight belongs to another operation and counts there.
        packed: Whether the outputs are views of one tensor, which is saved if one of them is.
        separate: Whether each output is computed with a weight of its own.
    """
    tokens, features = x.axes[:2], x.axes[2:]
    made = []
    width: Size = 0
    for output, axes in outputs.items():
        width += elements(axes)
        local = (g.mesh.tensor(axes[0]), *axes[1:]) if split == COLUMN else axes
        made.append(Tensor(output, (*tokens, *local), g.dtype_bytes))
    out = Axis.whole("out", width)
    if split == COLUMN:
        out = g.mesh.tensor(out)
    owners = {name: out}
    if separate:
        owners = {each: _joined(t.axes[2:]) for each, t in zip(outputs, made, strict=True)}
    weights = []
    for owner, axis in owners.items():
        weights.append(Weight(f"{owner}.weight", (axis, *features), shared))
        if bias:
            weights.append(Weight(f"{owner}.bias", (axis,)))
    save = Save(
        quantized(g, x), "input: needed for the weight gradient", KORTHIKANTI, for_weights=True
    )
    if x.kept_as is not None:
        shard = quantized(g, x.kept_as)
        reason = "shard of the input: backward all-gathers it again"
        save = Save(shard, reason, KORTHIKANTI_SP, for_weights=True)
    if packed:
        whole = Tensor("+".join(outputs), (*tokens, out), g.dtype_bytes)
        for tensor in made:
            tensor.kept_as = whole
    g.record(
        name,
        LINEAR,
        (x,),
        made,
        saves=(save,),
        flops=2 * elements(x.axes) * width,
        weights=weights,
    )
    return made


def _joined(axes: tuple[Axis, ...]) -> Axis:
    """Output features of several axes as one."""
    local = prod((axis.local for axis in axes), start=1)
    splits = tuple(split for axis in axes for split in axis.splits)
    return Axis.whole("out", elements(axes))._replace(local=local, splits=splits)


def matmul(
    g: Graph,
    name: str,
    output: str,
    x: Tensor,
    y: Tensor,
    axes: tuple[Axis, ...],
    over: Axis,
    causal: bool = False,
) -> Tensor:
    """A GEMM of two activations, x and y, summed over the axis ``over``.

    Saves both: the gradient of each needs the other.
    """
    out = Tensor(output, axes, x.dtype_bytes)
    reason = "factor: needed for the other factor's gradient"
    g.record(
        name,
        MATMUL,
        (x, y),
        (out,),
        saves=(Save(x, reason, KORTHIKANTI), Save(y, reason, KORTHIKANTI)),
        flops=2 * elements(axes) * over.size,
        causal=causal,
    )
    return out


def quantized(g: Graph, x: Tensor) -> Tensor:
    """A linear's input as it is saved: itself, or an fp8 copy.

    Transformer Engine's linears save one copy in fp8 if their GEMMs are in fp8 (module/linear.py,
    layernorm_linear.py: save_for_backward of the quantized input).
    """
    if g.linear_bytes in (None, x.dtype_bytes):
        return x
    return Tensor(f"{x.name}_fp8", x.axes, g.linear_bytes)
