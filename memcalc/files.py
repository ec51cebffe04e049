"""Writing files: whole or not at all."""

import os
import tempfile
from contextlib import suppress
from errno import EACCES
from pathlib import Path

from memcalc.errors import OutputError


def write(path: Path, data: bytes) -> None:
    """Write a file so that at every moment it is the old one, or the whole new one.

    A link is followed, a file keeps its permissions, and what is no regular file (a pipe, a
    device) is written into.

    Raises:
        OutputError: The file cannot be written; nothing is left behind.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)
        else:
            _replace(path.resolve(), data)
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OutputError(f"{path}: cannot be written: {reason}") from error


def _replace(target: Path, data: bytes) -> None:
    if target.exists() and not os.access(target, os.W_OK):
        raise PermissionError(EACCES, os.strerror(EACCES))
    handle, name = tempfile.mkstemp(prefix=f".{target.name[:50]}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(name, target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~_umask())
        os.replace(name, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
