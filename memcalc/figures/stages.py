"""The activations of each pipeline stage: at its peak (the paper's figure 9), and over time."""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from memcalc.analysis.schedule import (
    BACKWARD,
    BACKWARD_INPUTS,
    BACKWARD_WEIGHTS,
    FORWARD,
    Timed,
    timeline,
)
from memcalc.analysis.stages import ChunkBytes, Held, chunk_weights, stages
from memcalc.answers.notes import recomputation, whole_setting
from memcalc.config import Config, Parallel
from memcalc.figures import style
from memcalc.figures.style import BarPart
from memcalc.units import common_scale

PARTS = {
    "layers": ("layers", style.BLUE, "///"),
    "embedding": ("embedding", style.ORANGE, "\\\\\\"),
    "head": ("last norm, logits\nand loss", style.GREEN, "..."),
}
CURVES = 8  # the most that are drawn over time
LOOKED_AT = 64  # the most stages whose curves are computed, evenly spaced
MOST_POINTS = 2000  # per curve
WIDEST = 2.8  # line width of the first curve, in points
# A curve's color and line, from the first stage to the last.
LINES = (
    (style.BLUE, "-"),
    (style.ORANGE, "-"),
    (style.GREEN, "-"),
    (style.VERMILION, "-"),
    (style.SKY, "--"),
    (style.PURPLE, "--"),
    (style.GREY, "--"),
    (style.BLACK, "--"),
)

Curve = tuple[tuple[int, ...], tuple[int, ...]]


def draw(config: Config, accounting: str) -> Figure:
    """Above, stacked bars, one per stage; below, bytes in flight of stages over time."""
    config = config.padded
    runs = timeline(
        config.parallel, config.microbatches
    )  # first: it refuses schedules that are too long
    freed = stages(config, accounting)
    kept = stages(config, accounting, frees_outputs=False)
    unit, scale = common_scale("bytes", [held.total for held in kept])
    if config.parallel.pp == 1:
        figure, axes = style.single()
        bars(axes, freed, [], unit, scale)
    else:
        figure, (axes, below) = style.stacked(2, height=6.8)
        bars(axes, freed, kept, unit, scale)
        over_time(below, config, accounting, runs, unit, scale)
    how = f"{recomputation(config)}, {accounting} accounting"
    style.heading(figure, f"Activations of {whole_setting(config)}, {how}")
    return figure


def numbers(config: Config, accounting: str) -> tuple[tuple[list[Held], int, Parallel], str]:
    """What the figure shows, and the setting in its title."""
    config = config.padded
    names = ("pp", "vpp", "schedule", "microbatch_group_size")  # they set the order of passes
    order = Parallel(**{name: getattr(config.parallel, name) for name in names})
    return (stages(config, accounting), config.microbatches, order), whole_setting(config)


def bars(axes: Axes, freed: Sequence[Held], kept: Sequence[Held], unit: str, scale: float) -> None:
    """Stacked bars, one per stage; a dark line is their height if outputs are not deallocated."""
    style.stack(
        axes,
        [
            BarPart(label, color, hatch, [getattr(held, part) / scale for held in freed])
            for part, (label, color, hatch) in PARTS.items()
        ],
    )
    if kept:
        heights = [held.total / scale for held in kept]
        style.limits(axes, heights, "if stage outputs are\nnot deallocated")
    axes.set_xlabel("pipeline stage")
    axes.set_ylabel(f"{unit} per GPU at the peak")
    axes.set_ylim(0, 1.1 * max(held.total for held in kept or freed) / scale)
    style.stage_axis(axes, len(freed))
    style.legend(axes, reverse=True)


def over_time(
    axes: Axes,
    config: Config,
    accounting: str,
    runs: Sequence[Sequence[Timed]],
    unit: str,
    scale: float,
) -> None:
    """A curve per stage, or one for several stages with the same curve."""
    shown = curves(config, accounting, runs)
    for place, ((times, sizes), numbers) in enumerate(shown.items()):
        color, line = LINES[place]
        axes.plot(
            *thinned(times, [size / scale for size in sizes]),
            line,
            drawstyle="steps-post",
            linewidth=WIDEST
            - (WIDEST - 1) * place / CURVES,  # so that a curve under another is visible
            color=color,
            label=style.stages_in_words(numbers),
        )
    walked = max(step.step.microbatch for step in runs[0]) + 1
    some = (
        f", {walked} of {config.microbatches} micro-batches" if walked < config.microbatches else ""
    )
    axes.set_xlabel(
        f"time, {config.parallel.order} schedule{some}\n"
        "(unit: a model chunk's forward; its backward takes 2)"
    )
    axes.set_ylabel(f"{unit} per GPU, in flight")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    style.legend(axes)


def curves(
    config: Config, accounting: str, runs: Sequence[Sequence[Timed]]
) -> dict[Curve, list[int]]:
    """The curves to draw, each with the stages whose curve it is."""
    found: dict[Curve, list[int]] = {}
    for stage in spaced(len(runs), LOOKED_AT):
        times, sizes = curve(runs[stage], chunk_weights(config, stage, accounting))
        found.setdefault((tuple(times), tuple(sizes)), []).append(stage)
    return {list(found)[i]: list(found.values())[i] for i in spaced(len(found), CURVES)}


def spaced(number: int, most: int) -> list[int]:
    """All numbers below ``number``, or ``most`` of them with the first and the last.

    >>> spaced(3, 8), spaced(35, 8)
    ([0, 1, 2], [0, 5, 10, 15, 19, 24, 29, 34])
    """
    if number <= most:
        return list(range(number))
    return [round(i * (number - 1) / (most - 1)) for i in range(most)]


def thinned(times: Sequence[int], sizes: Sequence[float]) -> tuple[list[int], list[float]]:
    """A curve in at most about ``MOST_POINTS`` points: of neighbors, the highest stays.

    >>> thinned([0, 1], [5.0, 7.0])
    ([0, 1], [5.0, 7.0])
    """
    step = -(-len(times) // MOST_POINTS)
    groups = [range(i, min(i + step, len(times))) for i in range(0, len(times), step)]
    best = [max(group, key=lambda i: sizes[i]) for group in groups]
    if best[-1] != len(times) - 1:
        best.append(len(times) - 1)
    return [times[i] for i in best], [sizes[i] for i in best]


def curve(
    steps: Sequence[Timed], weights: Sequence[tuple[ChunkBytes, ChunkBytes]]
) -> tuple[list[int], list[int]]:
    """The times at which a stage's bytes in flight change, and the bytes from then on.

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
