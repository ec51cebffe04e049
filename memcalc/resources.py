"""Where the shipped data lies. No other module knows."""

import csv
import io
from collections.abc import Iterator
from pathlib import Path

# installed, data lies in the package; in a checkout, beside it
_PACKAGE = Path(__file__).parent
_DATA = next(path for path in (_PACKAGE / "data", _PACKAGE.parent / "data") if path.is_dir())


def read(path: str) -> bytes:
    """The bytes of a shipped file, named by its path under ``data/``.

    >>> b'"memcalc"' in read("models/175b.json")
    True
    """
    return (_DATA / path).read_bytes()


def rows(path: str) -> list[dict[str, str]]:
    """The rows of a shipped CSV table; lines that begin with # say where it is from.

    >>> rows("gpus.csv")[0]["name"]
    'titan-x'
    """
    lines = read(path).decode().splitlines(keepends=True)
    table = "".join(line for line in lines if not line.startswith("#"))
    return list(csv.DictReader(io.StringIO(table)))


def names(folder: str, suffix: str) -> Iterator[str]:
    """The names, without suffix and sorted, of the shipped files of a folder.

    >>> "175b" in names("models", ".json")
    True
    """
    yield from sorted(path.name.removesuffix(suffix) for path in _DATA.glob(f"{folder}/*{suffix}"))
