"""Measured training runs against their predictions.

The measured files are not the project's: the folder that ``MEMCALC_MEASURED_RUNS`` names has them,
of Megatron-LM's functional tests and of SimuMax's runs; without it their tests are skipped.
"""

import io
import json
import os
import re
from dataclasses import replace
from math import ceil
from pathlib import Path
from statistics import mean, median

import matplotlib.image
import pytest
from shared import is_refused

import memcalc as library
from memcalc import figures
from memcalc.checks.backtest import MORE_FLAGS, NO_FLAGS, UNKNOWN_WORLD, backtest, flags, rows
from memcalc.checks.runs import read
from memcalc.config.readers.megatron.names import UNMODELLED, UNMODELLED_VALUES
from memcalc.errors import InputError
from memcalc.frameworks import FRAMEWORKS
from memcalc.units import MIB

RUNS = Path(__file__).parents[1] / "runs.jsonl"  # made up: of both forms, one of them flagged
PAGE = (Path(__file__).parents[2] / "docs/runs.md").read_text()
EXAMPLES = [json.loads(line) for line in RUNS.read_text().splitlines()]
MEGATRON, FLAGGED, SIMUMAX = EXAMPLES

VARIABLE = "MEMCALC_MEASURED_RUNS"


@pytest.fixture(scope="module")
def measured():
    """The rows of a measured file, by its name."""
    folder = os.environ.get(VARIABLE)
    if folder is None:
        pytest.skip(f"{VARIABLE} names no folder of measured runs")
    kept = {}

    def of(name):
        if name not in kept:
            kept[name] = rows(Path(folder) / f"megatron_{name}.jsonl")
        return kept[name]

    return of


def shown_summaries():
    """The lines of each summary that the page shows."""
    blocks = [block.splitlines() for block in re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)]
    return [block for block in blocks if is_summary(block[0])]


def is_summary(note):
    """Whether a note sums up errors, and is not about assumptions and warnings of rows."""
    return not note.startswith(("assumed in", "warning in")) and "one may be stale" not in note


@pytest.fixture
def written(tmp_path):
    """The path of a file with these rows, or with this text."""

    def write(*content):
        path = tmp_path / "runs.jsonl"
        texts = [each if isinstance(each, str) else json.dumps(each) for each in content]
        path.write_text("\n".join(texts) + "\n")
        return path

    return write


def changed(row, *keys, to):
    """The row with another value at a path of keys; ``...`` takes the key away."""
    copy = json.loads(json.dumps(row))
    inner = copy
    for key in keys[:-1]:
        inner = inner[key]
    if to is ...:
        del inner[keys[-1]]
    else:
        inner[keys[-1]] = to
    return copy


@pytest.mark.measured
class TestMeasuredRuns:
    """The goals, on all of the rows."""

    def test_dense_runs_on_b200_at_every_stage(self, measured):
        errors = [
            abs(stage["peak_error"])
            for row in measured("b200")
            if not row.run.config.model.experts
            for stage in row.stages
        ]
        assert len(errors) == 11
        assert max(errors) <= 0.005
        assert mean(errors) <= 0.002
        assert f"Dense models are within {100 * max(errors):.2f} % at every stage" in PAGE

    def test_runs_with_experts_on_b200(self, measured):
        found = [row for row in measured("b200") if row.run.config.model.experts]
        errors = [stage["peak_error"] for row in found for stage in row.stages]
        assert len(errors) == 4
        assert max(abs(error) for error in errors) <= 0.007

    def test_functional_tests_that_are_not_flagged(self, measured):
        unflagged = [row for row in measured("ci") if not row.flags]
        for errors, middle, ninetieth in (
            (sorted(abs(row.peak_error) for row in unflagged), 0.01, 0.04),
            (sorted(abs(row.steady_error) for row in unflagged), 0.007, 0.03),
        ):
            assert median(errors) <= middle
            assert errors[ceil(0.9 * len(errors)) - 1] <= ninetieth

    def test_every_row_is_read_and_at_most_15_per_cent_are_flagged(self, measured):
        found = measured("ci")
        assert len(found) == 223
        assert all(row.predicted for row in found)
        assert sum(bool(row.flags) for row in found) <= 0.15 * len(found)

    def test_the_page_says_what_the_summary_says(self, measured):
        """Line by line: the page shows every line that is printed today, and no other."""
        for name, shown in zip(("b200", "ci"), shown_summaries(), strict=True):
            path = Path(os.environ[VARIABLE]) / f"megatron_{name}.jsonl"
            assert shown == [note for note in backtest(path).notes if is_summary(note)]

    def test_memory_says_what_the_rows_say(self, measured):
        known = FRAMEWORKS["megatron"].accuracy
        errors = [abs(row.peak_error) for row in measured("ci") if not row.flags]
        assert known.runs == len(errors)
        assert known.median == f"{100 * median(errors):.2f}"
        assert known.worst == f"{100 * max(errors):.1f}"

    def test_a_bound_is_held_by_the_command(self, measured, memcalc):
        path = Path(os.environ[VARIABLE]) / "megatron_ci.jsonl"
        assert memcalc(f"backtest {path} --max-error 1%").status == 0
        outcome = memcalc(f"backtest {path} --max-error 0.1%")
        assert outcome.status == 1
        assert "above --max-error 0.1%" in outcome.err


