"""The schema of JSON is made of the columns that the reports declare."""

import ast
import runpy
from pathlib import Path

import jsonschema
import pytest

ROOT = Path(__file__).parents[2]
REFRESH = runpy.run_path(str(Path(__file__).with_name("refresh_schema.py")))
VALIDATOR = jsonschema.Draft202012Validator(REFRESH["schema"]())

FACT = {"meaning": "layers", "value": "2", "fact": "layers"}
TRAINING = {
    "checkpoints": "none",
    "every": None,
    "kept_bytes": 0,
    "peak_bytes": 1,
    "extra_flops": 0,
}


def document(command, *rows):
    return {
        "schema": 1,
        "command": command,
        "title": "",
        "symbols": {},
        "columns": [{"name": "n", "unit": "count"}],
        "rows": list(rows),
        "notes": [],
    }


def test_the_schema_is_current():
    current = REFRESH["PATH"].read_text() == REFRESH["text"]()
    assert current, "tests/docs/refresh_schema.py writes it"


def test_columns_are_declared_once_outside_of_functions():
    """Else a table may have columns of which the schema knows nothing."""
    for path in (ROOT / "memcalc").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
                made = [each for each in calls if getattr(each.func, "id", "") == "Column"]
                assert not made, (path, node.name)


def test_rows_of_a_table_are_accepted():
    assert VALIDATOR.is_valid(document("models", FACT))
    assert VALIDATOR.is_valid(document("rnn", TRAINING, TRAINING | {"every": 3}))


@pytest.mark.parametrize(
    ("command", "row"),
    [
        ("models", {"fact": "layers"}),
        ("models", FACT | {"more": 1}),
        ("models", FACT | {"value": None}),
        ("layer", FACT),
        ("rnn", TRAINING | {"checkpoints": "some"}),
        ("rnn", TRAINING | {"every": 0}),
        ("rnn", TRAINING | {"kept_bytes": -1}),
        ("rnn", TRAINING | {"kept_bytes": 0.5}),
        ("rnn", TRAINING | {"kept_bytes": None}),
    ],
)
def test_a_row_that_no_table_has_is_refused(command, row):
    assert not VALIDATOR.is_valid(document(command, row))
