"""Ranks: one process, ranks that are only pretended, or real ones over gloo or NCCL."""

import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from memcalc.errors import MemcalcError

TIMEOUT_SECONDS = 120
LONG_SECONDS = 1800  # for what may take long without hanging

Result = TypeVar("Result")


class RankError(MemcalcError, RuntimeError):
    """A rank that failed, died, or did not answer in time."""


@contextmanager
def pretended(ranks: int) -> Iterator[None]:
    """A process group of so many ranks of which only rank 0 is there: collectives move nothing."""
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
    """What a function returns on each of so many processes, which share a group.

    Args:
        ranks: How many; one runs in this process, and under torchrun each is there already.
        function: A function of a module, called with the rank and the arguments.
        arguments: What else it is called with; they travel pickled.
        backend: What carries their collectives: ``gloo``, or ``nccl`` with a GPU for each.
        timeout: Seconds after which ranks that have not answered are ended.

    Raises:
        RankError: A rank failed, died, or did not answer in time.
    """
    if launched():
        return _joined(ranks, function, arguments, backend, timeout)
    if ranks == 1:
        return [function(0, *arguments)]
    with tempfile.TemporaryDirectory(prefix="memcalc-ranks-") as folder:
        context = mp.get_context("spawn")
        processes = [
            context.Process(
                target=_rank,
                args=(rank, ranks, folder, backend, timeout, function, arguments),
                daemon=True,
            )
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        try:
            return _answers(processes, Path(folder), timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()


def launched() -> bool:
    """Whether torchrun, or something like it, has started this process as one of several ranks."""
    numbers = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    return "MASTER_ADDR" in os.environ and all(number.isdecimal() for number in numbers)


def is_first() -> bool:
    """Whether this process speaks for all: it is alone, or the first of those launched."""
    return not launched() or os.environ["RANK"] == "0"


def _joined(
    ranks: int,
    function: Callable[..., Result],
    arguments: tuple[object, ...],
    backend: str,
    timeout: int,
) -> list[Result]:
    """What the function returns on each of the ranks that somebody else has launched."""
    size = int(os.environ["WORLD_SIZE"])
    if size != ranks:
        raise RankError(f"{size} ranks were launched, where tensor parallel {ranks} needs {ranks}")
    if not dist.is_initialized():
        _use_gpu(backend, int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    answers: list[Any] = [None] * size
    try:
        dist.all_gather_object(answers, function(dist.get_rank(), *arguments))
        dist.barrier()
    except MemcalcError:
        raise
    except Exception as error:
        raise RankError(f"rank {os.environ['RANK']} failed: {_shortly(error)}") from error
    dist.destroy_process_group()
    return answers


def _rank(
    rank: int,
    ranks: int,
    folder: str,
    backend: str,
    timeout: int,
    function: Callable[..., object],
    arguments: tuple[object, ...],
) -> None:
    """One rank: join the group, call the function, leave its answer in the folder."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)  # ranks of one machine share its cores
    answer: tuple[str, object]
    try:
        _use_gpu(backend, rank)
        dist.init_process_group(
            backend,
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=timeout),
        )
        answer = "done", function(rank, *arguments)
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:
        answer = "failed", _shortly(error)
    written = Path(folder, f"answer-{rank}.new")
    written.write_bytes(pickle.dumps(answer))
    written.rename(Path(folder, f"answer-{rank}"))


def _use_gpu(backend: str, index: int) -> None:
    """Make a GPU the current one before NCCL asks which is."""
    if backend == "nccl":
        torch.cuda.set_device(index)


def _answers(processes: Sequence[BaseProcess], folder: Path, timeout: int) -> list[Any]:
    """What every rank answers. The first to fail says why: others then fail for want of it."""
    deadline = time.monotonic() + timeout
    waiting, answers = dict(enumerate(processes)), {}
    while waiting:
        seconds = max(0.0, deadline - time.monotonic())
        ended = wait([process.sentinel for process in waiting.values()], seconds)
        late = [rank for rank in waiting if not _path(folder, rank).exists()]
        if late and not ended:
            ranks = ", ".join(map(str, late))
            raise RankError(f"rank {ranks} did not answer within {timeout} s")
        ready = [r for r, process in waiting.items() if not ended or process.sentinel in ended]
        for rank in sorted(ready, key=lambda rank: _written(folder, rank)):
            answers[rank] = _answer(rank, waiting.pop(rank), folder)
    return [answers[rank] for rank in range(len(processes))]


def _path(folder: Path, rank: int) -> Path:
    return folder / f"answer-{rank}"


def _written(folder: Path, rank: int) -> int:
    """When a rank answered; before all others, if it has ended and did not."""
    path = _path(folder, rank)
    return path.stat().st_mtime_ns if path.exists() else 0


def _answer(rank: int, process: BaseProcess, folder: Path) -> Any:
    path = _path(folder, rank)
    if not path.exists():
        process.join()
        raise RankError(f"rank {rank} died (exit code {process.exitcode})")
    # this process's own children wrote it, in a folder that only they and it can read
    kind, value = pickle.loads(path.read_bytes())
    if kind == "failed":
        raise RankError(f"rank {rank} failed: {value}")
    return value


def _shortly(error: Exception) -> str:
    return " ".join((f"{error}" or traceback.format_exc(limit=1)).split())[:300]
