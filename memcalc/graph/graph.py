"""Tensor, Op and Graph: the record of a block's forward pass."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from memcalc.graph.mesh import Axis, Mesh, Size


class Tensor:
    """An activation, as one rank holds it. Two tensors are the same only if they are one object.

    Attributes:
        name: What the tensor is.
        axes: Its axes: tokens first, features last.
        dtype_bytes: Bytes per element.
        bytes: Bytes on one rank.
        kept_as: What is saved in place of the tensor: the shard that backward gathers again, or the
            whole tensor of which this is a view; None for the tensor itself.
    """

    __slots__ = ("axes", "bytes", "dtype_bytes", "kept_as", "name")

    def __init__(
        self,
        name: str,
        axes: tuple[Axis, ...],
        dtype_bytes: int,
        kept_as: "Tensor | None" = None,
    ) -> None:
        self.name = name
        self.axes = axes
        self.dtype_bytes = dtype_bytes
        self.bytes: Size = prod((axis.local for axis in axes), start=dtype_bytes)
        self.kept_as = kept_as

    @property
    def shape(self) -> str:
        """The shape in letters, as in ``s/t b h``."""
        return " ".join(axis.shown for axis in self.axes)

    @property
    def split(self) -> str:
        """How ranks shard the tensor: ``tensor``, ``sequence``, both, or nothing."""
        return ", ".join(split.kind for axis in self.axes for split in axis.splits)

    def __repr__(self) -> str:
        return f"Tensor({self.name}: {self.shape}, {self.bytes} bytes)"


class Save(NamedTuple):
    """A tensor that an operation saves for backward.

    Attributes:
        tensor: The tensor.
        reason: Why it is saved.
        source: Where that is documented or implemented.
        small: Whether the paper's accounting leaves it out: a few bytes per token or row, without h
            or s x s in its shape.
        for_weights: Whether a weight gradient needs it. Zero-bubble schedules compute these late.
    """

    tensor: Tensor
    reason: str
    source: str
    small: bool = False
    for_weights: bool = False


class Move(NamedTuple):
    """A collective that an operation runs.

    Attributes:
        collective: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all`` or
            ``send_receive`` (parts that are sent around a ring).
        phase: ``forward`` or ``backward``.
        bytes: Bytes of the whole tensor, which each rank holds before or after; for an all-to-all,
            the bytes of a rank's tensor.
        degree: How many ranks take part.
        overlapped_with: The computation that overlaps with it, or nothing.
    """

    collective: str
    phase: str
    bytes: Size
    degree: Size
    overlapped_with: str = ""


class Weight(NamedTuple):
    """A parameter: its axes, with how they are sharded.

    Attributes:
        name: Its name.
        axes: Its axes.
        shared: Whether it belongs to another operation and counts there; backward computes a
            gradient for it here too.
    """

    name: str
    axes: tuple[Axis, ...]
    shared: bool = False


class Scratch(NamedTuple):
    """Bytes that an operation needs only while it runs.

    Its inputs, outputs and saved tensors, and their gradients, are not among them.

    Attributes:
        forward: In the forward pass.
        backward: In the backward pass.
    """

    forward: Size = 0
    backward: Size = 0


class Region:
    """A named part of the forward pass, which a recompute policy may select if it is ``alone``.

    The code of the operations itself checkpoints a region that is ``always`` recomputed.
    """

    __slots__ = ("alone", "always", "name")

    def __init__(self, name: str, alone: bool = True, always: bool = False) -> None:
        self.name = name
        self.alone = alone
        self.always = always


# What an operation's GEMMs multiply.
OF_WEIGHT = "an activation and a weight"
OF_ROUTER = "an activation and a router's weight"
OF_PATCHES = "patches of an image and a weight"
OF_ACTIVATIONS = "two activations"
OF_ATTENTION = "queries, keys and values, in one kernel"

# Where an operation's output lies, and the gradient of its input.
NEW = "memory of its own"
OVER_INPUT = "the memory of its input"
OVER_INPUT_OF_ADD = "the memory of its input if an add follows, with which it is one kernel"
VIEW = "a view of its input"
PASSED_ON = "the memory of its output's gradient, which it passes on unchanged"
NO_GRADIENT = "nowhere: whole numbers have no gradient"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class OpKind:
    """What an operation is, in any block. No field has a default: each is a fact to look up.

    Attributes:
        name: The function of ``memcalc.graph.ops`` that records it, or the function's chain.
        gemm: What its GEMMs multiply, one of the words above; None without a GEMM.
        output: Where its output lies: ``NEW``, ``OVER_INPUT``, ``OVER_INPUT_OF_ADD`` or ``VIEW``.
        gradient: Where the gradient of its input lies: ``NEW``, ``PASSED_ON`` or ``NO_GRADIENT``.
        cached: The recomputation policies that save its outputs rather than recompute them: all
            of them (1), or the first, the third and so on of a region (2).
        of_experts: Whether its weights belong to experts, with expert-parallel ranks of their own.
    """

    name: str
    gemm: str | None
    output: str
    gradient: str
    cached: Mapping[str, int]
    of_experts: bool

    def __repr__(self) -> str:
        return self.name


def plain(
    name: str,
    *,
    gemm: str | None = None,
    output: str = NEW,
    gradient: str = NEW,
    cached: Mapping[str, int] | None = None,
) -> OpKind:
    """An operation that has no GEMM, writes new tensors and is recomputed, but for what is given.

    >>> plain("softmax").output
    'memory of its own'
    """
    return OpKind(
        name=name,
        gemm=gemm,
        output=output,
        gradient=gradient,
        cached=cached or {},
        of_experts=False,
    )


class Op(NamedTuple):
    """One operation of the forward pass.

    Attributes:
        name: Its name in its block.
        kind: What it is.
        inputs: The activations it reads.
        outputs: The activations it computes.
        regions: The regions that it is in, outermost first.
        saves: What it saves for backward.
        flops: Forward FLOPs of its GEMMs, over all ranks, each GEMM counted once; a
            multiply-add is two.
        moves: The collectives it runs.
        weights: The parameters it owns.
        causal: Whether a causal mask hides half of the scores that its GEMMs compute or read.
        scratch: Bytes that it needs only while it runs.
        in_place: Whether backward writes the gradients of its input and weights over saved tensors.
        holds: Tensors that variables of the calling functions keep alive until the operation ends.
    """

    name: str
    kind: OpKind
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    regions: tuple[Region, ...]
    saves: Sequence[Save] = ()
    flops: Size = 0
    moves: Sequence[Move] = ()
    weights: Sequence[Weight] = ()
    causal: bool = False
    scratch: Scratch = Scratch()
    in_place: bool = False
    holds: Sequence[Tensor] = ()

    def is_in(self, names: Collection[str]) -> bool:
        """Whether it is in a region of one of these names."""
        return any(region.name in names for region in self.regions)


class Graph:
    """The operations of a forward pass, in order.

    Attributes:
        mesh: The ranks that share the pass.
        dtype_bytes: Bytes per element of activations, unless an operation has another dtype.
        linear_bytes: Bytes per element of the inputs that linears save; None: saved as they are.
        ops: The operations so far.
        shared: Inputs that many graphs share. They are kept once, and counted in none of these.
        returned: Tensors that the caller refers to until backward is over, with their regions.

    >>> graph = Graph(Mesh())
    >>> with graph.region("layer"):
    ...     x = graph.input("x", (Axis.whole("s", 4), Axis.whole("h", 8)))
    >>> x
    Tensor(x: s h, 64 bytes)
    """

    def __init__(self, mesh: Mesh, dtype_bytes: int = 2, linear_bytes: int | None = None) -> None:
        self.mesh = mesh
        self.dtype_bytes = dtype_bytes
        self.linear_bytes = linear_bytes
        self.ops: list[Op] = []
        self.shared: set[Tensor] = set()
        self.returned: list[tuple[Save, tuple[Region, ...]]] = []
        self._regions: tuple[Region, ...] = ()

    @contextmanager
    def region(self, name: str, alone: bool = True, always: bool = False) -> Iterator[None]:
        """Operations recorded inside belong to the named region and to those around it.

        A region that is not ``alone`` is part of another region's kernel: no policy selects it.
        One that is ``always`` recomputed needs no policy.
        """
        outside = self._regions
        self._regions = (*outside, Region(name, alone, always))
        try:
            yield
        finally:
            self._regions = outside

    def until(self, number: int) -> "Graph":
        """The same forward pass, of which only the first operations have run."""
        part = Graph(self.mesh, self.dtype_bytes, self.linear_bytes)
        part.ops, part.shared = self.ops[:number], self.shared
        part.returned = self.returned
        return part

    def input(self, name: str, axes: tuple[Axis, ...], shared: bool = False) -> Tensor:
        """An activation from outside the graph; ``shared`` if other graphs read it too."""
        tensor = Tensor(name, axes, self.dtype_bytes)
        if shared:
            self.shared.add(tensor)
        return tensor

    def record(
        self,
        name: str,
        kind: OpKind,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        saves: Sequence[Save] = (),
        flops: Size = 0,
        moves: Sequence[Move] = (),
        weights: Sequence[Weight] = (),
        causal: bool = False,
        scratch: Scratch = Scratch(),  # noqa: B008 - it cannot change
        in_place: bool = False,
        holds: Sequence[Tensor] = (),
    ) -> None:
        """Add an operation in the current regions."""
        made = (tuple(inputs), tuple(outputs), self._regions, saves, flops, moves, weights)
        self.ops.append(Op(name, kind, *made, causal, scratch, in_place, tuple(holds)))

    def returns(self, save: Save) -> None:
        """Keep a tensor until backward is over: the caller refers to it."""
        self.returned.append((save, self._regions))

    def hold(self, tensors: Sequence[Tensor]) -> None:
        """Keep tensors of a function that returns now alive until the last operation ends."""
        self.ops[-1] = self.ops[-1]._replace(holds=tuple(tensors))
