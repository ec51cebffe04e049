"""The command line: a contract with scripts."""

import csv
import io
import json
import os
import platform
import re
import shlex
import stat
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import jsonschema
import pytest
from shared import SCHEMA, is_document_of, is_valid

import memcalc as library
from memcalc import figures
from memcalc.cli.main import COMMANDS, cli, main
from memcalc.cli.memory import memory
from memcalc.cli.options import FORMATS
from memcalc.config import catalog, load
from memcalc.lazy import resolve
from memcalc.render import RENDERERS

RUNS = Path(__file__).parents[1] / "runs.jsonl"

# What runs torch, and is tested beside it, in tests/torch/test_commands.py.
RUN_TORCH = {"derive", "trace", "validate"}

# Questions, and the columns that their reports are to have, with their units.
QUESTIONS = {
    "layer 175b": {
        "layer_kind": "text",
        "technique": "text",
        "formula": "formula",
        "bytes": "bytes",
        "percent_of_tensor": "percent",
    },
    "ledger llama-3-70b --tp 8 --sp": {
        "layer_kind": "text",
        "tensor": "text",
        "op": "text",
        "shape": "text",
        "split": "text",
        "bytes": "bytes",
        "dropped_by": "text",
        "reason": "text",
        "source": "text",
    },
    "recompute 530b --sp": {
        "layer_kind": "text",
        "policy": "text",
        "kept_bytes": "bytes",
        "saved_bytes": "bytes",
        "extra_flops": "flops",
        "saved_bytes_per_extra_flop": "ratio",
    },
    "flops 1t --recompute selective": {
        "forward_flops": "flops",
        "backward_flops": "flops",
        "recompute_flops": "flops",
        "model_flops": "flops",
        "hardware_flops": "flops",
        "mfu_percent": "percent",
        "hfu_percent": "percent",
        "hfu_printed_percent": "percent",
    },
    "comm 175b --sp": {
        "scope": "text",
        "part": "text",
        "collective": "text",
        "phase": "text",
        "count": "count",
        "bytes_per_rank": "bytes",
        "overlapped_with": "text",
    },
    "memory 175b --sp": {
        "stage": "count",
        "layers": "count",
        "in_flight": "count",
        "weights_bytes": "bytes",
        "gradients_bytes": "bytes",
        "optimizer_bytes": "bytes",
        "activations_bytes": "bytes",
        "logits_bytes": "bytes",
        "buffers_bytes": "bytes",
        "peak_phase": "text",
        "peak_bytes": "bytes",
        "reserved_estimated_bytes": "bytes",
        "capacity_bytes": "bytes",
        "verdict": "text",
        "fits": "text",
    },
    "check": {
        "id": "text",
        "source": "text",
        "page": "count",
        "printed": "text",
        "unit": "text",
        "ours": "text",
        "difference": "ratio",
        "tolerance": "ratio",
        "verdict": "text",
        "explanation": "text",
    },
    f"backtest {RUNS}": {
        "id": "text",
        "stage": "count",
        "measured_peak_bytes": "bytes",
        "predicted_peak_bytes": "bytes",
        "peak_error": "ratio",
        "measured_steady_bytes": "bytes",
        "predicted_steady_bytes": "bytes",
        "steady_error": "ratio",
        "unmodelled": "text",
        "stages": "text",
    },
    "recompute llama-3-70b --tp 8 --sp": {
        "layer_kind": "text",
        "policy": "text",
        "kept_bytes": "bytes",
        "saved_bytes": "bytes",
        "extra_flops": "flops",
        "saved_bytes_per_extra_flop": "ratio",
    },
    "gpus": {
        "name": "text",
        "aliases": "text",
        "memory_bytes": "bytes",
        "usable_bytes": "bytes",
        "bf16_flops": "flops",
        "fp16_flops": "flops",
        "fp8_flops": "flops",
        "memory_bandwidth_bytes": "bytes",
        "nvlink_bandwidth_bytes": "bytes",
        "fp32_flops": "flops",
        "sms": "count",
        "register_bytes_per_sm": "bytes",
        "shared_bytes_per_sm": "bytes",
        "l2_bytes": "bytes",
        "source": "text",
        "memory_source": "text",
        "usable_source": "text",
        "chip_source": "text",
    },
    "rnn --cell lstm --gpu all": {
        "gpu": "text",
        "storage": "text",
        "density_percent": "percent",
        "bytes_per_nonzero": "ratio",
        "weight_bytes": "bytes",
        "weight_bytes_per_sm": "bytes",
        "u_percent": "percent",
        "weights_in": "text",
        "largest_hidden": "count",
        "largest_hidden_with_shared": "count",
        "largest_hidden_by_states": "count",
        "state_bytes_per_sm": "bytes",
        "states_fit": "text",
        "step_flops": "flops",
        "step_memory_bytes": "bytes",
        "step_l2_bytes": "bytes",
        "on_chip_seconds": "seconds",
        "streamed_seconds": "seconds",
        "speedup_bound": "ratio",
    },
    "rnn --scope training -s 100 --checkpoint-every 20": {
        "checkpoints": "text",
        "every": "count",
        "kept_bytes": "bytes",
        "peak_bytes": "bytes",
        "extra_flops": "flops",
    },
    "rnn --scope step --kernels torch-cuda --cell gru": {
        "tensor": "text",
        "op": "text",
        "shape": "text",
        "bytes": "bytes",
        "reason": "text",
        "source": "text",
    },
    "rnn --scope formula --cell gru": {"step": "text", "formula": "formula"},
    "formula qwen2.5-7b --tp 2 --accounting exact": {"step": "text", "formula": "formula"},
    "models --show deepseek-v3": {"meaning": "text", "value": "text", "fact": "text"},
    "models": {
        "name": "text",
        **dict.fromkeys(
            (
                "layers",
                "hidden_size",
                "heads",
                "kv_heads",
                "head_size",
                "ffn_size",
                "experts",
                "vocab_size",
                "max_seq_length",
            ),
            "count",
        ),
        **dict.fromkeys(("norm", "activation", "position", "source"), "text"),
    },
}


