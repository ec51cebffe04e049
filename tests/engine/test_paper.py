"""Korthikanti et al. 2022: what the engine derives equals what the paper prints, exactly."""

from types import SimpleNamespace

import pytest
import sympy

import memcalc
from memcalc import paper, symbols
from memcalc.answers.layer import TECHNIQUES
from memcalc.config import load
from memcalc.formulas import layer_formula
from memcalc.units import MIB

MODELS = ["22b", "175b", "530b", "1t"]
LETTERS = SimpleNamespace(**{x.letter: symbols.symbol(x.letter) for x in symbols.LETTERS})


def derived(model, technique):
    config = load(model)
    letters = symbols.symbolic(config, technique.tensor_parallel)
    return layer_formula(technique.of(config), sizes=letters).expression


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("technique", TECHNIQUES, ids=lambda technique: technique.name)
def test_every_row_of_table_2_is_derived(model, technique):
    printed = paper.TABLE_2[technique.name](LETTERS)
    assert sympy.simplify(derived(model, technique) - printed) == 0


@pytest.mark.parametrize(
    ("number", "settings", "layers"),
    [
        (1, {"tp": 1}, 1),
        (2, {}, 1),
        (4, {"sp": True}, 1),
        (6, {"sp": True, "recompute": "selective"}, LETTERS.L),
    ],
)
def test_the_equations_for_layers_are_derived(number, settings, layers):
    formula = layer_formula(load("175b", **settings)).expression
    assert sympy.simplify(layers * formula - paper.EQUATIONS[number](LETTERS)) == 0


# From equations 1, 2, 4, 6 and table 2 (pages 5 to 9) with table 3's sizes (page 10):
# MiB per layer for no parallelism, TP, TP+SP, TP+selective, TP+SP+selective, full.
PER_LAYER_MIB = {
    "22b": [6752, 1264, 844, 624, 204, 96],
    "175b": [2736, 552, 342, 312, 102, 48],
    "530b": [3920, 840, 490, 520, 170, 80],
    "1t": [4900, 1050, 612.5, 650, 212.5, 100],
}


@pytest.mark.parametrize("model", MODELS)
def test_the_numbers_of_table_2_for_the_models_of_table_3(model):
    assert memcalc.layer(load(model)).column("bytes") == [mib * MIB for mib in PER_LAYER_MIB[model]]


@pytest.mark.parametrize(
    ("settings", "technique"),
    [
        ({"tp": 1}, "none"),
        ({}, "tensor"),
        ({"sp": True}, "tensor+sequence"),
        ({"recompute": "selective"}, "tensor+selective"),
        ({"sp": True, "recompute": "selective"}, "tensor+sequence+selective"),
        ({"recompute": "full"}, "full"),
    ],
)
@pytest.mark.parametrize("model", MODELS)
def test_the_ledger_sums_to_its_technique(model, settings, technique):
    rows = memcalc.layer(load(model)).records()
    whole = next(row["bytes"] for row in rows if row["technique"] == technique)
    assert sum(memcalc.ledger(load(model, **settings)).column("bytes")) == whole


def test_the_10_the_24_and_the_5_of_equation_2_are_traced_in_the_ledger():
    """Section 4.2.1: 10sbh of norms, block inputs and masks are not split; 24sbh and 5as^2b are."""
    config = load("22b")
    s, b, h, a, t = 2048, 4, 6144, 64, 8
    rows = memcalc.ledger(config).records()

    def of(condition):
        return {row["tensor"]: row["bytes"] for row in rows if condition(row)}

    replicated = of(lambda row: row["split"] == "replicated")
    assert {name: size / (s * b * h) for name, size in replicated.items()} == {
        "layer_input": 2,
        "input_norm_output": 2,
        "attention_dropout_mask": 1,
        "attention_residual_output": 2,
        "mlp_norm_output": 2,
        "mlp_dropout_mask": 1,
    }
    quadratic = of(lambda row: row["shape"] == "b a/t s s")
    assert {name: size / (a * b * s**2 / t) for name, size in quadratic.items()} == {
        "softmax_output": 2,
        "softmax_dropout_mask": 1,
        "softmax_dropout_output": 2,
    }
    rest = of(lambda row: row["split"] == "tensor" and row["shape"] != "b a/t s s")
    assert {name: size / (s * b * h / t) for name, size in rest.items()} == {
        "query": 2,
        "key": 2,
        "value": 2,
        "context": 2,
        "fc1_output": 8,
        "gelu_output": 8,
    }
    assert sum(replicated.values()) == 10 * s * b * h
    assert sum(rest.values()) == 24 * s * b * h // t
    assert sum(quadratic.values()) == 5 * a * b * s**2 // t


def test_selective_recomputation_drops_the_attention_core_alone():
    rows = memcalc.ledger(load("22b")).records()
    dropped = {row["tensor"] for row in rows if "selective" in row["dropped_by"]}
    assert dropped == {"softmax_output", "softmax_dropout_mask", "softmax_dropout_output"}


def test_full_recomputation_drops_all_but_the_input():
    rows = memcalc.ledger(load("22b")).records()
    assert [row["tensor"] for row in rows if "full" not in row["dropped_by"]] == ["layer_input"]


def test_every_entry_of_the_ledger_names_reason_and_source():
    for row in memcalc.ledger(load("22b"), "exact").records():
        assert row["reason"]
        assert row["source"]


def test_full_recomputation_under_sequence_parallelism_keeps_the_shard():
    """2sbh/t: section 5's layer input, split as section 4.2.2 splits it."""
    assert memcalc.layer_bytes(load("22b", sp=True, recompute="full")) == 12 * MIB


def test_figure_7s_percentages_follow():
    """Page 11: of tensor parallelism alone, 22B keeps 66.8, 49.4, 16.1 and 7.6 percent."""
    percent = memcalc.layer(load("22b")).column("percent_of_tensor")
    assert [round(value, 1) for value in percent] == [534.2, 100.0, 66.8, 49.4, 16.1, 7.6]


@pytest.mark.parametrize(
    ("settings", "printed"),
    [
        ({"tp": 1}, "b*h*s*(34 + 5*a*s/h)"),
        ({}, "b*h*s*(10 + 24/t + 5*a*s/(h*t))"),
        ({"sp": True}, "b*h*s*(34 + 5*a*s/h)/t"),
        ({"recompute": "selective"}, "b*h*s*(10 + 24/t)"),
        ({"sp": True, "recompute": "selective"}, "34*b*h*s/t"),
        ({"recompute": "full"}, "2*b*h*s"),
    ],
)
def test_formulas_are_written_in_the_papers_shape(settings, printed):
    assert str(layer_formula(load("175b", **settings))) == printed


def test_latex_is_written_in_the_papers_shape():
    assert layer_formula(load("175b")).latex() == (
        r"sbh\left(10 + \frac{24}{t} + \frac{5as}{ht}\right)"
    )
