"""How every figure looks, and how it becomes a file."""

import io
import warnings
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

# Okabe and Ito's colours, which the colour-blind tell apart.
ORANGE, BLUE, GREEN = "#E69F00", "#0072B2", "#009E73"
VERMILION, SKY, PURPLE, GREY = "#D55E00", "#56B4E9", "#CC79A7", "#999999"


def sheet(width: float = 7.2, height: float = 4.2) -> tuple[Figure, Axes]:
    """An empty figure, in inches, with one plain pair of axes."""
    figure, (axes,) = panels(1, width, height)
    return figure, axes


def panels(number: int, width: float = 7.2, height: float = 4.2) -> tuple[Figure, list[Axes]]:
    """An empty figure, in inches, with plain pairs of axes side by side, on one scale."""
    return _plain(width, height, 1, number, sharey=True)


def sheets(number: int, width: float = 7.2, height: float = 4.2) -> tuple[Figure, list[Axes]]:
    """An empty figure, in inches, with several plain pairs of axes, one above the other."""
    return _plain(width, height, number, 1)


def _plain(
    width: float, height: float, rows: int, columns: int, sharey: bool = False
) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    found = list(figure.subplots(rows, columns, sharey=sharey, squeeze=False).flat)
    for axes in found:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, found


def encode(figure: Figure, suffix: str) -> bytes:
    """A figure as PNG, SVG or PDF: text stays text, and the same figure gives the same bytes."""
    metadata = {".png": None, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}[suffix]
    out = io.BytesIO()
    plain: Any = {"svg.fonttype": "none", "pdf.fonttype": 42, "svg.hashsalt": "memcalc"}
    with rc_context(plain), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a name in a script of other fonts
        figure.savefig(out, format=suffix[1:], dpi=200, metadata=metadata)
    return out.getvalue()
