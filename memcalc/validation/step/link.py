"""Let a CPU build of PyTorch run forward and backward on CUDA tensors without values.

Two objects in C++ stand in the way. PyTorch has no device guard for CUDA, and autograd asks the
"CUDA hooks" for a device. The guard becomes the one that PyTorch itself uses for fake tensors; it
does nothing, and stays for the process. Of the hooks, three answers change, and are put back.

Autograd starts its threads at the first backward of the process, one for each device that it finds
then. So this file sets the guard when it is imported. With CUDA built in, none of this is needed.
"""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import _scoped_library

from memcalc.errors import UsageError

TRIED = ("2.13.0",)  # versions of PyTorch whose symbols and tables these are
CUDA = 1  # c10/core/DeviceType.h
ENTRIES = 48  # of the hooks' table in ATen/detail/CUDAHooksInterface.h
# ATen/detail/AcceleratorHooksInterface.h: their places in it, after two destructors
IS_BUILT, IS_AVAILABLE, HAS_PRIMARY_CONTEXT = 2, 3, 4
GUARDS = "_ZN3c104impl26device_guard_impl_registryE"
HOOKS = "_ZN2at6detail12getCUDAHooksEv"

aten = torch.ops.aten
# native_functions.yaml: a CPU build has no CUDA kernel of these, and decomposes them instead.
DECOMPOSED = ("silu_backward", "mish_backward", "_fused_rms_norm", "_fused_rms_norm_backward")


def refusal() -> str:
    """Why CUDA tensors without values cannot run a step here; empty if they can."""
    version = torch.__version__.partition("+")[0]
    if version not in TRIED:
        return f"fake CUDA tensors need PyTorch {' or '.join(TRIED)}; this is {version}"
    if not torch.backends.cuda.is_built() and sys.platform != "linux":
        return "fake CUDA tensors need Linux, or a PyTorch that is built with CUDA"
    return ""


@contextmanager
def linked() -> Iterator[None]:
    """CUDA's device guard, hooks and kernels, as far as tensors without values need them.

    Raises:
        UsageError: This PyTorch was not tried, or its threads for backward have already started.
    """
    if reason := refusal():
        raise UsageError(reason)
    if torch.backends.cuda.is_built():
        yield
        return
    with _hooks(), _kernels():
        _require_threads()
        yield


def _library(name: str) -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))


def _set_guard() -> None:
    """Let PyTorch install its guard that does nothing: it does so for a guard without devices."""
    guards = (ctypes.c_void_p * (CUDA + 1)).in_dll(_library("libc10.so"), GUARDS)
    if guards[CUDA]:
        return
    no_devices = ctypes.CFUNCTYPE(ctypes.c_int)(int)
    table = (ctypes.c_void_p * 64)(*[ctypes.cast(no_devices, ctypes.c_void_p).value] * 64)
    guard = ctypes.c_void_p(ctypes.addressof(table))
    guards[CUDA] = ctypes.addressof(guard)
    torch._C._ensureCUDADeviceGuardSet()
    if guards[CUDA] == ctypes.addressof(guard):  # it has not: a backward will be refused
        guards[CUDA] = None


@contextmanager
def _hooks() -> Iterator[None]:
    """CUDA is built, available and has a context, for all who ask (ATen/DeviceAccelerator.cpp).

    The object's own table must be back before the process ends.
    """
    get = _library("libtorch_cpu.so")[HOOKS]
    get.restype = ctypes.c_void_p
    pointer = ctypes.c_void_p.from_address(get())
    own = pointer.value
    assert own is not None
    table = (ctypes.c_void_p * ENTRIES).from_address(own)
    changed = (ctypes.c_void_p * ENTRIES)(*table)
    returns_1 = ctypes.cast(ctypes.pythonapi.Py_IsInitialized, ctypes.c_void_p).value
    for entry in (IS_BUILT, IS_AVAILABLE, HAS_PRIMARY_CONTEXT):
        changed[entry] = returns_1
    pointer.value = ctypes.addressof(changed)
    try:
        yield
    finally:
        pointer.value = own


@contextmanager
def _kernels() -> Iterator[None]:
    """CUDA kernels of the operations that a CPU build would decompose; they are never called."""
    fakes = {
        aten._fused_rms_norm.default: _rms_norm,
        aten._fused_rms_norm_backward.default: _rms_norm_backward,
    }
    with _scoped_library("aten", "IMPL") as library:
        for name in DECOMPOSED:
            library.impl(name, _no_kernel, "CUDA")
        fake_impls.op_implementations_dict.update(fakes)
        try:
            yield
        finally:
            for each in fakes:
                del fake_impls.op_implementations_dict[each]


def _no_kernel(*args: Any, **kwargs: Any) -> None:
    raise NotImplementedError("this PyTorch is built without CUDA")


def _rms_norm(
    mode: FakeTensorMode, func: Any, x: Any, shape: Any, weight: Any, eps: Any
) -> tuple[Any, Any]:
    """The output and the fp32 reciprocal norms (layer_norm_kernel.cu: _fused_rms_norm_cuda)."""
    rows = (*x.shape[: x.dim() - len(shape)], *(1 for _ in shape))
    with mode:
        return torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)


def _rms_norm_backward(
    mode: FakeTensorMode, func: Any, grad: Any, x: Any, shape: Any, rstd: Any, weight: Any, of: Any
) -> tuple[Any, Any]:
    """The gradients that are asked for, of the input and of the weight."""
    with mode:
        return (
            torch.empty_like(x) if of[0] else None,
            torch.empty_like(weight) if of[1] and weight is not None else None,
        )


_started = False  # whether a backward on CUDA tensors is known to run in this process


def _require_threads() -> None:
    """Run a backward on a CUDA tensor: it fails if autograd's threads started without CUDA."""
    global _started
    if _started:
        return
    with FakeTensorMode():
        x = torch.empty(1, device="cuda", requires_grad=True)
        try:
            (x * 2).backward()
        except RuntimeError as error:
            if "device_ready_queues_" not in str(error):
                raise
            raise UsageError(
                "PyTorch ran a backward pass in this process before memcalc.validation.step was "
                "imported; import it first"
            ) from error
    _started = True


if not refusal() and not torch.backends.cuda.is_built():
    _set_guard()
