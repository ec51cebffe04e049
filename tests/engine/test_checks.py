"""``check``: claims, verdicts, and that a wrong one is noticed."""

from collections import Counter
from fractions import Fraction

import pytest
import sympy

import memcalc as library
from memcalc import paper as paper_module
from memcalc import resources
from memcalc.checks import check as module
from memcalc.checks import formulas, numbers, paper
from memcalc.checks.claims import VERDICTS, Claim, OwnFormula, claims, judge
from memcalc.checks.grammar import formula
from memcalc.config import load
from memcalc.errors import InputError

ALL = list(claims())


def claim(**changes):
    fields = {
        "id": "section5/x",
        "model": "",
        "quantity": "x",
        "relation": "=",
        "printed": "41.5",
        "unit": "percent",
        "tolerance": Fraction("0.05"),
        "page": 9,
        "obtained": "printed",
        "verdict": "agrees",
        "corrected": "",
        "explanation": "",
    }
    return Claim(**fields | changes)


def derived(value):
    return OwnFormula([(value, formulas.LETTERS)], str(value))


S, H = formulas.LETTERS.s, formulas.LETTERS.h


@pytest.mark.parametrize(
    ("changes", "ours", "expected"),
    [
        ({}, Fraction("41.5"), "agrees"),
        ({}, Fraction("41.54"), "agrees_rounding"),
        ({"obtained": "figure"}, Fraction("41.54"), "agrees_reading"),
        ({}, Fraction("41.56"), "unexplained"),
        ({"corrected": "41.6"}, Fraction("41.56"), "paper_slip"),
        ({"corrected": "41.6"}, Fraction("41.66"), "unexplained"),
        ({"tolerance": None}, Fraction("41.54"), "unexplained"),
        ({"obtained": "timing"}, None, "measured"),
        ({"obtained": "timing", "corrected": "33.3"}, Fraction(100, 3), "measured"),
        ({"obtained": "timing", "corrected": "33.3"}, Fraction(99), "unexplained"),
        ({"obtained": "timing"}, Fraction(99), "unexplained"),
        ({}, None, "not_derivable"),
        ({"obtained": "assumed", "relation": ">"}, Fraction("41.6"), "consistent"),
        ({"obtained": "assumed", "relation": ">"}, Fraction("41.5"), "inconsistent"),
        ({"obtained": "assumed", "relation": ">"}, None, "not_derivable"),
        ({"relation": "<"}, Fraction("41.49"), "agrees"),
        ({"relation": "<", "corrected": "41.5"}, Fraction("41.5"), "paper_slip"),
        ({"relation": ">"}, Fraction("41.51"), "agrees"),
        ({"relation": ">"}, Fraction("41.5"), "unexplained"),
        ({"unit": "formula", "printed": "2*s/h"}, derived(2 * S / H), "agrees"),
        ({"unit": "formula", "printed": "2*s"}, derived(3 * S), "unexplained"),
        ({"unit": "formula", "printed": "2*s", "corrected": "3*s"}, derived(3 * S), "paper_slip"),
        ({"unit": "text", "printed": "data gradient"}, "data gradient", "agrees"),
        ({"unit": "text", "printed": "a", "corrected": "b"}, "b", "paper_slip"),
        ({"unit": "text", "printed": "a", "corrected": "b"}, "c", "unexplained"),
    ],
)
def test_the_verdict_follows_from_printed_value_tolerance_and_ours(changes, ours, expected):
    assert judge(claim(**changes), ours) == expected


ORACLE = {
    "section4.1/attention": paper_module.COUNTS["attention"],
    "section4.1/mlp": paper_module.COUNTS["mlp"],
    "section4.1/norms": paper_module.COUNTS["norm"],
    "section4.2.3/interleave": paper_module.COUNTS["interleave"],
    **{
        f"section4.3/{n}": paper_module.COUNTS[n] for n in ("embedding", "final_norm", "projection")
    },
    "section4.3/logits": paper_module.COUNTS["logits"],
    "section5/full": paper_module.COUNTS["full"],
    "section5/full_sharded": paper_module.COUNTS["full_sharded"],
    "appendixB/first_rank": paper_module.COUNTS["freed_outputs"],
    **{
        f"appendixA/{name}": paper_module.COUNTS[f"{name}_flops"]
        for name in ("qkv", "scores", "context", "proj", "mlp", "layer", "output")
    },
    **{f"section4.1/{name}": printed for name, printed in paper_module.ITEMS.items()},
    **{f"equation{number}": printed for number, printed in paper_module.EQUATIONS.items()},
    **{f"table2/{name}": printed for name, printed in paper_module.TABLE_2.items()},
}


