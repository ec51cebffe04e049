"""The activations of every pipeline stage: at its peak, as figure 9 has it, and over time."""

from collections import Counter
from itertools import accumulate

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from memcalc.analysis.schedule import (
    BACKWARD,
    BACKWARD_INPUTS,
    BACKWARD_WEIGHTS,
    FORWARD,
    Timed,
    timeline,
)
from memcalc.analysis.stages import Weight, chunk_weights, stages
from memcalc.answers.notes import recomputation, setting
from memcalc.config import Config
from memcalc.figures import style
from memcalc.units import GIB

PARTS = {
    "layers": ("layers", style.BLUE),
    "embedding": ("embedding", style.ORANGE),
    "head": ("last norm,\nlogits, loss", style.GREEN),
}
CURVES = 8  # stages that are drawn over time, of many


def draw(config: Config, accounting: str) -> Figure:
    """Above, stacked bars, one a stage; below, what stages hold along the schedule."""
    config = config.padded
    if config.parallel.pp == 1:
        figure, axes = style.sheet()
        bars(axes, config, accounting)
        return figure
    figure, (above, below) = style.sheets(2, height=6.6)
    over_time(below, config, accounting)  # first: it refuses schedules that are too long
    bars(above, config, accounting)
    return figure


def bars(axes: Axes, config: Config, accounting: str) -> None:
    """Stacked bars, one a stage; a line shows what they were if outputs were not freed."""
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
            label="with outputs\nthat are not freed",
        )
    axes.set_xlabel("pipeline stage")
    axes.set_ylabel("GiB of activations per GPU")
    axes.set_ylim(0, 1.15 * max(held.total for held in kept) / GIB)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    title = f"Activations of {setting(config)},\n{recomputation(config)}, by stage at its peak"
    axes.set_title(title, fontsize=9, loc="left", parse_math=False)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def over_time(axes: Axes, config: Config, accounting: str) -> None:
    """A curve a stage: the bytes of micro-batches in flight, and of weights' inputs that wait."""
    p, n = config.parallel.pp, config.microbatches
    runs = timeline(config.parallel, n)
    shown = (
        sorted({round(i * (p - 1) / (CURVES - 1)) for i in range(CURVES)})
        if p > CURVES
        else (range(p))
    )
    colours = colormaps["viridis"]
    for stage in shown:
        times, sizes = curve(runs[stage], chunk_weights(config, stage, accounting))
        axes.plot(
            times,
            [size / GIB for size in sizes],
            drawstyle="steps-post",
            linewidth=1.2,
            color=colours(0.92 * stage / (p - 1)),
            label=f"stage {stage}",
        )
    walked = max(step.step.microbatch for step in runs[0]) + 1
    some = f", {walked} of {n} micro-batches" if walked < n else ""
    axes.set_xlabel(
        f"time along {config.parallel.order}{some}; a chunk's forward takes 1, its backward 2"
    )
    axes.set_ylabel("GiB in flight per GPU")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.legend(frameon=False, fontsize=8, ncols=1, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def curve(steps: list[Timed], weights: list[tuple[Weight, Weight]]) -> tuple[list[int], list[int]]:
    """When what a stage holds changes, and to how many bytes.

    A forward holds its activations from its start; a backward frees them at its end.
    """
    whole = [sum(weight) for weight, _ in weights]
    late = [sum(weight) for _, weight in weights]
    changes: Counter[int] = Counter({0: 0})
    for (phase, _, chunk), start, end in steps:
        if phase == FORWARD:
            changes[start] += whole[chunk]
        if phase in (BACKWARD, BACKWARD_INPUTS):
            changes[end] -= whole[chunk]
        if phase == BACKWARD_INPUTS:
            changes[end] += late[chunk]
        if phase == BACKWARD_WEIGHTS:
            changes[end] -= late[chunk]
    times = sorted(changes)
    return times, list(accumulate(changes[time] for time in times))
