"""``memory``: stages by parts, what fits, what may be kept whole, and its figures."""

import re
from dataclasses import replace
from fractions import Fraction

import pytest
from shared import is_valid

from memcalc import memory, plot, recompute
from memcalc.analysis import activations, flops
from memcalc.analysis.device import device
from memcalc.analysis.fill import fill
from memcalc.analysis.headroom import headroom
from memcalc.analysis.parts import GROUPS
from memcalc.analysis.rank import Rank
from memcalc.analysis.schedule import timeline
from memcalc.analysis.stages import chunk_weights, in_flight, stage
from memcalc.blocks.head import head_graph
from memcalc.config import load
from memcalc.config.gpus import gpu, gpus
from memcalc.errors import UsageError
from memcalc.figures.stages import curve
from memcalc.units import GIB


def rows(outcome):
    assert outcome.status == 0
    return outcome.document["rows"]


class TestRows:
    @pytest.mark.parametrize(
        "question",
        [
            "175b --sp",
            "llama-3-8b -s 4096 --dp 8 --zero 1",
            "mixtral-8x7b -s 4096 --pp 4 --ep 8 --dp 8 --zero 1",
            "deepseek-v3 -s 4096 --pp 16 --global-batch-size 64 --recompute full",
            "llama-3-70b -s 4096 --tp 8 --sp --pp 4 --schedule dualpipe --recompute selective",
            "22b --pp 4 --schedule gpipe --global-batch-size 32",
            "bert-large --pp 2",
            "t5-11b -s 512 --tp 8",
            "vit-large",
        ],
    )
    def test_the_parts_of_a_stage_are_its_peak(self, memcalc, question):
        found = rows(memcalc(f"memory {question} --format json"))
        for row in found:
            assert sum(row[f"{group}_bytes"] for group in GROUPS) == row["peak_bytes"]
            assert row["reserved_estimated_bytes"] > row["peak_bytes"]
        document = memcalc(f"memory {question} --explain --format json").document
        is_valid(document)
        for row in found:
            parts = [part for part in document["rows"] if part["stage"] == row["stage"]]
            allocated = [part for part in parts if part["group"] != "not allocated"]
            assert sum(part["bytes"] for part in allocated) == row["peak_bytes"]
            assert {part["phase"] for part in parts} == {row["peak_phase"]}
            assert all(part["source"] for part in parts)
            assert {p["certainty"] for p in parts if p not in allocated} == {"estimated"}

    def test_states_take_18_bytes_a_parameter(self, memcalc):
        """Figure 1: 16-bit weights, fp32 gradients, Adam's three fp32 copies."""
        for row in rows(memcalc("memory 175b --sp --format json")):
            n = Rank(load("175b"), row["stage"]).parameters.total()
            assert row["weights_bytes"] == 2 * n
            assert row["optimizer_bytes"] == 12 * n
            assert row["gradients_bytes"] >= 4 * n

    def test_stages_are_weighed_by_what_they_hold(self, memcalc):
        found = rows(memcalc("memory 22b --pp 4 --layout 6,12,12,18 --format json"))
        assert [row["layers"] for row in found] == [6, 12, 12, 18]
        assert [row["in_flight"] for row in found] == [1, 1, 1, 1]  # a global batch of 4 is 1
        found = rows(memcalc("memory 22b --pp 4 --global-batch-size 64 --format json"))
        assert [row["in_flight"] for row in found] == [4, 3, 2, 1]

    def test_in_flight_of_other_schedules(self, memcalc):
        line = "memory 22b --pp 4 --global-batch-size 64 --format json"
        for options, expected in [
            ("--vpp 3", [2 * (3 - s) + 2 * 4 + 1 for s in range(4)]),
            ("--vpp 3 --microbatch-group-size 6", [2 * (3 - s) + 2 * 6 + 1 for s in range(4)]),
            ("--schedule gpipe", [16] * 4),
            ("--schedule zb-h1", [4 - s for s in range(4)]),
            ("--schedule zb-v", [8] * 4),
            ("--schedule dualpipe", [5] * 4),
        ]:
            assert [row["in_flight"] for row in rows(memcalc(f"{line} {options}"))] == expected

    def test_both_ends_of_dualpipe_have_a_head_and_twice_the_layers(self, memcalc):
        line = "memory llama-3-70b -s 4096 --tp 8 --sp --pp 4 --format json"
        plain, dual = (rows(memcalc(f"{line}{x}")) for x in ("", " --schedule dualpipe"))
        assert [row["layers"] for row in dual] == [2 * row["layers"] for row in plain]
        for name in ("weights_bytes", "optimizer_bytes", "peak_bytes"):
            assert dual[0][name] == dual[3][name]
            assert dual[1][name] == dual[2][name]
        ends = plain[0]["weights_bytes"] + plain[3]["weights_bytes"]
        assert dual[0]["weights_bytes"] == ends

    def test_experts_are_shown_under_an_even_and_an_uneven_router(self, memcalc):
        line = "memory mixtral-8x7b -s 4096 --pp 4 --ep 8 --dp 8"
        notes = memory(load_line(line)).notes
        note = next(x for x in notes if x.startswith("largest peak of all stages"))
        even, uneven = (
            max(row["peak_bytes"] for row in rows(memcalc(f"{line} --imbalance {x} --format json")))
            for x in (1, 1.25)
        )
        assert even < uneven
        for peak, imbalance in ((even, 1), (uneven, 1.25)):
            assert f"{peak / GIB:.2f} GiB" in note
            assert f"--imbalance {imbalance}" in note

    def test_a_vocabulary_that_ranks_do_not_divide_is_padded_and_that_is_said(self, memcalc):
        """50257 is 98 * 512 and some: Megatron-LM pads it to a multiple of 128 t."""
        out = " ".join(memcalc("memory gpt2 --tp 4").out.split())
        assert f"vocabulary {99 * 512} (50257 padded to a multiple of 512" in out
        even = memcalc("memory gpt2 --tp 4 --format json").document["symbols"]["v"]
        assert even == 99 * 512
        assert "padded" not in memcalc("memory gpt2").out

    def test_what_is_assumed_of_stages_is_said(self, memcalc):
        out = " ".join(memcalc("memory deepseek-v3 --pp 16 -s 4096").out.split())
        assert "61 layers on 16 stages: one more on each of the first 13" in out
        assert "embedding table: a copy is on stage 15" in out

    def test_one_rank_splits_nothing_and_that_is_said(self, memcalc, tmp_path):
        """Hugging Face's ZeRO-3 file leaves batches, and so the number of ranks, to its trainer."""
        file = tmp_path / "auto.json"
        file.write_text(
            '{"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}, '
            '"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"}'
        )
        script = tmp_path / "run.sh"
        script.write_text(
            "torchrun --nproc_per_node 8 --nnodes $NODES pretrain_gpt.py --bf16 "
            "--micro-batch-size 1 --seq-length 4096 --use-distributed-optimizer"
        )
        alone = "nothing is sharded: there is one data-parallel rank"
        several = "parallel ranks: opt"
        for options in (f"--run {file}", f"--run {script}", "--zero 1", "--sharder fsdp2"):
            for dp, note, assumed in (("", alone, 1), ("--dp 1", alone, 0), ("--dp 8", several, 0)):
                line = f"memory llama-3-8b -s 4096 {options} {dp} --format json"
                notes = memcalc(line).document["notes"]
                assert sum(note in line for note in (alone, several) for line in notes) == 1
                assert any(note in line for line in notes)
                listed = next(line for line in notes if line.startswith("assumed: "))
                assert ("one data-parallel rank" in listed) == assumed

    def test_experts_of_their_own_ranks_are_split_without_data_parallel_ranks(self, memcalc):
        """t 8, and 1 of experts: eight ranks hold each expert."""
        line = "memory mixtral-8x7b -s 4096 --tp 8 --sp --etp 1 --zero 1 --dp 1"
        assert "nothing is sharded" not in " ".join(memcalc(line).out.split())

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ("", "weight 2 B, gradient 4 B, master weight 4 B, 8 B of Adam's moments"),
            (
                "--precision fp8",
                "weight 2 B (linear layers: 2 B, and 2 B of fp8 copies), gradient 4 B",
            ),
            (
                "--precision fp8 --fp8-params",
                "weight 2 B (linear layers: 1 B, and 1 B of fp8 copies), gradient 4 B",
            ),
            ("--sharder fsdp2 --dp 8", "weight 4 B, gradient 4 B, 8 B of Adam's moments"),
            (
                "--sharder deepspeed --zero 1 --dp 8",
                "weight 2 B, gradient 2 B, master weight 4 B, 8 B of Adam's moments",
            ),
        ],
    )
    def test_what_a_parameter_takes_is_said_as_it_is_counted(self, memcalc, options, said):
        line = f"memory llama-3-8b -s 4096 {options} --format json"
        assert any(said in note for note in memcalc(line).document["notes"])

    def test_workspaces_that_depend_on_the_gpu_are_named_where_there_is_none(self, memcalc):
        line = "memory llama-3-8b -s 4096 --implementation"
        for implementation, names in (
            ("megatron", "cuBLAS and Transformer Engine"),
            ("megatron-local", "cuBLAS"),
        ):
            note = f"not counted: workspaces of {names}, which depend on the GPU model: pass --gpu"
            without = memcalc(f"{line} {implementation} --format json").document["notes"]
            assert note in without
            known = memcalc(f"{line} {implementation} --gpu h100 --format json").document["notes"]
            assert not any("workspaces" in line for line in known)

    def test_what_muons_step_works_with_is_named(self, memcalc):
        notes = memcalc("memory llama-3-8b --optimizer muon --format json").document["notes"]
        assert any("Muon's Newton-Schulz steps" in note for note in notes)

    def test_experts_need_as_many_ranks_as_they_are_spread_over(self, memcalc):
        few = "--ep 8 x --tp 1 needs a multiple of 8 ranks per stage, but --tp x --cp x --dp = "
        assert f"{few}1: pass --dp 8\n" in memcalc("memory mixtral-8x7b --ep 8").err
        assert f"{few}4: pass --dp 8\n" in memcalc("memory mixtral-8x7b --ep 8 --dp 4").err
        error = memcalc("memory mixtral-8x7b --ep 8 --etp 1 --tp 4 --dp 3").err
        assert "--ep 8 x --etp 1 needs a multiple of 8 ranks" in error
        assert error.endswith("pass --dp 4\n")


