"""Whether autograd adds two gradients in place.

Where a tensor is used twice, autograd adds its gradients: in place if nothing else refers to the
first one and no dispatch mode is active (torch/csrc/autograd/input_buffer.cpp: accumulate,
can_accumulate_inplace). A tracker is such a mode, so the sum would take memory that it does not
take without one. Whether something else refers to the gradient is seen from use counts. What they
are if nothing does is measured once, in a backward pass of known gradients.
"""

import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from memcalc.validation.step.storages import storage_of

ADD = torch.ops.aten.add.Tensor
ENGINE = "_engine_run_backward"  # torch/autograd/graph.py: the function that calls autograd
WRAPPERS = ("_fn", "inner")  # torch/_dynamo's around a mode's dispatch function


def adds_in_place(func: Any, args: Any, device: str) -> bool:
    """Whether an operation is a sum of gradients that autograd would write into the first one.

    It must be called by a mode's ``__torch_dispatch__``.

    Args:
        func: The operation.
        args: Its arguments.
        device: ``cuda`` or ``cpu``.
    """
    if func is not ADD or torch._C._current_autograd_node() is None or torch.is_grad_enabled():
        return False
    if not _from_autograd() or not all(isinstance(x, Tensor) and not x.is_sparse for x in args[:2]):
        return False
    dense = torch._prims_common.is_non_overlapping_and_dense_or_false(args[0])
    return dense and _uses(args[0]) <= uses_of_unshared(device)


def _from_autograd() -> bool:
    """Whether autograd itself calls the operation, and not a backward that is written in Python."""
    frame = sys._getframe(3)  # the caller of __torch_dispatch__
    while frame is not None and frame.f_code.co_name in WRAPPERS:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is None or frame.f_code.co_name == ENGINE


def _uses(tensor: Tensor) -> tuple[int, int]:
    """How many refer to a tensor, and to its storage."""
    of_tensor: int = tensor._use_count()  # type: ignore[attr-defined]
    return of_tensor, torch._C._storage_Use_Count(storage_of(tensor)._cdata)


@cache
def uses_of_unshared(device: str) -> tuple[int, int]:
    """The use counts of a gradient that nothing but autograd refers to.

    Outside of a backward pass, as it runs one.
    """
    found: list[tuple[int, int]] = []

    class Look(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is ADD and not torch.is_grad_enabled():
                found.append(_uses(args[0]))
            return func(*args, **(kwargs or {}))

    with FakeTensorMode():
        x = torch.empty(2, 2, device=device, requires_grad=True)
        with Look():
            y = x * 2
            (y.sin() + y.cos()).sum().backward()
    return found[0]
