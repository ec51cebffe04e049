"""Importing matplotlib without the user's settings, and without starting another program.

``import matplotlib`` reads a ``matplotlibrc`` of the working directory, or one that the environment
or the home directory names. It runs ``fc-list`` if it has no list of fonts yet.
"""

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import chdir, contextmanager, nullcontext
from importlib import import_module
from pathlib import Path


def load() -> None:
    """Import matplotlib with its default settings, and without messages on stderr."""
    logging.getLogger("matplotlib").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="memcalc-") as empty:
        Path(empty, "matplotlibrc").touch()  # matplotlib reads this one first
        fonts = _writable(_cache()) or empty
        with _environment(MPLBACKEND="agg", MPLCONFIGDIR=fonts, PATH=empty), _inside(empty):
            import_module("matplotlib.figure")


def _cache() -> Path | None:
    """The folder in which matplotlib keeps its list of fonts for memcalc; None without a home."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return None
    return Path(base).absolute() / "memcalc"


def _writable(folder: Path | None) -> str | None:
    """The folder, created if necessary; None if it cannot be written to."""
    try:
        if folder is None:
            return None
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return str(folder) if os.access(folder, os.W_OK) else None


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Set environment variables, and restore them afterwards."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _inside(folder: str) -> chdir[str] | nullcontext[None]:
    """Change the working directory for a while, unless the present one has been deleted."""
    try:
        os.getcwd()
    except OSError:
        return nullcontext()
    return chdir(folder)
