"""The commands that run torch: their documents, and the examples in their help."""

import json

import pytest
from shared import is_document_of, is_valid

import memcalc as library

# Their questions, and the columns that design and schema promise, with their units.
QUESTIONS = {
    "validate 22b --tp 1": {
        "tensor": "text",
        "module": "text",
        "op": "text",
        "ledger_bytes": "bytes",
        "measured_bytes": "bytes",
        "status": "text",
        "backend": "text",
        "rank": "count",
    },
    "trace memcalc.validation.step.example:make --steps 1 --budget a100": {
        "module": "text",
        "kind": "text",
        "tensor": "text",
        "op": "text",
        "storages": "count",
        "bytes": "bytes",
        "verdict": "text",
        "fits": "text",
    },
    "derive 175b": {
        "layer_kind": "text",
        "tensor": "text",
        "module": "text",
        "op": "text",
        "formula": "formula",
        "bytes": "bytes",
    },
    "derive 175b --against ledger": {
        "layer_kind": "text",
        "tensor": "text",
        "module": "text",
        "op": "text",
        "formula": "formula",
        "ledger_formula": "formula",
        "difference": "formula",
    },
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_every_document_is_to_the_schema(memcalc, question):
    is_document_of(memcalc, question, QUESTIONS[question])


def test_times_are_to_the_schema(memcalc):
    """Seconds differ from run to run, so this question is not among those above."""
    is_valid(memcalc("validate 22b --tp 1 --device cpu --time --format json").document)


@pytest.mark.parametrize("name", ["derive", "trace", "validate"])
def test_every_example_in_help_runs(memcalc, examples, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "path" / "to"
    folder.mkdir(parents=True)
    config = {"model_type": "gpt2", "n_layer": 1, "n_embd": 64, "n_head": 4}
    config["n_positions"] = 8192
    (folder / "config.json").write_text(json.dumps(config))
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "blocks.py").write_text(
        "import torch\n\ndef make():\n    return torch.nn.Linear(8, 8), torch.ones(2, 64, 8)\n"
    )
    (tmp_path / "my_package" / "training.py").write_text(
        "import torch\n\ndef make():\n    model = torch.nn.Linear(8, 8)\n"
        "    return model, torch.ones(2, 8), torch.optim.SGD(model.parameters())\n"
    )
    for line in examples(name):
        outcome = memcalc(line)
        assert (outcome.status, outcome.err) == (0, ""), line


def test_every_public_name_is_there():
    for name in library.__all__:
        assert getattr(library, name) is not None
