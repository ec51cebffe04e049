"""CUDA: the GPU, and what PyTorch's allocator counts on it."""

import os
from collections.abc import Callable

import torch

from memcalc.config.allocator import expandable


def available() -> bool:
    """Whether this machine has a GPU that PyTorch can use."""
    return torch.cuda.is_available()


def prepare(rank: int) -> None:
    """Select a rank's GPU, with expandable segments unless the environment sets them otherwise.

    With expandable segments the allocator's count does not depend on earlier allocations. The
    setting is repeated where the environment has it, as PyTorch 2.9 ignores PYTORCH_ALLOC_CONF
    (issue 183387).
    """
    setter = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # since PyTorch 2.10
    (setter or torch.cuda.memory._set_allocator_settings)(
        f"expandable_segments:{segments_expand()}"
    )
    torch.cuda.set_device(index(rank))


def index(rank: int) -> int:
    """The index of a rank's GPU on its machine: LOCAL_RANK of torchrun, or else the rank."""
    return int(os.environ.get("LOCAL_RANK", rank))


def free() -> int:
    """Bytes that are free on this process's GPU, with those that PyTorch has cached."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(index(0))[0]


def segments_expand() -> bool:
    """Whether the allocator's segments expand: as the environment says, else as in ``prepare``."""
    return expandable(os.environ) is not False


def settle() -> None:
    """Wait for running kernels, and free the allocator's cache."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def peak_of(function: Callable[[], object]) -> int:
    """The peak of the allocator's count while a function runs, less its count before."""
    settle()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def hardware() -> str:
    """The GPU and the CUDA version."""
    major, minor = torch.cuda.get_device_capability()
    return (
        f"{torch.cuda.get_device_name()} (compute capability {major}.{minor}), "
        f"CUDA {torch.version.cuda}"
    )