class TestRows:
    def test_a_row_is_the_stage_with_the_highest_measured_peak(self):
        row = rows(RUNS)[2]
        assert [stage["stage"] for stage in row.stages] == [0, 1]
        assert (row.measured.stage, row.measured.peak) == (1, round(1200.25 * MIB))
        assert row.measured.steady is row.steady_error is None

    def test_the_last_rank_speaks_for_the_last_stage(self):
        row = rows(RUNS)[0]
        assert row.measured.stage == 1
        assert row.peak_error == (row.peak - 1234567890) / 1234567890
        assert row.steady_error == (row.steady - 345678901) / 345678901

    def test_parts_add_up_to_the_peak_the_largest_first(self):
        for row in rows(RUNS):
            for stage in row.stages:
                sizes = [part["bytes"] for part in stage["parts"]]
                assert sum(sizes) == stage["predicted_peak_bytes"]
                assert sizes == sorted(sizes, reverse=True)

    def test_experts_are_shown_balanced_and_not(self, written):
        model = {**SIMUMAX["model"], "num_experts": 8, "moe_router_topk": 2}
        model["moe_ffn_hidden_size"] = 1024
        spread = changed(SIMUMAX, "parallel", "expert", to=2)
        (row,) = rows(written(changed(spread, "model", to=model)))
        by_share = row.stages[1]["predicted_peak_bytes_by_imbalance"]
        assert list(by_share) == ["1", "1.25"]
        assert by_share["1.25"] > by_share["1"] == row.peak
        (uneven,) = rows(written(changed(spread, "model", to=model)), imbalance=1.25)
        assert uneven.peak == by_share["1.25"]
        # where every rank has all experts, none receives more than another
        (whole,) = rows(written(changed(SIMUMAX, "model", to=model)))
        assert set(whole.stages[1]["predicted_peak_bytes_by_imbalance"].values()) == {whole.peak}

    @pytest.mark.parametrize("dispatcher", [None, "allgather", "alltoall"])
    def test_megatrons_own_way_to_the_experts_gathers_all_tokens(self, written, dispatcher):
        args = {**MEGATRON["args"], "num-experts": 8, "sequence-parallel": True}
        args |= {"moe-token-dispatcher-type": dispatcher} if dispatcher else {}
        (run,) = read(written({**MEGATRON, "args": args}))
        assert run.config.run.implementation.gathers_tokens == (dispatcher != "alltoall")

    def test_gpu_and_image_are_inputs(self, written):
        without = changed(MEGATRON, "env", to={})
        sizes = {}
        for gpu, image in (("A100", "dev"), ("H100", "dev"), ("GB200", "dev"), ("GB200", "lts")):
            row = {**without, "gpu": gpu, "image": image}
            (found,) = rows(written(row))
            sizes[gpu, image] = found.steady
        # cuBLAS's two workspaces and Transformer Engine's: 8.125 and 4 MiB, or 32 each
        assert sizes["H100", "dev"] - sizes["A100", "dev"] == (96 - 20.25) * MIB
        assert sizes["GB200", "dev"] == sizes["H100", "dev"]
        assert sizes["GB200", "dev"] - sizes["GB200", "lts"] == (64 - 16.25) * MIB

    def test_without_a_vocabulary_bert_has_its_own_and_says_so(self, written):
        row = changed(MEGATRON, "vocabulary", "size", to=None)
        row = changed(row, "args", "use-distributed-optimizer", to=...)
        (run,) = read(written({**row, "id": "bert.example"}))
        assert run.config.model.vocab_size == 30720  # 30522, padded to a multiple of 128 x 2
        assert not run.config.model.causal
        assert run.notes == ["vocabulary 30522 (bert-large-uncased)"]

    def test_a_run_that_is_refused_is_a_row_and_flagged(self, written):
        row = changed(MEGATRON, "args", "tensor-model-parallel-size", to=3)
        (found,) = rows(written(row))
        assert found.peak is found.peak_error is None
        assert found.flags == ["refused: --tp 3 must divide heads 8: use 1, 2, 4 or 8"]

    @pytest.mark.parametrize(
        ("gpu", "flag"), [("TPU", "unknown GPU TPU"), (None, "unknown GPU"), (..., "unknown GPU")]
    )
    def test_of_an_unknown_gpu_the_workspaces_are_not_counted_and_it_is_flagged(
        self, written, gpu, flag
    ):
        known, found = rows(written(MEGATRON, {**changed(MEGATRON, "gpu", to=gpu), "id": "x"}))
        assert found.flags == [flag]
        assert known.steady - found.steady == 4 * MIB  # cuBLAS's are said by the row

    def test_lists_and_nulls_are_values(self, written):
        written_as = {
            "recompute-granularity": "selective",
            "recompute-modules": "[core_attn mlp]",
            "moe-layer-freq": "([0]*1+[1]*11)",
            "num-experts": 8,
        }
        listed = {**written_as, "recompute-modules": ["core_attn", "mlp"], "seed": None}
        listed |= {"moe-layer-freq": [0] + [1] * 11}
        one, two, three = rows(
            written(
                *(
                    {**MEGATRON, "id": name, "args": {**MEGATRON["args"], **more}}
                    for name, more in (
                        ("a", written_as),
                        ("b", listed),
                        ("c", {**listed, "moe-layer-freq": "[0 " + "1 " * 10 + "1]"}),
                    )
                )
            )
        )
        assert one.peak == two.peak == three.peak
        assert one.run.config.model == replace(two.run.config.model, name=one.run.config.model.name)
        assert not two.flags

    def test_what_a_row_may_leave_out(self, written):
        row = changed(MEGATRON, "measured", "steady_bytes", to=None)
        row = changed(changed(row, "image", to=...), "env", to=...)
        (found,) = rows(written(changed(row, "vocabulary", to=None)))
        assert found.measured.steady is found.steady_error is None
        assert found.flags == [
            "refused: gpt.example_tp2_pp2@A100 gives no vocabulary size: pass --vocab-size"
        ]
        (found,) = rows(written(row))
        assert found.flags == []
        assert found.run.notes == ["a recent PyTorch, because the row names no image"]

    def test_settings_of_libraries_that_make_no_sense_are_refused_row_by_row(self, written):
        row = changed(MEGATRON, "env", "CUBLAS_WORKSPACE_CONFIG", to="much")
        (found,) = rows(written(row))
        assert found.flags[0].startswith("refused: cublas_workspace must be :SIZE:COUNT")

    @pytest.mark.parametrize(
        ("forbidden", "kernel"),
        [
            ("", ("flash", True)),
            ("FLASH", ("flash", False)),  # cuDNN's
            ("FUSED UNFUSED", ("flash", True)),
            ("FLASH FUSED", ("unfused", None)),
        ],
    )
    def test_variables_decide_the_attention_kernel(self, written, forbidden, kernel):
        variables = {f"NVTE_{name}_ATTN": 0 for name in forbidden.split()}
        (run,) = read(written(changed(MEGATRON, "env", to=variables)))
        found = run.config.run.implementation
        assert found.attention == kernel[0]
        assert kernel[1] in (None, found.batch_first)
        args = {**MEGATRON["args"], "transformer-impl": "local"}
        (run,) = read(written({**MEGATRON, "args": args, "env": variables}))
        assert run.config.run.implementation.attention == "unfused"

    def test_an_assumed_number_of_gpus_is_noted(self, written):
        (run,) = read(written({**MEGATRON, "gpus_assumed": True}))
        assert run.notes == ["the number of GPUs (the row says gpus_assumed)"]

    @pytest.mark.parametrize(
        ("said", "words"),
        [
            ("full", ("full",)),
            ("full_block", ("full",)),
            ("selective", ("core_attn",)),
            ("core_attn,mlp", ("core_attn", "mlp")),
            (["moe_act", "layernorm"], ("moe_act", "layernorm")),
            (None, ("none",)),
        ],
    )
    def test_recomputation_is_read_from_either_form(self, written, said, words):
        (found,) = read(written(changed(SIMUMAX, "run", "recompute", to=said)))
        assert found.config.run.recompute == words

    @pytest.mark.parametrize("said", ["now and then", True, {"layers": 2}])
    def test_recomputation_that_nobody_knows_is_refused_row_by_row(self, written, said):
        (found,) = rows(written(changed(SIMUMAX, "run", "recompute", to=said)))
        assert found.flags[0].startswith("refused: --recompute-granularity")

    def test_further_keys_are_arguments_of_megatron(self, written):
        run = {**SIMUMAX["run"], "recompute": "full", "recompute_method": "block"}
        row = changed(SIMUMAX, "run", to={**run, "recompute_num_layers": 1})
        (found,) = rows(written(row))
        assert found.flags == []
        assert found.run.config.run.recompute_method == "block"
        row = changed(row, "parallel", "num_virtual_stages_per_pipeline_rank", to=2)
        (found,) = rows(written(row))
        assert found.run.config.parallel.vpp == 2
        (found,) = rows(written(changed(row, "model", "use_kitchen", to=True)))
        assert found.flags == ["--use-kitchen"]

    def test_sizes_of_nothing_are_none(self, written):
        model = {**SIMUMAX["model"], "moe_shared_expert_intermediate_size": 0, "num_experts": 0}
        (found,) = rows(written(changed(SIMUMAX, "model", to=model)))
        assert found.run.config.model.experts is None
        assert found.peak == rows(written(SIMUMAX))[0].peak

    def test_the_world_follows_from_degrees(self, written):
        (found,) = rows(written(changed(SIMUMAX, "gpus", to=None)))
        assert (found.run.world, found.flags) == (8, [])

    @pytest.mark.parametrize(
        ("word", "kind"), [("ring", "ring"), ("a2a", "all_to_all"), ("none", "ring")]
    )
    def test_words_for_context_parallelism(self, written, word, kind):
        (found,) = read(written(changed(SIMUMAX, "parallel", "context_comm", to=word)))
        assert found.config.parallel.cp_kind == kind

    def test_precisions(self, written):
        for word, precision, flags_ in (
            ("BF16", "bf16", []),
            ("fp16", "fp16", []),
            ("fp32", "fp32", []),
            ("mxfp8", "fp8", ["--fp8-format"]),
            ("int3", "bf16", ["not read: run.precision int3"]),
        ):
            (found,) = rows(written(changed(SIMUMAX, "run", "precision", to=word)))
            assert (found.run.config.run.precision, found.flags) == (precision, flags_)
            assert found.run.config.run.main_grads == "fp32"  # as the row says

    def test_simumaxs_fp8_is_flagged_and_a_loss_without_a_word_is_megatrons_own(self, written):
        run = {**SIMUMAX["run"], "precision": "fp8", "cross_entropy_fusion_impl": None}
        (found,) = rows(written(changed(SIMUMAX, "run", to=run)))
        assert found.flags == ["--fp8-format"]
        assert found.run.config.run.precision == "fp8"
        assert found.run.config.run.implementation.cross_entropy == "native"


