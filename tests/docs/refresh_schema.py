"""data/schema/report.schema.json, from the columns that the reports declare.

As a script, from anywhere: writes the schema. ``--check`` writes nothing, and exits 1 if the file
is not current.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import memcalc
from memcalc.checks.backtest import BY_IMBALANCE, PART, STAGE
from memcalc.cli.main import COMMANDS
from memcalc.lazy import resolve
from memcalc.render.json import SCHEMA
from memcalc.report import LEAST, UNITS, Column
from memcalc.symbols import LETTERS

PATH = Path(__file__).parents[2] / "data" / "schema" / "report.schema.json"

# Command -> the columns of each of its tables, where these are not the COLUMNS beside its function.
TABLES = {
    "memory": ("memcalc.answers.memory:STAGES", "memcalc.answers.memory:PARTS"),
    "rnn": tuple(
        f"memcalc.answers.rnn:{name}" for name in ("ON_CHIP", "TRAINING", "STEP", "FORMULA")
    ),
    "validate": ("memcalc.validation.validate:COLUMNS", "memcalc.validation.timing:COLUMNS"),
    "derive": (
        "memcalc.validation.deriving.forms:COLUMNS",
        "memcalc.validation.deriving.derive:COLUMNS",
    ),
    "models": ("memcalc.answers.models:COLUMNS", "memcalc.answers.models:FACTS"),
}
REPORTS = [name for name in COMMANDS if name != "plot"]  # the commands that print a report
TYPES = {
    **dict.fromkeys(("bytes", "flops", "count"), "integer"),
    **dict.fromkeys(("seconds", "percent", "ratio"), "number"),
}
SAID = {
    "percent": "Not rounded: 50.0 is half.",
    "formula": "ASCII with explicit *, / and **. In exact fractions, at the values of symbols, it "
    "equals the number in its row.",
}


def schema() -> dict[str, Any]:
    """The schema of every document that ``--format json`` prints."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "memcalc report",
        "description": "What every memcalc command prints with --format json.",
        **_record(
            {
                "schema": {"const": SCHEMA},
                "command": {"enum": REPORTS},
                "title": {"type": "string"},
                "symbols": {
                    "description": "The letters of the formulas with their values.",
                    "type": "object",
                    "propertyNames": {"enum": [each.letter for each in LETTERS]},
                    "additionalProperties": {"type": "integer", "minimum": 1},
                },
                "columns": {
                    "minItems": 1,
                    **_list(_record({"name": {"type": "string"}, "unit": {"enum": list(UNITS)}})),
                },
                "rows": _list({"type": "object"}),
                "notes": _list({"type": "string"}),
            }
        ),
        "allOf": [_of_command(command) for command in REPORTS],
        "$defs": {
            **{unit: _unit(unit) for unit in UNITS},
            "flag": {"type": "boolean"},
            "number_or_text": {"type": ["number", "string"]},
            "backtest_stages": _list(_stage()),
            "backtest_parts": {
                "description": "Parts of the peak, the largest first.",
                **_list(_row(PART)),
            },
        },
    }


def _of_command(command: str) -> dict[str, Any]:
    """The rows of a command: those of one of its tables."""
    function = getattr(memcalc, command)
    tables = TABLES.get(command) or (f"{function.__module__}:COLUMNS",)
    rows = [_row(resolve(columns)) for columns in tables]
    items = rows[0] if len(rows) == 1 else {"anyOf": rows}
    return {
        "if": {"properties": {"command": {"const": command}}},
        "then": {"properties": {"rows": {"items": items}}},
    }


def _row(columns: Iterable[Column]) -> dict[str, Any]:
    return _record({column.name: _value(column) for column in columns})


def _record(values: dict[str, Any]) -> dict[str, Any]:
    """An object with these values and no other."""
    return {
        "type": "object",
        "required": list(values),
        "additionalProperties": False,
        "properties": values,
    }


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _value(column: Column) -> dict[str, Any]:
    """A value of a column."""
    said = {"description": column.description} if column.description else {}
    if column.choices:
        return {**said, "enum": [*column.choices, *[None] * column.optional]}
    if column.least is not None:
        found = _number(column.unit, column.least)
    else:
        found = {"$ref": f"#/$defs/{column.definition or column.unit}"}
    return {**said, **({"anyOf": [found, {"type": "null"}]} if column.optional else found)}


def _unit(unit: str) -> dict[str, Any]:
    """What values of a unit have in common."""
    said = {"description": SAID[unit]} if unit in SAID else {}
    if unit == "formula":
        return {**said, "type": "string", "pattern": "^[A-Za-z0-9+*/(), -]+$"}
    if unit == "text":
        return {"type": "string"}
    return {**said, **_number(unit, LEAST.get(unit, -math.inf))}


def _number(unit: str, least: float) -> dict[str, Any]:
    bound = {} if least == -math.inf else {"minimum": least}
    return {"type": TYPES[unit], **bound}


def _stage() -> dict[str, Any]:
    """One stage of a measured run; models with experts have one value more."""
    stage = _row(STAGE)
    stage["properties"][BY_IMBALANCE] = {
        "description": "For models with experts: the peak under each imbalance of routed tokens.",
        "type": "object",
        "additionalProperties": _unit("bytes"),
    }
    return stage


def text() -> str:
    """The schema as its file has it."""
    return json.dumps(schema(), indent=2) + "\n"


def main() -> int:
    """The script; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 on a change")
    check = parser.parse_args().check
    current = PATH.read_text() == text()
    if not current:
        print(f"{PATH.name} is not current")
        if not check:
            PATH.write_text(text())
    return int(check and not current)


if __name__ == "__main__":
    sys.exit(main())
