"""Mixtures of experts: the router, routed tokens and the experts' GEMMs."""

from dataclasses import replace
from itertools import pairwise

from memcalc.graph.graph import OF_ROUTER, Graph, Move, Save, Tensor, Weight, plain
from memcalc.graph.mesh import Axis, divide, elements
from memcalc.graph.ops.elementwise import cast
from memcalc.graph.ops.products import COLUMN, LINEAR, quantized
from memcalc.graph.ops.sources import (
    HF_BATCHED,
    HF_EXPERTS,
    KORTHIKANTI,
    MEGATRON_ROUTER,
    TORCH_CHAIN,
)

EXPERTS_LINEAR = replace(LINEAR, of_experts=True)
ROUTER = plain("router", gemm=OF_ROUTER)
DISPATCH = plain("dispatch")
COMBINE = plain("combine")


def router(
    g: Graph,
    name: str,
    x: Tensor,
    experts: Axis,
    chosen: Axis,
    dtype: str,
    bias: bool = False,
    norm: bool = False,
) -> Tensor:
    """x (s, b, h) -> the weights (s, b, r) of each token's experts.

    A GEMM with the router's weight, a softmax or sigmoid, and a top-k. Saves its input, the fp32
    scores (or only those of a token's experts), and the index of each token's experts (int64). A
    router in fp32 saves an fp32 copy of its input. If weights are divided by their sum, both are
    saved.

    Args:
        g: The graph.
        name: The name of the operation.
        x: The input.
        experts: The experts.
        chosen: The experts of one token.
        dtype: What is in fp32, a word of ``memcalc.config.model.ROUTER_DTYPES``.
        bias: Whether the GEMM has a bias.
        norm: Whether the weights are divided by their sum.
    """
    tokens = x.axes[:-1]
    scores = Tensor(f"{name}_scores", (*tokens, experts), 4)
    if dtype == "chosen":
        scores = Tensor(f"{name}_scores", (*tokens, chosen), x.dtype_bytes)
    narrow = dtype in ("cast", "chosen")
    index = Tensor(f"{name}_index", (*tokens, chosen), 8)
    out = Tensor(f"{name}_weights", (*tokens, chosen), x.dtype_bytes if narrow else 4)
    weights = [Weight(f"{name}.weight", (experts, *x.axes[-1:]))]
    if bias:
        weights.append(Weight(f"{name}.bias", (experts,)))
    wide = cast(g, f"{name}_input_fp32", x, 4) if dtype == "fp32" else x
    saves = [
        Save(wide, "input: needed for the weight gradient", MEGATRON_ROUTER, for_weights=True),
        Save(scores, "scores: their gradient is computed from them", MEGATRON_ROUTER),
        Save(index, "experts of each token, int64", MEGATRON_ROUTER, small=True),
    ]
    if norm:
        reason = "needed for the gradient of the quotient"
        best = Tensor(f"{name}_best", (*tokens, chosen), 4)
        total = Tensor(f"{name}_sum", tokens, 4)
        saves += [Save(tensor, reason, TORCH_CHAIN, small=True) for tensor in (best, total)]
    g.record(
        name,
        ROUTER,
        (wide,),
        (out,),
        saves=saves,
        flops=2 * elements(x.axes) * experts.size,
        weights=weights,
    )
    return out


def dispatch(
    g: Graph,
    name: str,
    x: Tensor,
    routed: Axis,
    chosen: Axis,
    experts: Axis,
    chunks: bool,
    sorts: bool,
    bias: bool = False,
) -> Tensor:
    """x (s, b, h) -> (routed tokens, h): a copy for each of a token's experts, on their ranks.

    The copies are sorted by expert and sent to the experts' ranks by an all-to-all, then gathered
    over their tensor-parallel ranks. With ``chunks`` the received parts are sorted once more. With
    ``sorts`` it saves the order, its inverse and the token of each copy (int64), the start of each
    expert's tokens (int32), and with a bias the expert of each copy (int64). Indices of other
    implementations are not counted.
    """
    *before, out = [x, *_steps(g, name, x, routed, chosen, experts, chunks)]
    places = [Tensor(f"{name}_{what}", (routed,), 8) for what in ("order", "inverse", "token")]
    if bias:
        places.append(Tensor(f"{name}_expert", (routed,), 8))
    places.append(Tensor(f"{name}_offsets", (g.mesh.experts(experts),), 4))
    reason = "position of each routed token: backward routes gradients by it"
    saves = [Save(place, reason, HF_EXPERTS, small=True) for place in places]
    for old, new in pairwise(before):
        g.record(new.name, DISPATCH, (old,), (new,))
    moves = _exchanged(g, out, ("all_gather", "reduce_scatter"))
    g.record(name, DISPATCH, before[-1:], (out,), saves=saves if sorts else (), moves=moves)
    return out


