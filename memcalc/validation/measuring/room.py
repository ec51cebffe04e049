"""Check that a layer fits in memory before anything is allocated."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from memcalc.analysis.layers import layer_bytes
from memcalc.analysis.parameters import owned
from memcalc.blocks.layer import layer_graph
from memcalc.config import Config, Parallel
from memcalc.errors import MemcalcError
from memcalc.units import format_bytes
from memcalc.validation.measuring import cuda

SMALLER = "choose --device meta, a larger --tp or a smaller --seq-length"


class RoomError(MemcalcError, MemoryError):
    """A layer does not fit in memory."""


def require_room(config: Config, device: str = "cpu") -> None:
    """Refuse a layer that needs more memory than is free.

    Raises:
        RoomError: With both numbers.
    """
    need, free = NEEDS[device](config), FREE[device]()
    if free is not None and need > free:
        raise RoomError(
            f"the layer needs about {format_bytes(need)} of memory on {device}, and only "
            f"{format_bytes(free)} are free; {SMALLER}"
        )


@contextmanager
def out_of_memory() -> Iterator[None]:
    """Turn PyTorch's out-of-memory error into a ``RoomError``."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        first = str(error).partition(".")[0]
        raise RoomError(f"the GPU ran out of memory ({first}); {SMALLER}") from error


def needed_on_cpu(config: Config) -> int:
    """The approximate bytes that all ranks of a layer need on one machine.

    Each rank needs the whole weights in fp32 and in their dtype, and twice what it saves for
    backward; and the same for the unsharded fp32 layer with its gradients, for the comparison.

    >>> from memcalc.config import load
    >>> needed_on_cpu(load("1t")) > 2**34
    True
    """
    weights: int = owned(layer_graph(config))
    split = (4 + config.run.activation_bytes) * weights + 2 * layer_bytes(config, "exact")
    run = replace(config.run, precision="fp32")
    whole = 12 * weights + 2 * layer_bytes(Config(config.model, Parallel(), run), "exact")
    return config.parallel.tp * (split + whole)


def needed_on_cuda(config: Config) -> int:
    """The approximate bytes that a rank needs on its GPU: three layers, and temporary buffers.

    >>> from memcalc.config import load
    >>> needed_on_cuda(load("22b", tp=1)) // 2**30
    37
    """
    weights, width = owned(layer_graph(config)), config.run.activation_bytes
    none = replace(config, run=config.run.recomputing("none"))
    # a rank's shard of three layers and of gradients, and one whole weight drawn in fp32
    states: int = 4 * width * weights // config.parallel.tp + (4 + width) * weights // 3
    return states + 3 * layer_bytes(config, "exact") + 2 * layer_bytes(none, "exact")


def free_on_cpu() -> int | None:
    """Bytes that are free on this machine and in its control group, or None if not known."""
    found = []
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            found.append(1024 * int(line.split()[1]))
    limit, used = (_lines(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    if limit and used and limit[0].isdecimal():
        found.append(max(0, int(limit[0]) - int(used[0])))
    return min(found, default=None)


def free_on_cuda() -> int | None:
    """Bytes that are free on this process's GPU."""
    return cuda.free()


NEEDS = {"cpu": needed_on_cpu, "cuda": needed_on_cuda}
FREE = {"cpu": free_on_cpu, "cuda": free_on_cuda}


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().split("\n")
    except OSError:
        return []
