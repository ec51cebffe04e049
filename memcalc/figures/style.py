"""The style of all figures, and their encoding as files.

In every figure, filled bars and curves are memcalc's exact numbers, and points are measured or
published ones. Hatching on white is an estimate or a measurement, and a dark line across a bar is a
second number of the same kind, which the legend names.
"""

import io
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

from matplotlib import rc_context, rcParams, rcParamsDefault
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

# Okabe and Ito's colors, which color-blind readers can tell apart; their yellow is too faint.
ORANGE, BLUE, GREEN = "#E69F00", "#0072B2", "#009E73"
VERMILION, SKY, PURPLE, GREY, BLACK = "#D55E00", "#56B4E9", "#CC79A7", "#999999", "#000000"

# What a point stands for: its marker, and its face.
PUBLISHED: dict[str, Any] = {
    "marker": "o",
    "linestyle": "none",
    "color": BLACK,
    "markerfacecolor": "white",
    "markersize": 4.5,
    "zorder": 3,
}

WIDTH = 7.2  # inches: the width of a page's text
MOST_BARS = 128  # more bars are drawn as one outline
DPI, SCREEN_DPI = 200, 100
# Settings of the session that stay.
_KEPT = ("backend", "backend_fallback", "interactive", "toolbar", "timezone")
_OWN: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "memcalc",
    "pdf.fonttype": 42,
    "font.sans-serif": ["DejaVu Sans"],  # part of matplotlib
    "text.usetex": False,
    "hatch.linewidth": 0.8,
}


@contextmanager
def own() -> Iterator[None]:
    """Use memcalc's style, and restore the session's afterwards.

    >>> with rc_context({"text.usetex": True}), own():
    ...     rcParams["text.usetex"]
    False
    """
    settings: dict[Any, Any] = {k: v for k, v in rcParamsDefault.items() if k not in _KEPT}
    settings |= _OWN
    with rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a model's name may need other fonts
        rcParams.update(settings)
        yield


def drawn(draw: Callable[..., Figure], *given: Any) -> Figure:
    """The figure that a function draws, in memcalc's style."""
    with own():
        return draw(*given)


class Styled(Figure):
    """A figure that keeps memcalc's style whenever it is drawn, in a notebook too."""

    def draw(self, renderer: Any) -> None:
        """Draw the figure, in memcalc's style."""
        with own():
            super().draw(renderer)

    def savefig(self, fname: Any, **options: Any) -> None:
        """Write the figure to a file, in memcalc's style."""
        with own():
            super().savefig(fname, **options)

    def _repr_png_(self) -> bytes:
        return encode(self, ".png", SCREEN_DPI)


def single(height: float = 4.2) -> tuple[Figure, Axes]:
    """An empty figure of this height in inches, with one panel."""
    figure, (axes,) = _empty(height, 1, 1)
    return figure, axes


def side_by_side(number: int, height: float = 4.2) -> tuple[Figure, list[Axes]]:
    """An empty figure of this height in inches, with panels side by side, on one scale."""
    return _empty(height, 1, number, sharey=True)


def stacked(number: int, height: float = 4.2) -> tuple[Figure, list[Axes]]:
    """An empty figure of this height in inches, with panels one above the other."""
    return _empty(height, number, 1)