@pytest.mark.parametrize("id_", ORACLE)
def test_what_the_table_prints_is_what_the_oracle_prints(id_):
    """Two transcriptions of the paper, by id: text in data/paper, functions in memcalc.paper."""
    text = next(each.printed for each in ALL if each.id == id_)
    assert sympy.expand(formula(text)(formulas.LETTERS) - ORACLE[id_](formulas.LETTERS)) == 0


def test_the_oracle_has_the_corrected_equation_8():
    text = next(each.corrected for each in ALL if each.id == "equation8")
    printed = paper_module.CORRECTED[8](formulas.LETTERS)
    assert sympy.expand(formula(text)(formulas.LETTERS) - printed) == 0


@pytest.mark.parametrize(
    "text", ["s(", "__import__('os')", "s.real", "s if h else t", "'s'", "s@h"]
)
def test_the_grammar_of_formulas_holds_nothing_else(text):
    with pytest.raises(InputError):
        formula(text)(formulas.LETTERS)


def test_there_are_at_least_120_claims_and_their_ids_are_their_own():
    assert len(ALL) >= 120
    assert len({each.id for each in ALL}) == len(ALL)


@pytest.mark.parametrize("each", ALL, ids=lambda each: each.id)
def test_every_claim_is_well_formed(each):
    assert each.verdict in VERDICTS
    assert each.relation in ("=", "<", ">")
    assert each.obtained in ("printed", "timing", "figure", "recomputed", "summary", "assumed")
    assert each.page is None or each.page > 0
    assert each.source
    if each.quantity:
        assert each.quantity.split("/")[0] in paper.QUANTITIES
    if each.verdict in ("paper_slip", "inconsistent", "not_derivable"):
        assert each.explanation
    assert (each.verdict in ("consistent", "inconsistent")) == (each.obtained == "assumed")
    if each.verdict == "paper_slip" or (each.obtained == "timing" and each.quantity):
        assert each.corrected
    if each.unit == "formula":
        formula(each.printed)
    if each.verdict.startswith("agrees_"):
        assert each.tolerance is not None


def test_every_quantity_is_of_some_claim():
    assert {each.quantity.split("/")[0] for each in ALL if each.quantity} == {*paper.QUANTITIES}


def test_every_verdict_is_the_expected_one():
    report = library.check()
    assert report.failures == ()
    assert len(report.rows) == len(ALL)
    expected = Counter(each.verdict.split("_")[0] for each in ALL)  # set by hand in data/paper
    assert report.answer == (
        f"no unexpected verdict in {len(ALL)} claims: {expected['agrees']} agree, "
        f"{expected['measured']} measured, {expected['consistent']} consistent with stated "
        f"assumptions, {expected['inconsistent']} inconsistent, "
        f"{expected['paper']} errors in papers (paper_slip), "
        f"{expected['not']} not derivable"
    )
    words = set(report.render("text").split())  # at 80 columns
    assert {each.id for each in ALL} <= words
    assert set(VERDICTS) - {"unexplained"} <= words


def test_a_wrong_verdict_is_a_failure_and_status_1(memcalc, monkeypatch):
    wrong = claim(id="section5/wrong", quantity="", verdict="agrees")
    monkeypatch.setattr(module, "claims", lambda: iter([wrong]))
    outcome = memcalc("check --format csv")
    assert outcome.status == 1
    assert outcome.out.count("\n") == 2
    assert outcome.err == ("memcalc: failed: section5/wrong is not_derivable, expected agrees\n")


