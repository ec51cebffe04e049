"""A GPU's memory at every pipeline stage: stacked bars at the peak, and what there is room for."""

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import offset_copy

from memcalc.analysis.device import device
from memcalc.answers.memory import by_group
from memcalc.answers.notes import recomputation, setting
from memcalc.config import Config
from memcalc.config.gpus import gpu
from memcalc.figures import style
from memcalc.units import GIB

# Group of parts -> its colour, and its hatch for print without colour.
GROUPS = {
    "weights": (style.GREY, ""),
    "gradients": (style.SKY, "///"),
    "optimizer": (style.BLUE, ""),
    "activations": (style.ORANGE, ""),
    "logits": (style.VERMILION, "..."),
    "buffers": (style.PURPLE, "xxx"),
}
MARKERS = "ovs^D*P"  # of phases, above their bars


def draw(config: Config) -> Figure:
    """Stacked bars, one a stage; a mark above each says in which phase its peak is.

    The accounting is ``exact``: a GPU holds every byte.
    """
    figure, axes = style.sheet(height=4.6)
    config = config.padded
    held = device(config)
    tops = [0.0] * len(held)
    for group, (colour, hatch) in GROUPS.items():
        heights = [by_group(stage.peak)[group] / GIB for stage in held]
        if any(heights):
            axes.bar(
                range(len(held)),
                heights,
                bottom=tops,
                width=0.76,
                color=colour,
                hatch=hatch,
                edgecolor="white",
                linewidth=0.4,
                label=group,
            )
        tops = [top + height for top, height in zip(tops, heights, strict=True)]
    above = offset_copy(axes.transData, figure, y=6, units="points")
    phases = list(dict.fromkeys(stage.peak.name for stage in held))
    for phase, marker in zip(phases, MARKERS, strict=False):
        at = [stage.stage for stage in held if stage.peak.name == phase]
        axes.plot(
            at,
            [tops[stage] for stage in at],
            marker,
            color="black",
            markersize=4,
            transform=above,
            label=f"peak in {phase}",
        )
    most = max(tops)
    if config.run.gpu is not None:
        found = gpu(config.run.gpu)
        capacity = found.memory_bytes / GIB
        most = max(most, capacity)
        label = f"{found.name}: {capacity:.4g} GiB"
        axes.axhline(capacity, color="black", linestyle="--", linewidth=1, label=label)
    axes.set_xlabel("pipeline stage")
    axes.set_ylabel("GiB allocated per GPU")
    axes.set_ylim(0, 1.12 * most)
    axes.set_xlim(-0.6, len(held) - 0.4)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    how = f", {config.parallel.order}" if config.parallel.pp > 1 else ""
    title = f"Memory of {setting(config)},\n{recomputation(config)}{how}"
    axes.set_title(title, fontsize=9, loc="left", parse_math=False)
    axes.legend(
        frameon=False, fontsize=8, reverse=True, loc="upper left", bbox_to_anchor=(1.0, 1.0)
    )
    return figure
