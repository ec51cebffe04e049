"""Renderers and figures: what a person sees."""

import csv
import io
import json
import os
from dataclasses import replace
from xml.etree import ElementTree

import matplotlib.image
import pytest

import memcalc
from memcalc import figures
from memcalc.answers.layer import TECHNIQUES
from memcalc.config import load
from memcalc.errors import OutputError, UsageError
from memcalc.figures.techniques import PARTS, parts
from memcalc.files import write
from memcalc.render import render
from memcalc.report import Column, Report, scales
from memcalc.units import MIB

HOSTILE = Report(
    "demo",
    "<b>100% & more_</b>",
    (Column("name", "text"), Column("bytes", "bytes"), Column("share", "percent")),
    (("a|b*c_<d>&{e}~^\\", 1024, 50.0), ("[red]x[/red]", None, None)),
    {},
    ("a note: <i>",),
)


def test_text_shows_markup_as_it_is():
    text = render(HOSTILE, "text")
    assert "[red]x[/red]" in text
    assert "<b>100% & more_</b>" in text


def test_markdown_escapes_what_would_break_a_table():
    line = render(HOSTILE, "markdown").splitlines()[4]
    assert line == r"| a\|b\*c\_\<d\>&{e}~^\\ | 1024 | 50.0 |"


def test_no_text_becomes_a_link_a_picture_or_a_formula_of_a_spreadsheet():
    names = (
        "[click](javascript:alert(1))",
        "![i](http://evil/i.png)",
        "see www.evil.example",
        '=HYPERLINK("http://evil")',
        "@SUM(A1)",
        "+1",
        "-1",
        "-",
    )
    report = Report("demo", "[x](y)", (Column("id", "text"),), tuple((name,) for name in names))
    marked = render(report, "markdown")
    assert marked.startswith(r"**\[x\](y)**")
    assert r"\[click\](javascript" in marked
    assert r"\!\[i\](http\://evil" in marked
    assert r"www\.evil" in marked
    assert "://" not in marked.replace(r"\://", "")
    cells = [row[0] for row in csv.reader(io.StringIO(render(report, "csv")))][1:]
    assert cells == [f"'{name}" if name[0] in "=@+-" and len(name) > 1 else name for name in names]


def test_the_answer_is_the_first_line_of_every_rendering():
    report = replace(HOSTILE, answer="does not fit <b>", good=False)
    for format_ in ("text", "markdown", "latex"):
        assert "does not fit" in render(report, format_).splitlines()[0]
    assert render(report, "html").startswith("<div><p><b>does not fit &lt;b&gt;</b></p>")
    assert json.loads(render(report, "json"))["notes"] == ["does not fit <b>", "a note: <i>"]
    assert report.to_frame().attrs["answer"] == "does not fit <b>"
    assert "answer" not in render(HOSTILE, "json")


class TestText:
    COLUMNS = (
        Column("name", "text"),
        Column("bytes", "bytes"),
        Column("source", "text", detail=2),
        Column("phase", "text", detail=1),
        Column("empty", "text", detail=1),
    )

    def shown(self, name, source, columns, monkeypatch, wide=False):
        monkeypatch.setenv("COLUMNS", str(columns))
        row = (name, 1024, source, "forward", None)
        report = Report("demo", "One", self.COLUMNS, (row,), notes=("phase: of a step", "so: yes"))
        return render(report, "text", wide).splitlines()

    def test_columns_of_most_detail_are_left_out_first(self, monkeypatch):
        for columns, heads in ((80, "name B source phase"), (24, "name B phase"), (12, "name B")):
            lines = self.shown("x", "megatron/core", columns, monkeypatch)
            assert lines[2].split() == heads.split()
            assert ("  phase: of a step" in lines) == ("phase" in heads)
            assert "  so: yes" in lines or columns < 10
        wide = self.shown("x", "megatron/core " * 30, 12, monkeypatch, wide=True)
        assert wide[2].split() == ["name", "B", "source", "phase"]
        assert "megatron/core " * 29 in wide[4]

    @pytest.mark.parametrize("columns", [1, 10, 40, 80])
    def test_a_word_is_never_broken(self, columns, monkeypatch):
        name = "abstract/mfu_with_recomputation/and/more"
        lines = self.shown(name, "s", columns, monkeypatch)
        assert (columns < len(name)) or any(name in line for line in lines)
        text = " ".join(self.shown(f"{name} {name}", "s", 60, monkeypatch))
        assert text.count(name) == 2

    def test_a_narrow_column_stays_whole_beside_one_that_folds(self, monkeypatch):
        monkeypatch.setenv("COLUMNS", "24")
        columns = (Column("kind", "text"), Column("op", "text"), Column("dropped_by", "text"))
        report = Report("demo", "One", columns, (("dense", "one, two, three", "full"),))
        lines = render(report, "text").splitlines()
        assert max(map(len, lines)) <= 24
        words = {"kind", "op", "dropped", "by", "dense", "one,", "two,", "three", "full"}
        assert words <= set(" ".join(lines).split())

    @pytest.mark.parametrize("columns", ["9" * 20, "-5", "0", "x", ""])
    def test_any_width_of_a_terminal_is_one(self, columns, monkeypatch):
        assert self.shown("x", "s", columns, monkeypatch)[0]


