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
from memcalc.analysis.stages import Held, Weight, chunk_weights, stages
from memcalc.answers.notes import recomputation, whole_setting
from memcalc.config import Config, Parallel
from memcalc.figures import style
from memcalc.figures.style import Part
from memcalc.units import common_scale

PARTS = {
    "layers": ("layers", style.BLUE, "///"),
    "embedding": ("embedding", style.ORANGE, "\\\\\\"),
    "head": ("last norm, logits\nand loss", style.GREEN, "..."),
}
CURVES = 8  # of more stages, so many are drawn over time
LOOKED_AT = 64  # among so many, evenly spaced
MOST_POINTS = 2000  # of a curve
WIDEST = 2.8  # points: the first curve
# A curve's colour and line, from the first stage to the last.
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
    """Above, stacked bars, one per stage; below, what stages hold while the schedule runs."""
    config = config.padded
    runs = timeline(config.parallel, config.microbatches)  # first: it refuses what is too long
    freed = stages(config, accounting)
    kept = stages(config, accounting, frees_outputs=False)
    unit, scale = common_scale("bytes", [held.total for held in kept])
    if config.parallel.pp == 1:
        figure, axes = style.sheet()
        bars(axes, freed, [], unit, scale)
    else:
        figure, (axes, below) = style.sheets(2, height=6.8)
        bars(axes, freed, kept, unit, scale)
        over_time(below, config, accounting, runs, unit, scale)
    how = f"{recomputation(config)}, {accounting} accounting"
    style.heading(figure, f"Activations of {whole_setting(config)}, {how}")
    return figure


def numbers(config: Config, accounting: str) -> tuple[list[Held], int, Parallel]:
    """What the panels show: two questions with the same numbers have the same figure."""
    config = config.padded
    names = ("pp", "vpp", "schedule", "microbatch_group_size")  # of the order in which stages work
    order = Parallel(**{name: getattr(config.parallel, name) for name in names})
    return stages(config, accounting), config.microbatches, order


def bars(axes: Axes, freed: Sequence[Held], kept: Sequence[Held], unit: str, scale: int) -> None:
    """Stacked bars, one per stage; a dark line shows them if outputs are not deallocated."""
    style.stack(
        axes,
        [
            Part(label, colour, hatch, [getattr(held, part) / scale for held in freed])
            for part, (label, colour, hatch) in PARTS.items()
        ],
    )
    if kept:
        heights = [held.total / scale for held in kept]
        style.limits(axes, heights, "if stage outputs are\nnot deallocated")
    axes.set_xlabel("pipeline stage")
    axes.set_ylabel(f"{unit} per GPU at the peak")
    axes.set_ylim(0, 1.1 * max(held.total for held in kept or freed) / scale)
    style.stage_axis(axes, len(freed))
    style.beside(axes, reverse=True)


def over_time(
    axes: Axes,
    config: Config,
    accounting: str,
    runs: Sequence[Sequence[Timed]],
    unit: str,
    scale: int,
) -> None:
    """A curve per stage, or for all stages that hold the same at all times."""
    shown = curves(config, accounting, runs)
    for place, ((times, sizes), numbers) in enumerate(shown.items()):
        colour, line = LINES[place]
        axes.plot(
            *thinned(times, [size / scale for size in sizes]),
            line,
            drawstyle="steps-post",
            linewidth=WIDEST - (WIDEST - 1) * place / CURVES,  # what lies under another shows
            color=colour,
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
    style.beside(axes)


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
    """The numbers below one, or as many as there may be of them, the first and last included.

    >>> spaced(3, 8), spaced(35, 8)
    ([0, 1, 2], [0, 5, 10, 15, 19, 24, 29, 34])
    """
    if number <= most:
        return list(range(number))
    return [round(i * (number - 1) / (most - 1)) for i in range(most)]


def thinned(times: Sequence[int], sizes: Sequence[float]) -> tuple[list[int], list[float]]:
    """A curve in at most about ``MOST_POINTS`` points: of neighbours, the highest is left.

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
    steps: Sequence[Timed], weights: Sequence[tuple[Weight, Weight]]
) -> tuple[list[int], list[int]]:
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