def _empty(
    height: float, rows: int, columns: int, sharey: bool = False
) -> tuple[Figure, list[Axes]]:
    figure = Styled(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    found = list(figure.subplots(rows, columns, sharey=sharey, squeeze=False).flat)
    for axes in found:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, found


def heading(figure: Figure, *lines: str) -> None:
    """The title at the figure's upper left, each of its lines wrapped to the figure's width."""
    text = "\n".join(fitted(figure, line, 9) for line in lines if line)
    figure.suptitle(text, fontsize=9, x=0.01, ha="left", parse_math=False)


def fitted(figure: Figure, text: str, size: float, share: float = 0.94) -> str:
    """A text wrapped to a share of the figure's width, in at most four lines."""
    room = share * figure.get_figwidth() * 72
    for columns in range(140, 20, -4):
        lines = textwrap.wrap(text, columns, max_lines=4, placeholder=" ...")
        if max((width(line, size) for line in lines), default=0) <= room:
            break
    return "\n".join(lines)


def width(text: str, size: float) -> float:
    """The width of a line of text, in points."""
    canvas = _measuring()
    label = canvas.figure.text(0, 0, text, fontsize=size, parse_math=False)
    found = float(label.get_window_extent(canvas.get_renderer()).width) * 72 / DPI
    label.remove()
    return found


@cache
def _measuring() -> Any:
    """An empty figure's canvas, on which texts are measured."""
    return FigureCanvasAgg(Figure(dpi=DPI))


class BarPart(NamedTuple):
    """A part of stacked bars, with one height per bar."""

    label: str
    color: str
    hatch: str
    heights: Sequence[float]
    estimated: bool = False


def stack(axes: Axes, parts: Sequence[BarPart], bar: float = 0.76) -> list[float]:
    """Draw stacked bars at 0, 1, ...; returns their heights.

    Args:
        axes: Where they are drawn.
        parts: The parts, the lowest first. One that is nowhere more than zero is left out.
        bar: The width of a bar.
    """
    number = len(parts[0].heights)
    tops = [0.0] * number
    for label, color, hatch, heights, estimated in parts:
        above = [top + height for top, height in zip(tops, heights, strict=True)]
        look = hatched(color, hatch) if estimated else filled(color, hatch)
        if any(heights) and number > MOST_BARS:
            edges = [place - 0.5 for place in range(number + 1)]
            low, high = [*tops, tops[-1]], [*above, above[-1]]
            outline = {**look, "linewidth": 0, "label": label}
            axes.fill_between(edges, low, high, step="post", **outline)
        elif any(heights):
            axes.bar(range(number), heights, bar, tops, label=label, **look)
        tops = above
    return tops


def filled(color: str, hatch: str) -> dict[str, Any]:
    """The look of a bar in a color, hatched in white for print without color."""
    return {"facecolor": color, "edgecolor": "white", "hatch": hatch, "linewidth": 0.4}


def hatched(color: str, hatch: str) -> dict[str, Any]:
    """The look of an estimated or measured bar: hatched in a color, on white."""
    return {"facecolor": "white", "edgecolor": color, "hatch": hatch, "linewidth": 0.6}


def limits(axes: Axes, heights: Sequence[float], label: str, bar: float = 0.76) -> None:
    """A dark line across each bar."""
    half = 0.5 if len(heights) > MOST_BARS else bar / 2
    starts = [place - half for place in range(len(heights))]
    ends = [place + half for place in range(len(heights))]
    axes.hlines(heights, starts, ends, color=BLACK, linewidth=1.4, label=label, zorder=3)


def stage_axis(axes: Axes, stages: int) -> None:
    """Ticks at the first stage, the last and some between; with few stages, bars are not wider."""
    step = next(
        step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, stages) if stages <= 16 * step
    )
    ticks = list(range(0, stages, step))
    if ticks[-1] != stages - 1:
        ticks = [tick for tick in ticks if stages - 1 - tick >= 0.75 * step] + [stages - 1]
    axes.set_xticks(ticks)
    spare = max(0, 5 - stages) / 2
    axes.set_xlim(-0.6 - spare, stages - 0.4 + spare)


def legend(axes: Axes, **options: Any) -> None:
    """The legend to the right of the axes, in the order in which bars are stacked."""
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), **options)


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers in short.

    >>> ranges([0]), ranges([0, 15]), ranges([0, 1, 2, 5])
    ('0', '0 and 15', '0-2 and 5')
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = [f"{run[0]}-{run[-1]}" if len(run) > 2 else " and ".join(map(str, run)) for run in runs]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def stages_in_words(numbers: Sequence[int]) -> str:
    """Some stages, by their numbers.

    >>> stages_in_words([3]), stages_in_words([0, 1, 2])
    ('stage 3', 'stages 0-2')
    """
    return f"stage{'s' * (len(numbers) > 1)} {ranges(numbers)}"


def encode(figure: Figure, suffix: str, dpi: int = DPI) -> bytes:
    """A figure as the bytes of a file. Text stays text; the same figure gives the same bytes."""
    metadata: dict[str, Any] = {
        ".png": {"Software": None},
        ".svg": {"Date": None},
        ".pdf": {"CreationDate": None},
    }
    out = io.BytesIO()
    figure.savefig(out, format=suffix[1:], dpi=dpi, metadata=metadata[suffix])
    return out.getvalue()
