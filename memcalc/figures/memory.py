"""Memory per GPU at each pipeline stage: stacked bars at the peak, and the GPU's size."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from memcalc.analysis.device import StageMemory, device
from memcalc.analysis.headroom import headroom
from memcalc.answers.memory import by_group, memory
from memcalc.config import Config
from memcalc.config.gpus import gpu
from memcalc.figures import style
from memcalc.figures.style import BarPart
from memcalc.units import common_scale

# Group of allocated parts -> its color, and its hatch for print without color.
GROUPS = {
    "weights": (style.GREY, ""),
    "gradients": (style.SKY, "///"),
    "optimizer": (style.BLUE, ""),
    "activations": (style.ORANGE, "\\\\\\"),
    "logits": (style.VERMILION, "..."),
    "buffers": (style.PURPLE, "xxx"),
}
MOST_LABELS = 12  # stages whose totals are written on their bars


def draw(config: Config) -> Figure:
    """Stacked bars, one per stage: allocated bytes at the peak, and estimates above them.

    A stage fits if its whole bar is below the GPU's line. The accounting is ``exact``.
    """
    report = memory(config)
    config = config.padded
    held = device(config)
    room = None if config.run.gpu is None else gpu(config.run.gpu)
    beyond = headroom(config)
    totals = [beyond.needed(stage.peak.bytes) for stage in held]
    unit, scale = common_scale("bytes", [*totals, room.usable_bytes if room else 0])
    groups = [by_group(stage.peak) for stage in held]
    bars = [
        BarPart(group, color, hatch, [sizes[group] / scale for sizes in groups])
        for group, (color, hatch) in GROUPS.items()
    ]
    reserved = [(beyond.allocator(stage.peak.bytes) - stage.peak.bytes) / scale for stage in held]
    fixed = [sum(part.bytes for part in beyond.fixed) / scale] * len(held)
    for label, hatch, heights in (
        ("reserved but unallocated", "////", reserved),
        ("CUDA context and NCCL", "....", fixed),
    ):
        bars.append(BarPart(f"{label}\n(estimated)", "0.35", hatch, heights, estimated=True))

    figure, axes = style.single(height=4.6)
    tops = style.stack(axes, bars)
    style.limits(axes, [stage.peak.bytes / scale for stage in held], "allocated at the peak")
    if room is not None:
        size = room.usable_bytes / scale
        label = f"{room.name}: {size:,.4g} {unit}"
        axes.axhline(size, color="black", linestyle="--", linewidth=1, label=label)
    axes.set_ylim(0, 1.1 * max([*tops, *([room.usable_bytes / scale] if room else [])]))
    if len(held) <= MOST_LABELS:
        _totals(axes, tops)
    style.stage_axis(axes, len(held))
    axes.set_xlabel(f"pipeline stage\n{style.fitted(figure, phases(held), 9, 0.7)}", fontsize=9)
    axes.set_ylabel(f"{unit} per GPU at the stage's peak")
    style.heading(figure, report.title, report.answer)
    style.legend(axes, reverse=True)
    return figure


def numbers(config: Config, accounting: str | None) -> tuple[Any, str]:
    """What the figure shows, and its title."""
    report = memory(config)
    return (report.rows, report.answer), report.title


def phases(held: list[StageMemory]) -> str:
    """In which phase of a step each stage has its peak, in words.

    >>> from memcalc.config import load
    >>> phases(device(load("22b", pp=2)))
    'peak phase: forward (stage 0), loss (stage 1)'
    """
    found: dict[str, list[int]] = {}
    for stage in held:
        found.setdefault(stage.peak.name, []).append(stage.stage)
    if len(held) == 1:
        return f"peak phase: {held[0].peak.name}"
    words = [f"{phase} ({style.stages_in_words(found[phase])})" for phase in found]
    return f"peak phase: {', '.join(words)}"


def _totals(axes: Axes, tops: list[float]) -> None:
    """The height of each bar, above it, with about four digits."""
    places = sum(max(tops) < bound for bound in (100, 1000))
    for place, top in enumerate(tops):
        axes.annotate(
            f"{top:,.{places}f}",
            (place, top),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
        )
