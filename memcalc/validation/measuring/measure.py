"""Measure which storages autograd keeps alive after a forward pass, and what made and saved them.

Two counts in one run must agree. First, saved-tensor hooks give a handle for every tensor that is
packed, and the tensors of the handles that are still alive count (a checkpoint drops what it packs
inside). Second, a dispatch mode sees every new storage, and a finalizer sees it freed; what is left
must be what the hooks found, and the outputs.
"""

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

UNSEEN = "constant"  # made inside PyTorch, such as an index from a list


@dataclass(frozen=True, slots=True)
class Stored:
    """A storage that is saved for backward.

    Attributes:
        bytes: The size of the whole storage, also if only a view of it is saved.
        made_by: The name of the module that made it, or of the buffer; empty for an input.
        saved_by: The modules that save it; empty for what is alive but not saved, such as the cache
            of a selective checkpoint.
        shape: The shape of a tensor saved on it.
        path: The path of the module that made it; empty for an input or a buffer.
        op: The operation that made it; empty for an input or a buffer. For ``constant`` the
            operation is not known, and ``path`` is the module that saves it.
        dtype: Its dtype.
        size: Its bytes as a sympy expression, if sizes are symbols; ``bytes`` then holds at the
            example sizes.
    """

    bytes: int
    made_by: str
    saved_by: tuple[str, ...]
    shape: tuple[Any, ...]
    path: str = ""
    op: str = ""
    dtype: str = ""
    size: Any = None


@dataclass(frozen=True, slots=True)
class Measured:
    """What a forward pass saves for backward.

    Attributes:
        stored: The storages that are saved, without parameters, and those made in the pass that are
            alive but not saved. Storages from before the pass come first, then the order in which
            they were made.
        live_bytes: Bytes made in the pass and still alive, by the second count.
        born_bytes: Bytes of them in ``stored``.
        output_bytes: Bytes of them in outputs that are not saved.
        peak_bytes: The most bytes made in the pass that were alive at once.
        sizes: Bytes of each storage made in the pass and alive at its end.
        allocated_bytes: The device's allocator's count of these, or None.
    """

    stored: tuple[Stored, ...]
    live_bytes: int
    born_bytes: int
    output_bytes: int
    peak_bytes: int
    sizes: tuple[int, ...] = ()
    allocated_bytes: int | None = None

    @property
    def bytes(self) -> int:
        """The bytes of all storages."""
        return sum(each.bytes for each in self.stored)

    @property
    def agrees(self) -> bool:
        """Whether the two counts agree."""
        return self.live_bytes == self.born_bytes + self.output_bytes


class _Handle:
    """What a hook returns for a packed tensor; it lives as long as autograd keeps it."""

    __slots__ = ("__weakref__", "saved_by", "tensor")

    def __init__(self, tensor: Tensor, saved_by: str) -> None:
        self.tensor = tensor
        self.saved_by = saved_by


class _Birth(NamedTuple):
    """A new storage: its module, its operation and its first tensor."""

    path: str
    op: str
    shape: tuple[Any, ...]
    dtype: str
    nbytes: Any

    @property
    def bytes(self) -> int:
        return _number(self.nbytes)


