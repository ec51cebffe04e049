"""A framework is known by its record: no code compares its name."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest

import memcalc
from memcalc.answers.memory import memory
from memcalc.config import IMPLEMENTATIONS, load
from memcalc.frameworks import FRAMEWORKS, SHARDERS

PACKAGE = Path(memcalc.__file__).parent
NAMES = {*FRAMEWORKS, *SHARDERS, *IMPLEMENTATIONS}
SHORTEST = 4  # letters of a prefix or a suffix that stands for a name


def compared(node):
    """The pairs of what a node compares and the strings that it is compared with."""
    if isinstance(node, ast.Compare):
        sides = (node.left, *node.comparators)
        return [(sides, each.value) for side in sides for each in flat(side)]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        words = [each.value for argument in node.args for each in flat(argument)]
        return [((node.func.value,), name) for name in NAMES if affix(node.func.attr, name, words)]
    if isinstance(node, ast.MatchValue):
        return [((node.value,), each.value) for each in flat(node.value)]
    return []


def affix(method, name, words):
    """Whether a call of a string's method with such words would find a name by its ends."""
    long = tuple(word for word in words if len(word) >= SHORTEST)
    return method in ("startswith", "endswith") and getattr(name, method)(long)


def flat(node):
    """The strings that a node is, or that a written tuple, list or set has."""
    items = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
    return [x for x in items if isinstance(x, ast.Constant) and isinstance(x.value, str)]


def is_accounting(sides):
    """``paper`` is also a word of --accounting, where it names no implementation."""
    return any(isinstance(side, ast.Name) and side.id == "accounting" for side in sides)


def comparisons(code):
    """The lines of code that compare with a name, and the name."""
    return [
        (sides[0].lineno, name)
        for node in ast.walk(ast.parse(code))
        for sides, name in compared(node)
        if name in NAMES and not (name == "paper" and is_accounting(sides))
    ]


@pytest.mark.parametrize(
    "code",
    [
        'name == "torch"',
        'kernels.name != "megatron-local"',
        'kernels.name == "paper"',
        'name in ("other", "fsdp2")',
        'name not in {"deepspeed"}',
        'name.startswith("transformers-")',
        'name.endswith(("-local", "x"))',
        'match name:\n    case "x" | "nanotron":\n        pass',
    ],
)
def test_a_comparison_is_found(code):
    assert comparisons(code)


@pytest.mark.parametrize("code", ['accounting == "paper"', 'x == "flash"', 'TABLE["torch"]'])
def test_nothing_else_is_taken_for_one(code):
    assert not comparisons(code)


def test_no_name_is_compared_outside_the_folder_of_frameworks():
    files = [x for x in PACKAGE.rglob("*.py") if PACKAGE / "frameworks" not in x.parents]
    assert len(files) > 100
    found = {
        f"{path.relative_to(PACKAGE)}:{line}": name
        for path in files
        for line, name in comparisons(path.read_text())
    }
    assert found == {}


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("model", ["llama-3-8b", "22b"])
def test_the_name_of_an_implementation_changes_no_row_of_memory(model, name):
    config = load(model, implementation=name, tp=2, sp=True, dp=4, global_batch_size=16)
    mine = replace(config.run.implementation, name="mine")
    renamed = replace(config, run=replace(config.run, implementation=mine))
    assert memory(renamed).rows == memory(config).rows
