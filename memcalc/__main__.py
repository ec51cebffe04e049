"""``python -m memcalc``, and the console script: an interrupt is one line at any moment."""

import os
import signal
import sys
from threading import Timer
from types import FrameType
from typing import NoReturn

GRACE_SECONDS = 1.0  # for what holds files and processes to let go of them


def main() -> int:
    """Run the command line, from whose first import on an interrupt ends in one line.

    An interrupt is a KeyboardInterrupt, so that files and processes are let go. Imports of large
    libraries may swallow it or make another error of it: after a moment, at a second interrupt or
    at the end of the command, the process ends all the same.
    """
    interrupted = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        signal.signal(signal.SIGINT, _end)
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - nobody else speaks, to the end
        timer = Timer(GRACE_SECONDS, _end)
        timer.daemon = True
        timer.start()
        raise KeyboardInterrupt

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
    signal.signal(signal.SIGINT, _end)
    return status


def _end(*_: object) -> NoReturn:
    try:
        os.write(2, b"memcalc: interrupted\n")
    finally:
        os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
