"""memcalc's own numbers and words, for the claims of Korthikanti et al. 2022."""

from fractions import Fraction
from functools import cache
from typing import Any

import sympy

from memcalc import paper, symbols
from memcalc.analysis import communication, flops
from memcalc.analysis.device import device
from memcalc.analysis.fill import fill
from memcalc.analysis.in_flight import InFlight, holdings, peak
from memcalc.analysis.layers import layer_bytes
from memcalc.analysis.parameters import parameters
from memcalc.analysis.schedule import kept_whole, one_f_one_b
from memcalc.analysis.stages import stage
from memcalc.analysis.states import RECIPES
from memcalc.answers.layer import TECHNIQUES
from memcalc.blocks.layer import layer_graph
from memcalc.checks.claims import claims
from memcalc.checks.formulas import letters
from memcalc.config import load
from memcalc.config.gpus import gpu
from memcalc.graph.ops.collectives import ALL_GATHER
from memcalc.units import GIB


def size(model: str, name: str) -> int:
    """A size of table 3."""
    config = load(model)
    if name == "gpus":
        return config.parallel.ranks
    for holder in (config.model, config.parallel, config.run):
        if hasattr(holder, name):
            found: int = getattr(holder, name)
            return found
    raise KeyError(name)


def billions(model: str) -> Fraction:
    """Parameters, in billions."""
    return Fraction(parameters(load(model)), 10**9)


def percent(model: str, technique: str) -> Fraction:
    """Bytes of a layer under a technique, as a percentage of tensor parallelism alone."""
    sizes = _technique_bytes(model)
    return Fraction(100 * sizes[technique], sizes["tensor"])


def fivefold(model: str) -> Fraction:
    """Bytes under tensor parallelism alone, over bytes under both techniques."""
    return 100 / percent(model, "tensor+sequence+selective")


def over_full(model: str) -> Fraction:
    """Bytes under both techniques, over bytes under full recomputation."""
    sizes = _technique_bytes(model)
    return Fraction(sizes["tensor+sequence+selective"], sizes["full"])


def core_ratio(model: str) -> Fraction:
    """5as/h: bytes that the attention core keeps, in units of sbh."""
    config = load(model, tp=1)
    x = letters(config)
    core = layer_bytes(config) - layer_bytes(load(model, tp=1, recompute="selective"))
    ratio: Fraction = core / (x.s * x.b * x.h)
    return ratio


def core_percent(model: str) -> Fraction:
    """The share of a layer's bytes that selective recomputation saves, in percent."""
    whole = layer_bytes(load(model, tp=1))
    return Fraction(100 * (whole - layer_bytes(load(model, tp=1, recompute="selective"))), whole)


def ends_percent(model: str) -> Fraction:
    """Section 4.3's extra bytes, as a percentage of the layers in equation 5."""
    held = stage(load(model, sp=True), 0)
    return Fraction(100 * (held.embedding + held.head), held.layers)


def comm(name: str) -> Any:
    """Collectives of a layer in section 4.2.2."""
    if name == "overlap":  # of the gathers that backward adds to g's conjugate
        return next(
            move.overlapped_with
            for op in layer_graph(load("175b", sp=True)).ops
            for move in op.moves
            if op.kind is ALL_GATHER and move[:2] == ("all_gather", "backward")
        )
    tensor, sequence = (_traffic(sp) for sp in (False, True))
    if name == "all_reduces":
        return sum(row.times for row in tensor)
    rest = [row for row in sequence if row.overlapped_with != "data gradient"]
    if name in ("all_gathers", "reduce_scatters"):
        return sum(row.times for row in rest if row.collective == name.removesuffix("s"))
    sent = sum(row.bytes for row in rest) / sum(row.bytes for row in tensor)
    return Fraction(str(sympy.cancel(sent)))


def figure1(model: str, name: str) -> Fraction:
    """A bar of figure 1, in GiB per GPU: parameters and optimizer, activations, or both."""
    if name.endswith("/total"):
        return figure1(model, "parameters") + figure1(model, name.removesuffix("/total"))
    config = load(model)
    if name == "parameters":
        return Fraction(RECIPES["paper"].total * parameters(config), config.parallel.ranks * GIB)
    present: dict[str, Any] = {"sp": True, "recompute": "selective"} if name == "present" else {}
    return Fraction(stage(load(model, **present), 0).layers, GIB)


def figure9(model: str, name: str) -> Fraction:
    """Figure 9: 1F1B with full recomputation and no sequence parallelism, in GiB."""
    config = load(model, vpp=1, recompute="full")

    def held(number: int, frees: bool) -> int:
        return stage(config, number, frees_outputs=frees).total

    if name.startswith("slope"):  # between stages that have neither end
        frees = name == "slope/freed"
        return Fraction(held(1, frees) - held(2, frees), GIB)
    if name == "spike":
        return Fraction(stage(config, 0).embedding, GIB)
    return Fraction(held(0, False) - held(0, True), GIB)


def mfu(model: str) -> Fraction:
    """Model FLOPs utilization in percent, from the seconds in table 5."""
    config = load(model)
    return flops.percent_of_peak(flops.iteration(config).model, config, _seconds(model, "present"))


def hfu(model: str) -> Fraction:
    """Hardware FLOPs utilization in percent, from the seconds in table 5."""
    config = load(model, recompute="selective")
    return flops.percent_of_peak(
        flops.iteration(config).hardware, config, _seconds(model, "present")
    )


