"""CUDA: the device itself, what its allocator counts, and whether a layer fits it."""

import os
from collections.abc import Callable

import torch

from memcalc.config.environment import expandable


def available() -> bool:
    """Whether this machine has a GPU that PyTorch can use."""
    return torch.cuda.is_available()


def prepare(rank: int) -> None:
    """Make a rank's GPU the current one, with segments that expand unless somebody said otherwise.

    Under such segments what the allocator counts does not depend on what was allocated before. They
    are set also where the environment has said so: PyTorch 2.9 does not listen to its
    PYTORCH_ALLOC_CONF (issue 183387).
    """
    setter = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # not before PyTorch 2.10
    (setter or torch.cuda.memory._set_allocator_settings)(
        f"expandable_segments:{segments_expand()}"
    )
    torch.cuda.set_device(index(rank))


def index(rank: int) -> int:
    """Which of its machine's GPUs a rank has: as torchrun says, else the one of its number."""
    return int(os.environ.get("LOCAL_RANK", rank))


def free() -> int:
    """Memory that is free on this process's GPU, or that PyTorch holds there and nobody uses."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(index(0))[0]


def segments_expand() -> bool:
    """Whether the allocator's segments expand: as the environment says, else as ``prepare`` did."""
    return expandable(os.environ) is not False


def settle() -> None:
    """Wait for what runs, and let the allocator give back what nobody holds."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def peak_of(function: Callable[[], object]) -> int:
    """The most that the allocator counts while a function runs, beyond what it counted before."""
    settle()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def described() -> str:
    """The GPU, and the versions that ran on it."""
    major, minor = torch.cuda.get_device_capability()
    return (
        f"{torch.cuda.get_device_name()} (compute capability {major}.{minor}), "
        f"CUDA {torch.version.cuda}"
    )
