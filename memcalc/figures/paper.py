"""Figures 1, 7 and 8 of Korthikanti et al. 2022: bars are ours, points are read off theirs."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from memcalc.checks.claims import claims
from memcalc.checks.paper import MODELS, flops_overhead, percent
from memcalc.checks.paper import figure1 as gib
from memcalc.figures import style

NAMES = {"22b": "22B", "175b": "175B", "530b": "530B", "1t": "1T"}
GPU_GIB = 80  # the dashed line of figure 1


def figure1() -> Figure:
    """Parameters, optimizer states and activations of a GPU, without and with both techniques."""
    figure, axes = style.sheet()
    read = _read("figure1")
    bars = [(m, kind) for m in MODELS for kind in ("baseline", "present")]
    places = [3 * i // 2 + (0.4 if i % 2 else 0) for i in range(len(bars))]
    states = [float(gib(model, "parameters")) for model, _ in bars]
    activations = [float(gib(model, kind)) for model, kind in bars]
    axes.bar(places, states, 0.8, color=style.GREY, label="parameters and optimizer")
    axes.bar(places, activations, 0.8, bottom=states, color=style.BLUE, label="activations")
    totals = [read[f"figure1/{model}/{kind}/total"] for model, kind in bars]
    parameters = [read[f"figure1/{model}/{kind}/parameters"] for model, kind in bars]
    _points(axes, [*places, *places], [*parameters, *totals])
    axes.axhline(GPU_GIB, color="black", linestyle="--", linewidth=0.8)
    axes.set_xticks(places, [f"{NAMES[m]}\n{_KINDS[k]}" for m, k in bars], fontsize=7)
    axes.set_ylabel("GiB per GPU")
    return _finish(figure, axes, "Figure 1: memory of a GPU, and 80 GiB (dashed)")


def figure7() -> Figure:
    """Activations of a layer in percent of tensor parallelism alone."""
    figure, axes = style.sheet()
    read = _read("figure7")
    techniques = {
        "sequence": ("tensor+sequence", "sequence parallelism", style.ORANGE),
        "selective": ("tensor+selective", "selective recomputation", style.BLUE),
        "both": ("tensor+sequence+selective", "both", style.GREEN),
        "full": ("full", "full recomputation", style.GREY),
    }
    places, points = [], []
    for i, (key, (technique, label, colour)) in enumerate(techniques.items()):
        at = [x + 0.2 * (i - 1.5) for x in range(len(MODELS))]
        axes.bar(
            at, [float(percent(m, technique)) for m in MODELS], 0.18, color=colour, label=label
        )
        places += at
        points += [read[f"figure7/{model}/{key}"] for model in MODELS]
    _points(axes, places, points)
    axes.set_xticks(range(len(MODELS)), [NAMES[model] for model in MODELS])
    axes.set_ylabel("percent of tensor parallelism alone")
    return _finish(figure, axes, "Figure 7: activation memory of a layer", legend_room=1.3)


def figure8() -> Figure:
    """Time of a layer in percent of one that recomputes nothing: FLOPs alone, and as measured."""
    figure, axes = style.sheet()
    read = _read("figure8")
    policies = {"full": "full", "present": "selective"}
    bars = [(m, variant) for m in MODELS for variant in policies]
    places = [3 * i // 2 + (0.4 if i % 2 else 0) for i in range(len(bars))]
    parts = {
        "forward": ([100 / 3] * len(bars), style.SKY),
        "backward": ([200 / 3] * len(bars), style.BLUE),
        "recompute": ([float(flops_overhead(m, policies[v])) for m, v in bars], style.VERMILION),
    }
    bottom, measured = [0.0] * len(bars), [0.0] * len(bars)
    at, points = [], []
    for part, (heights, colour) in parts.items():
        axes.bar(places, heights, 0.8, bottom=bottom, color=colour, label=f"{part}, by FLOPs alone")
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
        measured = [
            b + read[f"figure8/{m}/{v}/{part}"] for b, (m, v) in zip(measured, bars, strict=True)
        ]
        at += places
        points += measured
    _points(axes, at, points, "ends of the measured parts, read off the paper's figure")
    axes.set_xticks(places, [f"{NAMES[m]}\n{_KINDS[v]}" for m, v in bars], fontsize=7)
    axes.set_ylabel("percent of a layer's time without recomputation")
    return _finish(figure, axes, "Figure 8: time of a layer", legend_room=1.35)


_KINDS = {
    "baseline": "tensor\nparallel",
    "present": "with\nboth",
    "full": "full\nrecompute",
}


def _read(figure: str) -> dict[str, float]:
    """The points that were read off a figure, by the ids of their claims."""
    return {
        claim.id: float(claim.number)
        for claim in claims()
        if claim.id.startswith(f"{figure}/") and claim.number is not None
    }


def _points(
    axes: Axes,
    places: Sequence[float],
    heights: Sequence[float],
    label: str = "read off the paper's figure",
) -> None:
    axes.plot(
        places, heights, "o", color="black", markerfacecolor="white", markersize=4, label=label
    )


def _finish(figure: Figure, axes: Axes, title: str, legend_room: float = 1.15) -> Figure:
    axes.set_ylim(0, legend_room * axes.get_ylim()[1])
    axes.set_title(
        f"Korthikanti et al. 2022, {title[0].lower()}{title[1:]}", fontsize=10, loc="left"
    )
    axes.legend(frameon=False, fontsize=8, loc="upper right", ncols=2)
    return figure