@pytest.mark.parametrize(
    ("pattern", "ids"),
    [
        ("table5/22b/mfu", ["table5/22b/mfu"]),
        ("table3/*/vpp", ["table3/175b/vpp", "table3/530b/vpp"]),
        ("equation9", ["equation9"]),
    ],
)
def test_a_pattern_chooses_claims_by_a_part_of_their_id_or_as_a_shell_does(memcalc, pattern, ids):
    rows = memcalc(f"check {pattern} --format json").document["rows"]
    assert [row["id"] for row in rows][: len(ids)] == ids
    assert all(row["id"] in ids for row in rows)


def test_a_verdict_chooses_claims():
    chosen = library.check(verdict="inconsistent")
    assert set(chosen.column("verdict")) == {"inconsistent"}
    assert set(chosen.column("id")) == {each.id for each in ALL if each.verdict == "inconsistent"}


def test_the_exit_status_counts_claims_that_are_not_shown(memcalc, monkeypatch):
    wrong = claim(id="section5/wrong", quantity="", verdict="agrees")
    right = claim(id="section5/right", quantity="", verdict="measured", obtained="timing")
    monkeypatch.setattr(module, "claims", lambda: iter([wrong, right]))
    outcome = memcalc("check --verdict measured --format json")
    assert outcome.status == 1
    assert [row["id"] for row in outcome.document["rows"]] == ["section5/right"]
    assert "section5/wrong is not_derivable, expected agrees" in outcome.err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("check nope", "no claim has an id like 'nope'; ids begin with abstract, section, eq"),
        ("check table3 --verdict paper_slip", "like 'table3' and has the verdict paper_slip;"),
    ],
)
def test_no_claim_is_an_error_that_says_where_claims_are(memcalc, line, message):
    outcome = memcalc(line)
    assert (outcome.status, outcome.out) == (2, "")
    assert message in outcome.err


@pytest.mark.parametrize(
    ("target", "wrong", "ids"),
    [
        ("layer_bytes", lambda real: lambda *a: 2 * real(*a), ["section5/core/175b"]),
        ("layer_entries", lambda real: lambda *a: real(*a)[1:], ["table2/none", "equation1"]),
        ("parameters", lambda real: lambda *a: 2 * real(*a), ["table3/22b/parameters"]),
    ],
)
def test_a_wrong_engine_is_noticed(monkeypatch, target, wrong, ids):
    numbers._technique_bytes.cache_clear()
    formulas._symbolic_entries.cache_clear()
    for module_ in (formulas, numbers):
        if hasattr(module_, target):
            monkeypatch.setattr(module_, target, wrong(getattr(module_, target)))
    failed = {line.split()[0] for line in library.check().failures}
    assert {*ids} <= failed
    numbers._technique_bytes.cache_clear()
    formulas._symbolic_entries.cache_clear()


@pytest.mark.parametrize(
    ("id_", "printed"),
    [
        ("section4.1/qkv_input", "999*b*h*s"),
        ("table2/full", "3*b*h*s"),
        ("li2021/mlp/break_even", "77*H"),
        ("table5/22b/mfu", "42.5"),
    ],
)
def test_a_wrong_transcription_is_noticed(monkeypatch, id_, printed):
    changed = [each._replace(printed=printed) if each.id == id_ else each for each in ALL]
    monkeypatch.setattr(module, "claims", lambda: iter(changed))
    (failure,) = library.check().failures
    assert failure.startswith(f"{id_} is unexplained")


# What the paper prints in section 5 (page 9) and A's errata compute, by hand.
@pytest.mark.parametrize(
    ("quantity", "model", "expected"),
    [
        ("core_ratio", "175b", 80),
        ("core_ratio", "530b", 64),
        ("core_percent", "175b", Fraction(8000, 114)),
        ("core_percent", "530b", Fraction(6400, 98)),
    ],
)
def test_section_5(quantity, model, expected):
    assert paper.QUANTITIES[quantity](model) == expected


@pytest.mark.parametrize(("model", "h", "layers"), [("175b", 12288, 96), ("530b", 20480, 105)])
def test_the_corrected_overhead(model, h, layers):
    """(4BLs^2h) over equation 7."""
    s, v = 2048, 51200
    seven = 72 * layers * s * h**2 * (1 + Fraction(s, 6 * h) + Fraction(v, 12 * h * layers))
    assert numbers.overhead(model) == 100 * 4 * layers * s**2 * h / seven


