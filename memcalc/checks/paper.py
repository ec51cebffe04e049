"""The quantities that the claims of Korthikanti et al. 2022 are about, as the engine has them.

A quantity is a function of a catalogue name, or of nothing. Numbers are exact where the engine's
are. Of a formula, a quantity gives pairs (ours, printed), of expressions or of numbers, which must
all be equal, and how ours is written where it is another formula.
"""

from collections.abc import Callable
from fractions import Fraction
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import sympy

from memcalc import li2021, paper, symbols
from memcalc.analysis import activations, communication, flops
from memcalc.analysis.layers import layer_bytes, layer_entries
from memcalc.analysis.parameters import parameters
from memcalc.analysis.schedule import holdings, interleaved, one_f_one_b, peak
from memcalc.analysis.stages import stage
from memcalc.analysis.states import RECIPES
from memcalc.answers.layer import TECHNIQUES
from memcalc.blocks.head import head_graph
from memcalc.blocks.layer import layer_graph
from memcalc.checks.claims import Claim, Ours, claims
from memcalc.config import Config, load
from memcalc.config.gpus import gpu
from memcalc.formulas import Formula
from memcalc.units import GIB

MODELS = ("22b", "175b", "530b", "1t")
LETTERS = SimpleNamespace(
    **{x.letter: symbols.symbol(x.letter) for x in symbols.LETTERS}, B=symbols.symbol("b")
)
PIPELINES = ((1, 1), (2, 1), (4, 2), (8, 3), (35, 3))  # p, m


class Pairs(NamedTuple):
    """What must be equal if a printed formula holds, and what ours is called if it does not."""

    pairs: list[tuple[Any, Any]]
    written: str = ""


def ours(claim: Claim) -> Ours:
    """What the engine says where the paper claims something; None where it has nothing to say.

    Raises:
        KeyError: There is no such quantity.
    """
    if not claim.quantity:
        return None
    found = _quantity(claim.quantity, claim.model)
    if not isinstance(found, Pairs):
        value: Ours = found
        return value
    if all(_equal(a, b) for a, b in found.pairs):
        return claim.printed
    return found.written or str(Formula(found.pairs[0][0]))


def _quantity(name: str, model: str) -> Any:
    """A quantity by its name: the first word is in the table, the rest are its arguments."""
    kind, _, rest = name.partition("/")
    function = QUANTITIES[kind]
    return function(*([model] if model else []), *([rest] if rest else []))


def _equal(a: Any, b: Any) -> bool:
    return bool(sympy.expand(a - b) == 0)


# --- formulas ----------------------------------------------------------------------------------


def equation(number: str) -> Pairs:
    """The numbered equations; 5 is walked, 9 is the ratio of 8 and 7 to first order in s/h."""
    settings: dict[str, dict[str, Any]] = {
        "1": {"tp": 1},
        "2": {},
        "4": {"sp": True},
        "6": {"sp": True, "recompute": "selective"},
    }
    if number == "5":
        configs = [load(model, sp=True, vpp=1) for model in MODELS]
        printed = paper.EQUATIONS[5]
        return Pairs([(stage(c, 0).layers, printed(_letters(c))) for c in configs])
    if number in settings:
        layers = LETTERS.L if number == "6" else 1
        derived = activations.total(_symbolic_entries(**settings[number]))
        return Pairs([(layers * derived, paper.EQUATIONS[int(number)](LETTERS))])
    forward, output, again = _symbolic_flops()
    model = 3 * (LETTERS.L * forward + output)
    hardware = model + LETTERS.L * again
    if number == "7":
        return Pairs([(model, paper.EQUATIONS[7](LETTERS))])
    if number == "8":
        written = "72*B*L*h**2*s*(1 + 2*s/(9*h) + v/(12*L*h))"
        _require(_equal(hardware, paper.CORRECTED[8](LETTERS)))
        return Pairs([(hardware, paper.EQUATIONS[8](LETTERS))], written)
    x = LETTERS
    slope = sympy.limit((hardware / model - 1).subs(x.v, 0) / x.s, x.s, 0) * x.s
    return Pairs([(1 + slope, 1 + x.s / (6 * x.h))], f"1 + {slope}")


