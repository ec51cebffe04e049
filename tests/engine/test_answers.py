"""The first lines of answers about a layer and an iteration, and the legends of their letters."""

import re

import pytest

from memcalc import (
    Recurrent,
    comm,
    flops,
    formula,
    gpus,
    layer,
    ledger,
    models,
    recompute,
    rnn,
)
from memcalc.answers.models import WORDS, model
from memcalc.config import load
from memcalc.config.model import FACTS
from memcalc.symbols import LETTERS

MEANINGS = {x.letter: x.meaning for x in LETTERS}


def legend(report):
    (line,) = [note for note in report.notes if note.startswith("letters: ")]
    return dict(each.split(" ", 1) for each in line.removeprefix("letters: ").split(", "))


def test_a_layer_begins_with_its_bytes_with_and_without_techniques():
    """Korthikanti et al. 2022, table 2, for 175b: 5as/h is 80; 34 + 80 and 34, over 8 ranks."""
    s, b, h, t = 2048, 1, 12288, 8
    most, least = s * b * h * (10 + 24 / t + 80 / t) / 2**20, s * b * h * 34 / t / 2**20
    assert layer(load("175b")).answer == (
        f"one layer keeps {most:.0f} MiB per GPU with tensor-parallel size 8; {least:.0f} MiB with "
        "sequence parallelism and selective recomputation"
    )


def test_a_ledger_begins_with_its_sum_and_largest_tensor():
    report = ledger(load("22b"))
    total, largest = sum(report.column("bytes")), max(report.records(), key=lambda x: x["bytes"])
    assert report.answer == (
        f"{total / 2**20:,.0f} MiB per layer per GPU in {len(report.rows)} tensors "
        f"(largest: {largest['tensor']}, {largest['bytes'] / 2**20:,.0f} MiB)"
    )
    kinds = ledger(load("deepseek-v2-lite", seq_length=4096)).answer
    assert re.fullmatch(r".* per dense layer per GPU .*; .* per moe layer per GPU .*", kinds)


@pytest.mark.parametrize("report", [layer, formula])
def test_a_legend_has_exactly_the_letters_of_the_formulas(report):
    found = report(load("llama-3-8b", tp=2, seq_length=4096))
    used = set(re.sub("Max|[^a-zA-Z]", "", "".join(map(str, found.column("formula")))))
    assert legend(found) == {letter: MEANINGS[letter] for letter in used}


def test_a_ledgers_legend_has_exactly_the_letters_of_its_shapes():
    found = ledger(load("mixtral-8x7b", tp=2, ep=2, sp=True, seq_length=4096, dp=2))
    used = set(re.sub("Max|[^a-zA-Z]", "", "".join(found.column("shape"))))
    assert legend(found) == {letter: MEANINGS[letter] for letter in used}


def test_a_formula_begins_with_itself():
    assert formula(load("22b", sp=True, recompute="selective")).answer.startswith(
        "34*b*h*s/t bytes"
    )


def test_flops_begin_with_the_models_and_the_utilization():
    """Korthikanti et al. 2022, table 5: 530b at 37.83 s has an MFU of 56.0 %, an HFU of 57.0 %."""
    run = {"sp": True, "recompute": "selective"}
    assert "; MFU 56.0 %, HFU 5" in flops(load("530b", **run), iteration_time=37.83).answer
    assert "MFU" not in flops(load("530b", **run)).answer


def test_comm_begins_with_what_a_gpu_sends():
    report = comm(load("22b"))
    sent = sum(row["bytes_per_rank"] for row in report.records() if row["scope"] == "iteration")
    assert report.answer.startswith(f"one GPU sends {sent / 2**30:.2f} GiB per iteration, ")
    assert comm(load("llama-3-8b")).answer == "a GPU sends nothing"


