"""HTML: a table for a notebook, with formulas for MathJax."""

from html import escape
from typing import Any

from memcalc import units
from memcalc.report import Column, Report, scales


def render(report: Report, wide: bool = False) -> str:
    """The report as a self-contained HTML fragment.

    Args:
        report: The report.
        wide: Whether columns of detail are shown, except empty ones.

    >>> from memcalc.report import Column
    >>> html = render(Report("demo", "<Two>", (Column("n", "count"),), ((2,),)))
    >>> "&lt;Two&gt;" in html and "<td" in html
    True
    """
    common = scales(report.columns, report.rows)
    columns = [
        _column(column, values, common)
        for column in report.columns
        for values in [report.column(column.name)]
        if not column.detail or (wide and any(each not in (None, "") for each in values))
    ]
    head = "".join(_tag("th", escape(header), number) for header, number, _ in columns)
    rows = (
        "<tr>" + "".join(_tag("td", cells[i], number) for _, number, cells in columns) + "</tr>"
        for i in range(len(report.rows))
    )
    answer = f"<p><b>{escape(report.answer)}</b></p>" if report.answer else ""
    notes = "".join(f"<li>{escape(note)}</li>" for note in report.notes)
    return (
        f"<div>{answer}<p><b>{escape(report.title)}</b></p>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
        f"<ul style='font-size:smaller'>{notes}</ul></div>\n"
    )


def _column(
    column: Column, values: list[Any], scales: dict[str, units.Scale]
) -> tuple[str, bool, list[str]]:
    """A column's header, whether it holds numbers, and its cells."""
    header = column.words
    if column.unit in scales:
        name, scale = scales[column.unit]
        scaled = units.column(values, scale)
        return column.header(name), True, ["-" if cell is None else cell for cell in scaled]
    cells = [_cell(value, column.unit) for value in values]
    return header, column.unit not in ("text", "formula"), cells


def _cell(value: Any, unit: str) -> str:
    if value is None or value == "":
        return "-"
    if hasattr(value, "latex"):
        return f"${value.latex()}$"
    return units.number(value, unit) if isinstance(value, (int, float)) else escape(str(value))


def _tag(name: str, content: str, number: bool) -> str:
    return f"<{name} style='text-align:{'right' if number else 'left'}'>{content}</{name}>"
