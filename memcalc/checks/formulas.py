"""memcalc's own formulas, for the claims of Korthikanti et al. 2022 and Li et al. 2021.

They are derived from symbols, or from schedules walked at several sizes.
"""

from fractions import Fraction
from functools import cache
from types import SimpleNamespace
from typing import Any

import sympy

from memcalc import li2021, paper, symbols
from memcalc.analysis import activations, flops
from memcalc.analysis.in_flight import holdings, peak
from memcalc.analysis.layers import layer_entries
from memcalc.analysis.schedule import interleaved, one_f_one_b
from memcalc.analysis.stages import stage
from memcalc.answers.layer import TECHNIQUES
from memcalc.blocks.head import head_graph
from memcalc.blocks.layer import layer_graph
from memcalc.checks.claims import OwnFormula
from memcalc.config import Config, load
from memcalc.formulas import Formula

MODELS = ("22b", "175b", "530b", "1t")
LETTERS = SimpleNamespace(
    **{x.letter: symbols.symbol(x.letter) for x in symbols.LETTERS}, B=symbols.symbol("b")
)
LI_LETTERS = SimpleNamespace(**{letter: getattr(li2021, letter) for letter in "BLHAZN"})
PIPELINES = ((1, 1), (2, 1), (4, 2), (8, 3), (35, 3))  # p, m


def equation(number: str) -> OwnFormula:
    """The numbered equations; 5 is from walked schedules, 9 is 8 over 7 to first order in s/h."""
    settings: dict[str, dict[str, Any]] = {
        "1": {"tp": 1},
        "2": {},
        "4": {"sp": True},
        "6": {"sp": True, "recompute": "selective"},
    }
    if number == "5":
        configs = [load(model, sp=True, vpp=1) for model in MODELS]
        held = [(stage(c, 0).layers, letters(c)) for c in configs]
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
        return OwnFormula([(1 + slope, LETTERS)], f"1 + {slope}")
    done = model + (LETTERS.L * again if number == "8" else 0)
    bracket = sympy.expand(done / (72 * LETTERS.B * LETTERS.L * LETTERS.s * LETTERS.h**2))
    terms = sorted(bracket.as_ordered_terms(), key=lambda term: len(term.free_symbols))
    written = " + ".join(sympy.sstr(term) for term in terms)
    return OwnFormula([(done, LETTERS)], f"72*B*L*h**2*s*({written})")


def table2(name: str) -> OwnFormula:
    """A row of table 2."""
    technique = next(each for each in TECHNIQUES if each.name == name)
    config = load("175b")
    letters = symbols.symbolic(config, technique.tensor_parallel)
    return _symbolic(activations.total(layer_entries(technique.of(config), "paper", letters)))


def item(name: str) -> OwnFormula:
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


def part(name: str) -> OwnFormula:
    """A sum in section 4.1: attention, MLP or norms."""
    return _symbolic(sum(e.tensor.bytes for e in _symbolic_entries(tp=1) if e.part == name))


def flop(name: str) -> OwnFormula:
    """A line of appendix A: the FLOPs of one or several GEMMs."""
    named = {name, *({"mlp": ("fc1", "fc2")}.get(name, ()))}
    ops = [op for op in _symbolic_ops() if {op.name, op.regions[0].name} & named]
    return _symbolic(sum(op.flops for op in ops))


def interleave() -> OwnFormula:
    """The interleave factor, from walked schedules: chunks in flight on the first rank over p*m."""
    held = []
    for p, m in PIPELINES:
        if m > 1:
            chunks = sum(
                n.whole for n in peak(interleaved(0, p, 8 * p, m), lambda chunk: 1).values()
            )
            held.append((Fraction(chunks, p * m), paper.exact({"p": p, "m": m})))
    return _walked(held, "1 + (p - 1)/(m*p)")


def ends(name: str) -> OwnFormula:
    """What section 4.3 adds at the ends of the pipeline."""
    if name.startswith("total"):
        single = name == "total_one_stage"
        configs = [load(m, sp=True, vpp=1) for m in MODELS if (m == "22b") == single]
        held = [stage(config, 0) for config in configs]
        extras = [
            (each.embedding + each.head, letters(config))
            for each, config in zip(held, configs, strict=True)
        ]
        return _walked(extras, "L*b*h*s/t*(p/L + 4/L*(1 + v/h))", "L*b*h*s/t*(p/L)")
    if name == "embedding":
        configs = [load(model, sp=True, vpp=1) for model in MODELS]
        return _walked([(stage(c, 0).embedding, letters(c)) for c in configs], "b*h*p*s/t")
    if name == "embedding_interleaved":
        configs = [load(model, sp=True) for model in ("175b", "530b")]
        return _walked([(_most_embedding(c), letters(c)) for c in configs], "2*b*h*p*s/t")
    tensor = {"final_norm": "head_input", "projection": "final_norm_output"}
    config = load("22b", sp=True)
    graph = head_graph(config, symbols.symbolic(config))
    entries = activations.counted(activations.kept(graph), "paper")
    named = {entry.tensor.name: entry.tensor.bytes for entry in entries}
    return _symbolic(named[tensor.get(name, "loss_softmax")])


def full(name: str = "full") -> OwnFormula:
    """Full recomputation of all layers of the first stage, without or with sharded inputs."""
    configs = [load(model, sp=name == "full_sharded", vpp=1, recompute="full") for model in MODELS]
    held = [(stage(c, 0).layers, letters(c)) for c in configs]
    return _walked(held, "2*L*b*h*s", "2*L*b*h*s/t")


def freed_outputs() -> OwnFormula:
    """Bytes saved by freeing the outputs of the first rank, without interleaving."""
    configs = [load(model, vpp=1) for model in MODELS[1:]]
    saved = [(stage(c, 0, frees_outputs=False).outputs, letters(c)) for c in configs]
    return _walked(saved, "2*b*h*p*s")


def outstanding() -> OwnFormula:
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


def li2021_(name: str) -> OwnFormula:
    """A row of Li et al. 2021's tables 1 and 2, or the break-even that follows from it."""
    kind, what = name.split("/")
    derived = getattr({"MLP": li2021.MLP, "attention": li2021.ATTENTION}[kind], what)
    return OwnFormula([(derived, LI_LETTERS)], sympy.sstr(derived))


def letters(config: Config) -> SimpleNamespace:
    """The sizes of a run by their letters, for the printed formulas."""
    return paper.exact(symbols.values(config) | {"B": config.sequences})


def _symbolic(derived: Any) -> OwnFormula:
    """A formula derived from symbols."""
    return OwnFormula([(derived, LETTERS)], str(Formula(derived)))


def _walked(witnesses: list[tuple[Any, SimpleNamespace]], *candidates: str) -> OwnFormula:
    """A formula confirmed by numbers at several sizes: the first candidate that equals them all."""
    found = (text for text in candidates if OwnFormula(witnesses, text).equals(text))
    return OwnFormula(witnesses, next(found, "no closed form found"))


def _most_embedding(config: Config) -> Fraction:
    """The peak of the embedding's bytes alone, which is not at the peak of the stage."""
    p, m = config.parallel.pp, config.parallel.vpp
    order = interleaved(0, p, config.microbatches, m)
    most = max(held[0].whole for held in holdings(order))
    first = stage(config, 0)
    return most * Fraction(first.embedding, first.microbatches[0])


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
