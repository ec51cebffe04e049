"""Measuring: which storages autograd keeps alive after a forward pass, and who made and saved them.

Two counts in one run must agree. Saved-tensor hooks hand out a handle for every tensor that is
packed; what is alive is a handle that still is (packed is not alive: a checkpoint drops what it
packed inside). A dispatch mode sees every storage that is born, and a finaliser sees it die; what
is left is what the hooks found, and the outputs.
"""

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True, slots=True)
class Stored:
    """A storage that is kept for backward.

    Attributes:
        bytes: Its size: all of the storage, also where only a view of it is saved.
        made_by: The module in which it was born, or the buffer that it is; nothing for an input.
        saved_by: The modules in which it was saved; none of what is alive without being saved, as
            the cache of a selective checkpoint, or what a caller holds.
        shape: The shape of a tensor saved on it.
    """

    bytes: int
    made_by: str
    saved_by: tuple[str, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """What a forward pass keeps.

    Attributes:
        stored: The storages that are saved and alive, without parameters, and those that were born
            in the pass and are alive without being saved.
        live_bytes: Storages born in the pass and still alive, by the second count.
        born_bytes: Those of them in ``stored``.
        output_bytes: Those of the outputs that nothing saved.
        peak_bytes: The most that was alive of storages born in the pass.
        sizes: Bytes of each storage that was born in the pass and is alive at its end.
        allocated_bytes: What the device's allocator counts for these, or None.
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
        """All that is kept."""
        return sum(each.bytes for each in self.stored)

    @property
    def agrees(self) -> bool:
        """Whether the two counts agree."""
        return self.live_bytes == self.born_bytes + self.output_bytes


class _Handle:
    """What a hook hands out for a packed tensor: alive as long as autograd holds it."""

    __slots__ = ("__weakref__", "saved_by", "tensor")

    def __init__(self, tensor: Tensor, saved_by: str) -> None:
        self.tensor = tensor
        self.saved_by = saved_by


@dataclass
class _Births(TorchDispatchMode):
    """Where every storage is born, and how many bytes of them are alive."""

    module: Callable[[], str]
    made_by: dict[int, str] = field(default_factory=dict)
    shapes: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    alive: int = 0
    peak: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and note the storages that it makes."""
        # torch.tensor makes its storage unseen, and is first seen being lifted
        given = () if func is torch.ops.aten.lift_fresh.default else (args, kwargs)
        known = {_key(t) for t in tree_leaves(given) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                key = _key(tensor)
                if key not in known and key not in self.made_by:
                    self._born(tensor, key)
        return out

    def _born(self, tensor: Tensor, key: int) -> None:
        storage = _plain(tensor).untyped_storage()
        self.made_by[key] = self.module()
        self.shapes[key] = storage.nbytes(), tuple(tensor.shape)
        self.alive += storage.nbytes()
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._died, key, storage.nbytes())

    def _died(self, key: int, size: int) -> None:
        self.alive -= size
        del self.made_by[key], self.shapes[key]  # keys are used again


def measure(
    module: nn.Module, *inputs: Tensor, allocated: Callable[[], int] | None = None
) -> Measured:
    """Run a module forward and see what autograd keeps.

    Args:
        module: The module; its submodules' names say who made and who saved a storage.
        inputs: Its inputs. They count as kept where they are saved, and not as born.
        allocated: What the device's allocator counts at this moment, if it has one.

    >>> import torch
    >>> layer = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU())
    >>> measured = measure(layer, torch.randn(2, 4))
    >>> [(each.bytes, each.made_by, each.saved_by) for each in measured.stored]
    [(32, '', ('0',)), (64, '0', ('1',))]
    """
    handles: weakref.WeakSet[_Handle] = weakref.WeakSet()
    parameters = {_key(t) for t in module.parameters()}
    buffers = {_key(t): name.rpartition(".")[2] for name, t in module.named_buffers()}
    before = allocated() if allocated else 0
    with ExitStack() as stack:
        current = stack.enter_context(_module_path(module))
        births = stack.enter_context(_Births(current))

        def pack(tensor: Tensor) -> _Handle:
            handle = _Handle(tensor, current())
            handles.add(handle)
            return handle

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda handle: handle.tensor):
            outputs = [t for t in tree_leaves(module(*inputs)) if isinstance(t, Tensor)]
    taken = allocated() - before if allocated else None
    found: dict[int, list[_Handle]] = {}
    for handle in list(handles):
        if _key(handle.tensor) not in parameters:
            found.setdefault(_key(handle.tensor), []).append(handle)
    extra = {_key(t): _bytes(t) for t in outputs if _key(t) not in found}
    made_by = {**buffers, **births.made_by}
    _settle(lambda: not births.made_by.keys() - found.keys() - extra.keys())
    stored = {key: _stored(found[key], made_by.get(key, "")) for key in found}
    for key in births.made_by.keys() - found.keys() - extra.keys():
        size, shape = births.shapes[key]
        stored[key] = Stored(size, births.made_by[key], (), shape)
    born = sum(each.bytes for key, each in stored.items() if key in births.made_by)
    of_outputs = sum(size for key, size in extra.items() if key in births.made_by)
    ordered = sorted(stored.values(), key=lambda each: (each.made_by, -each.bytes, each.saved_by))
    sizes = tuple(births.shapes[key][0] for key in births.made_by)
    return Measured(tuple(ordered), births.alive, born, of_outputs, births.peak, sizes, taken)


def peak_bytes(modules: Sequence[nn.Module], x: Tensor) -> int:
    """The most that is alive of what a chain of modules makes, forward and backward.

    Gradients of parameters are freed as they are made, as they would be in buckets; what is left is
    what is kept, and what comes and goes.
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
    """Wait a little for the threads of collectives, which let go of their tensors late."""
    tries = 200 if dist.is_initialized() and dist.get_backend() != "fake" else 0
    while tries and not agree():
        time.sleep(0.01)
        tries -= 1


@contextmanager
def _module_path(root: nn.Module) -> Iterator[Callable[[], str]]:
    """The name of the module that is running, by the last part of its path."""
    names = {module: name.rpartition(".")[2] or "." for name, module in root.named_modules()}
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


def _stored(handles: list[_Handle], made_by: str) -> Stored:
    savers = tuple(sorted({handle.saved_by for handle in handles}))
    shape = min(tuple(_plain(handle.tensor).shape) for handle in handles)
    return Stored(_bytes(handles[0].tensor), made_by, savers, shape)


def _key(tensor: Tensor) -> int:
    """The identity of a storage: never its address, which is 0 on meta."""
    return _plain(tensor).untyped_storage()._cdata


def _bytes(tensor: Tensor) -> int:
    return _plain(tensor).untyped_storage().nbytes()


def _plain(tensor: Tensor) -> Tensor:
    """The tensor that has the storage: a DTensor's local part, or what a collective awaits."""
    while is_traceable_wrapper_subclass(tensor):
        tensor = getattr(tensor, tensor.__tensor_flatten__()[0][0])
    return tensor