class TestJson:
    @pytest.mark.parametrize("question", QUESTIONS)
    def test_every_document_is_to_the_schema(self, memcalc, question):
        is_document_of(memcalc, question, QUESTIONS[question])

    def test_the_schema_knows_every_command_and_no_other(self):
        assert {*SCHEMA["properties"]["command"]["enum"]} == {*COMMANDS} - {"plot"}
        jsonschema.Draft202012Validator.check_schema(SCHEMA)

    @pytest.mark.parametrize("accounting", ["paper", "exact"])
    @pytest.mark.parametrize("name", catalog.names())
    def test_a_printed_formula_evaluates_to_its_bytes(self, memcalc, evaluate, name, accounting):
        document = memcalc(f"layer {name} --accounting {accounting} --format json").document
        for row in document["rows"]:
            assert evaluate(row["formula"], document["symbols"]) == row["bytes"]

    def test_the_steps_of_a_formula_sum_to_its_last(self, memcalc, evaluate):
        for options in ("", "--sp", "--sp --recompute selective", "--tp 1", "--recompute mlp"):
            document = memcalc(f"formula 22b {options} --format json").document
            value = {
                r["step"]: evaluate(r["formula"], document["symbols"]) for r in document["rows"]
            }
            whole = value.pop("one layer")
            parts = {step: v for step, v in value.items() if step.startswith("sum of ")}
            assert sum(parts.values()) == whole
            assert sum(value.values()) == 2 * whole

    def test_rows_of_a_layer_are_in_the_order_of_table_2(self, memcalc):
        rows = memcalc("layer llama-3-8b --tp 4 --format json").document["rows"]
        assert [row["technique"] for row in rows] == [
            "none",
            "tensor",
            "tensor+sequence",
            "tensor+selective",
            "tensor+sequence+selective",
            "full",
        ]

    def test_percent_is_unrounded_and_bytes_are_integers(self, memcalc):
        rows = memcalc("layer 22b --format json").document["rows"]
        assert rows[2]["percent_of_tensor"] == 100 * 844 / 1264
        assert all(type(row["bytes"]) is int for row in rows)

    def test_warnings_are_on_stderr_and_in_the_notes(self, memcalc):
        outcome = memcalc("ledger llama-3-8b --sp --format json")
        assert outcome.status == 0
        warning = "--sp has no effect with --tp 1"
        assert outcome.err == f"memcalc: warning: {warning}\n"
        assert f"warning: {warning}" in outcome.document["notes"]

    def test_a_gpu_without_an_iterations_time_is_warned_about(self, memcalc):
        warning = "--gpu has no effect on this answer"
        assert memcalc("flops 22b --gpu h100 --json").err == f"memcalc: warning: {warning}\n"
        assert memcalc("flops 22b --gpu h100 --iteration-time 1 --json").err == ""

    @pytest.mark.parametrize("option", ["--gpu a100", "--gpu A100-80GB", "--layout 48", "--tp 8"])
    def test_an_option_that_repeats_what_the_model_says_is_not_warned_about(self, memcalc, option):
        repeated = memcalc(f"memory 22b --json {option}")
        assert repeated.err == ""
        assert repeated.document["rows"] == memcalc("memory 22b --json").document["rows"]

    def test_a_recomputation_in_other_words_is_not_warned_about(self, memcalc, tmp_path):
        model = tmp_path / "model.json"
        sizes = {"layers": 2, "hidden_size": 64, "heads": 4, "vocab_size": 100}
        run = {"seq_length": 64, "recompute": "selective"}
        model.write_text(json.dumps({"memcalc": 1, "model": sizes, "run": run}))
        assert memcalc(f"memory {model} --recompute core_attn --json").err == ""

    def test_text_on_stdout_says_a_warning_once(self, memcalc, tmp_path):
        warning = "--sp has no effect with --tp 1"
        for line in ("ledger llama-3-8b --sp", "memory llama-3-8b --sp", "formula llama-3-8b --sp"):
            outcome = memcalc(line)
            assert outcome.err == ""
            assert " ".join(outcome.out.split()).count(warning) == 1
        for line in (
            f"ledger llama-3-8b --sp -o {tmp_path}/x.txt",
            "ledger llama-3-8b --sp --format csv",
            "formula llama-3-8b --sp --latex",
            f"plot memory llama-3-8b --sp -o {tmp_path}/x.svg",
        ):
            assert memcalc(line).err == f"memcalc: warning: {warning}\n"

    def test_what_a_layer_has_no_use_for_is_warned_about(self, memcalc):
        line = "flops llama-3-8b --scope layer --format json"
        outcome = memcalc(f"{line} --global-batch-size 64 --dp 2")
        warnings = [
            f"warning: {name} has no effect on this answer"
            for name in ("--global-batch-size", "--dp")
        ]
        assert sorted(outcome.err.splitlines()) == sorted(f"memcalc: {w}" for w in warnings)
        found = [note for note in outcome.document["notes"] if note.startswith("warning")]
        assert sorted(found) == sorted(warnings)
        assert memcalc(line).err == ""

    @pytest.mark.parametrize(
        ("typed", "meant"),
        [
            ("--optimizer AdamW", "--optimizer adam"),
            ("--precision float16", "--fp16"),
            ("--dtype torch.bfloat16", "--bf16"),
            ("--sharder FSDP --dp 2", "--sharder fsdp2 --dp 2"),
            ("--pp 2 --schedule zbv", "--pp 2 --schedule zb-v"),
            ("--tp 2 --cp 2 --cp-kind all-gather", "--tp 2 --cp 2 --cp-kind all_gather"),
        ],
    )
    def test_values_are_read_in_other_spellings(self, memcalc, typed, meant):
        asked = "memory llama-3-8b -s 4096 --json"
        assert memcalc(f"{asked} {typed}").document == memcalc(f"{asked} {meant}").document

    def test_an_assumed_sequence_beyond_training_lengths_begins_the_answer(self, memcalc):
        for question in ("memory", "layer", "flops"):
            assert memcalc(f"{question} mixtral-8x7b").out.startswith("at s 32768 (set -s): ")
            assert not memcalc(f"{question} mixtral-8x7b -s 32768").out.startswith("at s")
            assert not memcalc(f"{question} llama-3-8b").out.startswith("at s")  # of 8,192

    def test_selective_recomputation_under_flash_attention_is_said_to_save_nothing(self, memcalc):
        for question in ("memory", "flops", "ledger", "recompute", "formula"):
            said = " ".join(memcalc(f"{question} llama-3-8b --recompute selective").out.split())
            assert said.count("selective recomputation saves almost nothing here") == 1
            if question != "recompute":  # whose rows are all policies
                plain = memcalc(f"{question} llama-3-8b").out
                assert "saves almost nothing" not in " ".join(plain.split())

    def test_gpus_shows_one_gpu(self, memcalc):
        found = memcalc("gpus h100 --json").document
        assert [row["name"] for row in found["rows"]] == ["h100-sxm"]


