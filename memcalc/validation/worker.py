"""The process of one rank. It imports torch only once a thread watches its parent."""

import multiprocessing
import os
import shutil
import threading
from multiprocessing.connection import wait

from memcalc.lazy import resolve


def work(rank: int, folder: str, task: bytes) -> None:
    """Run a rank's task, and end at once if the parent process ends.

    Args:
        rank: The rank.
        folder: The folder of the ranks' results; this process removes it if the parent has ended.
        task: What ``memcalc.validation.ranks.run_task`` unpickles.
    """
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    resolve("memcalc.validation.ranks:run_task")(rank, task)


def _end_with_parent(folder: str) -> None:
    """Wait until the parent ends, remove its temporary folder, and end this process."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