@dataclass
class _Births(TorchDispatchMode):
    """Records where every storage is made, and how many bytes are alive."""

    module: Callable[[], str]
    births: dict[int, _Birth] = field(default_factory=dict)
    alive: int = 0
    peak: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and record the storages that it makes."""
        # the storage of torch.tensor is first seen in lift_fresh
        given = () if func is torch.ops.aten.lift_fresh.default else (args, kwargs)
        known = {_key(t) for t in tree_leaves(given) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                key = _key(tensor)
                if key not in known and key not in self.births:
                    self._born(tensor, key, str(func))
        return out

    def _born(self, tensor: Tensor, key: int, op: str) -> None:
        storage = _plain(tensor).untyped_storage()
        birth = _Birth(self.module(), op, tuple(tensor.shape), _type(tensor), storage.nbytes())
        self.births[key] = birth
        self.alive += birth.bytes
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._died, key, birth.bytes)

    def _died(self, key: int, size: int) -> None:
        self.alive -= size
        del self.births[key]  # keys are reused


def measure(
    module: nn.Module,
    *inputs: Any,
    allocated: Callable[[], int] | None = None,
    keywords: Mapping[str, Any] | None = None,
) -> Measured:
    """Run a module forward, and find the storages that autograd saves.

    Args:
        module: The module; storages are named by its submodules.
        inputs: Its positional arguments. They count if they are saved.
        allocated: Returns the device's allocator's count, if there is one.
        keywords: Its keyword arguments.

    >>> import torch
    >>> layer = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU())
    >>> measured = measure(layer, torch.randn(2, 4))
    >>> [(each.bytes, each.made_by, each.saved_by) for each in measured.stored]
    [(32, '', ('0',)), (64, '0', ('1',))]
    """
    handles: weakref.WeakSet[_Handle] = weakref.WeakSet()
    given = {_key(t) for t in tree_leaves((inputs, keywords)) if isinstance(t, Tensor)}
    parameters = {_key(t) for t in module.parameters()}
    buffers = {_key(t): name for name, t in _there(module)}
    before = allocated() if allocated else 0
    with ExitStack() as stack:
        current = stack.enter_context(module_path(module))
        births = stack.enter_context(_Births(current))

        def pack(tensor: Tensor) -> _Handle:
            handle = _Handle(tensor, current())
            handles.add(handle)
            return handle

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda handle: handle.tensor):
            made = module(*inputs, **(keywords or {}))
        if isinstance(made, Iterator):
            raise TypeError("it returns an iterator, which has not run yet")
        returned = tree_leaves(made)
        outputs = [t for t in returned if isinstance(t, Tensor)]
    taken = allocated() - before if allocated else None
    found: dict[int, list[_Handle]] = {}
    for handle in list(handles):
        if _key(handle.tensor) not in parameters:
            found.setdefault(_key(handle.tensor), []).append(handle)
    extra = {_key(t): _number(_nbytes(t)) for t in outputs if _key(t) not in found}
    _settle(lambda: not births.births.keys() - found.keys() - extra.keys())
    born = births.births
    # storages from before the pass come first
    known = [key for key in found if key not in born] + [key for key in born if key not in extra]
    stored = {
        key: _stored(found.get(key, []), born.get(key), buffers.get(key, ""), key in given)
        for key in known
    }
    return Measured(
        tuple(stored.values()),
        births.alive,
        sum(each.bytes for key, each in stored.items() if key in born),
        sum(size for key, size in extra.items() if key in born),
        births.peak,
        tuple(each.bytes for each in born.values()),
        taken,
    )


def peak_bytes(modules: Sequence[nn.Module], x: Tensor) -> int:
    """The peak of the bytes that a chain of modules makes in forward and backward.

    Gradients of parameters are freed at once, so the peak has saved tensors and temporary buffers.
    """
    for module in modules:
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(_forget)
    births = _Births(lambda: ".")
    with births:
        y = x
        for module in modules:
            y = module(y)
        y.backward(torch.ones_like(y))
    return births.peak


def _forget(parameter: Tensor) -> None:
    parameter.grad = None


def _settle(agree: Callable[[], bool]) -> None:
    """Wait a little for the threads of collectives, which free their tensors late."""
    tries = 200 if dist.is_initialized() and dist.get_backend() != "fake" else 0
    while tries and not agree():
        time.sleep(0.01)
        tries -= 1


@contextmanager
def module_path(root: nn.Module) -> Iterator[Callable[[], str]]:
    """The path of the module that is running; a dot for the root."""
    names = {module: name or "." for name, module in root.named_modules()}
    running: list[str] = []

    def enter(module: nn.Module, inputs: Any) -> None:
        running.append(names.get(module, running[-1] if running else "."))

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        running.pop()

    hooks = [
        register_module_forward_pre_hook(enter),
        register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield lambda: running[-1] if running else "."
    finally:
        for hook in hooks:
            hook.remove()


def _stored(handles: list[_Handle], birth: _Birth | None, buffer: str, given: bool) -> Stored:
    """A storage, described by what made it or, if that was not seen, by what saved it."""
    savers = tuple(sorted({_last(handle.saved_by) for handle in handles}))
    shapes = [tuple(_plain(handle.tensor).shape) for handle in handles]
    if birth is None:
        tensor = handles[0].tensor
        seen = bool(buffer) or given
        path, op = ("", "") if seen else (handles[0].saved_by, UNSEEN)
        birth = _Birth(path, op, shapes[0], _type(tensor), _nbytes(tensor))
    shape = min(shapes, key=lambda each: tuple(map(_number, each)), default=birth.shape)
    made_by = buffer if not birth.op or birth.op == UNSEEN else _last(birth.path)
    size = birth.nbytes.node.expr if isinstance(birth.nbytes, torch.SymInt) else None
    return Stored(birth.bytes, made_by, savers, shape, *birth[:2], birth.dtype, size)


def _there(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A module's buffers and other tensors that are not parameters, by name."""
    for each in module.modules():
        for name, held in (*vars(each).items(), *each._buffers.items()):
            if isinstance(held, Tensor):
                yield name, held


def _last(path: str) -> str:
    """The last part of a module's path; a dot for the root."""
    return path.rpartition(".")[2] or "."


def _type(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _key(tensor: Tensor) -> int:
    """The identity of a storage (its address is 0 on meta)."""
    return _plain(tensor).untyped_storage()._cdata


def _nbytes(tensor: Tensor) -> Any:
    return _plain(tensor).untyped_storage().nbytes()


def _number(size: Any) -> int:
    """A size, or the example value of a symbol."""
    return size.node.hint if isinstance(size, torch.SymInt) else size


def _plain(tensor: Tensor) -> Tensor:
    """The tensor that has the storage: a DTensor's local shard, or a collective's result."""
    while is_traceable_wrapper_subclass(tensor):
        tensor = getattr(tensor, tensor.__tensor_flatten__()[0][0])
    return tensor