class TestFormats:
    @pytest.mark.parametrize("question", QUESTIONS)
    def test_text_is_readable_at_80_columns(self, memcalc, question):
        lines = memcalc(question).out.splitlines()
        unbroken = question == "check" or "formula" in question  # ids of claims, and formulas
        assert unbroken or all(len(line) <= 80 for line in lines)
        assert all(line == line.rstrip() for line in lines)

    @pytest.mark.parametrize("columns", [1, 20, 40, 60])
    @pytest.mark.parametrize("question", ["layer 175b", "recompute 175b", "flops 175b", "models"])
    def test_a_narrow_terminal_never_cuts_a_number(self, memcalc, question, columns, monkeypatch):
        # names with digits may be folded, so of the catalog only numbers of thousands
        number = r"\d+,\d{3}" if question == "models" else r"\d[\d.,e-]*"
        numbers = re.findall(number, memcalc(question).out.split("──")[-1].split("\n\n")[0])
        monkeypatch.setenv("COLUMNS", str(columns))
        narrow = memcalc(question).out
        assert numbers
        assert all(number in narrow for number in numbers)

    @pytest.mark.parametrize("question", QUESTIONS)
    def test_csv_holds_the_same_rows(self, memcalc, question):
        rows = list(csv.DictReader(io.StringIO(memcalc(f"{question} --format csv").out)))
        expected = memcalc(f"{question} --format json").document["rows"]
        for row, exact in zip(rows, expected, strict=True):
            assert list(row) == list(exact)
            for name, value in exact.items():
                if isinstance(value, list):
                    assert row[name]  # in a few words
                else:
                    formula = isinstance(value, str) and re.match(r"[-+=@].", value)
                    plain = "" if value is None else str(value)
                    assert row[name] == (f"'{plain}" if formula else plain)

    @pytest.mark.parametrize("question", QUESTIONS)
    def test_markdown_and_latex_have_a_line_a_row(self, memcalc, question):
        document = memcalc(f"{question} --format json").document
        table = [
            x for x in memcalc(f"{question} --format markdown").out.splitlines() if x[:1] == "|"
        ]
        assert len(table) == 2 + len(document["rows"])
        width = len(document["columns"])
        latex = memcalc(f"{question} --format latex").out.splitlines()
        body = latex[latex.index(r"\midrule") + 1 : latex.index(r"\bottomrule")]
        assert len(body) == len(document["rows"])
        assert all(line.count(" & ") == width - 1 for line in body)

    def test_a_narrow_table_leaves_details_out_and_a_wide_one_shows_them(
        self, memcalc, monkeypatch
    ):
        assert "Korthikanti et al. 2022, section 4.1" not in memcalc("ledger 22b").out
        monkeypatch.setenv("COLUMNS", "220")
        assert "Korthikanti et al. 2022, section 4.1" in memcalc("ledger 22b").out

    def test_latex_of_a_formula_is_one_line(self, memcalc):
        outcome = memcalc("formula 175b --sp --recompute selective --latex")
        assert outcome.out == "\\frac{34sbh}{t}\n"

    def test_every_format_has_its_renderer(self):
        assert {*FORMATS} == {*RENDERERS}


