"""What tests of several folders share: data, and checks of what a command prints."""

import json
import subprocess
import sys
from pathlib import Path

import jsonschema

from memcalc import resources

TESTS = Path(__file__).parents[1]
CONFIGS = json.loads((TESTS / "configs.json").read_text())  # public config.json files, by model
SCHEMA = json.loads(resources.read("schema/report.schema.json"))


def python(*arguments, timeout=60, **options):
    """Run Python in a process of its own; both of its streams are kept as text."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, **options)


def is_valid(document):
    """Check a JSON document against the schema of reports."""
    jsonschema.Draft202012Validator(SCHEMA).validate(document)


def is_document_of(memcalc, question, units):
    """Check the JSON document of a command line: it is to the schema and has these columns."""
    outcome = memcalc(f"{question} --format json")
    assert (outcome.status, outcome.err) == (0, "")
    is_valid(outcome.document)
    assert outcome.document["command"] == question.split()[0]
    found = {column["name"]: column["unit"] for column in outcome.document["columns"]}
    assert found == units
    assert all(list(row) == list(units) for row in outcome.document["rows"])


def is_refused(outcome, message):
    """Check that a command line is refused with one line that has these words."""
    assert (outcome.status, outcome.out) == (2, "")
    assert message in outcome.err
    assert outcome.err.count("\n") == 1