def table2(name: str) -> Pairs:
    """A row of table 2."""
    technique = next(each for each in TECHNIQUES if each.name == name)
    config = load("175b")
    letters = symbols.symbolic(config, technique.tensor_parallel)
    derived = activations.total(layer_entries(technique.of(config), "paper", letters))
    return Pairs([(derived, paper.TABLE_2[name](LETTERS))])


def item(name: str) -> Pairs:
    """An item of section 4.1: one tensor, or two."""
    tensors = {
        "qkv_input": ("input_norm_output",),
        "query_and_key": ("query", "key"),
        "proj_input": ("context",),
        "mlp_input": ("mlp_norm_output",),
        "gelu_input": ("fc1_output",),
    }.get(name, (name,))
    entries = _symbolic_entries(tp=1)
    derived = sum(e.tensor.bytes for e in entries if e.tensor.name in tensors)
    return Pairs([(derived, paper.ITEMS[name](LETTERS))])


def part(name: str) -> Pairs:
    """A sum of section 4.1: attention, MLP or norms."""
    derived = sum(e.tensor.bytes for e in _symbolic_entries(tp=1) if e.part == name)
    return Pairs([(derived, paper.COUNTS[name](LETTERS))])


def flop(name: str) -> Pairs:
    """A line of appendix A: the FLOPs of one product, or of several."""
    ops = {"mlp": ("fc1", "fc2")}.get(name, (name,))
    named = {name, *ops}
    derived = sum(op.flops for op in _symbolic_ops() if {op.name, op.regions[0].name} & named)
    return Pairs([(derived, paper.COUNTS[f"{name}_flops"](LETTERS))])


def interleave() -> Pairs:
    """The interleave factor, walked: chunks in flight on the first rank over p * m."""
    walked = []
    for p, m in PIPELINES:
        if m > 1:
            chunks = sum(peak(interleaved(0, p, 8 * p, m), lambda chunk: 1).values())
            printed = paper.COUNTS["interleave"](paper.exact({"p": p, "m": m}))
            walked.append((Fraction(chunks, p * m), printed))
    return Pairs(walked)


def ends(name: str) -> Pairs:
    """What section 4.3 adds at the ends of the pipeline."""
    if name.startswith("embedding"):
        vpp = None if name == "embedding_interleaved" else 1
        configs = [load(model, sp=True, vpp=vpp) for model in MODELS]
        if name == "embedding_interleaved":
            configs = [config for config in configs if config.parallel.vpp > 1]
        printed = paper.COUNTS["embedding"]
        walked = []
        for config in configs:
            first = stage(config, 0)
            most = first.microbatches[0]
            if config.parallel.vpp > 1:  # of that chunk alone, at another time than the peak
                p, m = config.parallel.pp, config.parallel.vpp
                order = interleaved(0, p, config.microbatches, m)
                most = max(held.get(0, 0) for held in holdings(order))
            held_then = most * Fraction(first.embedding, first.microbatches[0])
            walked.append((held_then, printed(_letters(config))))
        return Pairs(walked, "2*b*h*p*s/t")
    tensor = {"final_norm": "head_input", "projection": "final_norm_output"}
    config = load("22b", sp=True)
    graph = head_graph(config, symbols.symbolic(config))
    entries = activations.counted(activations.kept(graph), "paper")
    named = {entry.tensor.name: entry.tensor.bytes for entry in entries}
    derived = named[tensor.get(name, "loss_softmax")]
    return Pairs([(derived, paper.COUNTS[name](LETTERS))])


def full(name: str = "full") -> Pairs:
    """Full recomputation, of all layers of the first stage: whole, or sharded."""
    configs = [load(model, sp=name == "full_sharded", vpp=1, recompute="full") for model in MODELS]
    return Pairs([(stage(c, 0).layers, paper.COUNTS[name](_letters(c))) for c in configs])