class TestOutput:
    def test_a_file_gets_the_format_of_its_suffix(self, memcalc, tmp_path):
        for suffix, start in [
            ("json", "{"),
            ("csv", "layer_kind,"),
            ("md", "one layer keeps 1,264 MiB"),
            ("tex", "%"),
            ("txt", "one layer keeps 1,264 MiB"),
            ("html", "<div>"),
        ]:
            path = tmp_path / f"out.{suffix}"
            outcome = memcalc(f"layer 22b -o {path}")
            assert outcome == (0, "", "")
            assert path.read_text().startswith(start)

    def test_an_asked_for_format_goes_before_the_suffix(self, memcalc, tmp_path):
        path = tmp_path / "out.csv"
        memcalc(f"layer 22b --format json -o {path}")
        assert json.loads(path.read_text())["command"] == "layer"

    def test_a_file_that_cannot_be_written_is_one_line_and_leaves_nothing(self, memcalc, tmp_path):
        for command, name in (("layer 22b", "out.csv"), ("plot techniques 22b", "out.png")):
            outcome = memcalc(f"{command} -o {tmp_path / 'no' / name}")
            assert outcome.status == 2
            assert "cannot be written: No such file or directory" in outcome.err
            assert outcome.err.count("\n") == 1
            assert memcalc(f"{command} -o {tmp_path / name} --tp 7").status == 2
            assert not list(tmp_path.iterdir())

    def test_an_error_leaves_the_old_file_as_it_was(self, memcalc, tmp_path):
        path = tmp_path / "old.json"
        path.write_text("old")
        assert memcalc(f"layer 22b --tp 5 -o {path}").status == 2
        assert path.read_text() == "old"

    def test_a_device_is_written_into_and_not_replaced(self, memcalc):
        assert memcalc("layer 22b -o /dev/null").status == 0
        assert stat.S_ISCHR(os.stat("/dev/null").st_mode)

    @pytest.mark.parametrize(
        "line",
        [
            "layer {model} -o {model}",
            "layer {model} -o {other}",
            "recompute {model} --json -o {model}",
            "layer {folder} -o {folder}/config.json",
            "layer {link} -o {model}",
            "layer {model} -o {link}",
            "ledger 22b --run {model} -o {model}",
            "backtest {runs} -o {runs} --format json",
            "plot backtest {figure} -o {figure}",
            "models {model} -o {model}",
            "models --show {model} -o {model}",
        ],
    )
    def test_an_output_that_is_an_input_needs_force(self, memcalc, tmp_path, line):
        config = json.dumps(
            {"model_type": "gpt2", "n_layer": 1, "n_embd": 64, "n_head": 4} | {"n_positions": 64}
        )
        files = {
            "model": tmp_path / "config.json",
            "runs": tmp_path / "runs.jsonl",
            "figure": tmp_path / "runs.png",
        }
        files["model"].write_text(config)
        for name in ("runs", "figure"):
            files[name].write_text(RUNS.read_text())
        link = tmp_path / "link.json"
        link.symlink_to(files["model"])
        line = line.format(folder=tmp_path, other=f"{tmp_path}/./config.json", link=link, **files)
        before = {each: each.read_bytes() for each in files.values()}
        outcome = memcalc(line)
        assert (outcome.status, outcome.out) == (2, "")
        assert "would replace the input file; choose another name, or add --force" in outcome.err
        assert {each: each.read_bytes() for each in files.values()} == before
        assert memcalc(f"{line} --force").status == 0
        assert {each: each.read_bytes() for each in files.values()} != before

    def test_an_earlier_output_is_replaced_without_a_word(self, memcalc, tmp_path):
        for _ in range(2):
            assert memcalc(f"layer 22b -o {tmp_path / 'x.json'}") == (0, "", "")

    def test_html_may_be_asked_for_by_its_name(self, memcalc):
        assert memcalc("layer 22b --format html").out.startswith("<div>")

    def test_a_dash_is_stdout(self, memcalc):
        assert memcalc("layer 22b -o -") == memcalc("layer 22b")