def test_latex_escapes_what_it_reads_otherwise():
    text = render(HOSTILE, "latex")
    assert r"a|b*c\_<d>\&\{e\}\textasciitilde{}\textasciicircum{}\textbackslash{}" in text
    assert r"\caption{<b>100\% \& more\_</b>}" in text
    assert "-- & --" in text


def test_html_escapes_and_typesets():
    html = render(HOSTILE, "html")
    assert "&lt;b&gt;100% &amp; more_&lt;/b&gt;" in html
    assert "<b>100%" not in html
    formulas = memcalc.layer(load("175b"))._repr_html_()
    assert r"$\frac{34sbh}{t}$" in formulas


def test_html_shows_columns_of_detail_if_wide_is_asked_for():
    columns = (*TestText.COLUMNS,)
    report = Report("demo", "One", columns, (("x", 1024, "a source", "forward", None),))
    assert "a source" not in report.render("html")
    wide = report.render("html", wide=True)
    assert "a source" in wide
    assert ">phase<" in wide
    assert ">empty<" not in wide


def test_html_is_well_formed():
    for report in (HOSTILE, memcalc.layer(load("175b")), memcalc.ledger(load("llama-3-8b"))):
        ElementTree.fromstring(report.render("html"))


def test_an_unknown_format_is_refused():
    with pytest.raises(UsageError, match="format 'jsn' is unknown; did you mean 'json'"):
        HOSTILE.render("jsn")


def test_a_formula_displays_as_latex():
    formula = memcalc.layer_formula(load("175b", sp=True))
    assert formula._repr_latex_() == (
        r"$\displaystyle \frac{sbh}{t}\left(34 + \frac{5as}{h}\right)$"
    )


def test_latex_of_key_value_heads():
    formula = memcalc.layer_formula(load("llama-2-70b", tp=8))
    assert r"\frac{4\max\left(1, \frac{k}{t}\right)}{a}" in formula.latex()


def test_a_frame_has_the_rows_and_their_units():
    report = memcalc.layer(load("22b"))
    frame = report.to_frame()
    assert list(frame["bytes"]) == report.column("bytes")
    assert frame.attrs["units"]["bytes"] == "bytes"
    assert frame.attrs["symbols"]["h"] == 6144
    assert str(report) == report.render("text")
    assert "34*b*h*s" in frame.to_json()


def test_small_ratios_survive_in_latex():
    assert "1.63e-05" in memcalc.recompute(load("llama-3-70b", tp=8, sp=True)).render("latex")


class TestFigure:
    def test_bars_stand_as_high_as_the_layer_keeps(self):
        config = load("22b")
        drawn = memcalc.plot("techniques", config)
        (axes,) = drawn.axes
        tops = {}
        for bar in axes.patches:
            x = round(bar.get_x() + bar.get_width() / 2)
            tops[x] = max(tops.get(x, 0), bar.get_y() + bar.get_height())
        report = memcalc.layer(config)
        assert scales(report.columns, report.rows)["bytes"][0] in axes.get_ylabel()
        expected = [size / MIB for size in report.column("bytes")]
        assert [tops[x] for x in range(6)] == pytest.approx(expected)

    @pytest.mark.parametrize("name", ["llama-3-8b", "deepseek-v3", "t5-11b", "bert-large"])
    def test_no_part_of_a_layer_is_left_out(self, name):
        config = load(name, seq_length=512)
        if name == "t5-11b":  # so that the figure is of a decoder layer
            config = replace(config, model=replace(config.model, encoder_layers=1))
        sizes = parts(config, "paper")
        assert sizes.keys() <= PARTS.keys()
        assert sum(sizes.values()) == memcalc.layer_bytes(config)

    def test_a_figure_of_a_mixed_model_shows_every_kind_of_layer(self):
        drawn = memcalc.plot("techniques", load("deepseek-v3", seq_length=512))
        titles = [axes.get_title(loc="left") for axes in drawn.axes]
        assert titles == ["dense layers (3)", "moe layers (58)", "mtp layers (1)"]

    def test_equal_bars_are_explained(self):
        drawn = memcalc.plot("techniques", load("llama-3-8b", seq_length=512))
        title = drawn.get_suptitle().replace("\n", " ")
        assert "--tp 1: bars with and without tensor" in title
        assert "selective recomputation drops nothing" in title
        assert "t is 1" not in memcalc.plot("techniques", load("22b")).get_suptitle()

    def test_each_part_has_a_color_of_its_own(self):
        (axes,) = memcalc.plot("techniques", load("22b")).axes
        colors = {bar.get_facecolor() for bar in axes.patches}
        # a layer has either an MLP or experts, which share a color
        assert len(colors) == len(PARTS) - 1 == len(axes.get_legend().get_texts())

    def test_the_parts_sum_to_the_layer(self):
        for name in ("175b", "llama-3-70b"):
            config = load(name, tp=8)
            sums = [sum(parts(t.of(config), "exact").values()) for t in TECHNIQUES]
            assert sums == memcalc.layer(config, "exact").column("bytes")

    def test_a_file_is_what_its_suffix_says(self):
        drawn = memcalc.plot("techniques", load("175b"))
        png = figures.encode(drawn, ".PNG")
        assert matplotlib.image.imread(io.BytesIO(png)).shape[:2] == (880, 1440)
        svg = figures.encode(drawn, ".svg").decode()
        assert ElementTree.fromstring(svg).tag.endswith("svg")
        assert "MiB per layer" in svg
        assert figures.encode(drawn, ".pdf").startswith(b"%PDF-")

    def test_the_same_question_draws_the_same_file(self):
        for suffix in figures.SUFFIXES:
            once, again = (
                figures.encode(memcalc.plot("techniques", load("22b")), suffix) for _ in range(2)
            )
            assert once == again

    def test_an_unknown_figure_is_refused(self):
        with pytest.raises(UsageError, match="did you mean 'techniques'"):
            memcalc.plot("technique", load("22b"))