class TestFlags:
    @pytest.mark.parametrize("name", [*UNMODELLED, *MORE_FLAGS])
    def test_flags_follow_from_arguments_alone(self, name):
        expected = [f"--{name}"] if f"--{name}" not in NO_FLAGS else []
        assert flags({name: "True"}, 8) == expected
        assert flags({name: "none"}, 8) == []

    @pytest.mark.parametrize(("name", "value"), UNMODELLED_VALUES)
    def test_flags_follow_from_some_values(self, name, value):
        shown = f"--{name} {value}"
        assert flags({name: value}, 8) == ([shown] if shown not in NO_FLAGS else [])
        assert flags({name: "another"}, 8) == []

    def test_megatrons_own_layers_are_modelled_and_its_own_graphs_are_not(self):
        assert flags({"spec": "local"}, 8) == []
        assert flags({"cuda-graph-impl": "local"}, 8) == ["--cuda-graph-impl"]

    def test_the_world_size_matters_where_something_is_spread_over_it(self):
        assert flags({"use-distributed-optimizer": "True"}, None) == [UNKNOWN_WORLD]
        assert flags({"expert-model-parallel-size": "2"}, None) == [UNKNOWN_WORLD]
        assert flags({}, None) == flags({"use-distributed-optimizer": "True"}, 8) == []

    def test_the_table_is_documented(self):
        table = {f"--{name}": reason for name, reason in {**UNMODELLED, **MORE_FLAGS}.items()}
        table |= {f"--{name} {value}": why for (name, value), why in UNMODELLED_VALUES.items()}
        for shown, reason in table.items():
            assert (f"| `{shown}` | {reason} |" in PAGE) == (shown not in NO_FLAGS), shown
        assert all(shown in table and f"`{shown}`" in PAGE for shown in NO_FLAGS)


