"""Context parallelism: how ranks exchange keys and values."""

from collections.abc import Sequence

from memcalc.graph.graph import Graph, Move, Tensor, plain
from memcalc.graph.mesh import CONTEXT

SHARE_CONTEXT = plain("share_context")
GATHER_CONTEXT = plain("gather_context")
EXCHANGE_HEADS = plain("exchange_heads")


def share_context(g: Graph, name: str, k: Tensor, v: Tensor, kind: str) -> None:
    """The exchange of keys and values (s/c, b, k, d) between ranks. Saves nothing.

    ``ring``: they and their gradients are sent around the ring. ``all_gather``: they are gathered,
    and their gradients reduce-scattered. Either way Megatron-core keeps only the rank's own part.
    """
    if g.mesh.c == 1:
        return
    size = (k.bytes + v.bytes) * g.mesh.c
    forward, backward = {
        "ring": ("send_receive", ("send_receive", "send_receive")),
        "all_gather": ("all_gather", ("all_gather", "reduce_scatter")),
    }[kind]
    moves = (
        Move(forward, "forward", size, g.mesh.c, "attention"),
        *(Move(way, "backward", size, g.mesh.c, "attention") for way in backward),
    )
    g.record(name, SHARE_CONTEXT, (k, v), (), moves=moves)


def gather_context(g: Graph, name: str, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v (s/c, b, k, d) -> (s, b, k, d), for unfused attention. Saves nothing."""
    if g.mesh.c == 1:
        return k, v
    whole = []
    for x in (k, v):
        s = x.axes[0]
        splits = tuple(split for split in s.splits if split.kind != CONTEXT)
        gathered = s._replace(local=s.local * g.mesh.c, splits=splits)
        whole.append(Tensor(f"{x.name}_gathered", (gathered, *x.axes[1:]), x.dtype_bytes))
    size = whole[0].bytes + whole[1].bytes
    moves = (
        Move("all_gather", "forward", size, g.mesh.c),
        Move("reduce_scatter", "backward", size, g.mesh.c),
    )
    g.record(name, GATHER_CONTEXT, (k, v), tuple(whole), moves=moves)
    return whole[0], whole[1]


def exchange_heads(g: Graph, name: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Ulysses: heads for tokens, (s/c, b, a, d) to (s, b, a/c, d), in as many bytes. Saves nothing.

    The result is a new tensor, and both may be saved.
    """
    if g.mesh.c == 1:
        return list(tensors)
    size = sum(tensor.bytes for tensor in tensors)
    moves = tuple(Move("all_to_all", phase, size, g.mesh.c) for phase in ("forward", "backward"))
    made = [Tensor(tensor.name, tensor.axes, tensor.dtype_bytes) for tensor in tensors]
    g.record(name, EXCHANGE_HEADS, tuple(tensors), made, moves=moves)
    return made
