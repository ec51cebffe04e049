"""memcalc's own values of the quantities in the claims of Korthikanti et al. 2022.

A quantity is a function of a catalogue name, or of nothing. It returns an exact number, a word, or
a formula derived from symbols or from schedules walked at several sizes.
"""

from collections.abc import Callable
from fractions import Fraction
from functools import cache
from types import SimpleNamespace
from typing import Any

import sympy

from memcalc import li2021, paper, symbols
from memcalc.analysis import activations, communication, flops
from memcalc.analysis.device import device
from memcalc.analysis.fill import fill
from memcalc.analysis.layers import layer_bytes, layer_entries
from memcalc.analysis.parameters import parameters
from memcalc.analysis.schedule import (
    InFlight,
    holdings,
    interleaved,
    kept_whole,
    one_f_one_b,
    peak,
)
from memcalc.analysis.stages import stage
from memcalc.analysis.states import RECIPES
from memcalc.answers.layer import TECHNIQUES
from memcalc.blocks.head import head_graph
from memcalc.blocks.layer import layer_graph
from memcalc.checks import onchip
from memcalc.checks.claims import Claim, Derived, Ours, claims
from memcalc.config import Config, load
from memcalc.config.gpus import gpu
from memcalc.formulas import Formula
from memcalc.graph.ops.collectives import ALL_GATHER
from memcalc.units import GIB

MODELS = ("22b", "175b", "530b", "1t")
LETTERS = SimpleNamespace(
    **{x.letter: symbols.symbol(x.letter) for x in symbols.LETTERS}, B=symbols.symbol("b")
)
LI_LETTERS = SimpleNamespace(**{letter: getattr(li2021, letter) for letter in "BLHAZN"})
PIPELINES = ((1, 1), (2, 1), (4, 2), (8, 3), (35, 3))  # p, m


def ours(claim: Claim) -> Ours:
    """memcalc's own value for a claim; None if it has none.

    Raises:
        KeyError: There is no such quantity.
    """
    if not claim.quantity:
        return None
    found: Ours = _quantity(claim.quantity, claim.model)
    return found


def _quantity(name: str, model: str) -> Any:
    """A quantity by its name: the first part is in the table, the rest is its argument."""
    kind, _, rest = name.partition("/")
    function = QUANTITIES[kind]
    return function(*([model] if model else []), *([rest] if rest else []))


def _symbolic(derived: Any) -> Derived:
    """A formula derived from symbols."""
    return Derived([(derived, LETTERS)], str(Formula(derived)))


def _walked(witnesses: list[tuple[Any, SimpleNamespace]], *candidates: str) -> Derived:
    """A formula confirmed by numbers at several sizes: the first candidate that equals them all."""
    found = (text for text in candidates if Derived(witnesses, text).equals(text))
    return Derived(witnesses, next(found, "no closed form found"))


# --- formulas ----------------------------------------------------------------------------------


def equation(number: str) -> Derived:
    """The numbered equations; 5 is from walked schedules, 9 is 8 over 7 to first order in s/h."""
    settings: dict[str, dict[str, Any]] = {
        "1": {"tp": 1},
        "2": {},
        "4": {"sp": True},
        "6": {"sp": True, "recompute": "selective"},
    }
    if number == "5":
        configs = [load(model, sp=True, vpp=1) for model in MODELS]
        held = [(stage(c, 0).layers, _letters(c)) for c in configs]
        return _walked(held, "L*b*h*s*(34 + 5*a*s/h)/t")
    if number in settings:
        layers = LETTERS.L if number == "6" else 1
        return _symbolic(layers * activations.total(_symbolic_entries(**settings[number])))
    forward, output, again = _symbolic_flops()
    model = 3 * (LETTERS.L * forward + output)
    if number == "9":
        x = LETTERS
        ratio = LETTERS.L * again / model
        slope = sympy.limit(ratio.subs(x.v, 0) / x.s, x.s, 0) * x.s
        return Derived([(1 + slope, LETTERS)], f"1 + {slope}")
    done = model + (LETTERS.L * again if number == "8" else 0)
    bracket = sympy.expand(done / (72 * LETTERS.B * LETTERS.L * LETTERS.s * LETTERS.h**2))
    terms = sorted(bracket.as_ordered_terms(), key=lambda term: len(term.free_symbols))
    written = " + ".join(sympy.sstr(term) for term in terms)
    return Derived([(done, LETTERS)], f"72*B*L*h**2*s*({written})")