def grouped_linear(
    g: Graph,
    name: str,
    x: Tensor,
    experts: Axis,
    features: Axis,
    split: str,
    bias: bool,
    batched: bool = False,
) -> Tensor:
    """x (routed tokens, in) -> (routed tokens, out): each token times its expert's weight.

    Saves its input, as every linear. ``batched``, with one GEMM per token, it also saves a copy of
    the weight of each token's expert.
    """
    routed, inner = x.axes
    local = g.mesh.expert_tensor(features) if split == COLUMN else features
    out = Tensor(f"{name}_output", (routed, local), x.dtype_bytes)
    experts = g.mesh.experts(experts)
    weights = [Weight(f"{name}.weight", (experts, local, inner))]
    if bias:
        weights.append(Weight(f"{name}.bias", (experts, local)))
    reason = "input: needed for the weight gradients"
    saves = [Save(quantized(g, x), reason, KORTHIKANTI, for_weights=True)]
    if batched:
        copies = Tensor(f"{name}_weights", (routed, local, inner), x.dtype_bytes)
        saves.append(
            Save(copies, "copy of each token's expert weight: needed for its gradient", HF_BATCHED)
        )
    g.record(
        name,
        EXPERTS_LINEAR,
        (x,),
        (out,),
        saves=saves,
        flops=2 * elements(x.axes) * features.size,
        weights=weights,
    )
    return out


def combine(
    g: Graph,
    name: str,
    y: Tensor,
    weights: Tensor,
    x: Tensor,
    chosen: Axis,
    experts: Axis,
    chunks: bool,
    keeps: bool,
) -> Tensor:
    """(routed tokens, h) -> x's (s, b, h): each token's copies are summed on the token's rank.

    They return the way that ``dispatch`` sent them. Saves both factors if the copies are weighted
    here, and nothing if weights are applied before the experts' second GEMM.
    """
    out = Tensor(f"{name}_output", x.axes, y.dtype_bytes)
    reason = "factor: needed for the other factor's gradient"
    saves = (Save(y, reason, TORCH_CHAIN), Save(weights, reason, TORCH_CHAIN, small=True))
    *others, _ = _steps(g, name, x, y.axes[0], chosen, experts, chunks)
    before = [y, *reversed(others)]
    for old, new in pairwise(before):
        g.record(new.name, COMBINE, (old,), (new,))
    moves = _exchanged(g, y, ("reduce_scatter", "all_gather"))
    last = (before[-1], weights)
    g.record(name, COMBINE, last, (out,), saves=saves if keeps else (), moves=moves)
    return out


def _steps(
    g: Graph, name: str, x: Tensor, routed: Axis, chosen: Axis, experts: Axis, chunks: bool
) -> list[Tensor]:
    """The copies of tokens at each step between a layer and its experts."""
    *tokens, features = x.axes
    whole = type(routed.local) is int and type(g.mesh.x) is int
    received = -(-routed.local // g.mesh.x) if whole else routed.local / g.mesh.x
    part = routed._replace(local=received)
    found: dict[str, tuple[Axis, ...]] = {"sent": (*tokens, chosen)}
    if g.mesh.e != 1:
        found["received"] = (part,)
    if g.mesh.x != 1:
        found["gathered"] = (routed,)
    if chunks and g.mesh.experts(experts).local != 1:
        found["sorted"] = (routed,)
    *others, _ = found.items()
    steps = [(f"{name}_{step}", axes) for step, axes in others]
    steps.append((f"{name}_output", (routed,)))
    return [Tensor(step, (*axes, features), x.dtype_bytes) for step, axes in steps]


def _exchanged(g: Graph, routed: Tensor, ways: tuple[str, str]) -> list[Move]:
    """The collectives that send routed tokens to the experts, or back."""
    moves = []
    own = divide(routed.bytes, g.mesh.x, "routed bytes")
    for phase, way in zip(("forward", "backward"), ways, strict=True):
        if g.mesh.e != 1:
            moves.append(Move("all_to_all", phase, own, g.mesh.e))
        if g.mesh.x != 1:
            moves.append(Move(way, phase, routed.bytes, g.mesh.x))
    return moves
