"""CSV: only the rows, exact, with a header line."""

import csv
import io
from typing import Any

from memcalc.report import Report

# First characters of what a spreadsheet may evaluate as a formula.
FORMULA = ("=", "+", "-", "@", "\t", "\r")


def render(report: Report) -> str:
    """The rows as RFC 4180 CSV, but with plain line ends; unknown is empty.

    A text that a spreadsheet might evaluate as a formula gets an apostrophe in front.

    >>> from memcalc.report import Column
    >>> print(render(Report("demo", "", (Column("n", "count"),), ((1,), (None,)))), end="")
    n
    1
    ""
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([column.name for column in report.columns])
    units = [column.unit for column in report.columns]
    writer.writerows(map(_cell, row, units) for row in report.rows)
    return out.getvalue()


def _cell(value: Any, unit: str) -> Any:
    if unit == "text" and isinstance(value, str) and len(value) > 1 and value.startswith(FORMULA):
        return f"'{value}"
    return value
