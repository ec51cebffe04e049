"""Ranks that are not there: collectives take memory, but nothing is sent."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch import distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from memcalc.errors import UsageError


@contextmanager
def fake_ranks(number: int) -> Iterator[None]:
    """Rank 0 of a process group of so many ranks. Enter it before ``FakeCuda``.

    What ``torchrun`` sets is in the environment, and ``init_process_group`` does nothing.

    Raises:
        UsageError: There is a process group already.
    """
    if dist.is_initialized():
        raise UsageError("there is a process group in this process already")
    # PyTorch's kernels of collectives for fake tensors
    import_module("torch.distributed._tools.fake_collectives")
    store = import_module("torch.testing._internal.distributed.fake_pg").FakeStore()
    zero, all_ = "0", str(number)
    environment = {"RANK": zero, "LOCAL_RANK": zero, "WORLD_SIZE": all_, "LOCAL_WORLD_SIZE": all_}
    dist.init_process_group("fake", rank=0, world_size=number, store=store)
    with ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        stack.enter_context(mock.patch.dict(os.environ, environment))
        nothing = mock.patch.object(dist, "init_process_group", mock.Mock())
        stack.enter_context(nothing)
        for target, name, value in _ddp():
            stack.enter_context(mock.patch.object(target, name, value))
        yield


def _ddp() -> Iterator[tuple[Any, str, Any]]:
    """What DDP does in C++ with values or with a device, replaced by nothing.

    Buckets are not rebuilt after the first iteration: their bytes would be the same.
    """
    ddp = import_module("torch.nn.parallel.distributed")
    init, c10d = ddp.DistributedDataParallel.__init__, import_module("torch._C._distributed_c10d")

    def with_hook(self: Any, *args: Any, **how: Any) -> None:
        init(self, *args, **how)
        c10d._register_comm_hook(self.reducer, None, _reduced)

    yield ddp.DistributedDataParallel, "__init__", with_hook
    yield ddp, "_verify_param_shape_across_processes", mock.Mock()
    yield ddp, "_sync_module_states", mock.Mock()
    yield c10d.Logger, "set_construction_data_and_log", mock.Mock()
    yield c10d.Logger, "set_runtime_stats_and_log", mock.Mock()
    yield c10d.Reducer, "_rebuild_buckets", mock.Mock(return_value=False)


def _reduced(state: None, bucket: Any) -> torch.futures.Future[Any]:
    """A bucket that is reduced in place, at once."""
    done: torch.futures.Future[Any] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def mesh_of_real_ranks(mesh: Any, *args: Any, _init: Any = DeviceMesh.__init__, **how: Any) -> None:
    """``DeviceMesh.__init__``, for which ranks must have values: 0, 1, and so on."""
    with _disable_current_modes():
        args, how = tuple(map(_real, args)), {name: _real(each) for name, each in how.items()}
        _init(mesh, *args, **how)


def _real(value: Any) -> Any:
    if not isinstance(value, FakeTensor):
        return value
    return torch.arange(value.numel(), dtype=torch.int, device="cpu").view(value.shape)
