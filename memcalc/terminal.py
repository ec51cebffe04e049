"""What a terminal is told: how wide it is, and messages of one line that cannot steer it."""

import os
import re
import shutil
import sys
from typing import TextIO

WIDEST = 1000  # columns; a larger number in COLUMNS is no terminal's
HEIGHT = 25  # lines, given to rich so that it does not read LINES; nothing depends on it
MOST_LETTERS = 2000  # of one message
LONGEST_WORD = 200  # a path, a number or a name within it


def width() -> int:
    """The columns of the terminal, or of the environment's COLUMNS; 80 if neither says.

    >>> 1 <= width() <= WIDEST
    True
    """
    return max(1, min(shutil.get_terminal_size().columns, WIDEST))


def one_line(text: str) -> str:
    r"""A message as one line of printable text, with long words and a long rest cut short.

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
    """Print a message on stderr, as one line, if anybody can read it."""
    tell(one_line(message))


def tell(text: str) -> None:
    """Print a text of memcalc's own on stderr, if anybody can read it."""
    if sys.stderr is None:
        return
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        abandon(sys.stderr)


def abandon(stream: TextIO | None) -> None:
    """Keep Python from writing what is left in a stream, and complaining once more, at its end."""
    if stream is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    end = most // 3
    return f"{text[: most - end - 3]}...{text[-end:]}"
