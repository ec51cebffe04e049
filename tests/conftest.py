"""What tests share: markers, the command line in this process, and exact evaluation of formulas."""

import ast
import gc
import json
import os
from collections.abc import Callable
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import settings

from memcalc.cli.main import main

# the same examples on every run of CI; new ones wherever else the tests run
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


def installed(name: str) -> bool:
    """Whether tests of a library run; in CI they do, and fail without it."""
    return "CI" in os.environ or find_spec(name) is not None


TESTS = Path(__file__).parent
WITHOUT = [name for name in ("torch", "transformers", "megatron") if not installed(name)]


@pytest.hookimpl(tryfirst=True)  # before markers are read
def pytest_collection_modifyitems(items):
    """A test has the marker of its folder."""
    for item in items:
        item.add_marker(item.path.relative_to(TESTS).parts[0])
        if WITHOUT and item.get_closest_marker("torch"):
            item.add_marker(pytest.mark.skip(reason=f"not installed: {', '.join(WITHOUT)}"))


def pytest_collection_finish():
    """What is loaded by now stays: the garbage collector need not look through it each time.

    And it need not look after every 700 new objects, as is the default: tests make many that stay.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_ignore_collect(collection_path):
    return True if WITHOUT and collection_path == TESTS / "torch" else None


def pytest_terminal_summary(terminalreporter):
    if WITHOUT:
        names = ", ".join(WITHOUT)
        terminalreporter.write_line(f"not installed: {names}; tests that need them are left out")


class Outcome(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def document(self):
        return json.loads(self.out)


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("MEMCALC_DEBUG", "1")  # a fault is a traceback here, and no test passes
    monkeypatch.delenv("NO_COLOR", raising=False)


@pytest.fixture
def memcalc(capsys) -> Callable[..., Outcome]:
    """Run a command line, given as one text, and return its status and what it printed."""

    def run(line: str) -> Outcome:
        status = main(line.split())
        captured = capsys.readouterr()
        return Outcome(status, captured.out, captured.err)

    return run


@pytest.fixture
def examples(memcalc) -> Callable[[str], list[str]]:
    """The command lines that a command's help shows as examples: two at least."""

    def of(command: str) -> list[str]:
        shown = memcalc(f"{command} --help").out.split("Examples:")[1].splitlines()
        lines = [line.strip() for line in shown if line.strip().startswith("memcalc ")]
        assert len(lines) >= 2, command
        return [line.removeprefix("memcalc ") for line in lines]

    return of


def _value(node: ast.AST, symbols: dict[str, int]) -> Fraction:
    match node:
        case ast.Expression():
            return _value(node.body, symbols)
        case ast.Constant(value=int()):
            return Fraction(node.value)
        case ast.Name():
            return Fraction(symbols[node.id])
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _value(left, symbols) + _value(right, symbols)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _value(left, symbols) - _value(right, symbols)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, symbols)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _value(left, symbols) * _value(right, symbols)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return _value(left, symbols) / _value(right, symbols)
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int(power))):
            return _value(left, symbols) ** power
        case ast.Call(func=ast.Name(id="Max"), args=args):
            return max(_value(arg, symbols) for arg in args)
    raise AssertionError(f"a formula may not hold {ast.dump(node)}")


@pytest.fixture
def evaluate() -> Callable[[str, dict[str, int]], Fraction]:
    """The exact value of a printed formula, by its grammar alone: no sympy."""
    return lambda formula, symbols: _value(ast.parse(formula, mode="eval"), symbols)
