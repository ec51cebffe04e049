"""The conjugate collectives of tensor and sequence parallelism."""

from memcalc.graph.graph import OVER_INPUT, PASSED_ON, Graph, Move, Tensor, plain
from memcalc.graph.mesh import Axis

COPY = plain("copy", output=OVER_INPUT, gradient=PASSED_ON)
ALL_REDUCE = plain("all_reduce", output=OVER_INPUT, gradient=PASSED_ON)
GATHER_FEATURES = plain("gather_features")
ALL_GATHER = plain("all_gather")
REDUCE_SCATTER = plain("reduce_scatter", cached={"selective_op": 1})


def enter_tensor_parallel(g: Graph, name: str, x: Tensor, keeps_gathered: bool) -> Tensor:
    """x (s, b, h) entering a tensor-parallel region: g under sequence parallelism, else f.

    ``keeps_gathered`` says whether g's output is saved, or gathered again in backward.
    """
    if g.mesh.t == 1:
        return x
    if g.mesh.sequence_parallel:
        return all_gather(g, name, x, keeps_gathered)
    return copy(g, name, x)


def leave_tensor_parallel(g: Graph, name: str, x: Tensor) -> Tensor:
    """Partial sums x (s, b, h) leaving such a region: g-bar with SP, else f-bar."""
    if g.mesh.t == 1:
        return x
    return reduce_scatter(g, name, x) if g.mesh.sequence_parallel else all_reduce(g, name, x)


def copy(g: Graph, name: str, x: Tensor) -> Tensor:
    """f: nothing forward, an all-reduce of the gradient backward. Saves nothing.

    Megatron-LM overlaps it with the weight gradient's GEMM.
    """
    g.record(
        name,
        COPY,
        (x,),
        (x,),
        moves=(Move("all_reduce", "backward", x.bytes, g.mesh.t, "weight gradient"),),
    )
    return x


def all_reduce(g: Graph, name: str, x: Tensor) -> Tensor:
    """f-bar: an all-reduce of the partial sums forward, nothing backward. Saves nothing."""
    out = Tensor(f"{name}_output", x.axes, x.dtype_bytes)
    moves = (Move("all_reduce", "forward", x.bytes, g.mesh.t),)
    g.record(name, ALL_REDUCE, (x,), (out,), moves=moves)
    return out


def gather_features(g: Graph, name: str, x: Tensor, axes: tuple[Axis, ...]) -> Tensor:
    """x (s, b, h/t) -> (s, b, h), or a part of the tokens; backward slices. Saves nothing.

    Under sequence parallelism the part is a view of the whole, which is saved if the part is
    (Megatron-core, mappings.py: ``_split_along_first_dim``). Backward first gathers the gradients
    of all tokens.
    """
    if g.mesh.t == 1:
        return x
    whole = Tensor(f"{name}_output", (*x.axes[:-1], axes[-1]), x.dtype_bytes)
    out = whole
    if g.mesh.sequence_parallel:
        out = Tensor(f"{name}_part", axes, x.dtype_bytes, kept_as=whole)
    phases = ("forward", "backward") if g.mesh.sequence_parallel else ("forward",)
    moves = [Move("all_gather", phase, x.bytes * g.mesh.t, g.mesh.t) for phase in phases]
    g.record(name, GATHER_FEATURES, (x,), (out,), moves=moves)
    return out


def all_gather(g: Graph, name: str, x: Tensor, keeps_gathered: bool) -> Tensor:
    """g: x (s/t, b, h) -> (s, b, h); backward reduce-scatters the gradient.

    Saves nothing itself. Unless ``keeps_gathered``, an operation that saves its output keeps the
    shard x instead, and backward gathers it again while the data gradient is computed. The
    reduce-scatter overlaps with the weight gradient's GEMM (Megatron-LM,
    tensor_parallel/layers.py).
    """
    axes = tuple(g.mesh.gathered(axis) for axis in x.axes)
    out = Tensor(f"{x.name}_gathered", axes, x.dtype_bytes, None if keeps_gathered else x)
    moves = [
        Move("all_gather", "forward", out.bytes, g.mesh.t),
        Move("reduce_scatter", "backward", out.bytes, g.mesh.t, "weight gradient"),
    ]
    if not keeps_gathered:
        moves.append(Move("all_gather", "backward", out.bytes, g.mesh.t, "data gradient"))
    g.record(name, ALL_GATHER, (x,), (out,), moves=moves)
    return out


def reduce_scatter(g: Graph, name: str, x: Tensor) -> Tensor:
    """g-bar: partial sums (s, b, h) -> (s/t, b, h); backward gathers. Saves nothing."""
    s, b, *features = x.axes
    out = Tensor(f"{name}_output", (g.mesh.sequence(s), b, *features), x.dtype_bytes)
    moves = (
        Move("reduce_scatter", "forward", x.bytes, g.mesh.t),
        Move("all_gather", "backward", x.bytes, g.mesh.t),
    )
    g.record(name, REDUCE_SCATTER, (x,), (out,), moves=moves)
    return out
