"""JSON: the whole report as one document, by the schema in data/schema."""

import json
from typing import Any

from memcalc.report import Report

SCHEMA = 1


def render(report: Report) -> str:
    """The report as a JSON document. Bytes and FLOPs are integers, unknown is null.

    The answer is the first of the notes.

    >>> import json
    >>> from memcalc.report import Column
    >>> json.loads(render(Report("demo", "Two", (Column("n", "count"),), ((2,),))))["rows"]
    [{'n': 2}]
    """
    document = {
        "schema": SCHEMA,
        "command": report.command,
        "title": report.title,
        "symbols": dict(report.symbols),
        "columns": [{"name": column.name, "unit": column.unit} for column in report.columns],
        "rows": [{name: _plain(value) for name, value in row.items()} for row in report.records()],
        "notes": [*([report.answer] if report.answer else []), *report.notes],
    }
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    """Numbers, lists and None as they are; anything else, such as a formula, as its text."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, (int, float)) else str(value)
