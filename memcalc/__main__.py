"""``python -m memcalc``, and the console script; an interrupt ends in one line on stderr."""

import os
import signal
import sys
from threading import Timer
from types import FrameType
from typing import NoReturn

GRACE_SECONDS = 1.0  # for cleanup after an interrupt


def main() -> int:
    """Run the command line; an interrupt, even of an import, ends in one line.

    An interrupt raises KeyboardInterrupt, so that files and processes are cleaned up. Imports of
    large libraries may catch it or turn it into another error. So the process also ends after
    ``GRACE_SECONDS``, at a second interrupt, or when the command ends. Where the caller ignores
    interrupts, as nohup and shells do for background jobs, they stay ignored.
    """
    interrupted = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        signal.signal(signal.SIGINT, _end)
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - no other messages, until the process ends
        timer = Timer(GRACE_SECONDS, _end)
        timer.daemon = True
        timer.start()
        raise KeyboardInterrupt

    ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    if not ignored:
        signal.signal(signal.SIGINT, interrupt)
    try:
        from memcalc.cli.main import main as run

        status = run()
    except BaseException as error:
        if not (interrupted or isinstance(error, KeyboardInterrupt)):
            raise
        _end()
    if interrupted:
        _end()
    if not ignored:
        signal.signal(signal.SIGINT, _end)
    return status


def _end(*_: object) -> NoReturn:
    try:
        os.write(2, b"memcalc: interrupted\n")
    finally:
        os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
