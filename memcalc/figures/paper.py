"""Figures 1, 7 and 8 of Korthikanti et al. 2022: memcalc's numbers, and the paper's as read off."""

from collections.abc import Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from memcalc.checks.claims import claims
from memcalc.checks.formulas import MODELS
from memcalc.checks.numbers import figure1 as gib
from memcalc.checks.numbers import flops_overhead, percent
from memcalc.figures import style

NAMES = {"22b": "22B", "175b": "175B", "530b": "530B", "1t": "1T"}
GPU_GIB = 80  # of the paper's A100
READ_OFF = "read off the paper's figure"
BOTH = "sequence parallelism and\nselective recomputation"


def figure1() -> Figure:
    """Parameters, optimizer states and activations per GPU, without and with both techniques."""
    figure, axes = style.single()
    read = _read("figure1")
    ticks = {"baseline": "tensor\nparallel", "present": "both"}
    bars = [(model, kind) for model in MODELS for kind in ticks]
    places = _pairs(len(bars))
    states = [float(gib(model, "parameters")) for model, _ in bars]
    activations = [float(gib(model, kind)) for model, kind in bars]
    axes.bar(places, states, 0.8, color=style.GREY, label="parameters and optimizer states")
    axes.bar(
        places, activations, 0.8, states, label="activations", **style.filled(style.BLUE, "///")
    )
    totals = [read[f"figure1/{model}/{kind}/total"] for model, kind in bars]
    parameters = [read[f"figure1/{model}/{kind}/parameters"] for model, kind in bars]
    axes.plot([*places, *places], [*parameters, *totals], label=READ_OFF, **style.PUBLISHED)
    label = f"an A100's {GPU_GIB} GiB"
    axes.axhline(GPU_GIB, color="black", linestyle="--", linewidth=1, label=label)
    axes.set_xticks(places, [f"{NAMES[model]}\n{ticks[kind]}" for model, kind in bars], fontsize=8)
    axes.set_xlabel(_flat(f"both: {BOTH}"), fontsize=8)
    axes.set_ylabel("GiB per GPU")
    return _finish(figure, axes, "figure 1: memory per GPU")


def figure7() -> Figure:
    """Activations of a layer, in percent of tensor parallelism alone."""
    figure, axes = style.single()
    read = _read("figure7")
    techniques = {
        "sequence": ("tensor+sequence", "sequence parallelism", style.ORANGE, "\\\\\\"),
        "selective": ("tensor+selective", "selective recomputation", style.BLUE, "///"),
        "both": ("tensor+sequence+selective", BOTH, style.GREEN, "..."),
        "full": ("full", "full recomputation", style.GREY, ""),
    }
    places, points = [], []
    for i, (key, (technique, label, color, hatch)) in enumerate(techniques.items()):
        at = [x + 0.2 * (i - 1.5) for x in range(len(MODELS))]
        heights = [float(percent(model, technique)) for model in MODELS]
        axes.bar(at, heights, 0.18, label=label, **style.filled(color, hatch))
        places += at
        points += [read[f"figure7/{model}/{key}"] for model in MODELS]
    axes.plot(places, points, label=READ_OFF, **style.PUBLISHED)
    axes.set_xticks(range(len(MODELS)), [NAMES[model] for model in MODELS])
    axes.set_ylabel("% of tensor parallelism alone")
    return _finish(figure, axes, "figure 7: activation memory of a layer")


def figure8() -> Figure:
    """Time of a layer, in percent of one without recomputation: by FLOPs alone, and measured."""
    figure, axes = style.single()
    read = _read("figure8")
    policies = {"full": "full", "present": "selective"}
    ticks = {"full": "full\nrecompute", "present": "both"}
    bars = [(model, variant) for model in MODELS for variant in policies]
    places = _pairs(len(bars))
    parts = {
        "forward": ([100 / 3] * len(bars), style.SKY),
        "backward": ([200 / 3] * len(bars), style.BLUE),
        "recompute": ([float(flops_overhead(m, policies[v])) for m, v in bars], style.VERMILION),
    }
    counted, measured = [0.0] * len(bars), [0.0] * len(bars)
    for part, (heights, color) in parts.items():
        read_off = [read[f"figure8/{model}/{variant}/{part}"] for model, variant in bars]
        axes.bar([place - 0.2 for place in places], heights, 0.36, counted, color=color, label=part)
        axes.bar(
            [place + 0.2 for place in places],
            read_off,
            0.36,
            measured,
            **style.hatched(color, "////"),
        )
        counted = [low + height for low, height in zip(counted, heights, strict=True)]
        measured = [low + height for low, height in zip(measured, read_off, strict=True)]
    axes.set_xticks(places, [f"{NAMES[m]}\n{ticks[v]}" for m, v in bars], fontsize=8)
    axes.set_xlabel(_flat(f"both: {BOTH}"), fontsize=8)
    axes.set_ylabel("% of a layer's time without recomputation")
    kinds = [
        Patch(facecolor="0.5", label="by FLOPs alone"),
        Patch(label=f"measured:\n{READ_OFF}", **style.hatched("0.4", "////")),
    ]
    handles = [*axes.get_legend_handles_labels()[0][::-1], *kinds]
    return _finish(figure, axes, "figure 8: time of a layer", handles=handles)


def _pairs(number: int) -> list[float]:
    """Places of bars in pairs, one pair per model."""
    return [2.3 * (i // 2) + 0.95 * (i % 2) for i in range(number)]


def _flat(text: str) -> str:
    return text.replace("\n", " ")


def _read(figure: str) -> dict[str, float]:
    """The numbers read off a figure, by the ids of their claims."""
    return {
        claim.id: float(claim.number)
        for claim in claims()
        if claim.id.startswith(f"{figure}/") and claim.number is not None
    }


def _finish(
    figure: Figure, axes: Axes, title: str, handles: Sequence[Artist] | None = None
) -> Figure:
    style.heading(figure, f"Korthikanti et al. 2022, {title}")
    style.legend(axes, **({} if handles is None else {"handles": handles}))
    return figure
