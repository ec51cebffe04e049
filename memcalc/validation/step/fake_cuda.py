"""A CUDA device for tensors without values: what programs ask of it, and the kernels it runs."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.optim import optimizer as optimizers
from torch.utils._pytree import tree_map

from memcalc.analysis.buffers import cublas_workspace
from memcalc.config.gpus import gpu as gpu_of
from memcalc.errors import UsageError
from memcalc.validation.step.attention import attention
from memcalc.validation.step.link import linked
from memcalc.validation.step.streams import Event, Stream

aten = torch.ops.aten
AMPERE = 80  # the first compute capability, times 10, with bf16


class FakeCuda:
    """A CUDA device whose tensors have no values; tensors are made on it while it is entered.

    Nothing is computed, and no memory is allocated. Where a program reads a value, it gets 1 or
    True, and what depends on values has its largest size.

    Args:
        gpu: The GPU to choose kernels for: a name of ``memcalc gpus``.
        attention: The kernel of scaled_dot_product_attention, one of ``attention.KERNELS``; by
            default the one that PyTorch chooses.

    Attributes:
        gpu: The GPU.
        cublas: Bytes of a cuBLAS workspace on it.
        read: The operations that read a value, each with how often.
        compiled: Whether ``torch.compile`` was called; what it was given runs eagerly.

    Raises:
        ConfigError: There is no such GPU.
        UsageError: It is not NVIDIA's; or, on entering, PyTorch is not of a version that was tried.

    >>> with FakeCuda("h100") as cuda:
    ...     layer = torch.nn.Linear(2**20, 2**20)  # 4 TiB
    ...     layer(torch.ones(1, 2**20)).sum().backward()
    >>> layer.weight.grad.device.type, cuda.cublas
    ('cuda', 33554432)
    """

    def __init__(self, gpu: str = "a100", attention: str | None = None) -> None:
        self.gpu = gpu_of(gpu)
        if self.gpu.capability is None:
            raise UsageError(f"a fake CUDA device needs an NVIDIA GPU, not {self.gpu.name}")
        self.capability = self.gpu.capability
        self.cublas = cublas_workspace(self.capability)
        self.attention = attention
        self.read: dict[str, int] = {}
        self.compiled = False

    def __enter__(self) -> "FakeCuda":
        with ExitStack() as stack:
            stack.enter_context(linked())
            for target, name, value in self._replaced():
                stack.enter_context(mock.patch.object(target, name, value))
            stack.enter_context(_Fake(self.read))
            stack.enter_context(torch.device("cuda"))
            self._stack = stack.pop_all()
        self.adapt()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def adapt(self) -> None:
        """Adapt libraries that were imported after it was entered, and treat fake tensors apart.

        transformers takes them for a sign of tracing, and then builds masks that it does not need.
        Triton's kernels do not run: they write into memory that exists already.
        """
        for module, name, attribute, value in (
            ("transformers.utils.import_utils", "", "is_fake_tensor", lambda tensor: False),
            ("triton.runtime.jit", "JITFunction", "run", _launch),
            ("triton.runtime.autotuner", "Autotuner", "run", _launch),
            ("triton.runtime.autotuner", "Heuristics", "run", _launch),
        ):
            found = sys.modules.get(module)
            target = getattr(found, name) if found and name else found
            if target and getattr(target, attribute, value) is not value:
                self._stack.enter_context(mock.patch.object(target, attribute, value))

    def _compile(self, model: Any = None, **options: Any) -> Any:
        """``torch.compile``, which compiles nothing."""
        self.compiled = True
        return model if model is not None else lambda function: function

    def _replaced(self) -> Iterator[tuple[Any, str, Any]]:
        """Attributes with the values that they have while the device is entered."""
        for name, value in self._answers().items():
            yield torch.cuda, name, value
        yield F, "scaled_dot_product_attention", attention(self.capability, self.attention)
        # fake tensors count as tensors of CUDA, so that optimizers have their usual form
        types = [*optimizers._foreach_supported_types, FakeTensor]
        yield optimizers, "_foreach_supported_types", types
        yield torch, "tensor", _tensor
        yield torch.utils, "swap_tensors", _swap
        yield torch, "compile", self._compile
        yield torch.amp.GradScaler, "_maybe_opt_step", _step
        if torch.distributed.is_available():
            ranks = import_module("memcalc.validation.step.ranks")
            yield ranks.DeviceMesh, "__init__", ranks.mesh_of_real_ranks

    def _answers(self) -> dict[str, Any]:
        """What ``torch.cuda`` answers."""
        major, minor = capability = divmod(self.capability, 10)
        properties = SimpleNamespace(
            name=self.gpu.name,
            major=major,
            minor=minor,
            total_memory=self.gpu.usable_bytes,
            multi_processor_count=self.gpu.sms or 1,
            warp_size=32,
            shared_memory_per_block_optin=(self.gpu.shared_bytes or 0) - 1024,
        )
        memory = self.gpu.usable_bytes

        def bf16(including_emulation: bool = True) -> bool:
            return including_emulation or self.capability >= AMPERE

        return {
            "_lazy_init": _nothing,
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "set_device": _nothing,
            "device": nullcontext,
            "get_device_capability": lambda device=None: capability,
            "get_device_properties": lambda device=None: properties,
            "get_device_name": lambda device=None: properties.name,
            "is_bf16_supported": bf16,
            "mem_get_info": lambda device=None: (memory, memory),
            "synchronize": _nothing,
            "empty_cache": _nothing,
            "ipc_collect": _nothing,
            "is_current_stream_capturing": lambda: False,
            "Stream": Stream,
            "Event": Event,
            "stream": lambda stream: stream or nullcontext(),
            "current_stream": lambda device=None: Stream.current,
            "default_stream": lambda device=None: Stream.default,
        }


class _Fake(FakeTensorMode):
    """Fake tensors of a device that must never be initialized; their values are 1 and True."""

    avoid_device_init = True

    def __init__(self, read: dict[str, int]) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.read = read

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation; if its output depends on values, make up one."""
        if func in _SAME:
            return args[0]
        try:
            return super().dispatch(func, types, args, kwargs or {})
        except (DataDependentOutputException, DynamicOutputShapeException):
            if func not in _VALUES:
                raise
            self.read[str(func)] = self.read.get(str(func), 0) + 1
            with self:
                return _VALUES[func](*args)


