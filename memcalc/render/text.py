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


def render(report: Report) -> str:
    """The report as text. Columns of detail are left out where they do not fit, or are empty.

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
    known = [
        column
        for column in report.columns
        if not column.detail or any(each not in (None, "") for each in report.column(column.name))
    ]
    brief = [column for column in known if not column.detail]
    endless = console.options.update(max_width=10_000)
    for columns, header_width in product((known, brief), (HEADER, 0)):
        table = _table(report, columns, header_width)
        width = console.measure(table, options=endless)
        if width.maximum <= console.width:
            break
    if width.minimum > console.width:
        # fold words, never digits: a terminal narrower than that wraps whole lines
        table = _table(report, brief, 0, fold=True)
        console.width = max(console.width, sum(_narrowest(report, column) for column in brief))
    console.print(Text(report.title, style="bold"))
    console.print(table)
    for note in report.notes:
        console.print(Padding(Text(note, style="dim"), (0, 0, 0, 2)))
    # rich pads its lines to the width of the table
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _table(
    report: Report, columns: Iterable[Column], header_width: int, fold: bool = False
) -> Table:
    """A table of some columns, with headers folded to this width, or that of their cells.

    Text is folded at its spaces, or with ``fold`` anywhere.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", padding=(0, 0, 0, 1))
    cells = []
    common = scales(report)
    for column in columns:
        header, values = _column(column, report.column(column.name), common)
        width = max(header_width, *(len(text) for text in (*values, *header.split(" "))))
        number = column.unit not in ("text", "formula")
        table.add_column(
            "\n".join(textwrap.wrap(header, width)),
            justify="right" if number else "left",
            no_wrap=number or not (fold or any(" " in value for value in values)),
            overflow="fold",
        )
        cells.append(values)
    for row in zip(*cells, strict=True):
        table.add_row(*(Text(cell) for cell in row))
    return table


def _narrowest(report: Report, column: Column) -> int:
    """How narrow a column may become: as wide as its numbers, and text a few letters."""
    if column.unit in ("text", "formula"):
        return 8
    header, values = _column(column, report.column(column.name), scales(report))
    return 2 + max(len(text) for text in (*values, *header.split(" ")))


def _column(
    column: Column, values: list[Any], scales: dict[str, tuple[str, int]]
) -> tuple[str, list[str]]:
    """A column's header, with its unit, and its cells."""
    header = column.name.replace("_", " ")
    if column.unit in scales:
        name, scale = scales[column.unit]
        header = f"{header.removesuffix(column.unit).rstrip()} {name}".strip()
        return header, ["-" if cell is None else cell for cell in units.column(values, scale)]
    if column.name.endswith("_error"):  # a ratio, which people read in percent
        return f"{header} %", ["-" if v is None else f"{100 * v:+.2f}" for v in values]
    return header, [_cell(value, column.unit) for value in values]


def _cell(value: Any, unit: str) -> str:
    if value is None or value == "":
        return "-"
    return units.number(value, unit) if isinstance(value, (int, float)) else str(value)
