"""Text: a table for a terminal, in scaled units, readable at 80 columns."""

import io
import os
import re
import sys
import textwrap
from collections.abc import Iterable
from itertools import product
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from memcalc import terminal, units
from memcalc.report import Column, Report, scales

HEADER = 14  # the width to which headers are wrapped, if there is room
GAP = 2  # columns of a terminal beside each column of a table
INDENT = "  "  # of notes
# A space at which a line is not broken: between a size's name and its number, or a number and its
# unit.
GLUE = re.compile(
    r"(?<=\b[a-z]) (?=[0-9])|(?<=\b[a-z]p) (?=[0-9])|(?<=\b(?:vpp|dim)) (?=[0-9])"
    r"|(?<=\b(?:ZeRO|size)) (?=[0-9])|(?<=\b(?:stage|batch)) (?=[0-9])"
    r"|(?<=[0-9]) (?=%|(?:[KMGTP]i?|k)?B\b|[kMGTPE]?FLOP)"
)
UNBROKEN = ("shape",)  # columns of text whose cells are never wrapped


def render(report: Report, wide: bool = False) -> str:
    """The report as text: the answer, the title, the table and the notes.

    Columns of detail that do not fit are left out, those of most detail first, and named under the
    table. A note that begins with such a column's name and a colon is left out too. Text is
    wrapped at spaces, and a formula between its terms. Words, numbers and shapes are never broken.

    Args:
        report: The report.
        wide: Whether all columns but empty ones are shown, each as wide as its cells.

    >>> from memcalc.report import Column
    >>> columns = (Column("part", "text"), Column("bytes", "bytes"))
    >>> print(render(Report("demo", "Two", columns, (("x", 2048), ("y", 1024)))), end="")
    Two
    <BLANKLINE>
     part      B
     ───────────
     x     2,048
     y     1,024
    <BLANKLINE>
    """
    out = io.StringIO()
    console = Console(
        file=out,
        width=terminal.width(),
        height=terminal.HEIGHT,
        force_terminal=bool(sys.stdout and sys.stdout.isatty()) and "NO_COLOR" not in os.environ,
        force_jupyter=False,
        highlight=False,
        emoji=False,
        markup=False,
    )
    if report.answer:
        answer = report.answer if wide else _wrapped(report.answer, console.width)
        console.print(Text(answer, style=f"bold {ANSWER[report.good]}"), soft_wrap=wide)
        console.print()
    console.print(Text(_wrapped(report.title, console.width), style="bold"))
    columns = console.width
    table, console.width, hidden = _fitting(report, console, wide)
    console.print(table)
    console.width = columns
    words = {column.words for column in hidden}
    lines = [note for note in report.notes if note.partition(":")[0] not in words]
    if hidden:
        names = ", ".join(column.header("") or column.words for column in hidden)
        lines.insert(0, f"not shown: {names} (--wide shows all columns)")
    for line in lines:
        console.print(Text(_wrapped(line, columns, INDENT), style="dim"))
    # rich pads its lines to the width of the table
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


# Report.good -> the color of the answer.
ANSWER = {True: "green", False: "red", None: ""}


def _wrapped(text: str, width: int, indent: str = "") -> str:
    """A text in lines, none of which ends between a number and its name or unit.

    >>> _wrapped("one stage (tp 8, 3.5 GiB)", 14).splitlines()
    ['one stage', '(tp 8,', '3.5 GiB)']
    """
    lines = textwrap.wrap(
        GLUE.sub("\N{NO-BREAK SPACE}", text),
        max(width, len(indent) + 1),
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
    )
    return "\n".join(lines).replace("\N{NO-BREAK SPACE}", " ")


class _Shown(NamedTuple):
    """A column of a table: its header in lines, its cells, its width and its least width."""

    column: Column
    header: list[str]
    cells: list[str]
    width: int
    least: int


def _fitting(report: Report, console: Console, wide: bool) -> tuple[Table, int, list[Column]]:
    """The table with as many columns as fit, its width, and the columns that are left out."""
    common, most = scales(report.columns, report.rows), console.width
    known = [
        (column, *_column(column, report.column(column.name), common))
        for column in report.columns
        if not column.detail or any(each not in (None, "") for each in report.column(column.name))
    ]
    levels = sorted({int(column.detail) for column, _, _ in known}, reverse=True)
    for level, header_width in product(levels, (HEADER, 0)):
        shown = [_shown(*each, header_width, most) for each in known if each[0].detail <= level]
        width = sum(each.width + GAP for each in shown)
        if wide or width <= most:
            break
    else:
        shown = _folded(shown, width - most)
        width = max(most, sum(each.width + GAP for each in shown))
    there = [each.column for each in shown]
    return _table(shown), width, [column for column, *_ in known if column not in there]


def _shown(column: Column, header: str, cells: list[str], header_width: int, most: int) -> _Shown:
    """A column whose header is wrapped to this width, or to that of its cells."""
    lines = textwrap.wrap(
        header, max(header_width, *(len(text) for text in (*cells, *header.split(" "))))
    )
    width = max(map(len, (*cells, *lines)))
    foldable = column.unit in ("text", "formula") and column.name not in UNBROKEN
    words = (word for text in (*cells, *lines) for word in text.split(" "))
    least = max(map(len, words)) if foldable else width
    least = min(most, least) if column.unit == "text" else least
    return _Shown(column, lines, cells, width, least)


def _folded(shown: list[_Shown], excess: int) -> list[_Shown]:
    """The columns, narrower by ``excess`` in all if their cells can be wrapped at spaces.

    The widest is narrowed first. Only a word that is wider than the terminal is broken.
    """
    widths = [each.width for each in shown]
    for _ in range(excess):
        able = [at for at, each in enumerate(shown) if widths[at] > each.least]
        if not able:
            break
        widths[max(able, key=lambda at: widths[at])] -= 1
    return [each._replace(width=width) for each, width in zip(shown, widths, strict=True)]


def _table(shown: Iterable[_Shown]) -> Table:
    """The table, with each column at its width."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", padding=(0, 0, 0, 1))
    for each in shown:
        table.add_column(
            "\n".join(each.header),
            justify="left" if each.column.unit in ("text", "formula") else "right",
            no_wrap=each.column.unit not in ("text", "formula") or each.column.name in UNBROKEN,
            overflow="fold",
            width=each.width,
        )
    for row in zip(*(each.cells for each in shown), strict=True):
        table.add_row(*(Text(cell) for cell in row))
    return table


def _column(
    column: Column, values: list[Any], scales: dict[str, units.Scale]
) -> tuple[str, list[str]]:
    """A column's header, with its unit, and its cells."""
    header = column.words
    if column.unit in scales:
        name, scale = scales[column.unit]
        return column.header(name), [
            "-" if cell is None else cell for cell in units.column(values, scale)
        ]
    if column.name.endswith("_error"):  # a ratio, shown in percent
        return f"{header} %", ["-" if v is None else f"{100 * v:+.2f}" for v in values]
    if column.name.endswith("_per_extra_flop"):  # too small a number for a single FLOP
        header = header.replace("flop", "MFLOP")
        return header, ["-" if v is None else _cell(1e6 * v, column.unit) for v in values]
    return header, [_cell(value, column.unit) for value in values]


def _cell(value: Any, unit: str) -> str:
    if value is None or value == "":
        return "-"
    return units.number(value, unit) if isinstance(value, (int, float)) else str(value)