USAGE = [
    ("lyer 22b", "no command 'lyer'; did you mean 'layer'"),
    ("layer", "MODEL is missing: usage: memcalc layer [OPTIONS] MODEL; try `memcalc layer -h`"),
    ("layer 175", "did you mean '175b'"),
    ("layer 22b --tpp 8", "no option --tpp; did you mean --tp?"),
    ("layer 22b --tp 7", "--tp 7 must divide heads 64"),
    ("layer 22b --tp 0", "--tp must be a whole number from 1 to 1,048,576, not '0'"),
    ("layer 22b -s -5", "--seq-length must be a whole number from 1 to"),
    ("layer 22b -s 1e3", "--seq-length must be a whole number from 1 to"),
    ("layer 22b -s 999999999999999999999", "--seq-length must be a whole number from 1 to"),
    ("layer 22b -s 1_0", "to 2,147,483,648, not '1_0'"),
    ("layer 22b -s ٨", "to 2,147,483,648, not '٨'"),
    ("rnn --hidden-size 1_0", "--hidden-size must be a whole number"),
    ("memory 22b --imbalance 1_0", "--imbalance must be a number, not '1_0'"),
    ("layer 22b --sp", "layer always lists every technique; drop --sp, or use `memcalc ledger --"),
    ("layer 22b --no-sp", "drop --no-sp, or use `memcalc ledger --no-sp`"),
    ("layer 22b --recompute full", "drop --recompute, or use `memcalc ledger --recompute`"),
    (
        "plot techniques 22b --sp -o x.png",
        "--sp has no effect on techniques: its bars show every choice",
    ),
    ("ledger 22b --recompute slective", "did you mean 'selective'"),
    ("ledger 22b --sp -s 1023", "--tp (with --sp) = 8 must divide --seq-length 1023"),
    ("ledger 22b --attention flahs", "--attention 'flahs' is unknown; did you mean 'flash'?"),
    ("ledger 22b --dropout 1.5", "dropout must be a number from 0 to less than 1, not 1.5"),
    ("ledger 22b --dropout nan", "dropout must be a number"),
    (
        "ledger 22b --accounting sloppy",
        "--accounting 'sloppy' is unknown; choose from 'exact', 'paper'",
    ),
    ("ledger 22b --format yaml", "--format 'yaml' is unknown; choose from 'csv', 'html'"),
    ("formula 22b --latex --format csv", "--latex cannot be combined with --format"),
    ("layer /", "/: the folder has no config.json"),
    ("layer nowhere/config.json", "no such file"),
    ("plot techniqes 22b -o x.png", "no figure 'techniqes'; did you mean 'techniques'?"),
    ("plot techniques 22b -o x.gif", "written as .png, .svg or .pdf, not as .gif"),
    ("plot techniques 22b -o picture", "not as a file without suffix"),
    ("plot techniques 22b", "Missing option '-o'"),
    ("models 22b extra", "unexpected extra argument"),
    ("models 22b --show 22b", "--show means MODEL: drop one of them"),
    ("recompute 22b --budget 80GB", "--budget needs --fill"),
    ("recompute 22b --margin 6GiB", "--margin needs --fill"),
    (
        "recompute 22b --recompute full --recompute-method block --recompute-layers 0 --fill",
        "--fill skips recomputation, and --recompute-layers 0 recomputes nothing",
    ),
    ("memory 22b --bf16 --fp16", "--bf16 and --fp16 contradict each other: drop one"),
    ("memory 22b --precision=fp16 --bf16", "--precision fp16 and --bf16 contradict each other"),
    ("memory 22b --tensor-parallel 8 --tp 4", "--tensor-parallel 8 and --tp 4 contradict each"),
    ("memory 22b --gpu h100 --gpu a100", "--gpu h100 and --gpu a100 contradict each other"),
    ("memory 22b -s 1024 --seq-length=2048", "-s 1024 and --seq-length 2048 contradict each"),
    ("memory 22b -s1024 -s2048", "-s 1024 and -s 2048 contradict each other"),
    ("memory 22b --sp --no-sp", "--sp and --no-sp contradict each other: drop one"),
    ("memory 22b --bf16 --dtype float16", "--bf16 and --dtype float16 contradict each other"),
    ("memory 22b --sharder deepsped", "--sharder 'deepsped' is unknown; did you mean 'deepspeed'"),
    (
        "memory 22b --implementation transformers",
        "did you mean 'transformers-sdpa' or 'transformers-eager'?",
    ),
    ("memory 22b --recompute uniform", "use --recompute full --recompute-method uniform"),
    (
        "memory meta-llama/Llama-3.1-8B",
        "no such file; for the Hub, hf:meta-llama/Llama-3.1-8B; the catalog has llama-3.1-8b",
    ),
    ("memory openai/gpt2-xxl", "for the Hub, hf:openai/gpt2-xxl; did you mean 'gpt2-xl'"),
    ("gpus h10", "did you mean 'h100'"),
    (
        "flops llama-3-8b --gpu h100 --iteration-time 3 --gpus 8",
        "--gpus 8, but the FLOPs are those of 1 rank: pass --dp 8 and --global-batch-size of the",
    ),
    ("backtest runs.jsonl --max-error x", "--max-error must be a ratio such as 2% or 0.02, not"),
    ("plot stages -o x.png", "MODEL is missing: usage: memcalc plot stages"),
    ("plot paper-1 22b -o x.png", "unexpected extra argument (22b)"),
    ("layer 22b -o table.png", "a table cannot be written as .png"),
    ("layer 22b -o table.jsn", "no format has the suffix .jsn; did you mean '.json'?; or pass"),
    ("layer 22b --recompute=", "layer always lists every technique; drop --recompute"),
    ("ledger 22b --recompute none,full", "--recompute none cannot be combined with"),
    (
        "ledger llama-3-8b --implementation transformers-eager --attention flash",
        "for flash attention use --implementation transformers-sdpa",
    ),
    ("flops 22b --iteration-time 0", "must be from 1e-6 to 1e9 seconds"),
    ("flops 22b --iteration-time 1e-320", "must be from 1e-6 to 1e9 seconds"),
    ("flops 22b --iteration-time 1e999", "must be from 1e-6 to 1e9 seconds"),
    ("flops 22b --iteration-time inf", "--iteration-time must be a number, not 'inf'"),
    ("flops 22b --iteration-time nan", "--iteration-time must be a number, not 'nan'"),
    ("plot paper-1 --tp 4 -o x.png", "--tp has no effect on paper-1"),
    ("plot paper-1 --tp=4 -o x.png", "--tp has no effect on paper-1"),
    ("flops 22b --gpus 8", "--gpus needs --iteration-time"),
    ("formula --paper li2021 --tp 4", "--paper takes no options except"),
    ("formula --paper li2021 --accounting paper", "--paper takes no options except"),
    ("flops 22b --iteration-time 1 --scope layer", "--iteration-time needs --scope iteration"),
    ("flops llama-3-8b --iteration-time 1", "utilization needs a GPU: pass --gpu"),
    ("flops llama-3-8b --iteration-time 1 --gpu a1000", "did you mean 'a100'"),
    ("flops 22b --iteration-time 1 --gpu v100 --precision bf16", "has no known peak for bf16"),
    (
        "flops 22b --global-batch-size 3",
        "--micro-batch-size x --dp = 4 must divide --global-batch-size",
    ),
    (
        "comm 22b --pp 100",
        "100 model chunks (--pp x chunks per rank) need at least 100 layers; 22b has 48",
    ),
    ("plot memory 22b --accounting paper -o x.png", "--accounting has no effect on memory"),
    ("plot paper-7 --accounting exact -o x.png", "--accounting has no effect on paper-7"),
]


