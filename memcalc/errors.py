"""The errors of memcalc: one base, and every subclass is a builtin error too."""

from collections.abc import Iterable
from difflib import get_close_matches

MOST_LISTED = 10  # choices in one message


class MemcalcError(Exception):
    """The base of every error that memcalc raises for something its user did."""


class ConfigError(MemcalcError, ValueError):
    """A model, a parallelism or a run that cannot be: the message says what, where and why."""


class NoLayerError(ConfigError):
    """A layer that its framework does not have."""


class InputError(MemcalcError, ValueError):
    """A file that cannot be read as what it should be."""


class OutputError(MemcalcError, OSError):
    """A file that cannot be written."""


class UsageError(MemcalcError, ValueError):
    """A question that makes no sense as it was asked."""


def either(words: list[str]) -> str:
    """Words of which one is to be chosen.

    >>> either(["a", "b", "c"]), either(["a"])
    ("'a', 'b' or 'c'", "'a'")
    """
    *first, last = (repr(word) for word in words)
    return f"{', '.join(first)} or {last}" if first else last


def nearest(word: str, choices: Iterable[str], all_of_them: str = "") -> str:
    """A sentence that leads from a mistyped word to the valid ones: to a few, where there are many.

    Args:
        word: What was written.
        choices: The valid words.
        all_of_them: What lists them all, where a message cannot.

    >>> nearest("175", ["22b", "175b", "530b"])
    "did you mean '175b'?"
    >>> nearest("zzz", ["none", "full"])
    "choose from 'full', 'none'"
    >>> nearest("gpt3", [f"gpt{n}" for n in range(4, 40)], "`memcalc models`")
    "did you mean 'gpt39', 'gpt38' or 'gpt37'? `memcalc models` lists all"
    >>> nearest("zzz", [f"gpt{n}" for n in range(4, 40)], "`memcalc models`")
    '`memcalc models` lists all'
    >>> nearest("zzz", [f"gpt{n}" for n in range(4, 40)])
    "the nearest of 36 are 'gpt9', 'gpt8', 'gpt7'"
    >>> nearest("bert", ["bert-large", "gpt2"])
    "did you mean 'bert-large'?"
    """
    choices = sorted(choices)
    many = len(choices) > MOST_LISTED
    lists = f"{all_of_them} lists all" if many and all_of_them else ""
    word = word.lower()
    close = get_close_matches(word, choices, n=3, cutoff=0.6)
    close = close or [each for each in choices if len(word) > 1 and each.startswith(word)][:3]
    if close:
        return f"did you mean {either(close)}? {lists}".rstrip()
    if lists:
        return lists
    few = get_close_matches(word, choices, n=3, cutoff=0) if many else choices
    listed = ", ".join(repr(c) for c in few)
    return f"the nearest of {len(choices)} are {listed}" if many else f"choose from {listed}"
