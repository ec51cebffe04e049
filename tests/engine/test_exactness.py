"""Ints, Fractions, symbols and arrays agree, over the whole catalog."""

from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import memcalc
from memcalc import symbols
from memcalc.analysis import activations
from memcalc.answers.layer import TECHNIQUES
from memcalc.blocks.layer import kinds, layer_graph
from memcalc.config import Config, Model, Parallel, Run, catalog, load
from memcalc.config.implementation import IMPLEMENTATIONS
from memcalc.config.model import ACTIVATIONS
from memcalc.config.recompute import POLICIES
from memcalc.errors import ConfigError
from memcalc.formulas import Formula, layer_formula

DEGREES = (1, 2, 4, 8)
ULPS = 4


def configs(tp):
    """Every model of the catalog at s = 2048 whose heads t divides."""
    for name in catalog.names():
        model = load(name, tp=1).model
        if model.heads % tp == 0 and 0 in (model.kv_heads % tp, tp % model.kv_heads):
            yield load(name, tp=tp, seq_length=2048)


@pytest.mark.parametrize("accounting", ["paper", "exact"])
@pytest.mark.parametrize("name", catalog.names())
def test_ints_symbols_and_arrays_agree(name, accounting):
    tables = []
    for tp in DEGREES:
        with suppress(ConfigError):
            config = load(name, tp=tp, seq_length=2048)
            tables.append((config, memcalc.layer(config, accounting).records()))
    for technique, kind in product(TECHNIQUES, kinds(load(name, tp=1))):
        letters = symbols.symbolic(tables[0][0], technique.tensor_parallel)
        formula = layer_formula(technique.of(tables[0][0]), accounting, letters, kind)
        exact, values = [], []
        for config, rows in tables:
            (size,) = [
                row["bytes"]
                for row in rows
                if (row["technique"], row["layer_kind"]) == (technique.name, kind)
            ]
            assert formula.value(symbols.values(config)) == size
            exact.append(size)
            values.append(symbols.values(config))
        arrays = {x: np.array([each[x] for each in values]) for x in values[0]}
        computed = np.broadcast_to(formula.evaluate(**arrays), len(exact))
        error = np.abs(computed - np.array(exact, dtype=np.float64))
        assert (error <= ULPS * np.spacing(np.array(exact, dtype=np.float64))).all()


@pytest.mark.parametrize("name", catalog.names())
def test_a_t_that_does_not_divide_the_heads_is_refused(name):
    heads = load(name, tp=1).model.heads
    for tp in (2, 4, 8):
        if heads % tp:
            with pytest.raises(ConfigError, match=f"--tp {tp} must divide heads"):
                load(name, tp=tp)


def test_some_models_of_the_catalogue_are_refused_at_some_degree():
    refused = [n for n, tp in product(catalog.names(), DEGREES) if load(n, tp=1).model.heads % tp]
    assert {"gpt2-xl", "qwen2.5-0.5b"} <= set(refused)


@pytest.mark.parametrize("tp", DEGREES)
def test_none_keeps_no_less_than_selective_and_that_no_less_than_full(tp):
    for config in configs(tp):
        size = dict(zip(*columns(memcalc.layer(config), "technique", "bytes"), strict=True))
        assert size["tensor"] >= size["tensor+selective"] >= size["full"]
        assert size["tensor+sequence"] >= size["tensor+sequence+selective"] >= size["full"]
        assert size["none"] >= size["tensor"] >= size["tensor+sequence"]


def columns(report, *names):
    return [report.column(name) for name in names]


def test_degree_one_is_the_serial_layer():
    for config in configs(1):
        sizes = {t.name: memcalc.layer_bytes(t.of(config)) for t in TECHNIQUES}
        assert sizes["none"] == sizes["tensor"] == sizes["tensor+sequence"]
        assert not [op for op in layer_graph(config).ops if op.moves]


@pytest.mark.parametrize("policy", sorted(POLICIES.keys() - {"offload"}))
def test_more_tokens_keep_more(policy):
    for name in ("22b", "llama-3-8b", "gpt2"):
        small, longer, wider = (
            memcalc.layer_bytes(
                load(name, tp=1, seq_length=s, micro_batch_size=b, recompute=policy), "exact"
            )
            for s, b in ((1024, 1), (2048, 1), (1024, 2))
        )
        assert small < longer
        assert small < wider


def test_fractions_are_as_exact_as_ints():
    config = load("llama-2-70b", tp=8, sp=True)
    sizes = {letter: Fraction(value) for letter, value in symbols.values(config).items()}
    graph = layer_graph(config, sizes)
    assert activations.total(activations.kept(graph)) == memcalc.layer_bytes(config, "exact")
    sizes["s"] = Fraction(1, 3)
    third = activations.total(
        activations.counted(activations.kept(layer_graph(config, sizes)), "paper")
    )
    assert third == Fraction(memcalc.layer_bytes(config), 3 * 4096)