def test_recompute_begins_with_the_best_policy_and_the_best_one_without_flops():
    """The norms' outputs, 4sbh bytes, are recomputed without a GEMM (Korthikanti et al., table 2).

    The core has 5as^2b over t ranks; with early stop only QK^T is computed again, 2bs^2h FLOPs.
    """
    s, b, h, a, t = 2048, 4, 6144, 64, 8
    whole = s * b * h * (10 + 24 / t) + 5 * a * s**2 * b / t
    core, norms = 5 * a * s**2 * b / t, 4 * s * b * h
    assert recompute(load("22b")).answer == (
        f"most bytes saved per extra FLOP: selective, early stop; it saves {core / 2**20:.0f} MiB "
        f"of {whole / 2**20:,.0f} MiB per layer for {2 * b * s**2 * h / 10**9:.2f} GFLOP; without "
        f"extra FLOPs layernorm saves {norms / 2**20:.0f} MiB of {whole / 2**20:,.0f} MiB per layer"
    )


def test_models_begin_with_their_number_and_one_with_its_size():
    """Mixtral: untied embeddings; per layer attention, two norms, a router, 2 of 8 experts."""
    assert models().answer.startswith(f"{len(models().rows)} models")
    h, kv, f, v, layers = 4096, 1024, 14336, 32000, 32
    expert, others = 3 * h * f, 2 * h * h + 2 * h * kv + 2 * h + 8 * h
    whole, active = (layers * (others + n * expert) + 2 * v * h + h for n in (8, 2))
    assert model("mixtral-8x7b").answer == (
        f"mixtral-8x7b has 32 MoE layers and {whole:,} parameters, {active:,} of them active per "
        "token"
    )


def test_every_fact_of_a_model_has_words():
    assert {*WORDS} == {*FACTS} - {"family"}


def test_gpus_begin_with_their_number():
    assert gpus().answer == f"{len(gpus().rows)} GPUs; --gpu and --budget take their names"


def test_rnn_begins_with_what_stays_on_chip_or_what_a_step_keeps():
    """A vanilla cell with an input of its own keeps 3bh: input, first state, next state."""
    report = rnn()
    speedup = max(row["speedup_bound"] or 0 for row in report.records())
    assert report.answer == (
        f"weights stay on chip in 2 of 3 rows; the largest speedup bound is {speedup:.3g} "
        "(30% 4+4 on p100-16gb)"
    )
    assert (
        rnn(scope="step").answer
        == f"one time step keeps {3 * 4 * 2304 * 4 / 2**10:.0f} KiB in 3 tensors"
    )
    assert rnn(scope="formula").answer == "kept per later step: 8*b*h bytes"


def test_rnn_training_begins_with_the_best_spacing():
    """Of 100 steps, in units of bh: 100 inputs, 6 checkpoints, and 13 steps with a first state."""
    state = 4 * 4 * 2304 / 2**10
    report = rnn(Recurrent(seq_length=100), scope="training")
    assert report.answer == (
        f"a checkpoint every 13 steps has the lowest peak: {120 * state:,.0f} KiB instead of "
        f"{201 * state:,.0f} KiB, for {100 * 2 * 2 * 4 * 2304**2 / 10**6:,.2f} MFLOP"
    )
    short = rnn(Recurrent(seq_length=2), scope="training").answer  # 2 inputs, 3 states
    assert short == f"the peak is {5 * state:.0f} KiB; checkpoints do not lower it"


def test_a_source_is_not_claimed_for_another_attention():
    own, other = layer(load("22b")).notes[0], layer(load("22b", attention="flash")).notes[0]
    assert "as Korthikanti et al. 2022 count it" in own
    assert "(flash attention; otherwise " in other


def test_rows_that_the_sequence_does_not_allow_are_left_out_of_a_layer():
    """A ViT has 196 patches and a class token: 197 tokens, which 8 ranks do not divide."""
    report = layer(load("vit-large", tp=8))
    assert report.column("technique") == ["none", "tensor", "tensor+selective", "full"]
    note = "rows with sequence parallelism are left out: --tp 8 does not divide --seq-length 197"
    assert note in report.notes