def freed_outputs() -> Pairs:
    """What freeing the first rank's outputs saves, without interleaving."""
    pairs = []
    for model in MODELS[1:]:
        config = load(model, vpp=1)
        saved = stage(config, 0, frees_outputs=False).outputs
        pairs.append((saved, paper.COUNTS["freed_outputs"](_letters(config))))
    return Pairs(pairs)


def outstanding() -> Pairs:
    """Micro-batches in flight at each stage of 1F1B."""
    walked = [
        (peak(one_f_one_b(stage, p, 3 * p), lambda chunk: 1)[0], p - stage)
        for p, _ in PIPELINES
        for stage in range(p)
    ]
    return Pairs(walked)


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
    """Bytes of a layer under a technique, in percent of tensor parallelism alone."""
    sizes = _technique_bytes(model)
    return Fraction(100 * sizes[technique], sizes["tensor"])


def fivefold(model: str) -> Fraction:
    """How many times less both techniques together keep than tensor parallelism alone."""
    return 100 / percent(model, "tensor+sequence+selective")


def over_full(model: str) -> Fraction:
    """How many times more both techniques together keep than full recomputation."""
    sizes = _technique_bytes(model)
    return Fraction(sizes["tensor+sequence+selective"], sizes["full"])


def core_ratio(model: str) -> Fraction:
    """5as/h: what the attention's core keeps, in units of sbh."""
    config = load(model, tp=1)
    x = _letters(config)
    core = layer_bytes(config) - layer_bytes(load(model, tp=1, recompute="selective"))
    ratio: Fraction = core / (x.s * x.b * x.h)
    return ratio


def core_percent(model: str) -> Fraction:
    """The share of a layer that selective recomputation drops."""
    whole = layer_bytes(load(model, tp=1))
    return Fraction(100 * (whole - layer_bytes(load(model, tp=1, recompute="selective"))), whole)


def ends_percent(model: str) -> Fraction:
    """Section 4.3's extras, in percent of the layers that equation 5 counts."""
    held = stage(load(model, sp=True), 0)
    return Fraction(100 * (held.embedding + held.head), held.layers)


def comm(name: str) -> Any:
    """Section 4.2.2's collectives of a layer."""
    tensor, sequence = (_traffic(sp) for sp in (False, True))
    again = [row for row in sequence if row.overlapped_with == "data gradient"]
    if name == "overlap":
        return again[0].overlapped_with
    if name == "all_reduces":
        return sum(row.times for row in tensor)
    rest = [row for row in sequence if row not in again]
    if name in ("all_gathers", "reduce_scatters"):
        return sum(row.times for row in rest if row.collective == name.removesuffix("s"))
    bytes_ = sum(row.bytes for row in rest)
    return Fraction(str(sympy.cancel(bytes_ / sum(row.bytes for row in tensor))))


def figure1(model: str, name: str) -> Fraction:
    """A bar of figure 1, in GiB of a GPU: parameters and optimizer, activations, or both."""
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
    """Model FLOPs utilisation, in percent, from table 5's seconds."""
    config = load(model)
    return _percent_of_peak(flops.iteration(config).model, config, _seconds(model, "present"))


def hfu(model: str) -> Fraction:
    """Hardware FLOPs utilisation, in percent, from table 5's seconds."""
    config = load(model, recompute="selective")
    return _percent_of_peak(flops.iteration(config).hardware, config, _seconds(model, "present"))


def hfu_printed(model: str) -> Fraction:
    """The same by the printed equation 8."""
    config = load(model)
    return _percent_of_peak(_by_equation(8, config), config, _seconds(model, "present"))


def mfu_2240(model: str) -> Fraction:
    """Model FLOPs utilisation with eight-way data parallelism, in percent."""
    config = load(model, dp=8, global_batch_size=2240)
    return _percent_of_peak(flops.iteration(config).model, config, _printed("section6.3/seconds"))


def overhead(model: str) -> Fraction:
    """FLOPs that selective recomputation adds to an iteration, in percent."""
    done = flops.iteration(load(model, recompute="selective"))
    return Fraction(100 * done.recomputed, done.model)


def overhead_printed(model: str) -> Fraction:
    """The same by the printed equations 7 and 8."""
    config = load(model)
    return 100 * (_by_equation(8, config) / _by_equation(7, config) - 1)