@st.composite
def layers(draw):
    """Small configs of every structure, with degrees that divide."""
    tp = draw(st.sampled_from(DEGREES))
    kv_heads = draw(st.sampled_from([1, 2, 4, 8]))
    heads = max(kv_heads, tp) * draw(st.integers(1, 3))
    model = Model(
        name="drawn",
        layers=1,
        hidden_size=heads * draw(st.integers(1, 16)) * 2,
        heads=heads,
        kv_heads=kv_heads if heads % kv_heads == 0 else heads,
        head_size=draw(st.sampled_from([None, 16, 64])),
        ffn_size=draw(st.sampled_from([None, 8 * 11])),
        norm=draw(st.sampled_from(["layernorm", "rmsnorm"])),
        activation=draw(st.sampled_from(ACTIVATIONS)),
        position="none",
        softmax_fp32=draw(st.booleans()),
        attention_dropout=draw(st.sampled_from([0.0, 0.1])),
        hidden_dropout=draw(st.sampled_from([0.0, 0.1])),
    )
    run = Run(
        seq_length=8 * draw(st.integers(1, 64)),
        micro_batch_size=draw(st.integers(1, 8)),
        precision=draw(st.sampled_from(["bf16", "fp32"])),
        recompute=tuple(
            draw(st.sets(st.sampled_from(["core_attention", "attention", "mlp", "norm", "full"])))
        ),
        implementation=replace(
            draw(st.sampled_from(list(IMPLEMENTATIONS.values()))),
            attention=draw(st.sampled_from(["flash", "unfused"])),
        ),
    )
    try:
        return Config(model, Parallel(tp=tp, sp=draw(st.booleans())), run)
    except ConfigError:
        return Config(model, Parallel(), run)


@settings(max_examples=150, deadline=None)
@given(layers())
def test_any_layers_formula_is_its_bytes(config):
    letters = symbols.values(config)
    for accounting in ("paper", "exact"):
        size = memcalc.layer_bytes(config, accounting)
        assert layer_formula(config, accounting).value(letters) == size
        assert sum(memcalc.ledger(config, accounting).column("bytes")) == size
    assert memcalc.layer_bytes(config, "paper") <= memcalc.layer_bytes(config, "exact")


@settings(max_examples=100, deadline=None)
@given(layers())
def test_recomputing_never_keeps_more_than_the_tensors_of_the_layer(config):
    """Each policy's entries are tensors of the same graph, none twice."""
    graph = layer_graph(config)
    everything = {t for op in graph.ops for t in (*op.inputs, *op.outputs)}
    everything |= {save.tensor for op in graph.ops for save in op.saves}
    for regions in POLICIES.values():
        names = [entry.tensor for entry in activations.kept(graph, regions)]
        assert len(names) == len(set(names))
        assert everything.issuperset(names)


def test_arrays_are_broadcast_and_chunked():
    formula = layer_formula(load("175b"))
    s = np.arange(1, 50_001, dtype=np.int32)[:, None] * 8
    t = np.array([1, 2, 4])
    sizes = formula.evaluate(s=s, b=1, h=12288, a=96, t=t)
    assert sizes.shape == (50_000, 3)
    assert sizes[-1, 1] == formula.value({"s": 400_000, "b": 1, "h": 12288, "a": 96, "t": 2})


def test_a_formula_over_no_letters_and_over_no_elements():
    assert Formula(7).evaluate() == 7
    assert layer_formula(load("175b")).evaluate(s=2, b=1, h=8, a=2, t=1).shape == ()
    assert layer_formula(load("175b")).evaluate(s=[], b=1, h=8, a=2, t=1).shape == (0,)


def test_formulas_are_equal_as_functions():
    s, b = symbols.symbol("s"), symbols.symbol("b")
    assert Formula(s * (b + 1)) == Formula(s * b + s)
    assert hash(Formula(s * (b + 1))) == hash(Formula(s * b + s))
    assert Formula(s) != Formula(b)
    assert Formula(s) != "s"


def test_a_formula_is_printed_as_what_it_is(evaluate):
    """Signs, several divisors, terms without s, b or h: what is printed evaluates to the value."""
    s, b, h, a, t, p, m, v = (symbols.symbol(letter) for letter in "sbhatpmv")
    letters = {"s": 16, "b": 2, "h": 8, "a": 4, "t": 2, "p": 4, "m": 3, "v": 5}
    for expression in (
        34 * s * b * h / (p * t) + 5 * a * b * s**2 / (p * t),
        s * b * h * (10 - 2 / t),
        -s * b * h,
        v / h + v / (h * m) - v / (h * m * p),
        4 * s * b + 4 * a * s * b,
        s * b * h / t + s * b + 24 + v,
        2 * s * b * h * (1 - 1 / t) - 7,
    ):
        formula = Formula(expression)
        assert evaluate(str(formula), letters) == formula.value(letters)
    assert str(Formula(4 * s * b + 4 * a * s * b)) == "b*s*(4 + 4*a)"
    assert str(Formula(s * b * h * (10 - 2 / t))) == "b*h*s*(10 - 2/t)"
    assert (
        Formula(s * b * h * (1 - 1 / t) / p).latex() == r"\frac{sbh}{p}\left(1 - \frac{1}{t}\right)"
    )