def table2(name: str) -> Derived:
    """A row of table 2."""
    technique = next(each for each in TECHNIQUES if each.name == name)
    config = load("175b")
    letters = symbols.symbolic(config, technique.tensor_parallel)
    return _symbolic(activations.total(layer_entries(technique.of(config), "paper", letters)))


def item(name: str) -> Derived:
    """An item of section 4.1: one tensor, or two."""
    tensors = {
        "qkv_input": ("input_norm_output",),
        "query_and_key": ("query", "key"),
        "proj_input": ("context",),
        "mlp_input": ("mlp_norm_output",),
        "gelu_input": ("fc1_output",),
    }.get(name, (name,))
    entries = _symbolic_entries(tp=1)
    return _symbolic(sum(e.tensor.bytes for e in entries if e.tensor.name in tensors))


def part(name: str) -> Derived:
    """A sum in section 4.1: attention, MLP or norms."""
    return _symbolic(sum(e.tensor.bytes for e in _symbolic_entries(tp=1) if e.part == name))


def flop(name: str) -> Derived:
    """A line of appendix A: the FLOPs of one or several GEMMs."""
    named = {name, *({"mlp": ("fc1", "fc2")}.get(name, ()))}
    ops = [op for op in _symbolic_ops() if {op.name, op.regions[0].name} & named]
    return _symbolic(sum(op.flops for op in ops))


def interleave() -> Derived:
    """The interleave factor, from walked schedules: chunks in flight on the first rank over p*m."""
    held = []
    for p, m in PIPELINES:
        if m > 1:
            chunks = sum(
                n.whole for n in peak(interleaved(0, p, 8 * p, m), lambda chunk: 1).values()
            )
            held.append((Fraction(chunks, p * m), paper.exact({"p": p, "m": m})))
    return _walked(held, "1 + (p - 1)/(m*p)")


def ends(name: str) -> Derived:
    """What section 4.3 adds at the ends of the pipeline."""
    if name.startswith("total"):
        single = name == "total_one_stage"
        configs = [load(m, sp=True, vpp=1) for m in MODELS if (m == "22b") == single]
        held = [stage(config, 0) for config in configs]
        extras = [
            (each.embedding + each.head, _letters(config))
            for each, config in zip(held, configs, strict=True)
        ]
        return _walked(extras, "L*b*h*s/t*(p/L + 4/L*(1 + v/h))", "L*b*h*s/t*(p/L)")
    if name == "embedding":
        configs = [load(model, sp=True, vpp=1) for model in MODELS]
        return _walked([(stage(c, 0).embedding, _letters(c)) for c in configs], "b*h*p*s/t")
    if name == "embedding_interleaved":
        configs = [load(model, sp=True) for model in ("175b", "530b")]
        return _walked([(_most_embedding(c), _letters(c)) for c in configs], "2*b*h*p*s/t")
    tensor = {"final_norm": "head_input", "projection": "final_norm_output"}
    config = load("22b", sp=True)
    graph = head_graph(config, symbols.symbolic(config))
    entries = activations.counted(activations.kept(graph), "paper")
    named = {entry.tensor.name: entry.tensor.bytes for entry in entries}
    return _symbolic(named[tensor.get(name, "loss_softmax")])


def _most_embedding(config: Config) -> Fraction:
    """The peak of the embedding's bytes alone, which is not at the peak of the stage."""
    p, m = config.parallel.pp, config.parallel.vpp
    order = interleaved(0, p, config.microbatches, m)
    most = max(held[0].whole for held in holdings(order))
    first = stage(config, 0)
    return most * Fraction(first.embedding, first.microbatches[0])


def full(name: str = "full") -> Derived:
    """Full recomputation of all layers of the first stage, without or with sharded inputs."""
    configs = [load(model, sp=name == "full_sharded", vpp=1, recompute="full") for model in MODELS]
    held = [(stage(c, 0).layers, _letters(c)) for c in configs]
    return _walked(held, "2*L*b*h*s", "2*L*b*h*s/t")


def freed_outputs() -> Derived:
    """Bytes saved by freeing the outputs of the first rank, without interleaving."""
    configs = [load(model, vpp=1) for model in MODELS[1:]]
    saved = [(stage(c, 0, frees_outputs=False).outputs, _letters(c)) for c in configs]
    return _walked(saved, "2*b*h*p*s")


def outstanding() -> Derived:
    """Micro-batches in flight at each stage of 1F1B."""
    held = [
        (
            peak(one_f_one_b(number, p, 3 * p), lambda chunk: 1)[0].whole,
            paper.exact({"p": p, "S": number}),
        )
        for p, _ in PIPELINES
        for number in range(p)
    ]
    return _walked(held, "p - S")


