"""Text: a table for a terminal, in units for people, readable at 80 columns."""

import io
import os
import sys
import textwrap
from collections.abc import Iterable
from itertools import product
from typing import Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memcalc import terminal, units
from memcalc.report import Column, Report, scales

HEADER = 14  # the width to which headers are folded, where there is room
ENDLESS = 100_000  # a width that no table reaches
GAP = 2  # columns of a terminal beside each column of a table


def render(report: Report, wide: bool = False) -> str:
    """The report as text: the answer, the title, the table and the notes.

    Columns of detail are left out where they do not fit, those of most detail first, and with a
    column the note that begins with its name and a colon. Words, numbers and formulas are never
    broken: a table that is too wide without detail is wider than the terminal.

    Args:
        report: The report.
        wide: Whether all columns are shown, each as wide as its cells.

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


# The colour of an answer, by whether it is good news.
ANSWER = {True: "green", False: "red", None: ""}


def _fitting(report: Report, console: Console, wide: bool) -> tuple[Table, int, list[Column]]:
    """The table with as many columns as there is room for, its width, and these columns."""
    known = [
        column
        for column in report.columns
        if not column.detail or any(each not in (None, "") for each in report.column(column.name))
    ]
    endless = console.options.update(max_width=ENDLESS)
    levels = sorted({int(column.detail) for column in known}, reverse=True)
    for level, header_width in product(levels, (HEADER, 0)):
        columns = [column for column in known if column.detail <= level]
        table = _table(report, columns, header_width, console.width)
        width = console.measure(table, options=endless)
        if wide or width.maximum <= console.width:
            return table, width.maximum, columns
    table = _table(report, columns, 0, console.width, fold=True)
    width = console.measure(table, options=endless)
    return table, max(console.width, width.minimum), columns


def _table(
    report: Report, columns: Iterable[Column], header_width: int, most: int, fold: bool = False
) -> Table:
    """A table of some columns, with headers folded to this width, or that of their cells.

    With ``fold``, text is folded at its spaces where the table is wider than ``most``; only a word
    that is wider than this is broken.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", padding=(0, 0, 0, 1))
    cells, widths, least = [], [], []
    common = scales(report)
    for column in columns:
        header, values = _column(column, report.column(column.name), common)
        width = max(header_width, *(len(text) for text in (*values, *header.split(" "))))
        lines = textwrap.wrap(header, width)
        table.add_column(
            "\n".join(lines),
            justify="left" if column.unit in ("text", "formula") else "right",
            no_wrap=column.unit != "text",
            overflow="fold",
        )
        cells.append(values)
        widths.append(max(map(len, (*values, *lines))))
        words = [word for text in (*values, *lines) for word in text.split(" ")]
        least.append(min(most, max(map(len, words))) if column.unit == "text" else widths[-1])
    if fold:
        excess = sum(widths) + GAP * len(widths) - most
        for at in sorted(range(len(widths)), key=lambda at: least[at] - widths[at]):
            cut = max(0, min(excess, widths[at] - least[at]))
            table.columns[at].width = widths[at] - cut
            excess -= cut
    for row in zip(*cells, strict=True):
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
    if column.name.endswith("_error"):  # a ratio, which people read in percent
        return f"{header} %", ["-" if v is None else f"{100 * v:+.2f}" for v in values]
    return header, [_cell(value, column.unit) for value in values]


def _words(name: str) -> str:
    """A column's name in words."""
    return name.replace("_", " ")


def _cell(value: Any, unit: str) -> str:
    if value is None or value == "":
        return "-"
    return units.number(value, unit) if isinstance(value, (int, float)) else str(value)
