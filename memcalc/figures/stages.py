"""The activations of every pipeline stage at its peak: figure 9's kind of figure."""

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from memcalc.analysis.stages import stages
from memcalc.answers.notes import recomputation, setting
from memcalc.config import Config
from memcalc.figures import style
from memcalc.units import GIB

PARTS = {
    "layers": ("layers", style.BLUE),
    "embedding": ("embedding", style.ORANGE),
    "head": ("last norm, logits, loss", style.GREEN),
}


def draw(config: Config, accounting: str) -> Figure:
    """Stacked bars, one a stage; a line shows what they were if outputs were not freed."""
    figure, axes = style.sheet()
    freed = stages(config, accounting)
    kept = stages(config, accounting, frees_outputs=False)
    numbers = [held.stage for held in freed]
    tops = [0.0] * len(freed)
    for part, (label, colour) in PARTS.items():
        heights = [getattr(held, part) / GIB for held in freed]
        if any(heights):
            axes.bar(numbers, heights, bottom=tops, width=0.8, color=colour, label=label)
        tops = [top + height for top, height in zip(tops, heights, strict=True)]
    if config.parallel.pp > 1:
        axes.plot(
            numbers,
            [held.total / GIB for held in kept],
            "o-",
            markersize=3,
            linewidth=1,
            color="black",
            label="with outputs that are not freed",
        )
    axes.set_xlabel("pipeline stage")
    axes.set_ylabel("GiB of activations per GPU")
    axes.set_ylim(0, 1.15 * max(held.total for held in kept) / GIB)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    title = f"Activations of {setting(config)}, {recomputation(config)}, by stage at its peak"
    axes.set_title(title, fontsize=9, loc="left", parse_math=False)
    axes.legend(frameon=False, fontsize=9)
    return figure
