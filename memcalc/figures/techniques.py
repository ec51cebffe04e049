"""The memory of one layer under each technique: stacked bars, a color per part."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from memcalc.analysis import activations
from memcalc.answers.layer import techniques
from memcalc.answers.notes import setting
from memcalc.blocks.layer import kinds, layer_graph
from memcalc.config import Config
from memcalc.figures import style
from memcalc.figures.style import BarPart
from memcalc.units import column, common_scale

CORE = "core"

# Part -> its name, its color, and its hatch for print without color.
PARTS = {
    "layer": ("layer's input", style.GREY, ""),
    "norm": ("norms", style.ORANGE, "\\\\\\"),
    "attention": ("attention", style.BLUE, "///"),
    CORE: ("attention scores (s x s)", style.VERMILION, "xxx"),
    "mlp": ("MLP", style.GREEN, "..."),
    "moe": ("experts", style.PURPLE, "..."),
}
SHOWN = {"cross_attention": "attention"}  # parts that are drawn with another
TICKS = {
    "none": "no\nparallelism",
    "tensor": "tensor\nparallel",
    "tensor+sequence": "tensor +\nsequence\nparallel",
    "tensor+selective": "tensor\nparallel,\nselective\nrecompute",
    "tensor+sequence+selective": "tensor +\nsequence\nparallel,\nselective\nrecompute",
    "full": "tensor\nparallel,\nfull\nrecompute",
}


def draw(config: Config, accounting: str) -> Figure:
    """Stacked bars, one per technique, for each kind of layer, in the unit of ``layer``'s table."""
    under = {technique.name: technique.of(config) for technique in techniques(config)}
    layers = kinds(config)
    bars = {kind: [parts(each, accounting, kind) for each in under.values()] for kind in layers}
    unit, scale = common_scale(
        "bytes", [sum(sizes.values()) for found in bars.values() for sizes in found]
    )
    figure, panels = style.stacked(len(layers), height=1.8 + 2.6 * len(layers))
    for axes, (kind, sizes) in zip(panels, bars.items(), strict=True):
        _panel(axes, sizes, list(under), unit, scale)
        if len(layers) > 1:
            axes.set_title(f"{kind} layers ({layers[kind]})", fontsize=9, loc="left")
    highest = max(axes.get_ylim()[1] for axes in panels)
    for axes in panels:
        axes.set_ylim(0, highest)
        axes.label_outer()
    panels[-1].set_xticks(range(len(under)), [TICKS[name] for name in under], fontsize=8)
    style.heading(
        figure,
        f"Activation memory of one layer of {setting(config.with_parallel(sp=False))}, per GPU",
        *_equal(config, list(bars.values()), list(under)),
    )
    figure.supxlabel(
        f"{config.run.implementation.name} implementation, {accounting} accounting; "
        "100 % is tensor parallelism alone",
        fontsize=8,
        color="0.35",
        parse_math=False,
    )
    return figure


def numbers(config: Config, accounting: str) -> tuple[list[dict[str, int]], str]:
    """What the figure shows, and the setting in its title."""
    under = [technique.of(config) for technique in techniques(config)]
    bars = [parts(each, accounting, kind) for kind in kinds(config) for each in under]
    return bars, setting(config)


def parts(config: Config, accounting: str, kind: str | None = None) -> dict[str, int]:
    """The bytes that one layer saves for backward, by the part that saves them.

    ``core`` is what selective recomputation drops of the attention.

    >>> from memcalc.config import load
    >>> parts(load("22b"), "paper")["core"] == 5 * 64 * 2048**2 * 4 // 8
    True
    """
    graph = layer_graph(config, kind=kind)
    dropped_by = activations.drops(graph)
    sizes: dict[str, int] = {}
    for entry in activations.counted(activations.kept(graph, config.run.policy), accounting):
        part = (
            CORE if "selective" in dropped_by(entry.tensor) else SHOWN.get(entry.part, entry.part)
        )
        sizes[part] = sizes.get(part, 0) + entry.tensor.bytes
    return sizes


def _panel(
    axes: Axes, bars: list[dict[str, int]], names: list[str], unit: str, scale: float
) -> None:
    """The bars of one kind of layer, with their heights, also in percent of tensor parallelism."""
    tops = style.stack(
        axes,
        [
            BarPart(label, color, hatch, [sizes.get(part, 0) / scale for sizes in bars])
            for part, (label, color, hatch) in PARTS.items()
        ],
        0.68,
    )
    totals = [sum(sizes.values()) for sizes in bars]
    tensor = totals[names.index("tensor")]
    written = column(totals, scale)
    for place, (top, total, text) in enumerate(zip(tops, totals, written, strict=True)):
        share = 100 * total / tensor
        axes.annotate(
            f"{text}\n{share:.0f} %" if share >= 1 else f"{text}\n{share:.2g} %",
            (place, top),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=8,
        )
    axes.set_ylabel(f"{unit} per layer")
    axes.set_ylim(0, 1.22 * max(tops))
    style.legend(axes, reverse=True)


def _equal(config: Config, panels: list[list[dict[str, int]]], names: list[str]) -> list[str]:
    """Reasons why bars are equal."""
    lines = []
    if config.parallel.tp == 1:
        lines.append("--tp 1: bars with and without tensor and sequence parallelism are equal")
    if all(bars[names.index("tensor")] == bars[names.index("tensor+selective")] for bars in panels):
        lines.append("selective recomputation drops nothing: attention keeps no scores")
    return ["; ".join(lines)] if lines else []