@pytest.mark.parametrize(("line", "message"), USAGE, ids=[line for line, _ in USAGE])
def test_bad_usage_is_one_line_on_stderr_and_status_2(memcalc, line, message):
    outcome = memcalc(line)
    assert (outcome.status, outcome.out) == (2, "")
    assert message in outcome.err
    assert outcome.err.startswith("memcalc")
    assert outcome.err.count("\n") == 1


HOSTILE = "x\x1b]0;title\x07\x1b[31m\u202ered"


@pytest.mark.parametrize(
    "words",
    [
        ["layer", HOSTILE],
        ["layer", f"./{HOSTILE}"],
        ["layer", f"./{HOSTILE}.json"],
        ["layer", "22b", HOSTILE],
        ["layer", "22b", f"--{HOSTILE}"],
        ["layer", "22b", f"-{HOSTILE}"],
        ["layer", "22b", "--tp", HOSTILE],
        ["layer", "22b", "--attention", HOSTILE],
        ["layer", "22b", "--dropout", HOSTILE],
        ["ledger", "22b", "--recompute", HOSTILE],
        ["layer", "22b", "--run", f"{HOSTILE}.json"],
        ["layer", "22b", "-o", f"x.{HOSTILE}"],
        ["layer", "22b", "-o", f"no/{HOSTILE}.json"],
        ["memory", "22b", "--gpu", HOSTILE],
        ["memory", "22b", "--budget", HOSTILE],
        ["memory", "22b", "--layout", HOSTILE],
        ["backtest", HOSTILE],
        ["plot", HOSTILE],
        [HOSTILE],
    ],
    ids=lambda words: " ".join(words).replace(HOSTILE, "X"),
)
@pytest.mark.parametrize("times", [1, 300])
def test_what_is_echoed_cannot_steer_a_terminal_nor_flood_it(capsys, tmp_path, words, times):
    assert main([word.replace(HOSTILE, HOSTILE * times) for word in words]) == 2
    printed = capsys.readouterr()
    line, end, rest = printed.err.partition("\n")
    assert (printed.out, end, rest) == ("", "\n", "")
    assert line.isprintable()
    assert len(line) <= 700


VALUES = (
    *("", " ", "-", "--", ",", "=", "-1", "0", "1e309", "nan", "0x10", "1_0", "٨", "9" * 5000),
    *("$(id)", "`id`", "; id", "{}", "{0.__class__}", "%s%n", "[[", "(((1)))*9", "[red]x[/]"),
    *("💥", "a" * 5000, "../../etc/passwd", "/dev/null", "/", "1,2", "true", "-5GB", "1e5000GB"),
)


@pytest.mark.parametrize(
    "option", [max(each.opts, key=len) for each in memory.params if each.name != "model"]
)
def test_no_value_of_an_option_is_more_than_a_line(capsys, tmp_path, monkeypatch, option):
    monkeypatch.chdir(tmp_path)
    for value in VALUES:
        status = main(["memory", "22b", "--explain", f"{option}={value}"])
        printed = capsys.readouterr()
        assert status in (0, 1, 2)
        if status == 2:
            assert printed.out == ""
            assert printed.err.count("\n") == 1
        assert all(line.isprintable() and len(line) <= 2000 for line in printed.err.splitlines())


