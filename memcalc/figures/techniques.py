"""The memory of one layer under each technique: stacked bars, a colour a part."""

from matplotlib.figure import Figure

from memcalc.analysis import activations
from memcalc.answers.layer import TECHNIQUES
from memcalc.answers.notes import setting
from memcalc.blocks.layer import kinds, layer_graph, usual_kind
from memcalc.config import Config
from memcalc.figures import style
from memcalc.units import GIB

CORE = "core"

# Part -> how it is named, its colour, and its hatch for print without colour.
PARTS = {
    "layer": ("layer's input", style.GREY, "--"),
    "norm": ("norms", style.ORANGE, ""),
    "attention": ("attention", style.BLUE, "///"),
    CORE: ("attention core (s x s)", style.VERMILION, "xxx"),
    "mlp": ("MLP", style.GREEN, "..."),
    "moe": ("experts", style.GREEN, "..."),
}
SHOWN = {"cross_attention": "attention"}  # parts that are drawn with another
_TICKS = {"none": "no\nparallelism", "full": "full\nrecompute"}


def draw(config: Config, accounting: str) -> Figure:
    """Stacked bars: one a technique, its parts in one colour each, GiB on the axis."""
    figure, axes = style.sheet()
    bars = {technique.name: parts(technique.of(config), accounting) for technique in TECHNIQUES}
    tops = [0.0] * len(bars)
    for part, (label, colour, hatch) in PARTS.items():
        heights = [sizes.get(part, 0) / GIB for sizes in bars.values()]
        if any(heights):
            axes.bar(
                range(len(bars)),
                heights,
                bottom=tops,
                width=0.68,
                color=colour,
                hatch=hatch,
                edgecolor="white",
                linewidth=0.6,
                label=label,
            )
        tops = [top + height for top, height in zip(tops, heights, strict=True)]
    tensor = tops[list(bars).index("tensor")]
    for x, top in enumerate(tops):
        axes.annotate(
            f"{top:.3g} GiB\n{100 * top / tensor:.0f} %",
            (x, top),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=8,
        )
    ticks = [_TICKS.get(name, name.replace("+", "\n+ ")) for name in bars]
    axes.set_xticks(range(len(bars)), ticks, fontsize=9)
    axes.set_ylabel("GiB per layer and GPU")
    axes.set_ylim(0, 1.16 * max(tops))
    kind = f"{usual_kind(config)} " if len(kinds(config)) > 1 else ""
    title = f"Activation memory of one {kind}layer of {setting(config.with_parallel(sp=False))}"
    axes.set_title(title, fontsize=10, loc="left", parse_math=False)
    axes.legend(frameon=False, fontsize=9, reverse=True)
    axes.set_xlabel(
        f"{config.run.implementation.name} implementation, {accounting} accounting; "
        "percent of tensor parallelism alone",
        fontsize=8,
        color="0.35",
        parse_math=False,
    )
    return figure


def parts(config: Config, accounting: str) -> dict[str, int]:
    """The bytes that one layer keeps, by the part that keeps them.

    The attention's core is what selective recomputation drops.

    >>> from memcalc.config import load
    >>> parts(load("22b"), "paper")["core"] == 5 * 64 * 2048**2 * 4 // 8
    True
    """
    graph = layer_graph(config)
    dropped_by = activations.drops(graph)
    sizes: dict[str, int] = {}
    for entry in activations.counted(activations.kept(graph, config.run.policy), accounting):
        part = (
            CORE if "selective" in dropped_by(entry.tensor) else SHOWN.get(entry.part, entry.part)
        )
        sizes[part] = sizes.get(part, 0) + entry.tensor.bytes
    return sizes
