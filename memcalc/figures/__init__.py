"""Figures: one file per kind, drawn with matplotlib's object interface."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from memcalc.config import Config
from memcalc.errors import UsageError, nearest
from memcalc.lazy import resolve

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Kind -> the function that draws it, from a Config.
KINDS = {
    "techniques": "memcalc.figures.techniques:draw",
    "memory": "memcalc.figures.memory:draw",
    "stages": "memcalc.figures.stages:draw",
    "step": "memcalc.figures.step:draw",
}

ACCOUNTED = ("techniques", "stages")  # the kinds for which an accounting can be chosen
# The same for figures of papers, which take no model.
PAPER = {
    "onchip": "memcalc.figures.onchip:draw",
    "paper-1": "memcalc.figures.paper:figure1",
    "paper-7": "memcalc.figures.paper:figure7",
    "paper-8": "memcalc.figures.paper:figure8",
}
# The same for figures of a file of measured runs.
RUNS = {"backtest": "memcalc.figures.backtest:draw"}

ALL = KINDS | PAPER | RUNS
SUFFIXES = (".png", ".svg", ".pdf")


def plot(
    kind: str, subject: Config | Path | None = None, accounting: str | None = None
) -> "Figure":
    """A figure of one kind, in memcalc's style.

    Args:
        kind: ``techniques``: memory of one layer under each technique, by its parts; ``memory``:
            memory per GPU at every pipeline stage; ``stages``: activations of every pipeline
            stage, at its peak and over time; ``step``: what a step has allocated, event by event;
            ``paper-1``, ``paper-7``, ``paper-8``: figures of
            Korthikanti et al. 2022, with memcalc's numbers; ``onchip``: the largest recurrent
            layers that GPUs hold, and published ones; ``backtest``: predicted against measured
            peaks.
        subject: The model and its run; the path of a file of measured runs for ``backtest``; None
            for ``onchip`` and the figures of the paper.
        accounting: ``paper`` (the default) or ``exact``, for ``techniques`` and ``stages``.

    Raises:
        UsageError: There is no such kind of figure; or it needs a model or a file, or takes none;
            or it has no choice of accounting.

    >>> from memcalc.config import load
    >>> figure = plot("techniques", load("22b"))
    >>> figure.axes[0].get_ylabel()
    'MiB per layer'
    """
    if kind not in ALL:
        raise UsageError(f"figure {kind!r} is unknown; {nearest(kind, ALL)}")
    if kind in RUNS and not isinstance(subject, Path):
        raise UsageError(f"the figure {kind} needs a file of measured runs")
    if kind not in RUNS and (subject is None) != (kind in PAPER):
        problem = "needs a model" if subject is None else "takes no model"
        raise UsageError(f"the figure {kind} {problem}")
    if accounting is not None and kind not in ACCOUNTED:
        raise UsageError(f"the figure {kind} does not take --accounting")
    given: list[Any] = [] if subject is None else [subject]
    given += [accounting or "paper"] * (kind in ACCOUNTED)
    figure: Figure = resolve("memcalc.figures.style:drawn")(resolve(ALL[kind]), *given)
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
    """Refuse a file suffix that is not one of the three."""
    if suffix.lower() not in SUFFIXES:
        raise UsageError(
            f"a figure is written as {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}, "
            f"not as {suffix or 'a file without suffix'}"
        )
