"""The engine needs no torch: here nothing can import it, and no child process either."""

import os
import sys
from pathlib import Path

import pytest

LIBRARIES = ("torch", "transformers", "megatron")
# a folder of modules with these names, each of which refuses to be imported
REFUSING = Path(__file__).parent / "without"


@pytest.fixture(autouse=True)
def _without_torch(monkeypatch):
    for name in LIBRARIES:
        monkeypatch.setitem(sys.modules, name, None)
    path = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(REFUSING), *([path] if path else [])]))
