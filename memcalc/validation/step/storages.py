"""What is known of a storage, and of the moment at which most bytes are allocated."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from memcalc.analysis.allocator import rounded

KINDS = {
    "weights": "parameters",
    "gradients": "of parameters",
    "optimizer": "the optimizer's states",
    "buffers": "a module's tensors that are not parameters",
    "inputs": "made before the first phase",
    "saved": "made in a forward pass and alive at its end",
    "temporary": "all others",
    "workspace": "allocated by a kernel for itself",
}


@dataclass(slots=True, eq=False)
class Storage:
    """A storage, from its birth to its death.

    Attributes:
        bytes: Its size, not rounded.
        born: The number of events in the log before its birth.
        phase: The phase in which it was made.
        module: The module that made it; in backward, whose forward pass made the gradient's node.
        op: The operation that made it, such as ``aten.mm.default``.
        shape: The shape of the first tensor on it.
        dtype: That tensor's dtype, such as ``bfloat16``.
        stream: The number of the CUDA stream, whose pool it is taken from.
        died: The number of events in the log before its death; None if it is alive.
        kind: One of ``KINDS``, or empty while it is not known.
        name: The parameter, buffer or state that it holds.
    """

    bytes: int
    born: int
    phase: str
    module: str
    op: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    stream: int = 0
    died: int | None = None
    kind: str = ""
    name: str = ""

    @property
    def rounded(self) -> int:
        """Its size, as PyTorch's allocator rounds it."""
        return rounded(self.bytes)

    def alive(self, event: int) -> bool:
        """Whether it is alive after the log's event of this number."""
        return self.born <= event and (self.died is None or self.died > event)


class Event(NamedTuple):
    """A line of the log.

    Attributes:
        what: ``birth``, ``death``, ``empty_cache`` or ``reset_peaks``.
        storage: Whose birth or death.
    """

    what: Literal["birth", "death", "empty_cache", "reset_peaks"]
    storage: Storage | None = None


class Peak(NamedTuple):
    """The first moment at which most bytes are allocated.

    Attributes:
        bytes: The bytes of all storages, each rounded as the allocator does, or not.
        event: The number of the event after which it is.
        phase: Its phase.
        module: Its module.
        op: Its operation; empty if nothing was allocated since peaks were reset.
        storages: The storages that are alive then.
        parts: Bytes by kind; they add up to ``bytes``.
    """

    bytes: int
    event: int
    phase: str
    module: str
    op: str
    storages: tuple[Storage, ...]
    parts: Counter[str]


def plain(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that have the storages: of a DTensor, its local shard."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        part = getattr(tensor, name)
        if isinstance(part, Tensor):
            yield from plain(part)


def storage_of(tensor: Tensor) -> Any:
    """The storage of a tensor, or of the first tensor in it."""
    return next(plain(tensor)).untyped_storage()
