"""What a terminal is told: its width, messages of one line, and progress."""

import io
import sys
import time

import pytest

from memcalc import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("name", ["COLUMNS", "LINES"])
@pytest.mark.parametrize(
    "value", ["9" * 20, "9" * 5000, "0", "-1", "²", "٨", "", "1e3", "\udcff", "80x"]
)
def test_no_value_of_columns_and_lines_stops_an_answer(memcalc, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    outcome = memcalc("layer 22b")
    assert (outcome.status, outcome.err) == (0, "")
    assert "6,752" in outcome.out


def test_progress_is_silent_where_stderr_is_no_terminal(monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE_SECONDS", 0)
    for stream in (io.StringIO(), None):
        monkeypatch.setattr(sys, "stderr", stream)
        with progress.progress("counting", 2) as step:
            step()
        assert stream is None or stream.getvalue() == ""


def test_progress_is_shown_on_a_terminal_and_taken_away_again(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "PATIENCE_SECONDS", 0)
    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    with progress.progress("counting [sheep]", 2) as step:
        step()
        time.sleep(0.3)
    assert "counting [sheep]" in shown.getvalue()
    assert "1/2" in shown.getvalue()
    assert shown.getvalue().endswith("\x1b[2K")  # the line is erased


def test_a_dumb_terminal_shows_no_progress(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(progress, "PATIENCE_SECONDS", 0)
    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    with progress.progress("counting", 2) as step:
        step()
        time.sleep(0.1)
    assert shown.getvalue() == ""


def test_work_that_is_done_at_once_shows_no_progress(monkeypatch):
    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    with progress.progress("counting", 2) as step:
        step()
    assert shown.getvalue() == ""
