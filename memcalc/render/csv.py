"""CSV: the rows alone, exact, with a header line."""

import csv
import io

from memcalc.report import Report


def render(report: Report) -> str:
    """The rows as RFC 4180 CSV with plain line ends; unknown is empty.

    >>> from memcalc.report import Column
    >>> print(render(Report("demo", "", (Column("n", "count"),), ((1,), (None,)))), end="")
    n
    1
    ""
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([column.name for column in report.columns])
    writer.writerows(report.rows)
    return out.getvalue()
