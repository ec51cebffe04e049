"""The notebooks, executed from top to bottom in a folder that is thrown away.

As a script, from anywhere: writes the present outputs into notebooks/*.ipynb, or into those whose
names begin with an argument (``01 06``), and names those that changed. The same code gives the same
files. Exits 1 if a cell fails or writes to stderr, or if a cell that draws stores no picture.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
ENVIRONMENT = {"COLUMNS": "80", "PYTHONWARNINGS": "", "PYTHONHASHSEED": "0"}
LANGUAGE = {"name": "python"}  # and not which Python ran it


def executed(path: Path, folder: Path) -> nbformat.NotebookNode:
    """A notebook with fresh outputs, and with nothing of the machine that made them.

    Raises:
        CellExecutionError: A cell failed.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(folder)}},
    )
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT)
    os.environ.pop("MPLBACKEND", None)
    try:
        asyncio.run(client.async_execute())
    finally:
        os.environ.clear()
        os.environ.update(before)
    notebook.metadata["language_info"] = dict(LANGUAGE)
    return notebook


def faults(notebook: nbformat.NotebookNode) -> Iterator[str]:
    """What a reader must not see: words on stderr, and a figure that is not there."""
    for cell in notebook.cells:
        outputs = cell.get("outputs", [])
        if any(each.get("name") == "stderr" for each in outputs):
            yield f"a cell writes to stderr:\n{cell.source}"
        if draws(cell) and not any("image/png" in each.get("data", {}) for each in outputs):
            yield f"a cell draws and stores no picture:\n{cell.source}"


def draws(cell: nbformat.NotebookNode) -> bool:
    """Whether a cell makes a figure."""
    words = ("memcalc.plot(", ".plot.", "plt.subplots(")
    return cell.cell_type == "code" and any(word in cell.source for word in words)


def main() -> int:
    """Execute notebooks and write them; 1 if one of them has a fault."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="the beginnings of their names")
    names = tuple(parser.parse_args().names) or ("",)
    failed = False
    for path in NOTEBOOKS:
        if not path.name.startswith(names):
            continue
        with TemporaryDirectory() as folder:
            try:
                notebook = executed(path, Path(folder))
                found = list(faults(notebook))
            except CellExecutionError as error:
                found = [str(error)]
        for fault in found:
            print(f"{path.name}: {fault}", file=sys.stderr)
        failed = failed or bool(found)
        if found:
            print(f"{path.name}: left as it was")
            continue
        before, now = path.read_text(), nbformat.writes(notebook) + "\n"
        path.write_text(now)
        print(f"{path.name}: {'the same' if now == before else 'written'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
