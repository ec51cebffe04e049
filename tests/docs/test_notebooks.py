"""Notebooks run from top to bottom, and show what they would show if they were run now."""

import runpy
import subprocess
from pathlib import Path

import nbformat
import pytest

REFRESH = runpy.run_path(str(Path(__file__).with_name("refresh_notebooks.py")))
NOTEBOOKS = REFRESH["NOTEBOOKS"]
RUN_TORCH = ("03_validation.ipynb", "04_derive.ipynb")
COMPARED = ("text/plain", "text/html", "text/latex", "text/markdown")


def shown(cell):
    """What a cell shows: its texts, and that there is a picture."""
    for output in cell.get("outputs", []):
        if output["output_type"] == "stream":
            yield output["text"]
        elif "image/png" in output["data"]:
            yield "a picture"
        else:
            yield {kind: output["data"].get(kind) for kind in COMPARED}


@pytest.mark.filterwarnings("default")  # the kernel's own libraries warn as they please
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.name, marks=[pytest.mark.torch] * (path.name in RUN_TORCH))
        for path in NOTEBOOKS
    ],
)
def test_a_notebook_shows_what_it_shows_and_writes_no_file(path, tmp_path):
    stored = nbformat.read(path, as_version=4)
    fresh = REFRESH["executed"](path, tmp_path)
    for old, new in zip(stored.cells, fresh.cells, strict=True):
        assert list(shown(old)) == list(shown(new)), (
            f"tests/docs/refresh_notebooks.py writes what is new: {old.source}"
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_stored_notebook_has_its_pictures_and_nothing_of_a_machine(path):
    stored = nbformat.read(path, as_version=4)
    assert list(REFRESH["faults"](stored)) == []
    assert any(REFRESH["draws"](cell) for cell in stored.cells)
    assert set(stored.metadata) == {"kernelspec", "language_info"}
    assert stored.metadata["language_info"] == REFRESH["LANGUAGE"]
    assert all(not cell.metadata for cell in stored.cells)
    counts = [cell.execution_count for cell in stored.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))


def test_a_figure_without_a_picture_is_a_fault():
    cell = nbformat.v4.new_code_cell('memcalc.plot("paper-7")')
    (fault,) = REFRESH["faults"](nbformat.v4.new_notebook(cells=[cell]))
    assert fault.startswith("a cell draws and stores no picture")


def test_there_is_a_first_notebook():
    assert NOTEBOOKS[0].name == "01_first_steps.ipynb"


def test_nothing_that_a_notebook_writes_is_committed():
    folder = NOTEBOOKS[0].parent
    done = subprocess.run(["git", "ls-files"], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("this is no git checkout")
    assert [name for name in done.stdout.split() if not name.endswith(".ipynb")] == []