def hfu_printed(model: str) -> Fraction:
    """The same with the printed equation 8."""
    config = load(model)
    return flops.percent_of_peak(flops.printed_hardware(config), config, _seconds(model, "present"))


def mfu_2240(model: str) -> Fraction:
    """Model FLOPs utilization with eight-way data parallelism, in percent."""
    config = load(model, dp=8, global_batch_size=2240)
    return flops.percent_of_peak(
        flops.iteration(config).model, config, _printed("section6.3/seconds")
    )


def overhead(model: str) -> Fraction:
    """FLOPs that selective recomputation adds per iteration, in percent."""
    done = flops.iteration(load(model, recompute="selective"))
    return Fraction(100 * done.recomputed, done.model)


def overhead_printed(model: str) -> Fraction:
    """The same with the printed equations 7 and 8."""
    config = load(model)
    ratio: Fraction = flops.printed_hardware(config) / paper.EQUATIONS[7](letters(config))
    return 100 * (ratio - 1)


def flops_overhead(model: str, policy: str) -> Fraction:
    """FLOPs that a policy adds to one layer's forward and backward, in percent."""
    done = flops.layer(load(model, recompute=policy))
    return Fraction(100 * done.recomputed, done.model)


def filled(model: str) -> Fraction:
    """Appendix C: model FLOPs utilization from FLOPs alone, with free memory filled, in percent.

    Every stage skips recomputation for as many passes as fit in its GPU, and the time in table 5
    shrinks in proportion to the FLOPs.
    """
    config = load(model, sp=True, recompute="selective")
    room = gpu(str(config.run.gpu)).memory_bytes
    saved = sum(fill(config, at.stage, room - at.peak.bytes).saved for at in device(config))
    hardware = flops.iteration(config).hardware
    return mfu(model) * Fraction(hardware, hardware - saved)


def figure10(name: str) -> int:
    """Figure 10: the first of 4 stages, 9 micro-batches, 1 of every 4 not recomputed."""
    steps = list(one_f_one_b(0, 4, 9))
    window = peak(steps, lambda chunk: 1)[0].whole
    if name == "window":
        return window
    return max(held.get(1, InFlight()).whole for held in holdings(kept_whole(steps, 1, window, 1)))


def flops_gain(model: str) -> Fraction:
    """Throughput gain of selective over full recomputation, from FLOPs alone, in percent."""
    full_, selective = (flops.iteration(load(model, recompute=p)) for p in ("full", "selective"))
    return 100 * (Fraction(full_.hardware, selective.hardware) - 1)


def throughput_gain(model: str) -> Fraction:
    """Throughput gain in percent, from the seconds in table 5."""
    return 100 * (_seconds(model, "full") / _seconds(model, "present") - 1)


def faster(model: str) -> Fraction:
    """The gain in the abstract, in percent, from its two utilizations."""
    return 100 * (_printed("abstract/mfu") / _printed("abstract/mfu_with_recomputation") - 1)


def overhead_removed(model: str) -> Fraction:
    """The share of full recomputation's time overhead that is removed, in percent."""
    ids = {
        "22b": ("table4/full/overhead", "table4/selective+sequence/overhead"),
        "530b": ("section6.2/overhead/full", "section6.2/overhead/present"),
    }[model]
    before, after = (_printed(id_) for id_ in ids)
    return 100 * (before - after) / before


def table4(model: str, name: str) -> Fraction:
    """What follows from the milliseconds in table 4: percent, or a difference in milliseconds."""
    experiment, what = name.split("/")

    def time(row: str, column: str) -> Fraction:
        return _printed(f"table4/{row}/{column}")

    if what == "overhead":
        return 100 * (time(experiment, "combined") / time("baseline", "combined") - 1)
    if what == "total":
        return 100 * time(experiment, "combined") / time("baseline", "combined")
    if what == "more_backward":  # milliseconds
        return time(experiment, "backward") - time("baseline", "backward")
    if what == "forward_gain":
        return 100 * (1 - time(experiment, "forward") / time("baseline", "forward"))
    return 100 * (time(experiment, "backward") / time("baseline", "backward") - 1)


def figure8(model: str, variant: str) -> Fraction:
    """Time that recomputation adds to a layer, read off figure 8, in percent."""
    total: Fraction = _printed(f"figure8/{model}/{variant}/total")
    return total - 100


def layers_per_device(model: str) -> int:
    """Layers of one pipeline rank."""
    config = load(model)
    return config.model.layers // config.parallel.pp


def peak_tflops(model: str) -> Fraction:
    """The peak of the run's GPU, in TFLOP/s."""
    run = load(model).run
    return Fraction(gpu(str(run.gpu)).peaks[run.precision] or 0, 10**12)


@cache
def _printed_numbers() -> dict[str, Fraction]:
    """Every printed number by its id, without formulas and words."""
    return {claim.id: claim.number for claim in claims() if claim.number is not None}


def _printed(id_: str) -> Fraction:
    return _printed_numbers()[id_]


def _seconds(model: str, column: str) -> Fraction:
    return _printed(f"table5/{model}/{column}")


@cache
def _technique_bytes(model: str) -> dict[str, int]:
    config = load(model)
    return {technique.name: layer_bytes(technique.of(config)) for technique in TECHNIQUES}


@cache
def _traffic(sp: bool) -> list[communication.Traffic]:
    config = load("175b", sp=sp)
    return communication.of_graph(layer_graph(config, symbols.symbolic(config)))