class TestReport:
    def test_the_summary_is_of_the_rows(self):
        report = backtest(RUNS)
        errors = [abs(row["peak_error"]) for row in report.records() if not row["unmodelled"]]
        shown = ", ".join(
            f"{name} {100 * value:.2f} %"
            for name, value in (
                ("median", median(errors)),
                ("mean", mean(errors)),
                ("90th percentile", max(errors)),
                ("maximum", max(errors)),
            )
        )
        assert f"unflagged rows, absolute peak error: {shown} (2 rows)" in report.notes
        assert any(note.startswith("1 of 3 rows (33.3 %) flagged") for note in report.notes)

    def test_ids_are_whole_at_80_columns(self, written):
        name = "moe.gpt3_mcore_te_tp2_pp1_te_8experts2parallel_top2router@A100-lts"
        text = backtest(written(MEGATRON, {**MEGATRON, "id": name})).render("text")
        assert {name, MEGATRON["id"]} <= set(text.split())

    def test_the_answer_is_the_median_and_the_worst_error(self):
        found = {row.run.id: row.peak_error for row in rows(RUNS) if not row.flags}
        middle, worst = (
            median(map(abs, found.values())),
            max(found, key=lambda id_: abs(found[id_])),
        )
        assert backtest(RUNS).answer == (
            f"median peak error {100 * middle:.2f} % over 2 rows, worst "
            f"{100 * found[worst]:+.2f} % ({worst}); 1 row flagged and left out"
        )

    @pytest.mark.parametrize("pattern", ["tp2_pp2", "gpt.*@A100"])
    def test_a_pattern_chooses_runs_by_their_ids(self, memcalc, pattern):
        document = memcalc(f"backtest {RUNS} {pattern} --format json").document
        assert [row["id"] for row in document["rows"]] == [MEGATRON["id"]]

    def test_no_run_of_a_pattern_is_an_error(self, memcalc):
        outcome = memcalc(f"backtest {RUNS} nope")
        assert (outcome.status, outcome.out) == (2, "")
        assert outcome.err == f"memcalc: {RUNS}: no run has an id like 'nope'\n"

    def test_a_text_has_errors_in_per_cent_and_the_largest_parts(self, memcalc):
        out = memcalc(f"backtest {RUNS} --wide").out
        (line,) = (line for line in out.splitlines() if "gpt.example_tp2_pp2@A100" in line)
        assert re.search(r"[+-]\d+\.\d\d", line)
        assert "stage 1, loss: " in line
        assert "--fp8-format" in out

    @pytest.mark.parametrize("share", ["50%", "0.5"])
    def test_a_bound_that_holds(self, memcalc, share):
        assert memcalc(f"backtest {RUNS} --max-error {share}").status == 0

    def test_a_bound_that_does_not_hold(self, memcalc):
        outcome = memcalc(f"backtest {RUNS} --max-error 0.001%")
        assert outcome.status == 1
        assert outcome.out
        assert outcome.err.startswith(
            "memcalc: failed: the median absolute peak error of 2 unflagged rows is"
        )

    def test_where_all_are_flagged_none_holds_a_bound(self, memcalc, written):
        outcome = memcalc(f"backtest {written(FLAGGED)} --max-error 2%")
        assert outcome.status == 1
        assert "every row is flagged" in outcome.err

    def test_less_than_an_even_share_is_refused(self, memcalc, written):
        model = {**SIMUMAX["model"], "num_experts": 8, "moe_ffn_hidden_size": 1024}
        spread = changed(SIMUMAX, "parallel", "expert", to=2)
        outcome = memcalc(f"backtest {written(changed(spread, 'model', to=model))} --imbalance 0.5")
        assert (outcome.status, outcome.out) == (2, "")
        assert "imbalance must be a number from 1 to 1e+09, not 0.5" in outcome.err

    @pytest.mark.parametrize("share", ["-1%", "x", "2%%", "nan", "1e9"])
    def test_what_is_no_share(self, memcalc, share):
        outcome = memcalc(f"backtest {RUNS} --max-error={share}")
        assert (outcome.status, outcome.out) == (2, "")
        assert "--max-error must be a ratio such as 2% or 0.02, not" in outcome.err

    def test_rows_of_the_same_arguments_that_are_far_apart_are_listed(self, written):
        twin = {**MEGATRON, "id": "twin", "image": "lts"}
        assert not any("stale" in note for note in backtest(written(MEGATRON, twin)).notes)
        twin = changed(twin, "measured", "peak_bytes", to=2 * 1234567890)
        (note,) = (n for n in backtest(written(MEGATRON, twin)).notes if "stale" in n)
        assert note == (
            f"{MEGATRON['id']} and twin have the same arguments but peaks 100 % apart: "
            "one may be stale"
        )

    def test_what_rows_met_without_a_flag_is_counted(self, written):
        args = {**MEGATRON["args"], "cp-comm-type": "a2a+p2p", "some-new-option": "7"}
        notes = backtest(written({**MEGATRON, "args": args})).notes
        assert [note for note in notes if note.startswith("warning in")] == [
            "warning in 1 row: --cp-comm-type a2a+p2p is not modeled: counted as p2p",
            "warning in 1 row: unknown to memcalc, ignored: --some-new-option",
        ]

    def test_keys_that_are_not_read_are_flags(self, written):
        parallel = {**SIMUMAX["parallel"], "virtual": 2, "zero_bubble": True, "spare": 1}
        (found,) = rows(written({**SIMUMAX, "parallel": parallel}))
        assert found.flags == ["not read: parallel.virtual", "not read: parallel.zero_bubble"]


