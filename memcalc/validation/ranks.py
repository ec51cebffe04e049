"""Ranks: this process alone, pretended ranks, or a process per rank over gloo or NCCL."""

import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from memcalc.errors import MemcalcError
from memcalc.validation import worker

TIMEOUT_SECONDS = 120
LONG_SECONDS = 1800  # for layers of full size, which run for minutes
STARTED = multiprocessing.get_context("spawn")  # a fork server that is killed leaves its folder

Result = TypeVar("Result")


class RankError(MemcalcError, RuntimeError):
    """A rank that failed, died, or did not answer in time."""


@contextmanager
def pretended(ranks: int) -> Iterator[None]:
    """A process group in which only rank 0 exists: collectives move no data."""
    if ranks == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def on_each(
    ranks: int,
    function: Callable[..., Result],
    *arguments: object,
    backend: str = "gloo",
    timeout: int = TIMEOUT_SECONDS,
) -> list[Result]:
    """Call a function on every rank of a process group, and return what each rank returns.

    A single rank runs in this process. Under torchrun this process is one of the ranks. Otherwise
    each rank is a new process, which ends when this one does.

    Args:
        ranks: The number of ranks.
        function: A function of a module, called with the rank and the arguments.
        arguments: The further arguments; they are pickled.
        backend: The backend of the collectives: ``gloo``, or ``nccl`` with a GPU per rank.
        timeout: Seconds after which ranks that have not answered are ended.

    Raises:
        RankError: A rank failed, died, or did not answer in time.
    """
    if launched():
        return _joined(ranks, function, arguments, backend, timeout)
    if ranks == 1:
        return [function(0, *arguments)]
    with tempfile.TemporaryDirectory(prefix="memcalc-ranks-") as folder:
        task = pickle.dumps((ranks, folder, backend, timeout, function, arguments))
        processes = [
            STARTED.Process(target=worker.work, args=(rank, folder, task), daemon=True)
            for rank in range(ranks)
        ]
        try:
            with _uninterrupted():
                for process in processes:
                    process.start()
            return _results(processes, Path(folder), timeout)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Block SIGINT here and in processes started meanwhile; only this process handles it.

    Starting multiprocessing's resource tracker unblocks SIGINT, so it is started before.
    """
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def launched() -> bool:
    """Whether torchrun, or a launcher like it, has started this process as one of several ranks."""
    numbers = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    return "MASTER_ADDR" in os.environ and all(number.isdecimal() for number in numbers)


def is_first() -> bool:
    """Whether this process prints the report: it is alone, or rank 0 of a launch."""
    return not launched() or os.environ["RANK"] == "0"


def _joined(
    ranks: int,
    function: Callable[..., Result],
    arguments: tuple[object, ...],
    backend: str,
    timeout: int,
) -> list[Result]:
    """What the function returns on each rank of a launch by torchrun."""
    size = int(os.environ["WORLD_SIZE"])
    if size != ranks:
        raise RankError(f"--tp {ranks} needs {ranks} ranks, but {size} were launched")
    if not dist.is_initialized():
        _use_gpu(backend, int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    results: list[Any] = [None] * size
    try:
        dist.all_gather_object(results, function(dist.get_rank(), *arguments))
        dist.barrier()
    except MemcalcError:
        raise
    except Exception as error:
        raise RankError(f"rank {os.environ['RANK']} failed: {_shortly(error)}") from error
    dist.destroy_process_group()
    return results


def run_task(rank: int, task: bytes) -> None:
    """On one rank, join the process group, call the function, and write its result to a file."""
    ranks, folder, backend, timeout, function, arguments = pickle.loads(
        task
    )  # written by this process's parent
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)  # ranks of one machine share its cores
    found: tuple[str, object]
    try:
        _use_gpu(backend, rank)
        dist.init_process_group(
            backend,
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=timeout),
        )
        found = "done", function(rank, *arguments)
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:
        found = "failed", _shortly(error)
    written = Path(folder, f"result-{rank}.new")
    written.write_bytes(pickle.dumps(found))
    written.rename(Path(folder, f"result-{rank}"))


def _use_gpu(backend: str, index: int) -> None:
    """Select a rank's GPU, which NCCL reads when the group is made."""
    if backend == "nccl":
        torch.cuda.set_device(index)


def _results(processes: Sequence[BaseProcess], folder: Path, timeout: int) -> list[Any]:
    """Every rank's result. Of several failures the first is raised, as it caused the others."""
    deadline = time.monotonic() + timeout
    waiting, results = dict(enumerate(processes)), {}
    while waiting:
        seconds = max(0.0, deadline - time.monotonic())
        ended = wait([process.sentinel for process in waiting.values()], seconds)
        late = [rank for rank in waiting if not _path(folder, rank).exists()]
        if late and not ended:
            ranks = ", ".join(map(str, late))
            raise RankError(f"no answer from rank {ranks} within {timeout} s")
        ready = [r for r, process in waiting.items() if not ended or process.sentinel in ended]
        for rank in sorted(ready, key=lambda rank: _written(folder, rank)):
            results[rank] = _result(rank, waiting.pop(rank), folder)
    return [results[rank] for rank in range(len(processes))]


def _path(folder: Path, rank: int) -> Path:
    return folder / f"result-{rank}"


def _written(folder: Path, rank: int) -> int:
    """When a rank wrote its result; 0 if it ended without one."""
    path = _path(folder, rank)
    return path.stat().st_mtime_ns if path.exists() else 0


def _result(rank: int, process: BaseProcess, folder: Path) -> Any:
    path = _path(folder, rank)
    if not path.exists():
        process.join()
        raise RankError(f"rank {rank} died (exit code {process.exitcode})")
    # written by a child of this process, in a folder that only this user can read
    kind, value = pickle.loads(path.read_bytes())
    if kind == "failed":
        raise RankError(f"rank {rank} failed: {value}")
    return value


def _shortly(error: Exception) -> str:
    return " ".join((f"{error}" or traceback.format_exc(limit=1)).split())[:300]