def load_line(line):
    """The config of a line of options with values."""
    _, model, *words = line.split()
    names = {"-s": "seq_length"}
    pairs = zip(words[::2], words[1::2], strict=True)
    return load(model, **{names.get(k, k[2:]): int(v) for k, v in pairs})


class TestFits:
    def test_a_gpu_that_is_too_small_is_no_failure(self, memcalc):
        outcome = memcalc("memory 22b --gpu v100 --format json")
        (row,) = rows(outcome)
        assert (row["verdict"], row["fits"]) == ("does_not_fit", False)
        assert row["capacity_bytes"] == gpu("v100").usable_bytes
        first = outcome.document["notes"][0]
        assert first.startswith("does not fit v100-32gb (31.74 GiB): ")
        assert " short at the peak (stage 0, " in first
        assert "; largest part: " in first
        (large,) = rows(memcalc("memory 22b --sp --recompute selective --format json"))
        assert (large["verdict"], large["fits"]) == ("fits", True)

    def test_the_verdict_is_the_first_line(self, memcalc):
        line = "memory llama-3-8b -s 4096 --gpu h100 --zero 1 --dp 8"
        text = memcalc(line).out
        assert text.startswith("does not fit h100-sxm")
        assert "allocated bytes alone would fit" in " ".join(text.splitlines()[:4])
        (row,) = rows(memcalc(f"{line} --format json"))
        assert (row["verdict"], row["fits"]) == ("allocated_only", False)
        assert row["peak_bytes"] < row["capacity_bytes"]

    def test_without_a_gpu_the_smallest_that_fits_is_named(self, memcalc):
        outcome = memcalc("memory llama-3-8b -s 4096 --format json")
        (row,) = rows(outcome)
        assert [row[name] for name in ("capacity_bytes", "verdict", "fits")] == [None] * 3
        first = outcome.document["notes"][0]
        name = first.partition("the smallest NVIDIA GPU with bf16 that fits is ")[2].split()[0]
        assert rows(memcalc(f"memory llama-3-8b -s 4096 --gpu {name} --format json"))[0]["fits"]
        smaller = [g for g in gpus() if g.usable_bytes < gpu(name).usable_bytes and g.capability]
        assert smaller
        for each in smaller:
            line = f"memory llama-3-8b -s 4096 --gpu {each.name} --format json"
            assert not rows(memcalc(line))[0]["fits"]
        out = memcalc("memory llama-3.1-405b").out.split("\n\n")[0]
        assert "no NVIDIA GPU of the catalog with bf16 holds that" in " ".join(out.split())

    def test_an_attention_kernel_that_a_script_names_stays_on_any_gpu(self):
        """Left to itself, Transformer Engine runs FlashAttention on an A100, cuDNN's on an H100."""
        for said, on_a100 in ((None, True), (False, False), (True, True)):
            config = load("llama-3-8b", batch_first=said)
            assert config.on_gpu("a100").run.implementation.batch_first is on_a100
            assert config.on_gpu("h100").run.implementation.batch_first is bool(said)

    def test_a_budget_is_a_check_of_all_that_the_gpu_needs(self, memcalc):
        line = "memory 22b --sp --recompute selective"
        (row,) = rows(memcalc(f"{line} --format json"))
        config = load("22b", sp=True, recompute="selective")
        needed = headroom(config).needed(row["peak_bytes"])
        assert memcalc(f"{line} --budget {needed}B").status == 0
        outcome = memcalc(f"{line} --budget {needed - 1}B")
        assert outcome.status == 1
        assert outcome.err.startswith("memcalc: failed: stage 0 needs")
        assert outcome.out.startswith("does not fit")
        assert memcalc(f"{line} --budget a100-80gb").status == 0
        assert memcalc(f"{line} --budget v100").status == 1

    def test_the_old_rule_compares_allocated_bytes_alone(self, memcalc):
        line = "memory 22b --sp --recompute selective"
        (row,) = rows(memcalc(f"{line} --format json"))
        peak = row["peak_bytes"]
        assert memcalc(f"{line} --budget {peak}B").status == 1
        for option in ("--allocated-only", "--margin 0%", "--margin 0GiB"):
            assert memcalc(f"{line} --budget {peak}B {option}").status == 0
            assert memcalc(f"{line} --budget {peak - 1}B {option}").status == 1
        assert memcalc(f"{line} --allocated-only --margin 1GiB").status == 2

    def test_a_margin_is_a_size_or_a_share_of_the_allocated_bytes(self, memcalc):
        line = "memory 22b --sp --recompute selective"
        (row,) = rows(memcalc(f"{line} --format json"))
        peak = row["peak_bytes"]
        for margin, more in (("6GiB", 6 * GIB), ("10%", round(Fraction(peak, 10)))):
            assert memcalc(f"{line} --budget {peak + more}B --margin {margin}").status == 0
            (found,) = rows(memcalc(f"{line} --margin {margin} --format json"))
            assert found["reserved_estimated_bytes"] == row["reserved_estimated_bytes"]
            outcome = memcalc(f"{line} --budget {peak + more - 1}B --margin {margin}")
            assert outcome.status == 1
            assert " GiB margin; allocated bytes alone would fit" in " ".join(outcome.out.split())
        outcome = memcalc(f"{line} --margin lots")
        assert (outcome.status, outcome.err.count("\n")) == (2, 1)

    def test_the_budget_rather_than_the_gpu_has_the_verdict(self, memcalc):
        outcome = memcalc("memory 175b --sp --recompute selective --budget 40GB --format json")
        notes = outcome.document["notes"]
        assert [n for n in notes if "fit" in n] == [notes[0]]
        assert notes[0].startswith("does not fit 40GB (37.25 GiB)")
        assert {row["capacity_bytes"] for row in outcome.document["rows"]} == {40 * 10**9}

    def test_a_table_and_its_first_line_have_one_unit(self, memcalc):
        for line in ("175b --sp --recompute selective", "gpt2 --gpu t4", "llama-3-8b --gpu h100"):
            text = memcalc(f"memory {line}").out
            assert set(re.findall(r"[KMGT]iB", text)) in ({"GiB"}, {"MiB"}), line

    @pytest.mark.parametrize("columns", [80, 200])
    def test_what_matters_stays_at_80_columns(self, memcalc, columns, monkeypatch):
        monkeypatch.setenv("COLUMNS", str(columns))
        for line in ("memory 175b --sp --recompute selective", "memory llama-3-8b --gpu h100"):
            table = memcalc(line).out.partition("\n\n")[2]
            head = table.split("─")[0]
            assert all(name in head for name in ("stage", "peak", "reserved", "fits"))

    def test_sizes_read_as_written(self, memcalc):
        """80GB is 8e10 bytes, 80GiB is 80 * 2^30."""
        for size, expected in (("80GB", 8 * 10**10), ("80GiB", 80 * 2**30), ("0.5 TiB", 2**39)):
            report = memory(load("22b", sp=True, recompute="selective"), budget=size)
            assert report.column("capacity_bytes") == [expected]
            assert report.answer.startswith(f"fits {size} (")

    @pytest.mark.parametrize("size", ["80", "80XB", "-5GB", "h1000", "1e3GB"])
    def test_what_is_no_size_is_one_line(self, memcalc, size):
        outcome = memcalc(f"memory 22b --budget {size}")
        assert outcome.status == 2
        assert outcome.err.count("\n") == 1
        assert "must be a size with its unit, such as 80GB or 80GiB, or a GPU" in outcome.err
        assert size[0] == "h" or "did you mean" not in outcome.err  # a number is no GPU's name


