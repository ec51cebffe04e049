"""Predicted against measured peaks: a point a run."""

from pathlib import Path

from matplotlib.figure import Figure

from memcalc.checks.backtest import Row, rows
from memcalc.figures import style
from memcalc.units import GIB

KINDS = {
    "dense": style.BLUE,
    "experts": style.ORANGE,
    "flagged as unmodelled": style.GREY,
}


def draw(path: Path) -> Figure:
    """Two panels over the measured peaks: the predicted ones, and their errors in per cent.

    A dashed line is where prediction and measurement agree. Both peaks are on logarithmic scales;
    errors are cut off at the panel's edges, with an arrow for what lies beyond.
    """
    found = [row for row in rows(path) if row.peak is not None]
    figure = style.panels()
    above, below = figure.axes
    sizes = [size for row in found for size in (row.measured.peak, row.peak or 0)]
    ends = [0.8 * min(sizes) / GIB, 1.25 * max(sizes) / GIB]
    above.plot(ends, ends, "--", color="black", linewidth=0.8, zorder=1)
    below.axhline(0, linestyle="--", color="black", linewidth=0.8, zorder=1)
    for kind, colour in reversed(KINDS.items()):
        mine = [row for row in found if kind_of(row) == kind]
        measured = [row.measured.peak / GIB for row in mine]
        label = f"{kind} ({len(mine)})"
        above.plot(
            measured,
            [(row.peak or 0) / GIB for row in mine],
            "o",
            markersize=4,
            alpha=0.6,
            markeredgewidth=0,
            color=colour,
            label=label,
        )
        errors = [100 * (row.peak_error or 0.0) for row in mine]
        for marker, inside in (("o", True), ("^", False)):
            points = [
                (x, max(-EDGE, min(EDGE, y)))
                for x, y in zip(measured, errors, strict=True)
                if (abs(y) <= EDGE) == inside
            ]
            below.plot(
                [x for x, _ in points],
                [y for _, y in points],
                marker,
                markersize=4,
                alpha=0.6,
                markeredgewidth=0,
                color=colour,
                clip_on=False,
            )
    return figure


EDGE = 10  # per cent of error that the panel shows


def kind_of(row: Row) -> str:
    """What a point is drawn as."""
    if row.flags:
        return "flagged as unmodelled"
    config = row.run.config
    return "experts" if config is not None and config.model.experts else "dense"
