"""Notebooks run from top to bottom, and show what they would show if they were run now."""

import asyncio
import os
import subprocess
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
RUN_TORCH = ("03_validation.ipynb", "04_derive.ipynb")
COMPARED = ("text/plain", "text/html", "text/latex", "text/markdown")


def shown(cell):
    """What a cell shows, without pictures and the addresses of objects."""
    for output in cell.get("outputs", []):
        if output["output_type"] == "stream":
            yield output["text"]
        elif "image/png" not in output["data"]:
            yield {kind: output["data"].get(kind) for kind in COMPARED}


@pytest.mark.filterwarnings("default")  # the kernel's own libraries warn as they please
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.name, marks=[pytest.mark.torch] * (path.name in RUN_TORCH))
        for path in NOTEBOOKS
    ],
)
def test_a_notebook_shows_what_it_shows(path, tmp_path, monkeypatch):
    monkeypatch.setitem(os.environ, "PYTHONWARNINGS", "")
    stored = nbformat.read(path, as_version=4)
    fresh = nbformat.read(path, as_version=4)
    client = NotebookClient(fresh, timeout=120, resources={"metadata": {"path": str(tmp_path)}})
    asyncio.run(client.async_execute())
    for old, new in zip(stored.cells, fresh.cells, strict=True):
        assert list(shown(old)) == list(shown(new)), old.source


def test_there_is_a_first_notebook():
    assert NOTEBOOKS[0].name == "01_first_steps.ipynb"


def test_nothing_that_a_notebook_writes_is_committed():
    folder = NOTEBOOKS[0].parent
    done = subprocess.run(["git", "ls-files"], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("this is no git checkout")
    assert [name for name in done.stdout.split() if not name.endswith(".ipynb")] == []
