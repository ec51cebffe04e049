"""Predicted against measured peaks: one point per run."""

from math import ceil
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import AutoLocator, FixedLocator, NullLocator

from memcalc.checks.backtest import ComparedRun, rows
from memcalc.figures import style
from memcalc.units import common_scale

# Kind of run -> its color and its marker.
KINDS = {
    "dense": (style.BLUE, "o"),
    "experts": (style.VERMILION, "s"),
    "flagged as not modeled": (style.GREY, "X"),
}
# Ranges of the lower panel, in percent of error; points beyond are drawn on its edge.
EDGES = (0.1, 0.2, 0.5, 1, 2, 5, 10)
SHOWN = 0.95  # the share of points that the range includes, if the largest range does


def draw(path: Path) -> Figure:
    """Two panels over the measured peaks of a file's runs: predicted peaks, and their errors."""
    found = [row for row in rows(path) if row.peak is not None]
    sizes = [size for row in found for size in (row.measured.peak, row.peak) if size] or [1]
    unit, scale = common_scale("bytes", sizes)
    ends = [0.8 * min(sizes) / scale, 1.25 * max(sizes) / scale]
    errors = {id(row): 100 * (row.peak_error or 0.0) for row in found}
    edge = reach(list(errors.values()))

    figure, (above, below) = style.stacked(2, height=6.4)
    above.plot(ends, ends, "--", color="black", linewidth=0.8, label="predicted = measured")
    below.axhline(0, linestyle="--", color="black", linewidth=0.8)
    for kind, (color, marker) in KINDS.items():
        mine = [row for row in found if kind_of(row) == kind]
        if mine:
            look: dict[str, Any] = {
                "color": color,
                "marker": marker,
                "label": f"{kind} ({len(mine)})",
            }
            at = [row.measured.peak / scale for row in mine]
            _points(above, at, [(row.peak or 0) / scale for row in mine], **look)
            shown = [max(-edge, min(edge, errors[id(row)])) for row in mine]
            _points(below, at, shown, **look)
    for axes in (above, below):
        axes.set_xscale("log")
        axes.set_xlim(*ends)
        axes.grid(color="0.9", linewidth=0.6)
        axes.set_axisbelow(True)
    above.set_yscale("log")
    above.set_ylim(*ends)
    for axis in (above.xaxis, above.yaxis, below.xaxis):
        _ticks(axis, *ends)
    above.set_ylabel(f"predicted peak, {unit}")
    below.set_ylabel("error of the prediction, %")
    below.set_xlabel(f"measured peak, {unit}")
    below.set_ylim(-1.06 * edge, 1.06 * edge)
    style.heading(figure, f"Peak memory of {len(found)} training runs: predicted against measured")
    beyond = sum(abs(error) > edge for error in errors.values())
    if beyond:
        below.set_title(
            f"errors beyond ±{edge:g} % are drawn at the edge: {beyond} of {len(found)} runs",
            fontsize=8,
            loc="right",
            color="0.35",
        )
    above.legend(frameon=False, fontsize=9)
    return figure


def reach(errors: list[float]) -> float:
    """The range of the panel of errors, in percent.

    >>> reach([0.16, -0.02]), reach([]), reach([80.0])
    (0.2, 0.1, 10)
    """
    ordered = sorted(abs(error) for error in errors)
    most = ordered[ceil(SHOWN * len(ordered)) - 1] if ordered else 0
    return next((edge for edge in EDGES if most <= edge), EDGES[-1])


def kind_of(row: ComparedRun) -> str:
    """The kind of a run, one of ``KINDS``."""
    if row.flags:
        return "flagged as not modeled"
    config = row.run.config
    return "experts" if config is not None and config.model.experts else "dense"


def _ticks(axis: Axis, least: float, most: float) -> None:
    """Ticks at 1, 2 and 5 times powers of ten, or evenly spaced if that gives fewer than three."""
    steps = [step * 10.0**power for power in range(-12, 16) for step in (1, 2, 5)]
    places = [step for step in steps if least <= step <= most]
    axis.set_major_locator(FixedLocator(places) if len(places) > 2 else AutoLocator())
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: f"{value:,.6g}")


def _points(axes: Axes, at: list[float], values: list[float], **look: Any) -> None:
    """The points of one kind of run."""
    axes.plot(
        at,
        values,
        linestyle="none",
        markersize=4.5,
        alpha=0.65,
        markeredgewidth=0,
        clip_on=False,
        **look,
    )