def report_index(report, name):
    return [column.name for column in report.columns].index(name)


class TestFill:
    """Appendix C: micro-batches kept whole in the memory that is free."""

    @pytest.mark.parametrize(
        ("model", "settings"),
        [
            ("175b", {"sp": True, "recompute": "selective"}),
            ("175b", {"sp": True, "recompute": "full"}),
            ("22b", {"pp": 4, "global_batch_size": 64, "recompute": "full"}),
        ],
    )
    def test_as_many_as_fit_and_no_more(self, model, settings):
        config = load(model, **settings)
        room = gpu("a100").usable_bytes
        for held in device(config):
            free = room - held.peak.bytes
            kept = fill(config, held.stage, free)
            base = stage(config, held.stage, "exact").total
            assert kept.bytes <= max(free, 0)
            assert kept.window == in_flight(config, held.stage)
            if kept.whole < kept.window:
                more = stage(config, held.stage, "exact", whole=kept.whole + 1).total - base
                assert more > free
            else:
                assert kept.share == 1

    def test_all_kept_whole_is_no_recomputation(self):
        config = load("530b", sp=True, recompute="full", vpp=1)
        none = replace(config, run=config.run.recomputing("none"))
        for number in (0, 17, 34):
            everything = stage(config, number, "exact", whole=in_flight(config, number))
            assert everything == stage(none, number, "exact")

    def test_some_kept_whole_lie_between(self):
        """1F1B's stage 0 of 4: N of the 4 in flight keep all, the others what is left to them."""
        config = load("22b", pp=4, global_batch_size=36, recompute="full")
        none = replace(config, run=config.run.recomputing("none"))
        some, whole = (sum(chunk_weights(c, 0, "exact")[0][0]) for c in (config, none))
        for n in range(5):
            assert stage(config, 0, "exact", whole=n).total == n * whole + (4 - n) * some

    def test_the_flops_that_it_saves(self):
        """9 micro-batches in windows of 4, 1 of each whole: the first, the fifth and the ninth."""
        config = load("22b", pp=4, global_batch_size=36, recompute="full")
        none = replace(config, run=config.run.recomputing("none"))
        some, whole = (stage(c, 0, "exact").total for c in (config, none))
        kept = fill(config, 0, (whole - some) // 4)
        assert (kept.whole, kept.window, kept.share) == (1, 4, Fraction(3, 9))
        again = flops.iteration(config).recomputed
        assert kept.recomputed == again / 4
        assert kept.saved == again // 4 * 3 // 9

    def test_memory_shows_it(self, memcalc):
        outcome = memcalc("memory 175b --sp --recompute selective --fill --format json")
        assert all(row["fits"] for row in rows(outcome))
        assert outcome.document["notes"][0].startswith("fits a100-80gb")
        plain = rows(memcalc("memory 175b --sp --recompute selective --format json"))
        grown = [
            a["activations_bytes"] - b["activations_bytes"]
            for a, b in zip(rows(outcome), plain, strict=True)
        ]
        assert all(more > 0 for more in grown)
        note = next(
            n for n in outcome.document["notes"] if n.startswith("micro-batches in flight that")
        )
        assert "21/21 19/19 17/17;" in note  # late stages need no recomputation at all

    def test_a_smaller_budget_keeps_fewer(self, memcalc):
        line = "recompute 175b --sp --recompute selective --fill --format json"
        kept = [
            [row["kept_bytes"] for row in rows(memcalc(f"{line}{b}")) if "stage" in row["policy"]]
            for b in (" --budget 62GiB", "", " --budget 1TB")
        ]
        assert len(kept[0]) == 8
        assert all(a < b <= c for a, b, c in zip(*kept, strict=True))
        assert kept[1][0] < kept[2][0]
        assert set(kept[2]) == {342 * 2**20}  # table 2's row of tensor and sequence parallelism

    @pytest.mark.parametrize("command", ["memory", "recompute"])
    def test_what_recomputes_nothing_is_filled_even_where_it_does_not_fit(self, memcalc, command):
        outcome = memcalc(f"{command} 22b --recompute cross_attention --fill --budget 1GB")
        assert outcome.status == (1 if command == "memory" else 0)
        assert "a fault of memcalc" not in outcome.err

    def test_what_cannot_be_filled_is_refused(self):
        with pytest.raises(UsageError, match="--fill needs --recompute"):
            memory(load("175b"), fill=True)
        with pytest.raises(UsageError, match="--fill needs a GPU"):
            memory(load("llama-3-8b", recompute="full"), fill=True)
        with pytest.raises(UsageError, match="--fill needs a GPU"):
            recompute(load("llama-3-8b", recompute="full"), fill=True)


class TestFigures:
    def test_bars_are_allocated_parts_and_estimates_and_the_line_is_the_gpu(self):
        config = load("175b", sp=True, recompute="selective")
        (axes,) = plot("memory", config).axes
        allocated, tops = [0.0] * 8, [0.0] * 8
        for bar in axes.patches:
            place = round(bar.get_x() + bar.get_width() / 2)
            top = bar.get_y() + bar.get_height()
            tops[place] = max(tops[place], top)
            if bar.get_facecolor() != (1, 1, 1, 1):  # estimates are white with hatching
                allocated[place] = max(allocated[place], top)
        held = device(config)
        assert allocated == pytest.approx([stage.peak.bytes / GIB for stage in held])
        needed = headroom(config).needed
        assert tops == pytest.approx([needed(stage.peak.bytes) / GIB for stage in held])
        (lines,) = axes.collections
        marked = [segment[0][1] for segment in lines.get_segments()]
        assert marked == pytest.approx(allocated)
        labels = [text.get_text() for text in axes.get_legend().get_texts()]
        assert "activations" in labels
        assert "a100-80gb: 79.25 GiB" in labels
        assert "peak phase: backward (stages 0-7)" in axes.get_xlabel()

    def test_an_accounting_is_refused_where_every_byte_is_counted(self):
        with pytest.raises(UsageError, match="figure memory does not take --accounting"):
            plot("memory", load("22b"), "paper")

    def test_a_gpu_that_nobody_named_has_no_line(self):
        (axes,) = plot("memory", load("llama-3-8b", seq_length=4096)).axes
        assert not any("GiB" in text.get_text() for text in axes.get_legend().get_texts())

    @pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "zb-h2", "zb-v", "dualpipe"])
    def test_curves_reach_the_peak_and_end_at_nothing(self, schedule):
        config = load("22b", pp=4, global_batch_size=64, schedule=schedule)
        runs = timeline(config.parallel, config.microbatches)
        for number in range(4):
            _, sizes = curve(runs[number], chunk_weights(config, number, "exact"))
            assert sizes[-1] == 0
            assert max(sizes) == stage(config, number, "exact").total

    def test_of_many_stages_eight_are_drawn(self):
        below = plot("stages", load("530b", vpp=1)).axes[1]
        labels = [text.get_text() for text in below.get_legend().get_texts()]
        assert labels[::7] == ["stage 0", "stage 34"]
        assert len(below.lines) == 8
        assert "140 of 280 micro-batches" in below.get_xlabel()

    def test_one_stage_has_no_time(self):
        assert len(plot("stages", load("22b")).axes) == 1


def test_gpipe_holds_every_head_at_once():
    """16 micro-batches have gone through the last stage before the first comes back."""
    config = load("22b", pp=4, global_batch_size=64, schedule="gpipe")
    last = device(config)[-1]
    head = activations.total(activations.kept(head_graph(config)))
    held = sum(part.bytes for part in last.peak.parts if part.group in ("logits", "activations"))
    assert held >= stage(config, 3, "exact").layers + 16 * head
