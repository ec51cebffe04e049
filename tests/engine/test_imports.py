"""Start-up: what a question loads is part of the contract."""

from importlib import import_module
from pathlib import Path

import pytest
from shared import python

HEAVY = {"sympy", "numpy", "pandas", "matplotlib", "torch", "huggingface_hub"}


def loaded(code, tmp_path):
    """The heavy libraries that a fresh process has loaded after running code."""
    probe = f"import sys\n{code}\nprint('loaded:', *({HEAVY!r} & set(sys.modules)))"
    done = python("-c", probe, cwd=tmp_path, check=True)
    return set(done.stdout.rpartition("loaded:")[2].split())


def questions(*lines):
    """Code that asks one after the other: the last has loaded what any of them has."""
    asked = [line.split() for line in lines]
    return f"from memcalc.cli.main import main\nfor line in {asked!r}:\n    main(line)"


@pytest.mark.parametrize(
    "line",
    [
        *("models", "ledger 22b", "recompute llama-3-8b", "flops 175b --recompute full"),
        f"backtest {Path(__file__).parents[1] / 'runs.jsonl'}",
        "memory deepseek-v3 --pp 16 -s 4096",
        "rnn --gpu all",
        "rnn --scope training -s 100",
    ],
)
def test_questions_without_formulas_load_nothing_heavy(line, tmp_path):
    formats = ("text", "json", "csv", "markdown")
    asked = questions(*(f"{line} --format {format_}" for format_ in formats))
    assert loaded(asked, tmp_path) == set()


def test_help_loads_nothing_heavy(tmp_path):
    commands = ("layer", "plot", "validate", "rnn")
    lines = ("--help", "--version", "nonsense", *(f"{command} --help" for command in commands))
    assert loaded(questions(*lines), tmp_path) == set()


def test_readers_of_files_are_not_loaded_for_the_catalogue(tmp_path):
    probe = "print(*(m for m in sys.modules if m.startswith('memcalc.config.readers.')))"
    code = f"import memcalc\nmemcalc.load('22b')\nprint('loaded:')\n{probe}\nprint('loaded:')"
    done = python("-c", f"import sys\n{code}", cwd=tmp_path, check=True)
    assert "megatron" not in done.stdout


@pytest.mark.parametrize("line", ["layer 22b", "formula 22b --latex", "rnn --scope formula"])
def test_formulas_load_sympy_alone(line, tmp_path):
    assert loaded(questions(line), tmp_path) == {"sympy"}


def test_the_library_loads_nothing_until_it_is_used(tmp_path):
    assert loaded("import memcalc\nmemcalc.layer_bytes(memcalc.load('22b'))", tmp_path) == set()
    assert loaded("import memcalc\nassert 'layer' in dir(memcalc)", tmp_path) == set()


def test_every_public_name_is_there_and_no_other():
    import memcalc

    assert sorted(memcalc._PUBLIC) == sorted(memcalc.__all__)
    for name, reference in memcalc._PUBLIC.items():
        if not reference.startswith("memcalc.validation."):  # which is torch's, in tests/torch
            assert getattr(memcalc, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = memcalc.nothing


@pytest.mark.parametrize("name", ["torch", "transformers", "megatron"])
def test_nothing_here_can_import_torch_in_this_process_or_another(name, tmp_path):
    with pytest.raises(ModuleNotFoundError):
        import_module(name)
    code = f"try:\n    import {name}\nexcept ModuleNotFoundError as error:\n    print(error)"
    done = python("-c", code, cwd=tmp_path, check=True)
    assert done.stdout == f"tests/engine runs without {name}\n"
