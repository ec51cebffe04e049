"""How every figure looks, and how it becomes a file.

One vocabulary: filled bars and curves are memcalc's exact numbers, points are measured or published
ones. Hatching on white is an estimate or a measurement, and a dark line across a bar is a second
number of the same kind, which the legend names.
"""

import io
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from matplotlib import rc_context, rcParams, rcParamsDefault
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers can tell apart; their yellow is too faint.
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
MOST_BARS = 128  # more than these touch, and are drawn as one outline
DPI, SCREEN_DPI = 200, 100
_KEPT = ("backend", "backend_fallback", "interactive", "toolbar", "timezone")  # the session's
_OWN: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "memcalc",
    "pdf.fonttype": 42,
    "font.sans-serif": ["DejaVu Sans"],  # matplotlib brings it
    "text.usetex": False,
    "hatch.linewidth": 0.8,
}


@contextmanager
def own() -> Iterator[None]:
    """memcalc's style instead of the session's, which is as before afterwards.

    >>> with rc_context({"text.usetex": True}), own():
    ...     rcParams["text.usetex"]
    False
    """
    settings: dict[Any, Any] = {k: v for k, v in rcParamsDefault.items() if k not in _KEPT}
    settings |= _OWN
    with rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a name in a script of other fonts
        rcParams.update(settings)
        yield


def drawn(draw: Callable[..., Figure], *given: Any) -> Figure:
    """The figure that a function draws, in memcalc's style."""
    with own():
        return draw(*given)


class Sheet(Figure):
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


def sheet(width: float = WIDTH, height: float = 4.2) -> tuple[Figure, Axes]:
    """An empty figure, in inches, with one plain pair of axes."""
    figure, (axes,) = panels(1, width, height)
    return figure, axes


def panels(number: int, width: float = WIDTH, height: float = 4.2) -> tuple[Figure, list[Axes]]:
    """An empty figure, in inches, with plain pairs of axes side by side, on one scale."""
    return _plain(width, height, 1, number, sharey=True)


def sheets(number: int, width: float = WIDTH, height: float = 4.2) -> tuple[Figure, list[Axes]]:
    """An empty figure, in inches, with several plain pairs of axes, one above the other."""
    return _plain(width, height, number, 1)


def _plain(
    width: float, height: float, rows: int, columns: int, sharey: bool = False
) -> tuple[Figure, list[Axes]]:
    figure = Sheet(figsize=(width, height), layout="constrained")
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
    """A text in as many lines as it needs, four at the most, in a share of the figure's width."""
    room = share * figure.get_figwidth() * 72
    for columns in range(140, 20, -4):
        lines = textwrap.wrap(text, columns, max_lines=4, placeholder=" ...")
        if max((width(line, size) for line in lines), default=0) <= room:
            break
    return "\n".join(lines)


def width(text: str, size: float) -> float:
    """The width of a line of text, in points."""
    canvas: Any = FigureCanvasAgg(Figure(dpi=DPI))
    label = canvas.figure.text(0, 0, text, fontsize=size, parse_math=False)
    return float(label.get_window_extent(canvas.get_renderer()).width) * 72 / DPI


class Part(NamedTuple):
    """A part of stacked bars: its name, its colour, its hatch for print, and a height per bar."""

    label: str
    colour: str
    hatch: str
    heights: Sequence[float]
    estimated: bool = False


def stack(axes: Axes, parts: Sequence[Part], bar: float = 0.76) -> list[float]:
    """Stacked bars at 0, 1, ...; how high they stand.

    Args:
        axes: Where they are drawn.
        parts: The parts, the lowest first. One that is nowhere more than zero is left out.
        bar: The width of a bar.
    """
    number = len(parts[0].heights)
    tops = [0.0] * number
    for label, colour, hatch, heights, estimated in parts:
        above = [top + height for top, height in zip(tops, heights, strict=True)]
        look = hatched(colour, hatch) if estimated else filled(colour, hatch)
        if any(heights) and number > MOST_BARS:
            edges = [place - 0.5 for place in range(number + 1)]
            low, high = [*tops, tops[-1]], [*above, above[-1]]
            outline = {**look, "linewidth": 0, "label": label}
            axes.fill_between(edges, low, high, step="post", **outline)
        elif any(heights):
            axes.bar(range(number), heights, bar, tops, label=label, **look)
        tops = above
    return tops


def filled(colour: str, hatch: str) -> dict[str, Any]:
    """The look of a bar in a colour, hatched in white for print without colour."""
    return {"facecolor": colour, "edgecolor": "white", "hatch": hatch, "linewidth": 0.4}


def hatched(colour: str, hatch: str) -> dict[str, Any]:
    """The look of a bar that is not memcalc's exact number: hatched in a colour, on white."""
    return {"facecolor": "white", "edgecolor": colour, "hatch": hatch, "linewidth": 0.6}


def limits(axes: Axes, heights: Sequence[float], label: str, bar: float = 0.76) -> None:
    """A dark line across each bar."""
    half = 0.5 if len(heights) > MOST_BARS else bar / 2
    starts = [place - half for place in range(len(heights))]
    ends = [place + half for place in range(len(heights))]
    axes.hlines(heights, starts, ends, color=BLACK, linewidth=1.4, label=label, zorder=3)


def stage_axis(axes: Axes, stages: int) -> None:
    """Ticks of the first stage, of the last, and of some between; one bar is not a wide block."""
    step = next(
        step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, stages) if stages <= 16 * step
    )
    ticks = list(range(0, stages, step))
    if ticks[-1] != stages - 1:
        ticks = [tick for tick in ticks if stages - 1 - tick >= 0.75 * step] + [stages - 1]
    axes.set_xticks(ticks)
    spare = max(0, 5 - stages) / 2
    axes.set_xlim(-0.6 - spare, stages - 0.4 + spare)


def beside(axes: Axes, **options: Any) -> None:
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
    """A figure as the bytes of a file: text stays text; the same figure gives the same bytes."""
    metadata: dict[str, Any] = {
        ".png": {"Software": None},
        ".svg": {"Date": None},
        ".pdf": {"CreationDate": None},
    }
    out = io.BytesIO()
    with own():
        figure.savefig(out, format=suffix[1:], dpi=dpi, metadata=metadata[suffix])
    return out.getvalue()