# --- sizes, memory and communication -----------------------------------------------------------


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
    x = _letters(config)
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


# --- FLOPs and time ----------------------------------------------------------------------------


def mfu(model: str) -> Fraction:
    """Model FLOPs utilisation in percent, from the seconds in table 5."""
    config = load(model)
    return flops.percent_of_peak(flops.iteration(config).model, config, _seconds(model, "present"))


def hfu(model: str) -> Fraction:
    """Hardware FLOPs utilisation in percent, from the seconds in table 5."""
    config = load(model, recompute="selective")
    return flops.percent_of_peak(
        flops.iteration(config).hardware, config, _seconds(model, "present")
    )


def hfu_printed(model: str) -> Fraction:
    """The same with the printed equation 8."""
    config = load(model)
    return flops.percent_of_peak(flops.printed_hardware(config), config, _seconds(model, "present"))


def mfu_2240(model: str) -> Fraction:
    """Model FLOPs utilisation with eight-way data parallelism, in percent."""
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
    ratio: Fraction = flops.printed_hardware(config) / paper.EQUATIONS[7](_letters(config))
    return 100 * (ratio - 1)


def flops_overhead(model: str, policy: str) -> Fraction:
    """FLOPs that a policy adds to one layer's forward and backward, in percent."""
    done = flops.layer(load(model, recompute=policy))
    return Fraction(100 * done.recomputed, done.model)


def filled(model: str) -> Fraction:
    """Appendix C: model FLOPs utilisation from FLOPs alone, with free memory filled, in percent.

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
    """The gain in the abstract, in percent, from its two utilisations."""
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


def li2021_(name: str) -> Derived:
    """A row of Li et al. 2021's tables 1 and 2, or the break-even that follows from it."""
    kind, what = name.split("/")
    derived = getattr({"MLP": li2021.MLP, "attention": li2021.ATTENTION}[kind], what)
    return Derived([(derived, LI_LETTERS)], sympy.sstr(derived))


QUANTITIES: dict[str, Callable[..., Any]] = {
    "comm": comm,
    "core_percent": core_percent,
    "core_ratio": core_ratio,
    "ends": ends,
    "ends_percent": ends_percent,
    "equation": equation,
    "faster": faster,
    "figure1": figure1,
    "figure9": figure9,
    "fivefold": fivefold,
    "flops": flop,
    "flops_gain": flops_gain,
    "flops_overhead": flops_overhead,
    "freed_outputs": freed_outputs,
    "full": full,
    "full_sharded": lambda: full("full_sharded"),
    "hfu": hfu,
    "hfu_printed": hfu_printed,
    "figure10": figure10,
    "figure8": figure8,
    "filled": filled,
    "interleave": interleave,
    "item": item,
    "layers_per_device": layers_per_device,
    "li2021": li2021_,
    "mfu": mfu,
    "mfu_2240": mfu_2240,
    "outstanding": outstanding,
    "over_full": over_full,
    "overhead": overhead,
    "overhead_printed": overhead_printed,
    "overhead_removed": overhead_removed,
    "parameters": billions,
    "part": part,
    "peak": peak_tflops,
    "percent": percent,
    "size": size,
    "table2": table2,
    "table4": table4,
    "throughput_gain": throughput_gain,
    **onchip.QUANTITIES,
}


# --- helpers -----------------------------------------------------------------------------------


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
def _symbolic_entries(**settings: Any) -> list[activations.Entry]:
    config = load("175b", **settings)
    return layer_entries(config, "paper", symbols.symbolic(config))


@cache
def _symbolic_ops() -> tuple[Any, ...]:
    config = load("175b", tp=1)
    sizes = symbols.symbolic(config)
    return (*layer_graph(config, sizes).ops, *head_graph(config, sizes).ops)


def _symbolic_flops() -> tuple[Any, Any, Any]:
    """Forward FLOPs of a layer and of the head, and FLOPs that selective recomputation adds."""
    config = load("175b", tp=1)
    sizes = symbols.symbolic(config)
    layer = layer_graph(config, sizes)
    again = flops.recomputed(layer, load("175b", recompute="selective").run.policy)
    return flops.forward(layer), flops.forward(head_graph(config, sizes)), again


@cache
def _traffic(sp: bool) -> list[communication.Traffic]:
    config = load("175b", sp=sp)
    return communication.of_graph(layer_graph(config, symbols.symbolic(config)))


def _letters(config: Config) -> SimpleNamespace:
    return paper.exact(symbols.values(config) | {"B": config.sequences})