class TestFigure:
    def test_a_point_is_a_run(self):
        figure = library.plot("backtest", RUNS)
        above, below = figure.axes
        points = {line.get_label(): line for line in above.lines}
        assert set(points) == {"predicted = measured", "dense (2)", "flagged as not modeled (1)"}
        found = rows(RUNS)
        assert list(points["dense (2)"].get_xdata()) == [
            row.measured.peak / 2**20 for row in (found[0], found[2])
        ]
        assert below.get_ylabel() == "error of the prediction, %"

    def test_it_is_written_as_any_figure(self, memcalc, tmp_path):
        path = tmp_path / "runs.png"
        assert memcalc(f"plot backtest {RUNS} -o {path}").status == 0
        assert matplotlib.image.imread(path).shape[1] == 1440

    def test_it_needs_a_file(self, memcalc):
        outcome = memcalc("plot backtest -o x.png")
        assert outcome.status == 2
        assert "FILE is missing" in outcome.err
        outcome = memcalc(f"plot backtest {RUNS} --tp 2 -o x.png")
        assert "--tp has no effect on backtest" in outcome.err

    def test_the_same_runs_are_the_same_bytes(self):
        first, second = (figures.encode(library.plot("backtest", RUNS), ".svg") for _ in range(2))
        assert io.BytesIO(first).getvalue() == second


