"""Where the shipped data lies. No other module knows."""

from collections.abc import Iterator
from importlib.resources import files

_DATA = files("memcalc.data")


def read(path: str) -> bytes:
    """The bytes of a shipped file, named by its path under ``data/``.

    >>> b'"memcalc"' in read("models/175b.json")
    True
    """
    return _DATA.joinpath(*path.split("/")).read_bytes()


def names(folder: str, suffix: str) -> Iterator[str]:
    """The names, without suffix and sorted, of the shipped files of a folder.

    >>> "175b" in names("models", ".json")
    True
    """
    found = (entry.name for entry in _DATA.joinpath(folder).iterdir())
    yield from sorted(name.removesuffix(suffix) for name in found if name.endswith(suffix))
