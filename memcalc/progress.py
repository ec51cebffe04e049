"""Progress on stderr, for work that may take more than two seconds."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer

from memcalc import terminal

PATIENCE_SECONDS = 0.5  # shorter work shows no progress

_relabel: list[Callable[[str], object]] = []  # sets the label of the progress that is shown


@contextmanager
def progress(label: str, total: int | None = None) -> Iterator[Callable[[], None]]:
    """Show progress on stderr, if it is a terminal and the work takes ``PATIENCE_SECONDS``.

    Args:
        label: The work, such as "checking claims".
        total: The number of steps; None if it is unknown, which shows a spinner.

    Yields:
        A function to call after each step.

    >>> with progress("counting", 3) as step:
    ...     for _ in range(3):
    ...         step()
    """
    if not (sys.stderr and sys.stderr.isatty()):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

    console = Console(file=sys.stderr, width=terminal.width(), height=terminal.HEIGHT)
    if not console.is_interactive:  # TERM=dumb
        yield lambda: None
        return
    columns = [SpinnerColumn(), TextColumn("{task.description}", markup=False)]
    if total is not None:
        columns += [BarColumn(), MofNCompleteColumn()]
    # rich must not redirect stdout and stderr: the work may do so itself
    shown = Progress(
        *columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False
    )
    task = shown.add_task(label, total=total)
    _relabel.append(lambda text: shown.update(task, description=text))
    timer = Timer(PATIENCE_SECONDS, shown.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda: shown.advance(task)
    finally:
        _relabel.pop()
        timer.cancel()
        timer.join()
        shown.stop()


def doing(label: str) -> None:
    """Change the label of the progress that is shown.

    >>> doing("measuring at s = 64")
    """
    for relabel in _relabel[-1:]:
        relabel(label)