PEAK = ("measured", "peak_bytes")
MANY = "measured", "peak_allocated_mib_by_stage"

HOSTILE = [
    ("{", "not JSON"),
    ("[1]", "must be a JSON object"),
    ("null", "must be a JSON object"),
    ("[" * 5000, "nested more than 32 levels deep"),
    ("\x00", "not text"),
    ('{"id": "a", "id": "b"}', "is given twice"),
    ("{}", "id must be a line of text"),
    ({**MEGATRON, "id": 3}, "id must be a line of text"),
    ({**MEGATRON, "id": "a\nb"}, "id must be a line of text"),
    ({**MEGATRON, "gpus": 0}, "gpus must be a whole number"),
    ({**MEGATRON, "gpus": True}, "gpus must be a whole number"),
    ({**MEGATRON, "args": []}, "args must be an object"),
    ({**MEGATRON, "measured": 3}, "measured must be an object"),
    (changed(MEGATRON, *PEAK, to=...), "measured.peak_bytes must be"),
    (changed(MEGATRON, *PEAK, to=-1), "measured.peak_bytes must be"),
    (changed(MEGATRON, *PEAK, to=0), "measured.peak_bytes must be"),
    (changed(MEGATRON, *PEAK, to=1.5), "measured.peak_bytes must be"),
    (changed(MEGATRON, "measured", "steady_bytes", to=0), "measured.steady_bytes must be"),
    (changed(MEGATRON, *PEAK, to=float("nan")), "measured.peak_bytes must be"),
    (changed(MEGATRON, *PEAK, to=10**30), "measured.peak_bytes must be"),
    (changed(MEGATRON, "args", "num-layers", to=float("inf")), "args.num-layers must be"),
    (changed(MEGATRON, "args", "num-layers", to=[[1]]), "args.num-layers must be"),
    (changed(MEGATRON, "args", "a b", to=1), "args.a b must be"),
    (changed(MEGATRON, "env", "X", to={}), "env.X must be"),
    ({**MEGATRON, "image": 3}, "image must be a line of text"),
    (changed(SIMUMAX, *MANY, to=[]), "must be a list of sizes in MiB"),
    (changed(SIMUMAX, *MANY, to=[1, float("nan")]), "must be a list of sizes in MiB"),
    (changed(SIMUMAX, *MANY, to=[1, "2"]), "must be a list of sizes in MiB"),
    (changed(SIMUMAX, *MANY, to=[1]), "1 peaks for 2 pipeline stages"),
    (changed(SIMUMAX, "run", "precision", to=...), "run.precision must be a line of text"),
    (changed(SIMUMAX, "parallel", "tensor", to="2"), "parallel.tensor must be a whole number"),
]