def test_the_abstracts_gain_is_that_of_its_utilizations():
    """54.2 % and 42.1 % of the peak."""
    assert numbers.faster("530b") == 100 * (Fraction(542, 421) - 1)


def test_the_first_stages_extras_are_not_negligible():
    """22B, over t ranks: a mask, the last norm's and the head's inputs (5sbh) and logits (4sbv).

    A layer has sbh(34 + 5as/h): equation 4.
    """
    s, b, h, a, v, layers = 2048, 4, 6144, 64, 51200, 48
    ends = 5 * s * b * h + 4 * s * b * v
    assert numbers.ends_percent("22b") == 100 * ends / (
        layers * s * b * (34 * h + Fraction(5 * a * s))
    )


def test_every_table_says_where_it_is_from():
    for name in resources.names("paper", ".csv"):
        first = resources.read(f"paper/{name}.csv").decode().splitlines()[0]
        assert first.startswith(("# Korthikanti", "# Li et al.", "# Persistent RNNs: Zhu et al."))


def test_the_paper_figures_points_lie_on_our_bars():
    for kind, figure in (("paper-1", "figure1/"), ("paper-7", "figure7/")):
        (tolerance,) = {each.tolerance for each in ALL if each.id.startswith(figure)}
        (axes,) = library.plot(kind).axes
        tops = [(b.get_x() + b.get_width() / 2, b.get_y() + b.get_height()) for b in axes.patches]
        points = [line for line in axes.lines if line.get_marker() == "o"]
        assert len(points) == 1
        for x, y in zip(*points[0].get_data(), strict=True):
            near = min(abs(y - top) for at, top in tops if abs(at - x) < 1e-6)
            assert near <= tolerance


def test_stages_are_drawn_as_they_hold():
    from memcalc.analysis.stages import stages
    from memcalc.units import GIB

    config = load("530b", vpp=1, recompute="full")
    axes, _ = library.plot("stages", config).axes
    (lines,) = axes.collections
    kept = stages(config, frees_outputs=False)
    drawn = [segment[0][1] for segment in lines.get_segments()]
    assert drawn == pytest.approx([held.total / GIB for held in kept])
    assert len({p.get_facecolor() for p in axes.patches}) == 3
    tops = {}
    for bar in axes.patches:
        at = round(bar.get_x() + bar.get_width() / 2)
        tops[at] = max(tops.get(at, 0), bar.get_y() + bar.get_height())
    assert [tops[number] for number in range(35)] == pytest.approx(
        [held.total / GIB for held in stages(config)]
    )


def test_figure_8s_bars_are_flops_alone_beside_the_measured():
    """A third forward, two thirds backward, and a third more where all is recomputed."""
    (axes,) = library.plot("paper-8").axes
    counted, measured = (
        sorted(
            (bar.get_y(), bar.get_height())
            for bar in axes.patches
            if abs(bar.get_x() + bar.get_width() / 2 - at) < 1e-6
        )
        for at in (-0.2, 0.2)
    )
    assert [height for _, height in counted] == pytest.approx([100 / 3, 200 / 3, 100 / 3])
    read = {claim.id: float(claim.number) for claim in claims() if claim.number is not None}
    parts = ("forward", "backward", "recompute")
    expected = [read[f"figure8/22b/full/{part}"] for part in parts]
    assert [height for _, height in measured] == pytest.approx(expected)


class TestLi2021:
    def test_the_break_evens_are_derived(self, memcalc):
        rows = memcalc("formula --paper li2021 --format json").document["rows"]
        formulas = {row["step"]: row["formula"] for row in rows}
        assert formulas["MLP, sequence parallelism needs less where B*L >"] == "32*H"
        assert formulas["attention, sequence parallelism needs less where B*L >"] == "16*A*Z"

    def test_a_model_or_a_paper(self, memcalc):
        for line in ("formula", "formula 22b --paper li2021"):
            outcome = memcalc(line)
            assert outcome.status == 2
            assert "needs either MODEL or --paper" in outcome.err
