"""matplotlib as a command imports it: in no style but its own, and starting no other program.

``import matplotlib`` obeys a ``matplotlibrc`` of the working directory, then one that the
environment or the home directory names; and it runs ``fc-list`` where it has no list of fonts yet.
"""

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import chdir, contextmanager, nullcontext
from importlib import import_module
from pathlib import Path


def load() -> None:
    """Import matplotlib without anybody's settings, and without a word on stderr."""
    logging.getLogger("matplotlib").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="memcalc-") as empty:
        Path(empty, "matplotlibrc").touch()  # the first that matplotlib looks for
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
    """The folder, made where there is none; None where nothing can be written into it."""
    try:
        if folder is None:
            return None
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return str(folder) if os.access(folder, os.W_OK) else None


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Some variables of the environment have other values, for a while."""
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
    """A working directory, for a while; a deleted one, which holds no file, is kept."""
    try:
        os.getcwd()
    except OSError:
        return nullcontext()
    return chdir(folder)
