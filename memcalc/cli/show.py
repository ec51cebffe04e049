"""Showing a report: on stdout, or in a file, with its warnings and failures on stderr."""

import sys
from collections.abc import Iterable
from pathlib import Path

import click

from memcalc import files
from memcalc.cli.command import remembered
from memcalc.errors import OutputError, nearest
from memcalc.figures import SUFFIXES as FIGURES
from memcalc.render import SUFFIXES
from memcalc.report import Report
from memcalc.terminal import abandon, say


def warn(notes: Iterable[str]) -> None:
    """Print on stderr those notes that are warnings; not every output shows notes."""
    for note in notes:
        if note.startswith("warning: "):
            say(f"memcalc: {note}")


def show(report: Report, format_: str | None, output: Path | None) -> None:
    """Print a report, or write it to a file, in the given format or that of the file's suffix.

    Warnings are among the report's notes. Text on stdout shows them only there; with every other
    output they are on stderr too. A report's failures go to stderr, and the exit status is then 1.
    """
    suffix = output.suffix.lower() if output else ""
    if suffix in FIGURES:
        raise click.UsageError(
            f"a table cannot be written as {suffix}; for figures, see `memcalc plot`"
        )
    if format_ is None and suffix and suffix not in SUFFIXES:
        hint = nearest(suffix, SUFFIXES)
        raise click.UsageError(f"no format has the suffix {suffix}; {hint}; or pass --format")
    format_ = format_ or SUFFIXES.get(suffix, "text")
    if format_ != "text" or _file(output):
        warn(report.notes)
    write(report.render(format_, remembered("wide")), output)
    for failure in report.failures:
        say(f"memcalc: failed: {failure}")
    if report.failures:
        raise click.exceptions.Exit(1)


def write(text: str, output: Path | None) -> None:
    """Print a text, or write it to a file, whole or not at all; the file ``-`` is stdout.

    Raises:
        OutputError: The file or stdout cannot be written.
    """
    if file := _file(output):
        files.write(file, text.encode())
        return
    try:
        click.echo(_printable(text), nl=False)
    except BrokenPipeError:
        raise
    except OSError as error:
        abandon(sys.stdout)
        raise OutputError(f"the answer cannot be printed: {error.strerror}") from error


def _file(output: Path | None) -> Path | None:
    """The file to write; None for stdout."""
    return None if str(output) == "-" else output


def _printable(text: str) -> str:
    """The text in stdout's encoding, with escapes for other characters."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.replace("─", "-").encode(encoding, "backslashreplace").decode(encoding)
    return text
