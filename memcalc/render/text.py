"""Text: a table for a terminal, in scaled units, readable at 80 columns."""

import io
import os
import sys
import textwrap
from collections.abc import Iterable
from itertools import product
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memcalc import terminal, units
from memcalc.report import Column, Report, scales

HEADER = 14  # the width to which headers are wrapped, if there is room
GAP = 2  # columns of a terminal beside each column of a table


def render(report: Report, wide: bool = False) -> str:
    """The report as text: the answer, the title, the table and the notes.

    Columns of detail that do not fit are left out, those of most detail first. A note that begins
    with such a column's name and a colon is left out too. Words, numbers and formulas are never
    broken: a table that is too wide without detail is wider than the terminal.

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
        console.print(Text(report.answer, style=f"bold {ANSWER[report.good]}"), soft_wrap=wide)
        console.print()
    console.print(Text(report.title, style="bold"))
    columns = console.width
    table, console.width, shown = _fitting(report, console, wide)
    console.print(table)
    console.width = columns
    hidden = {_words(column.name) for column in report.columns if column not in shown}
    for note in report.notes:
        if note.partition(":")[0] in hidden:
            continue
        console.print(Padding(Text(note, style="dim"), (0, 0, 0, 2)))
    # rich pads its lines to the width of the table
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


# Report.good -> the colour of the answer.
ANSWER = {True: "green", False: "red", None: ""}


class _Shown(NamedTuple):
    """A column of a table: its header in lines, its cells, its width and its least width."""

    column: Column
    header: list[str]
    cells: list[str]
    width: int
    least: int


def _fitting(report: Report, console: Console, wide: bool) -> tuple[Table, int, list[Column]]:
    """The table with as many columns as fit, its width, and these columns."""
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
    return _table(shown), width, [each.column for each in shown]


def _shown(column: Column, header: str, cells: list[str], header_width: int, most: int) -> _Shown:
    """A column whose header is wrapped to this width, or to that of its cells."""
    lines = textwrap.wrap(
        header, max(header_width, *(len(text) for text in (*cells, *header.split(" "))))
    )
    width = max(map(len, (*cells, *lines)))
    words = (word for text in (*cells, *lines) for word in text.split(" "))
    least = min(most, max(map(len, words))) if column.unit == "text" else width
    return _Shown(column, lines, cells, width, least)


def _folded(shown: list[_Shown], excess: int) -> list[_Shown]:
    """The columns, narrower by ``excess`` in all if text can be wrapped at its spaces.

    Only a word that is wider than the terminal is broken.
    """
    found = list(shown)
    for at in sorted(range(len(shown)), key=lambda at: shown[at].least - shown[at].width):
        cut = max(0, min(excess, shown[at].width - shown[at].least))
        found[at] = shown[at]._replace(width=shown[at].width - cut)
        excess -= cut
    return found


def _table(shown: Iterable[_Shown]) -> Table:
    """The table, with each column at its width."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", padding=(0, 0, 0, 1))
    for each in shown:
        table.add_column(
            "\n".join(each.header),
            justify="left" if each.column.unit in ("text", "formula") else "right",
            no_wrap=each.column.unit != "text",
            overflow="fold",
            width=each.width,
        )
    for row in zip(*(each.cells for each in shown), strict=True):
        table.add_row(*(Text(cell) for cell in row))
    return table


def _column(
    column: Column, values: list[Any], scales: dict[str, tuple[str, int]]
) -> tuple[str, list[str]]:
    """A column's header, with its unit, and its cells."""
    header = _words(column.name)
    if column.unit in scales:
        name, scale = scales[column.unit]
        header = f"{header.removesuffix(column.unit).rstrip()} {name}".strip()
        return header, ["-" if cell is None else cell for cell in units.column(values, scale)]
    if column.name.endswith("_error"):  # a ratio, shown in percent
        return f"{header} %", ["-" if v is None else f"{100 * v:+.2f}" for v in values]
    return header, [_cell(value, column.unit) for value in values]


def _words(name: str) -> str:
    """A column's name in words."""
    return name.replace("_", " ")


def _cell(value: Any, unit: str) -> str:
    if value is None or value == "":
        return "-"
    return units.number(value, unit) if isinstance(value, (int, float)) else str(value)
