"""Figures: a file a kind, each drawn from a Config with matplotlib's object interface."""

from typing import TYPE_CHECKING

from memcalc.config import Config
from memcalc.errors import UsageError, nearest
from memcalc.lazy import resolve

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Kind -> the function that draws it.
KINDS = {"techniques": "memcalc.figures.techniques:draw"}
SUFFIXES = (".png", ".svg", ".pdf")


def plot(kind: str, config: Config, accounting: str = "paper") -> "Figure":
    """A figure of one kind.

    Args:
        kind: ``techniques``: the memory of one layer under each technique, by its parts.
        config: The model and its run.
        accounting: ``paper`` or ``exact``.

    Raises:
        UsageError: There is no such kind of figure.

    >>> from memcalc.config import load
    >>> figure = plot("techniques", load("22b"))
    >>> figure.axes[0].get_ylabel()
    'GiB per layer and GPU'
    """
    if kind not in KINDS:
        raise UsageError(f"figure {kind!r} is unknown; {nearest(kind, KINDS)}")
    figure: Figure = resolve(KINDS[kind])(config, accounting)
    return figure


def encode(figure: "Figure", suffix: str) -> bytes:
    """A figure as the bytes of a file: PNG, SVG or PDF by its suffix.

    Raises:
        UsageError: The suffix is none of these.
    """
    check(suffix)
    encoded: bytes = resolve("memcalc.figures.style:encode")(figure, suffix.lower())
    return encoded


def check(suffix: str) -> None:
    """Refuse a suffix that no figure is written as."""
    if suffix.lower() not in SUFFIXES:
        raise UsageError(
            f"a figure is written as {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}, "
            f"not as {suffix or 'a file without suffix'}"
        )