class TestFiles:
    def test_a_file_keeps_its_permissions_and_a_link_its_target(self, tmp_path):
        target, link = tmp_path / "target", tmp_path / "link"
        target.write_text("old")
        target.chmod(0o640)
        link.symlink_to(target)
        write(link, b"new")
        assert target.read_bytes() == b"new"
        assert target.stat().st_mode & 0o777 == 0o640
        assert link.is_symlink()

    def test_what_fails_leaves_nothing_behind(self, tmp_path, monkeypatch):
        monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
        with pytest.raises(OutputError, match="cannot be written: full"):
            write(tmp_path / "out", b"new")
        assert not list(tmp_path.iterdir())

    def test_a_file_that_may_not_be_written_is_not_replaced(self, tmp_path, monkeypatch):
        target = tmp_path / "precious"
        target.write_text("old")
        monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anything
        with pytest.raises(OutputError, match="Permission denied"):
            write(target, b"new")
        assert target.read_text() == "old"

    def test_a_pipe_is_written_into(self, tmp_path):
        os.mkfifo(tmp_path / "pipe")
        reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
        write(tmp_path / "pipe", b"new")
        assert os.read(reader, 10) == b"new"
        os.close(reader)

    def test_a_folder_is_no_file(self, tmp_path):
        with pytest.raises(OutputError, match="Is a directory"):
            write(tmp_path, b"new")


def test_a_table_that_is_too_wide_is_folded_at_spaces_and_never_cut(monkeypatch):
    columns = (Column("name", "text"), Column("says", "text"), Column("form", "formula"))
    row = ("an-identifier", "a few words, then more of them", "(s*b*h + 1)/(2*t)")
    report = Report("demo", "One", columns, (row,))
    for columns_ in (42, 20):  # 13 + 6 + 8 and 2 beside each are 33
        monkeypatch.setenv("COLUMNS", str(columns_))
        *_, rows = report.render().split("──\n")
        assert max(map(len, rows.splitlines())) <= max(33, columns_)
        assert sorted(rows.split()) == sorted(" ".join(row).split())


def test_a_shape_is_never_wrapped_and_a_long_label_is_no_narrower_than_a_formula(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    columns = (Column("part", "text"), Column("shape", "text"), Column("formula", "formula"))
    label, shape = "label of few words", "s b a (d-o)"
    form = " + ".join(f"{number}*b*h*s" for number in range(1, 9))
    text = Report("demo", "One", columns, ((label, shape, form),)).render()
    assert max(map(len, text.splitlines())) <= 60
    assert shape in text
    assert label in text


def test_columns_left_out_are_named_under_the_table(monkeypatch):
    columns = (Column("name", "text"), Column("logits_bytes", "bytes", detail=1))
    report = Report("demo", "One", columns, (("x" * 30, 1),))
    monkeypatch.setenv("COLUMNS", "34")
    assert "not shown: logits (--wide shows" in report.render()
    assert "not shown" not in report.render(wide=True)


def test_a_line_ends_neither_between_a_number_and_its_unit_nor_after_its_letter(monkeypatch):
    for width in range(20, 60):
        monkeypatch.setenv("COLUMNS", str(width))
        said = "peak of 17.5 GiB, MFU 68.2 % (s 4096, tp 8, ZeRO 1)"
        text = Report("demo", said, (Column("n", "count"),), ((1,),)).render()
        for whole in ("17.5 GiB", "68.2 %", "s 4096", "tp 8", "ZeRO 1"):
            assert whole in text
