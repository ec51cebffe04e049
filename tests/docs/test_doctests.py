"""The examples in docstrings and in the README."""

import doctest
import pkgutil
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest

import memcalc

with suppress(ImportError):  # it must come before the first backward pass of the process
    import memcalc.validation.step.link

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's, of its collectives

ROOT = Path(__file__).parents[2]
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(memcalc.__path__, "memcalc.")
    if module.name != "memcalc.__main__"
)


# the package's own examples, and README's, run torch too
TORCH = [name for name in MODULES if name.startswith("memcalc.validation")]


@pytest.mark.parametrize(
    "name",
    [
        *sorted({*MODULES} - {*TORCH}),
        *(pytest.param(name, marks=pytest.mark.torch) for name in ("memcalc", *TORCH)),
    ],
)
def test_the_examples_of_a_module_run(name):
    assert doctest.testmod(import_module(name), optionflags=doctest.REPORT_UDIFF).failed == 0


@pytest.mark.torch
def test_examples_are_where_they_are_promised():
    """Every public function and class has an example that runs."""
    finder = doctest.DocTestFinder(recurse=False)
    plain = {"MemcalcError", "ConfigError", "InputError", "OutputError", "UsageError"}
    for name in set(memcalc.__all__) - plain - {"IMPLEMENTATIONS"}:
        (found,) = finder.find(getattr(memcalc, name), name)
        assert found.examples, name


@pytest.mark.torch
def test_the_readmes_python_runs():
    results = doctest.testfile(str(ROOT / "README.md"), module_relative=False)
    assert results.attempted > 3
    assert results.failed == 0
