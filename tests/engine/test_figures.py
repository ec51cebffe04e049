"""Figures: in one style of their own, with nothing cut off, and no other program started."""

import os
import subprocess
import sys

import matplotlib
import pytest

from memcalc import figures, load, plot

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
