"""Figures: in one style of their own, with nothing cut off, and no other program started."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import matplotlib
import pytest
from matplotlib.text import Text

from memcalc import figures, load, plot
from memcalc.analysis.device import device
from memcalc.analysis.rank import Rank
from memcalc.analysis.timeline import LAST_ITERATION, events, replay
from memcalc.analysis.walk import SAVED
from memcalc.figures import stages, step, style

HOSTILE_RC = {
    "usetex": b"text.usetex: True\nfont.size: 40\nsavefig.dpi: 10\nsavefig.bbox: tight\n",
    "not text": b"\xff\xfe\0",
    "wrong": b"font.size: many\nno such line\n: :\n",
}
PROGRAMS = ("latex", "pdflatex", "xelatex", "dvipng", "dvisvgm", "gs", "fc-list", "kpsewhich")


class TestStyle:
    @pytest.fixture
    def run(self, tmp_path):
        """A figure in a process of its own, with stand-ins for every program it might start."""
        folder = tmp_path / "bin"
        folder.mkdir()
        for name in PROGRAMS:
            program = folder / name
            program.write_text(f"#!/bin/sh\ntouch '{tmp_path}/started'\nexit 1\n")
            program.chmod(0o755)

        def run(cwd, **more):
            environment = {
                **os.environ,
                "PATH": f"{folder}:{os.environ['PATH']}",
                "XDG_CACHE_HOME": str(tmp_path / "cache"),
                **more,
            }
            done = subprocess.run(
                [sys.executable, "-m", "memcalc", "plot", "techniques", "22b", "-o", "x.png"],
                cwd=cwd,
                env=environment,
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
            assert not (tmp_path / "started").exists()
            return (cwd / "x.png").read_bytes()

        return run

    @pytest.fixture
    def plain(self):
        return figures.encode(plot("techniques", load("22b")), ".png")

    @pytest.mark.parametrize("content", HOSTILE_RC.values(), ids=HOSTILE_RC)
    def test_nobodys_matplotlibrc_has_an_influence(self, run, tmp_path, plain, content):
        work, home = tmp_path / "work", tmp_path / "home" / "matplotlib"
        for folder in (work, home):
            folder.mkdir(parents=True)
            (folder / "matplotlibrc").write_bytes(content)
        style = home / "stylelib"
        style.mkdir()
        (style / "bad.mplstyle").write_bytes(content)
        named = dict.fromkeys(("MATPLOTLIBRC", "MPLCONFIGDIR"), str(home))
        named["XDG_CONFIG_HOME"] = str(tmp_path / "home")
        assert run(work, **named, MPLBACKEND="bogus") == plain
        assert {path.name for path in work.iterdir()} == {"matplotlibrc", "x.png"}

    def test_a_home_that_cannot_be_written_is_no_matter(self, run, tmp_path, plain):
        work = tmp_path / "work"
        work.mkdir()
        (tmp_path / "taken").write_text("a file, in which no folder can be made")
        named = {"HOME": str(tmp_path / "taken"), "TMPDIR": str(tmp_path / "scratch")}
        (tmp_path / "scratch").mkdir()
        assert run(work, **named, XDG_CACHE_HOME=str(tmp_path / "taken")) == plain
        assert list((tmp_path / "scratch").iterdir()) == []

    def test_a_session_keeps_its_style_and_a_figure_ours(self, plain):
        theirs = {"text.usetex": True, "font.size": 40, "savefig.dpi": 10}
        with matplotlib.rc_context(theirs):
            drawn = plot("techniques", load("22b"))
            assert figures.encode(drawn, ".png") == plain
            assert {name: matplotlib.rcParams[name] for name in theirs} == theirs
            assert drawn._repr_png_().startswith(b"\x89PNG")


class TestCommand:
    def test_every_kind_has_a_help_of_its_own_with_examples_that_run(
        self, memcalc, tmp_path, monkeypatch
    ):
        listed = memcalc("plot --help").out
        (tmp_path / "runs.jsonl").write_text(RUNS.read_text())
        monkeypatch.chdir(tmp_path)
        for kind in figures.ALL:
            assert f"  {kind} " in listed
            for flag in ("-h", "--help"):
                assert f"memcalc plot {kind}" in memcalc(f"plot {kind} {flag}").out
            (example, *_) = re.findall(
                r"^ *memcalc (plot .*)$", memcalc(f"plot {kind} -h").out, re.M
            )
            assert memcalc(example).status == 0
            assert Path(example.split()[-1]).exists()

    def test_help_of_a_kind_has_the_options_that_change_it(self, memcalc):
        def listed(kind):
            return set(
                re.findall(r"^ +(?:-\w, )?(--[\w-]+)", memcalc(f"plot {kind} --help").out, re.M)
            )

        own = {"--output", "--force", "--help"}
        assert listed("paper-7") == listed("backtest") == own
        assert {"--tp", "--attention", "--accounting"} < listed("techniques")
        assert not {"--pp", "--gpu", "--optimizer", "--sp"} & listed("techniques")
        assert {"--pp", "--dp", "--recompute", "--cross-entropy"} < listed("stages")
        assert not {"--gpu", "--optimizer", "--zero"} & listed("stages")
        assert {"--pp", "--gpu", "--optimizer", "--zero"} < listed("memory")
        assert {"--gpu", "--optimizer", "--main-grads"} < listed("step")

    @pytest.mark.parametrize("kind", ["techniques", "stages"])
    @pytest.mark.parametrize(
        "option",
        ["--gpu h100", "--optimizer sgd", "--zero 3", "--moments fp8", "--main-grads bf16"],
    )
    def test_an_option_without_effect_is_refused_by_name(self, memcalc, kind, option):
        outcome = memcalc(f"plot {kind} llama-3-8b {option} -o x.png")
        message = f"memcalc plot {kind}: {option.split()[0]} has no effect on {kind}\n"
        assert (outcome.status, outcome.err) == (2, message)

    def test_what_changes_nothing_in_a_layer_is_refused_of_its_figure(self, memcalc):
        for option in ("--pp 4", "--global-batch-size 64", "--cross-entropy te", "--dp 2"):
            outcome = memcalc(f"plot techniques llama-3-8b {option} -o x.png")
            assert f"{option.split()[0]} has no effect on techniques" in outcome.err

    @pytest.mark.parametrize(
        "line",
        [
            "techniques 22b --imbalance 2",
            "stages llama-3-8b -s 512 --pp 2 --recompute selective",
            "memory llama-3-8b -s 512 --bucket 5",
        ],
    )
    def test_an_option_that_changes_nothing_here_is_named(self, memcalc, tmp_path, line):
        outcome = memcalc(f"plot {line} -o {tmp_path}/x.svg")
        *_, option, _ = line.split()
        assert outcome.status == 0
        assert re.search(rf"warning: .*{option.strip('-')}.* has no effect", outcome.err)

    def test_what_changes_a_figure_is_not_named(self, memcalc, tmp_path):
        for line in (
            "stages 22b --pp 4 --global-batch-size 64",
            "stages llama-3-8b -s 512 --dp 8",
            "techniques 22b --tp 4 -s 1024",
        ):
            assert memcalc(f"plot {line} -o {tmp_path}/x.svg").err == ""

    def test_a_model_in_place_of_a_kind_leads_on(self, memcalc):
        assert "try `memcalc plot memory 175b -o FILE`" in memcalc("plot 175b").err


RUNS = Path(__file__).parents[1] / "runs.jsonl"
DUALPIPE = {"pp": 16, "schedule": "dualpipe", "global_batch_size": 64}
IN_BACKWARD = {"implementation": "transformers-sdpa", "main_grads": "bf16"}
IN_BACKWARD |= {"main_params": "none", "moments": "bf16"}
LONG = "W" * 300  # the widest letter there is

# What is drawn, of what: one stage and many, every kind of layer, no GPU and one, long names.
DRAWN = [
    ("memory", "175b", {"sp": True, "recompute": "selective"}),
    ("memory", "llama-3-8b", {"seq_length": 4096, "gpu": "h100", "zero": 1, "dp": 8}),
    ("memory", "t5-11b", {"seq_length": 512}),
    ("memory", "1t", {"sp": True, "recompute": "selective"}),
    ("memory", "deepseek-v3", {"seq_length": 4096, "pp": 32, "ep": 8, "dp": 8, "zero": 1}),
    ("stages", "22b", {}),
    ("stages", "175b", {"sp": True, "recompute": "selective"}),
    ("stages", "530b", {"vpp": 1, "recompute": "full"}),
    ("stages", "llama-3-70b", {"pp": 4, "vpp": 5}),
    ("stages", "deepseek-v3", {"seq_length": 4096, **DUALPIPE}),
    ("techniques", "175b", {}),
    ("techniques", "llama-3-8b", {}),
    ("techniques", "deepseek-v3", {"seq_length": 4096, "tp": 8}),
    ("techniques", "t5-11b", {"seq_length": 16}),
    ("step", "gpt2", IN_BACKWARD),
    ("step", "llama-3.2-1b", {"seq_length": 2048, "gpu": "a100", **IN_BACKWARD}),
    ("step", "gpt2", {"global_batch_size": 8, "recompute": "full", **IN_BACKWARD}),
    ("step", "mixtral-8x7b", {"optimizer": "sgd", "keep_gradients": True, **IN_BACKWARD}),
    *((kind, LONG, {}) for kind in ("memory", "stages", "techniques")),
    *((kind, None, {}) for kind in figures.PAPER),
    ("backtest", RUNS, {}),
]


def drawn(kind, name, settings):
    if name is None or isinstance(name, Path):
        return plot(kind, name)
    config = load("530b" if name == LONG else name, **settings)
    if name == LONG:
        config = replace(config, model=replace(config.model, name=LONG))
    return plot(kind, config)


class TestLayout:
    @pytest.mark.parametrize(
        ("kind", "name", "settings"),
        DRAWN,
        ids=[f"{kind}-{str(name)[-20:]}" for kind, name, _ in DRAWN],
    )
    def test_no_text_is_cut_off_or_covers_another(self, monkeypatch, kind, name, settings):
        figure = drawn(kind, name, settings)
        boxes = {}
        draw = Text.draw

        def recorded(text, renderer, *rest):
            if text.get_visible() and text.get_text().strip():
                boxes[text] = text.get_window_extent(renderer)
            draw(text, renderer, *rest)

        figure.draw_without_rendering()  # it is now laid out
        monkeypatch.setattr(Text, "draw", recorded)
        figure.canvas.draw()
        assert len(boxes) > 5
        texts = {text: box.padded(-0.5) for text, box in boxes.items()}
        for text, box in texts.items():
            inside = figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1
            assert inside, text
            assert figure.bbox.y0 <= box.y0, text
            assert box.y1 <= figure.bbox.y1, text
        for text, box in texts.items():
            covered = [other for other in texts if other is not text and box.overlaps(texts[other])]
            assert not covered, text


class TestStages:
    @pytest.mark.parametrize("number", [1, 2, 8, 16, 17, 35, 36, 64, 100, 1000])
    def test_ticks_are_of_stages_that_exist(self, number):
        _, axes = style.single()
        style.stage_axis(axes, number)
        ticks = axes.get_xticks()
        assert (ticks[0], ticks[-1]) == (0, number - 1)
        assert all(tick in range(number) for tick in ticks)
        assert len(ticks) <= 18

    def test_stages_with_the_same_curve_are_named_together(self):
        config = load("deepseek-v3", seq_length=4096, **DUALPIPE)
        _, below = plot("stages", config).axes
        labels = [text.get_text() for text in below.get_legend().get_texts()]
        assert labels == [f"stages {stage} and {15 - stage}" for stage in range(8)]

    def test_a_long_curve_is_thinned_and_keeps_its_peak_and_its_end(self):
        times = list(range(100_001))
        sizes = [0.0] * 100_001
        sizes[77_777] = 5.0
        few, left = stages.thinned(times, sizes)
        assert len(few) <= stages.MOST_POINTS + 1
        assert left[few.index(77_777)] == 5.0
        assert few[-1] == 100_000

    def test_many_bars_are_one_outline_of_the_same_heights(self):
        number = style.MOST_BARS + 1
        _, axes = style.single()
        parts = [style.BarPart(name, "red", "", range(number)) for name in "ab"]
        assert style.stack(axes, parts) == [2 * height for height in range(number)]
        assert len(axes.collections) == 2


class TestStep:
    """The figure of one iteration, from the events of ``memcalc.analysis.timeline``."""

    @staticmethod
    def curve(name="gpt2", **settings):
        return step.curve(load(name, **{**IN_BACKWARD, **settings}).padded)

    @pytest.mark.parametrize(
        "settings",
        [
            {},
            {"seq_length": 16},
            {"recompute": "full", "global_batch_size": 4},
            {"keep_gradients": True, "dp": 2},
            {"optimizer_step": "fused", "holds_logits": False},
        ],
    )
    @pytest.mark.parametrize("name", ["gpt2", "llama-3.2-1b"])
    def test_its_peak_is_that_of_memory(self, name, settings):
        settings = {"seq_length": 512, **IN_BACKWARD, **settings}
        config = load(name, **settings).padded
        drawn = step.curve(config)
        (memory,) = device(config)
        assert drawn.peak.allocated == memory.peak.bytes
        assert max(point.reserved for point in drawn.points) == replay(config).reserved
        assert {"optimizer step": "step"}.get(memory.peak.name, memory.peak.name) == (
            drawn.peak.phase
        )
        assert all(size >= 0 for point in drawn.points for size in point.sizes)

    def test_what_lives_when(self):
        """Weights 2 bytes per parameter, moments 4; in the step gradients 2, square roots 2."""
        config = load("gpt2", **IN_BACKWARD).padded
        number = Rank(config, 0).parameters.total()
        points = self.curve().points
        most = {
            phase: dict(
                zip(step.KINDS, map(max, zip(*(p.sizes for p in group), strict=True)), strict=True)
            )
            for phase, group in groupby(points, key=lambda point: point.phase)
        }
        assert {sizes["weights"] for sizes in most.values()} == {2 * number}
        assert {sizes["optimizer"] for sizes in most.values()} == {4 * number}
        assert [most[phase]["gradients"] for phase in ("forward", "loss", "step")] == [
            0,
            0,
            2 * number,
        ]
        assert most["step"]["temporary"] == 2 * number
        logits = 1024 * config.model.vocab_size
        assert 2 * logits < most["embedding backward"]["logits"] < 2.1 * logits  # returned
        # fp32 log-probabilities, two gradients of their size, and the logits that are returned
        assert 14 * logits < most["head backward"]["logits"] < 14.1 * logits
        assert most["step"]["logits"] == most["step"][SAVED] == 0

    def test_ddps_buckets_are_buffers_which_last(self):
        config = load("gpt2", dp=2, **IN_BACKWARD).padded
        place = list(step.KINDS).index("buffers")
        least = min(point.sizes[place] for point in self.curve(dp=2).points)
        assert least >= 2 * Rank(config, 0).parameters.total()

    def test_the_phases_have_all_events(self):
        drawn = self.curve()
        config = load("gpt2", **IN_BACKWARD).padded
        (*_, last) = (
            list(group)
            for mark, group in groupby(events(Rank(config, 0)), lambda e: e.op == LAST_ITERATION)
            if not mark
        )
        assert sum(n for _, n in drawn.phases) == sum(e.storage is not None for e in last)

    def test_few_points_are_drawn_and_the_peak_is_one_of_them(self):
        config = load("llama-3-70b", seq_length=64, recompute="full", **IN_BACKWARD).padded
        drawn = step.curve(config)
        assert sum(n for _, n in drawn.phases) > 10 * step.MOST_POINTS
        assert len(drawn.points) <= step.MOST_POINTS + len(drawn.phases)
        assert drawn.peak.allocated == replay(config).allocated

    def test_micro_batches_that_are_not_drawn_are_said(self):
        (axes,) = plot("step", load("gpt2", global_batch_size=8, **IN_BACKWARD)).axes
        assert axes.get_xlabel().endswith("; 2 of 8 micro-batches")
        (axes,) = plot("step", load("gpt2", global_batch_size=2, **IN_BACKWARD)).axes
        assert "micro-batches" not in axes.get_xlabel()

    def test_the_peak_and_the_gpu_are_in_the_legend(self):
        (axes,) = plot("step", load("gpt2", gpu="a10", **IN_BACKWARD)).axes
        shown = [text.get_text() for text in axes.get_legend().get_texts()]
        assert shown[0] == "a10: 21.99 GiB"
        assert shown[1].splitlines()[1:] == ["head backward", "loss_log_softmax"]
        assert "reserved" in shown

    @pytest.mark.parametrize(
        ("options", "dtype"),
        [
            ("", "bf16"),
            ("--implementation transformers-sdpa", "bf16"),
            ("--implementation transformers-eager --precision fp32 --pp 2", "fp32"),
            ("--implementation torch --dp 8 --zero 3 --sharder fsdp2", "bf16"),
        ],
    )
    def test_a_run_whose_order_is_not_known_is_refused_with_what_to_pass(
        self, memcalc, tmp_path, options, dtype
    ):
        outcome = memcalc(f"plot step gpt2 {options} -o {tmp_path}/x.png")
        assert (outcome.status, outcome.err.count("\n")) == (2, 1)
        assert outcome.err.startswith("memcalc plot step: ") or outcome.err.startswith("memcalc: ")
        assert (
            f"pass --implementation transformers-sdpa (or torch) --main-grads {dtype} "
            f"--main-params none --moments {dtype}, and leave out --tp, --pp, --cp and --zero"
        ) in outcome.err
        assert not list(tmp_path.iterdir())
