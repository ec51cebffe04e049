"""Open values: what only a running shell knows, marked by name within a word."""

from memcalc.config import fields

_SPACE = "\1"  # stands for a space in an open name, since words are split at spaces


def unknown(name: str) -> str:
    """The mark, within a word, of a value that only a running shell knows."""
    return f"\0{shown(name).replace(' ', _SPACE)}\0"


def shown(text: str) -> str:
    """A text as a message shows it: the start, on one line, with open values by their names."""
    text = text[:40].replace("\0", "").replace(_SPACE, " ")
    return fields.printable(text, instead=" ")


def opened(word: str) -> list[str]:
    """The names of a word's open values."""
    return word.replace(_SPACE, " ").split("\0")[1::2]
