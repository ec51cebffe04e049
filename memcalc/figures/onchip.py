"""The largest hidden size whose recurrent weights fit in registers, against density."""

from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from memcalc.analysis.onchip import Chip, Storage, exact, fit
from memcalc.checks.claims import claims
from memcalc.checks.onchip import words
from memcalc.config.gpus import gpu
from memcalc.config.recurrent import OnChip, Recurrent
from memcalc.figures import style

# GPU -> its color, and its line for print without color.
GPUS = {
    "b200": (style.PURPLE, "-"),
    "h100": (style.SKY, "--"),
    "a100": (style.GREEN, "-"),
    "v100": (style.ORANGE, "--"),
    "p100": (style.VERMILION, "-"),
    "titan-x": (style.GREY, "-."),
}
PANELS = {
    "2+2": "4 bytes per weight (pruned: 2 of value, 2 of index)",
    "4+4": "8 bytes per weight (pruned: 4 of value, 4 of index)",
}
DENSITIES = [0.01 * 100 ** (step / 40) for step in range(41)]
SIZES = (500, 1000, 2000, 4000, 8000, 16000, 32000)


class Point(NamedTuple):
    """A published layer: its density, its hidden size, and how its weights are stored."""

    density: float
    hidden: int
    pair: str


def draw() -> Figure:
    """A curve per GPU, for two assumed sizes of a weight; the published layers as points."""
    figure, panels = style.side_by_side(len(PANELS))
    for axes, (pair, title) in zip(panels, PANELS.items(), strict=True):
        for name, (color, line) in GPUS.items():
            axes.plot(
                [100 * density for density in DENSITIES],
                curve(name, pair),
                line,
                color=color,
                label=gpu(name).name,
                linewidth=1.4,
            )
        axes.set_title(title, fontsize=8, loc="left")
        _points(axes, pair)
        _scale(axes)
    panels[0].set_ylabel("largest hidden size")
    lines = panels[0].get_lines()
    panels[1].legend(handles=lines[: len(GPUS)], frameon=False, fontsize=8, loc="upper right")
    panels[0].legend(handles=lines[len(GPUS) :], frameon=False, fontsize=8, loc="lower left")
    style.heading(
        figure,
        "Largest vanilla recurrent layer whose weights fit in a GPU's registers, by density",
    )
    return figure


def curve(name: str, pair: str) -> list[int]:
    """The largest hidden sizes that a GPU holds, one per density."""
    chip = Chip.of(gpu(name), OnChip())
    value, index = map(exact, map(float, pair.split("+")))
    return [
        fit(Recurrent(), chip, Storage(Fraction(density), value, index), OnChip()).largest
        for density in DENSITIES
    ]


def published() -> Iterator[Point]:
    """The published layers, from the claims about them."""
    for claim in claims():
        kind, _, assumed = claim.quantity.partition("/")
        if kind == "largest" and claim.number is not None:
            said = words(assumed)
            yield Point(float(said.get("density", 1)), int(claim.number), said["pair"])


def _points(axes: Axes, pair: str) -> None:
    """The published layers that this panel shows: pruned ones by its storage, dense ones once."""
    found = sorted(set(published()))
    pruned = [point for point in found if point.pair == pair]
    dense = [point for point in found if "+" not in point.pair] if pair == "2+2" else []
    for points, label, marker, beside in (
        (pruned, "published, pruned, on P100\n(Zhu et al. 2018)", "D", (-3, -4)),
        (dense, "published, dense, on TITAN X\nand P100 (Diamos et al. 2016)", "o", (6, 0)),
    ):
        axes.plot(
            [100 * point.density for point in points],
            [point.hidden for point in points],
            label=label,
            **{**style.PUBLISHED, "marker": marker},
        )
        for point in points:
            left = beside[0] < 0 and point.density > DENSITIES[0]
            axes.annotate(
                f"{point.hidden:,}{' (fp16)' if point.pair == '2' else ''}",
                (100 * point.density, point.hidden),
                xytext=beside if left else (6, 0),
                textcoords="offset points",
                fontsize=7,
                ha="right" if left else "left",
                va="top" if left else "center",
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
            )


def _scale(axes: Axes) -> None:
    """Logarithmic axes, with plain numbers as ticks."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(0.9, 420)
    axes.set_ylim(SIZES[0], 1.1 * SIZES[-1])
    axes.set_xlabel("density of the recurrent weights, %")
    for axis, places in ((axes.xaxis, (1, 3, 10, 30, 100)), (axes.yaxis, SIZES)):
        axis.set_major_locator(FixedLocator(places))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.grid(color="0.92", linewidth=0.6)