def _one(tensor: Tensor) -> float | bool:
    if tensor.dtype == torch.bool:
        return True
    return 1.0 if tensor.dtype.is_floating_point else 1


def _all_indices(tensor: Tensor) -> Tensor:
    return tensor.new_empty((tensor.numel(), tensor.dim()), dtype=torch.int64)


# Operations that return what they are given: no collective runs, and the host's memory is not ours.
_SAME = (torch.ops._c10d_functional.wait_tensor.default, aten._pin_memory.default)
_VALUES: dict[Any, Callable[..., Any]] = {
    aten._local_scalar_dense.default: _one,
    aten.equal.default: lambda first, second: True,
    aten.nonzero.default: _all_indices,
    aten.masked_select.default: lambda tensor, mask: tensor.new_empty(tensor.numel()),
}


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _launch(*args: Any, **kwargs: Any) -> None:
    """A Triton kernel's launch."""


def _tensor(data: Any, *, device: Any = None, _make: Any = torch.tensor, **options: Any) -> Tensor:
    """``torch.tensor``, which makes constants on the CPU first, in every thread.

    PyTorch's own switch for that (FakeTensorMode.__enter__) is one per thread, and autograd has
    threads of its own. A scalar without a device stays on the CPU, as an optimizer's step count
    does where nobody sets a default device.
    """
    plain = tree_map(lambda each: 1.0 if isinstance(each, Tensor) else each, data)
    made: Tensor = _make(plain, device="cpu", **options)
    if device is None:
        device = torch.empty(0).device if made.dim() else "cpu"
    return made if torch.device(device).type == "cpu" else made.to(device)


def _swap(old: Any, new: Any, _theirs: Any = torch.utils.swap_tensors) -> None:
    """``Module.to`` swaps tensors of subclasses, which needs them unshared; CUDA's get new data."""
    try:
        _theirs(old, new)
    except RuntimeError:
        old.data = new.data


def _step(scaler: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
    """A GradScaler's step: no gradient is infinite."""
    return optimizer.step(*args, **kwargs)
