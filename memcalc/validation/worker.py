"""The process of one rank. It loads no torch until it is sure to end together with its parent."""

import multiprocessing
import os
import shutil
import threading
from multiprocessing.connection import wait

from memcalc.lazy import resolve


def work(rank: int, folder: str, task: bytes) -> None:
    """Run a rank's task, and end at once where the process that started it has ended.

    Args:
        rank: The rank.
        folder: The folder of the ranks' answers, which the last one alive removes.
        task: What ``memcalc.validation.ranks.answer`` unpickles.
    """
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    resolve("memcalc.validation.ranks:answer")(rank, task)


def _end_with_parent(folder: str) -> None:
    """Wait for the parent's end, remove what it can no longer remove, and end this process."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