def test_a_fault_of_our_own_is_one_line_and_a_traceback_for_those_who_ask(memcalc, monkeypatch):
    monkeypatch.setattr("memcalc.cli.models.show", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        memcalc("models")
    monkeypatch.delenv("MEMCALC_DEBUG")
    outcome = memcalc("models")
    assert (outcome.status, outcome.out) == (2, "")
    assert outcome.err == (
        "memcalc: an error in memcalc, please report it (MEMCALC_DEBUG=1 shows where): "
        "ZeroDivisionError: division by zero\n"
    )


def test_an_error_of_the_operating_system_is_printed_as_it_is(memcalc, monkeypatch):
    def fail(*_):
        raise OSError("libcudart.so: cannot open shared object file")

    monkeypatch.setattr("memcalc.cli.main.abandon", lambda stream: None)
    monkeypatch.setattr("memcalc.cli.models.show", fail)
    error = "memcalc: libcudart.so: cannot open shared object file\n"
    assert memcalc("models") == (2, "", error)


def test_force_without_a_file_is_warned_about(memcalc, tmp_path):
    warning = "memcalc: warning: --force has no effect without -o FILE\n"
    assert memcalc("models --force").err == memcalc("models --force -o -").err == warning
    assert memcalc(f"models --force -o {tmp_path}/x.csv").err == ""


@pytest.mark.parametrize("same", [".5", "0.5", "5e-1", "0.50"])
def test_a_number_may_begin_with_its_point(memcalc, same):
    assert memcalc(f"ledger 22b --dropout {same}") == memcalc("ledger 22b --dropout 0.5")


def test_a_ratio_is_a_percentage_or_a_number(memcalc):
    outcomes = [memcalc(f"backtest {RUNS} --max-error {ratio}") for ratio in ("2%", ".02", "0.02")]
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert "above --max-error 2%" in outcomes[0].err


@pytest.mark.parametrize("option", ["--tp", "-s", "--dropout", "--format", "--budget", "--gpu"])
def test_a_value_of_5000_digits_is_not_echoed_whole(memcalc, option):
    outcome = memcalc(f"memory 22b {option} {'9' * 5000}")
    assert outcome.status == 2
    assert outcome.err.count("9") < 250


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("layer qwen", "did you mean 'qwen3-8b' or 'qwen3-32b'? `memcalc models` lists all\n"),
        ("layer zzzz", "nor a file; `memcalc models` lists all\n"),
        ("memory 22b --gpu zzzz", "is unknown; `memcalc gpus` lists all\n"),
        ("memory 22b --budget zzzz", "or a GPU; `memcalc gpus` lists all\n"),
        ("ledger 22b --recompute zzzz", "nor a region; `memcalc memory --help` lists all\n"),
        ("zzzz", "no command 'zzzz'; `memcalc --help` lists all\n"),
    ],
)
def test_of_many_choices_a_few_are_named_and_what_lists_all(memcalc, line, hint):
    outcome = memcalc(line)
    assert outcome.status == 2
    assert hint in outcome.err
    assert len(outcome.err) < 200


class TestHelp:
    def test_every_command_has_help_with_examples(self, memcalc):
        listed = memcalc("--help").out
        for name in COMMANDS:
            assert f"  {name} " in listed
            outcome = memcalc(f"{name} --help")
            assert outcome.status == 0
            assert f"memcalc {name}" in outcome.out.split("Examples:")[1]
            for option in resolve(COMMANDS[name][0]).params:
                assert getattr(option, "help", "") or option.param_type_name == "argument"

    @pytest.mark.parametrize("name", sorted(COMMANDS.keys() - RUN_TORCH))
    def test_every_example_in_help_runs(self, capsys, examples, tmp_path, monkeypatch, name):
        monkeypatch.chdir(tmp_path)
        folder = tmp_path / "path" / "to"
        folder.mkdir(parents=True)
        config = {"model_type": "gpt2", "n_layer": 1, "n_embd": 64, "n_head": 4}
        config["n_positions"] = 8192
        (folder / "config.json").write_text(json.dumps(config))
        (tmp_path / "runs.jsonl").write_text(RUNS.read_text())
        for line in examples(name):
            status, printed = main(shlex.split(line)), capsys.readouterr()
            if status == 1 and "--budget" in line:
                assert printed.err.startswith("memcalc: failed: "), line
            else:
                assert (status, printed.err) == (0, ""), line
        if name != "plot":
            main([*shlex.split(examples(name)[0]), "--format", "json"])
            is_valid(json.loads(capsys.readouterr().out))

    def test_no_question_is_answered_with_help(self, memcalc):
        outcome = memcalc("")
        assert outcome.status == 2
        assert "Usage: memcalc" in outcome.err

    def test_version(self, memcalc):
        found = re.fullmatch(
            r"memcalc (\S+) \(Python (\S+), torch (\S+|is not installed)\)\n",
            memcalc("--version").out,
        )
        assert found[1] == version("activation-memcalc")
        assert found[2] == platform.python_version()
        assert library.__version__ == version("activation-memcalc")

    def test_the_lazy_tables_name_what_is_there(self):
        for name, (reference, _) in COMMANDS.items():
            assert resolve(reference).name == name
        assert list(cli.commands) == []
        for reference in (figures.KINDS | figures.PAPER).values():
            assert callable(resolve(reference))


