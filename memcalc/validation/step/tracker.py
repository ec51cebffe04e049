"""Follow every storage of a device: where it is made, what it is, when it dies."""

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memcalc.analysis.allocator import Allocator, AllocatorConf
from memcalc.analysis.allocator import Block as AllocatorBlock
from memcalc.validation.step.gradients import adds_in_place, uses_of_unshared
from memcalc.validation.step.modules import Modules
from memcalc.validation.step.statistics import statistics
from memcalc.validation.step.storages import Event, Peak, Storage, plain, storage_of
from memcalc.validation.step.streams import Stream
from memcalc.validation.step.workspaces import GEMMS, workspace

SETUP = "setup"  # the phase before the first one that is named
FORWARD = "forward"  # the names of forward phases begin with this
CUBLAS = "cuBLAS workspace"


class Tracker(TorchDispatchMode):
    """Follows every storage of a device while it is entered.

    Args:
        device: ``cuda``, or ``cpu`` for real tensors.
        cublas: Bytes of a cuBLAS workspace: one per thread and stream, at its first GEMM. 0 for
            none.
        workspaces: Whether the memory that other kernels allocate for themselves counts.

    Attributes:
        log: Births and deaths, in order.
        allocated: Bytes that are alive, each storage rounded as the allocator does.
        last: The module and the operation that ran last.

    >>> with Tracker("cpu") as tracker:
    ...     model = torch.nn.Linear(256, 256)
    ...     tracker.watch(model)
    ...     tracker.phase("forward")
    ...     loss = model(torch.ones(128, 256)).sum()
    ...     tracker.phase("backward")
    ...     loss.backward()
    >>> tracker.peak().bytes, tracker.peak().phase
    (658432, 'backward')
    """

    def __init__(self, device: str = "cuda", cublas: int = 0, workspaces: bool = False) -> None:
        super().__init__()
        self.device, self.cublas, self.workspaces = device, cublas, workspaces
        self.log: list[Event] = []
        self.allocated = 0
        self._alive: dict[int, Storage] = {}  # by the storage's address
        self._phase = SETUP
        self._forward_ends: list[int] = []
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._modules = Modules()
        self._handles: set[tuple[int, int]] = set()  # of cuBLAS
        self._asleep = False
        self.last: tuple[str, Any] = "", None

    def __enter__(self) -> "Tracker":
        uses_of_unshared(self.device)
        with ExitStack() as stack:
            stack.enter_context(self._modules.followed())
            if self.device == "cuda" and not torch.backends.cuda.is_built():
                for name, function in statistics(self).items():
                    stack.enter_context(mock.patch.object(torch.cuda, name, function))
            stack.enter_context(self._resizes())
            stack.enter_context(self._propagation())
            super().__enter__()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._stack.close()

    def watch(self, *watched: nn.Module | Optimizer) -> None:
        """Tell weights, gradients, buffers and states from other storages.

        Args:
            watched: Models and optimizers. A part of a model that is watched is watched already.
        """
        for each in watched:
            if isinstance(each, nn.Module):
                if not any(each is part for model in self._models for part in model.modules()):
                    self._models.add(each)
                    self._modules.know(each)
            else:
                self._optimizers.add(each)
        self._name_watched()

    def phase(self, name: str) -> None:
        """Begin a phase, if it is another. What is alive at the end of a forward phase is saved."""
        self._name_watched()
        if name == self._phase:
            return
        if self._phase.startswith(FORWARD):
            self._forward_ends.append(len(self.log))
        self._phase = name

    def reset_peaks(self, empty_cache: bool = False) -> None:
        """Forget earlier peaks, after the allocator has freed what is unused if so asked.

        As ``torch.cuda.reset_peak_memory_stats`` and ``torch.cuda.empty_cache``.
        """
        self._name_watched()
        if empty_cache:
            self.log.append(Event("empty_cache"))
        self.log.append(Event("reset_peaks"))

    @property
    def current(self) -> str:
        """The phase."""
        return self._phase

    @property
    def depth(self) -> int:
        """How many modules run within one another."""
        return self._modules.depth

    def peak(self, rounded: bool = True, until: int | None = None) -> Peak:
        """The first moment, since peaks were last reset, at which most bytes are allocated.

        Args:
            rounded: Whether each storage counts as the allocator rounds it.
            until: The number of events in the log to consider; by default all.
        """
        now = most = at = 0
        for number, event in enumerate(self.log[:until]):
            if event.storage is not None:
                size = event.storage.rounded if rounded else event.storage.bytes
                now += size if event.what == "birth" else -size
            if now > most or event.what == "reset_peaks":
                most, at = now, number
        there = [e.storage for e in self.log[: at + 1] if e.what == "birth" and e.storage]
        alive = tuple(each for each in there if each.bytes and each.alive(at))
        parts: Counter[str] = Counter()
        for each in alive:
            parts[self.kind(each)] += each.rounded if rounded else each.bytes
        last = self.log[at].storage if self.log else None
        if last is None:
            return Peak(most, at, self._phase, "", "", alive, parts)
        return Peak(most, at, last.phase, last.module, last.op, alive, parts)

    def kind(self, storage: Storage) -> str:
        """What a storage is, one of ``storages.KINDS``."""
        if storage.kind:
            return storage.kind
        if storage.phase == SETUP:
            return "inputs"
        if storage.phase.startswith(FORWARD):
            ends = self._forward_ends
            if any(storage.born < end and storage.alive(end - 1) for end in ends):
                return "saved"
        return "temporary"

    def replay(
        self, conf: AllocatorConf | None = None, capacity: int | None = None, taken: int = 0
    ) -> Allocator:
        """PyTorch's allocator after the log.

        Args:
            conf: Its settings.
            capacity: Bytes of the GPU; None is unlimited.
            taken: Bytes of the GPU that others hold.

        Raises:
            OutOfMemory: The GPU has no memory for it.
        """
        allocator = Allocator(conf or AllocatorConf(), capacity, taken)
        blocks: dict[Storage, AllocatorBlock] = {}
        for what, storage in self.log:
            if storage is None:
                getattr(allocator, what)()
            elif what == "birth":
                blocks[storage] = allocator.malloc(storage.bytes, storage.stream)
            else:
                allocator.free(blocks.pop(storage))
        return allocator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and record the storages that it makes."""
        kwargs = kwargs or {}
        if any(each is not FakeTensor and hasattr(each, "__tensor_flatten__") for each in types):
            return NotImplemented  # a DTensor, whose local operations come here afterwards
        self.last = self._modules.current, func
        if self._asleep:
            return func(*args, **kwargs)
        if adds_in_place(func, args, self.device):
            return args[0]
        # the storage of torch.tensor is first seen as the argument of lift_fresh
        given = () if func is torch.ops.aten.lift_fresh.default else (args, kwargs)
        known = {storage_of(t)._cdata for t in tree_leaves(given) if isinstance(t, Tensor)}
        if self.cublas and func in GEMMS:
            self._handle(str(func))
        out = func(*args, **kwargs)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.device.type == self.device:
                storage = storage_of(tensor)
                if storage._cdata not in known and storage._cdata not in self._alive:
                    self._born(storage, str(func), tensor)
        if self.workspaces and (size := workspace(func, args)):
            self._dead(self._birth(size, str(func), kind="workspace"))
        return out

    def _birth(self, size: int, op: str, **known: Any) -> Storage:
        made = Storage(size, len(self.log), self._phase, self._modules.current, op, **known)
        self.log.append(Event("birth", made))
        self.allocated += made.rounded
        return made

    def _born(self, storage: Any, op: str, tensor: Tensor) -> None:
        made = self._birth(
            storage.nbytes(),
            op,
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            stream=_stream(self.device),
        )
        self._alive[storage._cdata] = made
        weakref.finalize(storage, self._died, storage._cdata, made)

    def _died(self, key: int, storage: Storage) -> None:
        if self._alive.get(key) is storage:
            del self._alive[key]
            self._dead(storage)

    def _dead(self, storage: Storage) -> None:
        storage.died = len(self.log)
        self.log.append(Event("death", storage))
        self.allocated -= storage.rounded

    def _handle(self, op: str) -> None:
        """A thread's first GEMM on a stream takes a cuBLAS workspace, which stays."""
        key = threading.get_ident(), _stream(self.device)
        if key not in self._handles:
            self._handles.add(key)
            self._birth(self.cublas, op, kind="workspace", name=CUBLAS, stream=key[1])

    @contextmanager
    def _resizes(self) -> Iterator[None]:
        """FSDP frees storages by setting their size to 0: no dispatch mode sees that."""
        resize = torch.UntypedStorage.resize_

        def resize_(storage: Any, size: int) -> Any:
            before = self._alive.get(storage._cdata)
            out = resize(storage, size)
            if before is not None:
                self._died(storage._cdata, before)
                again = self._birth(
                    storage.nbytes(),
                    "resize_",
                    shape=before.shape,
                    dtype=before.dtype,
                    stream=_stream(self.device),
                    kind=before.kind,
                    name=before.name,
                )
                self._alive[storage._cdata] = again
                weakref.finalize(storage, self._died, storage._cdata, again)
            return out

        with mock.patch.object(torch.UntypedStorage, "resize_", resize_):
            yield

    @contextmanager
    def _propagation(self) -> Iterator[None]:
        """A DTensor infers shapes with whole fake tensors, which take no memory."""
        module = sys.modules.get("torch.distributed.tensor._sharding_prop")
        if module is None:
            yield
            return
        name = "_propagate_tensor_meta_non_cached"
        infer = getattr(module.ShardingPropagator, name)
        with mock.patch.object(module.ShardingPropagator, name, self._unseen(infer)):
            yield

    def _unseen(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def unseen(*args: Any, **kwargs: Any) -> Any:
            self._asleep = True
            try:
                return function(*args, **kwargs)
            finally:
                self._asleep = False

        return unseen

    def _name_watched(self) -> None:
        """Set the kind and the name of the storages of watched models and optimizers."""
        names: dict[int, str] = {}
        for model in self._models:
            for name, parameter in model.named_parameters():
                names[id(parameter)] = name
                self._name(parameter, "weights", name)
                self._name(parameter.grad, "gradients", name)
            for name, buffer in model.named_buffers():
                self._name(buffer, "buffers", name)
        for optimizer in self._optimizers:
            for owner, states in optimizer.state.items():
                for name, state in states.items():
                    self._name(state, "optimizer", f"{names.get(id(owner), '')} {name}".strip())

    def _name(self, tensor: Any, kind: str, name: str) -> None:
        if not isinstance(tensor, Tensor):
            return
        for part in plain(tensor):
            storage = self._alive.get(part.untyped_storage()._cdata)
            if storage is not None and storage.kind in ("", kind):
                storage.kind, storage.name = kind, storage.name or name


def _stream(device: str) -> int:
    return Stream.current.number if device == "cuda" else 0