def flops_overhead(model: str, policy: str) -> Fraction:
    """FLOPs that a policy adds to one layer's forward and backward, in percent."""
    done = flops.layer(load(model, recompute=policy))
    return Fraction(100 * done.recomputed, done.model)


def flops_gain(model: str) -> Fraction:
    """What FLOPs alone say of the throughput, selective over full recomputation, in percent."""
    full_, selective = (flops.iteration(load(model, recompute=p)) for p in ("full", "selective"))
    return 100 * (Fraction(full_.hardware, selective.hardware) - 1)


def throughput_gain(model: str) -> Fraction:
    """Table 5's throughput gain, from its seconds, in percent."""
    return 100 * (_seconds(model, "full") / _seconds(model, "present") - 1)


def faster(model: str) -> Fraction:
    """The abstract's gain, from its two utilisations, in percent."""
    return 100 * (_printed("abstract/mfu") / _printed("abstract/mfu_with_recomputation") - 1)


def overhead_removed(model: str) -> Fraction:
    """How much of full recomputation's overhead in time goes, in percent."""
    ids = {
        "22b": ("table4/full/overhead", "table4/selective+sequence/overhead"),
        "530b": ("section6.2/overhead/full", "section6.2/overhead/present"),
    }[model]
    before, after = (_printed(id_) for id_ in ids)
    return 100 * (before - after) / before


def table4(model: str, name: str) -> Fraction:
    """What table 4's milliseconds say, in percent."""
    experiment, what = name.split("/")

    def time(row: str, column: str) -> Fraction:
        return _printed(f"table4/{row}/{column}")

    if what == "overhead":
        return 100 * (time(experiment, "combined") / time("baseline", "combined") - 1)
    if what == "total":
        return 100 * time(experiment, "combined") / time("baseline", "combined")
    if what == "forward_gain":
        return 100 * (1 - time(experiment, "forward") / time("baseline", "forward"))
    return 100 * (time(experiment, "backward") / time("baseline", "backward") - 1)


def li2021_(name: str) -> Pairs:
    """A row of Li et al. 2021's tables 1 and 2, or the break-even that follows from it."""
    kind, what = name.split("/")
    block = {"MLP": li2021.MLP, "attention": li2021.ATTENTION}[kind]
    return Pairs([(getattr(block, what), li2021.PRINTED[kind][what])])


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
    "interleave": interleave,
    "item": item,
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
    "percent": percent,
    "size": size,
    "table2": table2,
    "table4": table4,
    "throughput_gain": throughput_gain,
}


# --- helpers -----------------------------------------------------------------------------------


@cache
def _printed_numbers() -> dict[str, Fraction]:
    """Every printed number by its id; formulas and words are left out."""
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
    """Forward FLOPs of a layer and of the head, and what the selective policy adds to a layer."""
    config = load("175b", tp=1)
    sizes = symbols.symbolic(config)
    layer = layer_graph(config, sizes)
    again = flops.recomputed(layer, load("175b", recompute="selective").run.regions)
    return flops.forward(layer), flops.forward(head_graph(config, sizes)), again


@cache
def _traffic(sp: bool) -> list[communication.Traffic]:
    config = load("175b", sp=sp)
    return communication.of_graph(layer_graph(config, symbols.symbolic(config)))


def _letters(config: Config) -> SimpleNamespace:
    batch = config.microbatches * config.run.micro_batch_size * config.parallel.dp
    return paper.exact(symbols.values(config) | {"B": batch})


def _by_equation(number: int, config: Config) -> Fraction:
    found: Fraction = paper.EQUATIONS[number](_letters(config))
    return found


def _percent_of_peak(done: Fraction | int, config: Config, seconds: Fraction) -> Fraction:
    assert config.run.gpu is not None
    peak_ = gpu(config.run.gpu).peaks[config.run.precision]
    assert peak_ is not None
    return 100 * Fraction(done) / (seconds * config.parallel.ranks * peak_)


def _require(holds: bool) -> None:
    if not holds:
        raise AssertionError("the corrected equation 8 is not what the engine derives")
