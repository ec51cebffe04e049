"""Figures: matplotlib without global state, in colours that the colour-blind tell apart."""

import io
from collections.abc import Callable

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from memcalc.answers.layer import PARTS, TECHNIQUES, parts
from memcalc.config import Config
from memcalc.errors import UsageError, nearest
from memcalc.units import GIB

SUFFIXES = (".png", ".svg", ".pdf")

# Okabe and Ito's colours; the hatches tell the parts apart in print without colour.
_COLOURS = {
    "norm": "#E69F00",
    "attention": "#0072B2",
    "core attention": "#D55E00",
    "mlp": "#009E73",
}
_HATCHES = {"norm": "", "attention": "///", "core attention": "xxx", "mlp": "..."}
_LABELS = {"norm": "norms", "core attention": "attention core (s x s)", "mlp": "MLP"}
_TICKS = {"none": "no parallelism"}


def plot(kind: str, config: Config, accounting: str = "paper") -> Figure:
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
    return KINDS[kind](config, accounting)


def encode(figure: Figure, suffix: str) -> bytes:
    """A figure as the bytes of a file: PNG, SVG or PDF by its suffix.

    Raises:
        UsageError: The suffix is none of these.
    """
    if suffix.lower() not in SUFFIXES:
        raise UsageError(
            f"a figure is written as {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}, "
            f"not as {suffix or 'a file without suffix'}"
        )
    out = io.BytesIO()
    # text stays text, and no date: the same question gives the same file
    with rc_context({"svg.fonttype": "none", "pdf.fonttype": 42, "svg.hashsalt": "memcalc"}):
        metadata = {".png": None, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
        figure.savefig(out, format=suffix.lower()[1:], dpi=200, metadata=metadata[suffix.lower()])
    return out.getvalue()


def techniques(config: Config, accounting: str) -> Figure:
    """Stacked bars: one a technique, its parts in one colour each, GiB on the axis."""
    report = parts(config, accounting)
    sizes = {(row["technique"], row["part"]): row["bytes"] / GIB for row in report.records()}
    names = [technique.name for technique in TECHNIQUES]
    shown = [part for part in PARTS if any(sizes[name, part] for name in names)]
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    tops = [0.0] * len(names)
    for part in shown:
        heights = [sizes[name, part] for name in names]
        axes.bar(
            range(len(names)),
            heights,
            bottom=tops,
            width=0.68,
            color=_COLOURS[part],
            hatch=_HATCHES[part],
            edgecolor="white",
            linewidth=0.6,
            label=_LABELS.get(part, part),
        )
        tops = [top + height for top, height in zip(tops, heights, strict=True)]
    percent = [100 * top / tops[names.index("tensor")] for top in tops]
    for x, (top, share) in enumerate(zip(tops, percent, strict=True)):
        axes.annotate(
            f"{top:.3g} GiB\n{share:.0f} %",
            (x, top),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=8,
        )
    axes.set_xticks(range(len(names)), [_tick(name) for name in names], fontsize=9)
    axes.set_ylabel("GiB per layer and GPU")
    axes.set_ylim(0, 1.16 * max(tops))
    axes.set_title(report.title, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, reverse=True)
    axes.set_xlabel(
        f"{config.run.implementation.name} implementation, {accounting} accounting; "
        "percent of tensor parallelism alone",
        fontsize=8,
        color="0.35",
    )
    return figure


KINDS: dict[str, Callable[[Config, str], Figure]] = {"techniques": techniques}


def _tick(name: str) -> str:
    return _TICKS.get(name, name).replace("+", "\n+ ").replace("no parallelism", "no\nparallelism")