class TestHostileFiles:
    @pytest.mark.parametrize(("row", "message"), HOSTILE)
    def test_a_bad_row_is_one_line_that_names_it(self, memcalc, written, row, message):
        path = written(MEGATRON, row)
        outcome = memcalc(f"backtest {path}")
        is_refused(outcome, message)
        assert outcome.err.startswith(f"memcalc: {path}: line 2: ")

    @pytest.mark.parametrize("text", ["", "\n\n  \n"])
    def test_a_file_without_rows(self, memcalc, written, text):
        outcome = memcalc(f"backtest {written(text)}")
        assert outcome.status == 2
        assert "the file is empty" in outcome.err

    def test_what_is_no_file(self, memcalc, tmp_path):
        assert "not a regular file" in memcalc(f"backtest {tmp_path}").err
        assert "no such file" in memcalc(f"backtest {tmp_path}/none").err

    def test_a_row_twice(self, written):
        with pytest.raises(InputError, match=r"line 2: the id '.*' is on line 1 too"):
            read(written(MEGATRON, MEGATRON))

    def test_a_number_of_thousands_of_digits(self, memcalc, written):
        row = json.dumps(MEGATRON).replace("1234567890", "1" * 5000)
        outcome = memcalc(f"backtest {written(row)}")
        assert (outcome.status, outcome.err.count("\n")) == (2, 1)

    @pytest.mark.parametrize("value", ["9" * 18, "-1", "0", "x", "1e5"])
    def test_absurd_arguments_are_refused_row_by_row(self, written, value):
        for name in ("num-layers", "hidden-size", "seq-length", "pipeline-model-parallel-size"):
            (found,) = rows(written(changed(MEGATRON, "args", name, to=value)))
            assert found.predicted is None
            assert found.flags[-1].startswith("refused: ")
            assert len(found.flags[-1]) < 300
