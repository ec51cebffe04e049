"""Predicted against measured peaks: a point a run."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from memcalc.checks.backtest import Row, rows
from memcalc.figures import style
from memcalc.units import GIB

KINDS = {
    "dense": (style.BLUE, "o"),
    "experts": (style.VERMILION, "s"),
    "flagged as unmodelled": (style.GREY, "X"),
}
EDGE = 10  # per cent of error that the panel shows; what is beyond stands on its edge


def draw(path: Path) -> Figure:
    """Two panels over the measured peaks of a file's runs: the predicted ones, and their errors."""
    found = [row for row in rows(path) if row.peak is not None]
    figure, (above, below) = style.sheets(2, height=6.4)
    sizes = [size / GIB for row in found for size in (row.measured.peak, row.peak) if size] or [1]
    ends = [0.8 * min(sizes), 1.25 * max(sizes)]
    above.plot(ends, ends, "--", color="black", linewidth=0.8, label="as measured")
    below.axhline(0, linestyle="--", color="black", linewidth=0.8)
    for kind, (colour, marker) in KINDS.items():
        mine = [row for row in found if kind_of(row) == kind]
        if mine:
            label = f"{kind} ({len(mine)})"
            _scatter(above, mine, [(r.peak or 0) / GIB for r in mine], colour, marker, label)
            errors = [100 * (row.peak_error or 0.0) for row in mine]
            _scatter(below, mine, [_cut(each) for each in errors], colour, marker, label)
    for axes in (above, below):
        axes.set_xscale("log")
        axes.set_xlim(*ends)
        axes.grid(color="0.9", linewidth=0.6)
        axes.set_axisbelow(True)
    above.set_yscale("log")
    above.set_ylim(*ends)
    for axis in (above.xaxis, above.yaxis, below.xaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    above.set_ylabel("predicted peak, GiB")
    below.set_ylabel("error of the prediction, %")
    below.set_xlabel("measured peak, GiB")
    below.set_ylim(-1.06 * EDGE, 1.06 * EDGE)
    beyond = sum(abs(100 * (row.peak_error or 0.0)) > EDGE for row in found)
    if beyond:
        text = f"{beyond} of {len(found)} runs are off by more than {EDGE} %: on the panel's edges"
        below.set_title(text, fontsize=8, loc="right", color="0.35")
    title = f"Peak memory of {len(found)} training runs: predicted against measured"
    above.set_title(title, fontsize=10, loc="left")
    above.legend(frameon=False, fontsize=9)
    return figure


def kind_of(row: Row) -> str:
    """What a point is drawn as."""
    if row.flags:
        return "flagged as unmodelled"
    config = row.run.config
    return "experts" if config is not None and config.model.experts else "dense"


def _cut(error: float) -> float:
    return max(-EDGE, min(EDGE, error))


def _scatter(
    axes: Axes, found: list[Row], values: list[float], colour: str, marker: str, label: str
) -> None:
    axes.plot(
        [row.measured.peak / GIB for row in found],
        values,
        marker,
        markersize=4.5,
        alpha=0.65,
        markeredgewidth=0,
        color=colour,
        label=label,
        clip_on=False,
    )
