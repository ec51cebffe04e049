"""The terminal's width, and messages of one line without control characters."""

import os
import re
import shutil
import sys
from typing import TextIO

WIDEST = 1000  # columns; the most that is taken from COLUMNS
HEIGHT = 25  # lines, given to rich so that it does not read LINES
MOST_LETTERS = 2000  # characters of one message
LONGEST_WORD = 200  # a path, a number or a name within it


def width() -> int:
    """The columns of the terminal, or COLUMNS of the environment; 80 if neither is known.

    >>> 1 <= width() <= WIDEST
    True
    """
    return max(1, min(shutil.get_terminal_size().columns, WIDEST))


def one_line(text: str) -> str:
    r"""A message as one line of printable text; long words and long messages are shortened.

    >>> one_line("no file \x1b[31m.json\n here"), one_line("9" * 5000)[:4]
    ('no file \\x1b[31m.json here', '9999')
    >>> len(one_line("9" * 5000)), len(one_line("a " * 5000))
    (200, 2000)
    """
    line = " ".join(text.split())
    line = "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in line
    )
    line = re.sub(rf"\S{{{LONGEST_WORD + 1},}}", lambda word: _cut(word[0], LONGEST_WORD), line)
    return _cut(line, MOST_LETTERS)


def say(message: str) -> None:
    """Print a message on stderr, as one line, unless stderr is closed."""
    tell(one_line(message))


def tell(text: str) -> None:
    """Print one of memcalc's messages on stderr, unless stderr is closed."""
    if sys.stderr is None:
        return
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        abandon(sys.stderr)


def abandon(stream: TextIO | None) -> None:
    """Discard what a stream still buffers, so that Python reports no error at exit."""
    if stream is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    end = most // 3
    return f"{text[: most - end - 3]}...{text[-end:]}"