class TestProcess:
    """What only a process of its own shows."""

    def run(self, *args, **options):
        return subprocess.run(
            [sys.executable, "-m", "memcalc", *args], text=True, timeout=60, **options
        )

    def test_it_runs_in_its_own_checkout_too(self):
        """There the folder memcalc/ hides the installed package."""
        root = Path(__file__).parents[2]
        done = self.run("layer", "22b", "--format", "csv", capture_output=True, cwd=root)
        assert done.stdout == library.layer(load("22b")).render("csv")

    def test_the_module_runs_and_its_status_is_the_processs(self, tmp_path):
        done = self.run("layer", "22b", "--format", "csv", capture_output=True, cwd=tmp_path)
        assert done.returncode == 0
        assert done.stdout == library.layer(load("22b")).render("csv")
        done = self.run("layer", "23b", capture_output=True, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")

    def test_a_reader_that_leaves_is_no_error(self, tmp_path):
        process = subprocess.Popen(
            [sys.executable, "-m", "memcalc", "models", "--format", "json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=tmp_path,
        )
        process.stdout.close()
        assert process.stderr.read() == b""
        process.stderr.close()
        assert process.wait(60) == 0

    @pytest.mark.parametrize("line", ["models", "--help", "layer -h", "--version"])
    def test_a_full_disk_is_one_line(self, tmp_path, line):
        with open("/dev/full", "w") as full:
            done = self.run(*line.split(), stdout=full, stderr=subprocess.PIPE, cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr == "memcalc: the answer cannot be printed: No space left on device\n"

    @pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8"])
    def test_any_encoding_of_stdout_will_do(self, tmp_path, encoding):
        environment = {**os.environ, "PYTHONIOENCODING": encoding}
        done = self.run("layer", "22b", capture_output=True, cwd=tmp_path, env=environment)
        assert (done.returncode, done.stderr) == (0, "")
        assert "6,752" in done.stdout

    @pytest.mark.parametrize("line", ["layer 22b", "--help", "layer -h", "--version"])
    def test_an_answer_that_a_closed_stdout_loses_is_an_error(self, tmp_path, line):
        command = f"exec {sys.executable} -m memcalc {line} >&-"
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, cwd=tmp_path)
        message = "memcalc: the answer cannot be printed: Bad file descriptor\n"
        assert (done.returncode, done.stderr) == (2, message)

    def test_a_file_needs_no_stdout(self, tmp_path):
        command = f"exec {sys.executable} -m memcalc layer 22b -o x.csv >&-"
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert (tmp_path / "x.csv").read_text() == library.layer(load("22b")).render("csv")

    @pytest.mark.parametrize(
        ("line", "status"),
        [
            ("layer nope 2>&-", 2),
            ("layer nope >&- 2>&-", 2),
            ("layer 22b >&- 2>&-", 2),
            ("ledger llama-3-8b --sp -o x.json 2>&-", 0),
            ("layer nope 2>/dev/full", 2),
            ("2>/dev/full", 2),
            ("ledger llama-3-8b --sp --json 2>/dev/full", 0),
        ],
    )
    def test_a_closed_stderr_changes_no_status(self, tmp_path, line, status):
        command = f"exec {sys.executable} -m memcalc {line}"
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (status, "")

    def test_a_reader_of_stderr_that_leaves_changes_no_status(self, tmp_path):
        read, write = os.pipe()
        os.close(read)
        done = self.run("layer", "nope", stdout=write, stderr=write, cwd=tmp_path)
        os.close(write)
        assert done.returncode == 2

    def test_a_figure_needs_no_window_and_takes_any_name(self, tmp_path):
        config = {"model_type": "gpt2", "n_layer": 1, "n_embd": 64, "n_head": 4, "n_positions": 64}
        names = ("a$b_$c", "模型", "x" * 200, "tab\tbed")
        for name in names:
            (tmp_path / name).mkdir()
            (tmp_path / name / "config.json").write_text(json.dumps(config))
        lines = [["plot", "techniques", f"./{name}", "-o", "x.svg"] for name in names]
        code = f"from memcalc.cli.main import main\nprint(*map(main, {lines!r}))"
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env={**os.environ, "MPLBACKEND": "bogus"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.stdout.split()[-4:], done.stderr) == (["0"] * 4, "")

    @pytest.mark.parametrize(
        "setting",
        [
            *("LC_ALL=C", "LC_ALL=xx_YY", "LANG=", "TERM=", "TERM=dumb", "NO_COLOR=", "HOME="),
            *("FORCE_COLOR=zz", "TTY_COMPATIBLE=zz", "UNICODE_VERSION=9999999999", "PATH="),
            *("PYTHONIOENCODING=utf-16", "PYTHONUTF8=0", "PYTHONWARNINGS=error", "TMPDIR=/none"),
        ],
    )
    def test_no_setting_of_the_environment_stops_an_answer(self, tmp_path, setting):
        name, _, value = setting.partition("=")
        done = subprocess.run(
            [sys.executable, "-m", "memcalc", "models"],
            capture_output=True,
            cwd=tmp_path,
            env={**os.environ, name: value},
            timeout=60,
        )
        assert (done.returncode, done.stderr) == (0, b"")
        assert b"d\0e\0e\0p" in done.stdout or b"deepseek-v3" in done.stdout

    def test_no_color_and_no_terminal_print_no_escapes(self, tmp_path):
        done = self.run("layer", "22b", capture_output=True, cwd=tmp_path)
        assert "\x1b" not in done.stdout
