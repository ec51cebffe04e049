"""Markdown: the answer, the title, a table with exact numbers, and the notes."""

import re
from typing import Any

from memcalc.report import Report


def render(report: Report) -> str:
    """The report as GitHub-flavoured markdown.

    >>> from memcalc.report import Column
    >>> print(render(Report("demo", "Two", (Column("n", "count"),), ((2,),))), end="")
    **Two**
    <BLANKLINE>
    | n |
    |--:|
    | 2 |
    """
    right = [column.unit not in ("text", "formula") for column in report.columns]
    lines = [
        *([_escaped(report.answer), ""] if report.answer else []),
        f"**{_escaped(report.title)}**",
        "",
        f"| {' | '.join(column.name for column in report.columns)} |",
        f"|{'|'.join('--:' if number else '---' for number in right)}|",
    ]
    for row in report.rows:
        cells = [_cell(v, c.unit) for v, c in zip(row, report.columns, strict=True)]
        lines.append(f"| {' | '.join(cells)} |")
    if report.notes:
        lines += ["", *(f"- {_escaped(note)}" for note in report.notes)]
    return "\n".join(lines) + "\n"


def _cell(value: Any, unit: str) -> str:
    if value is None:
        return ""
    return f"`{value}`" if unit == "formula" else _escaped(str(value))


def _escaped(text: str) -> str:
    """The text as markdown that shows it: no emphasis, tag, link or picture, not even of a URL."""
    text = " ".join(text.split())
    return re.sub(r"[\\|*_<>`\[\]!@]|(?<=www)\.|:(?=//)", r"\\\g<0>", text, flags=re.IGNORECASE)
