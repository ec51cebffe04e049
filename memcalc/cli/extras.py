"""Libraries that only some commands need, and the line that says how to install them."""

from collections.abc import Iterator
from contextlib import contextmanager

import click

# Extra, which is also the name of the package that it installs -> the library's name.
EXTRAS = {
    "torch": "PyTorch",
    "transformers": "Hugging Face transformers",
    "megatron": "Megatron-core",
}


@contextmanager
def installed() -> Iterator[None]:
    """Turn an import that fails into one line.

    Raises:
        click.UsageError: With the command that installs what is missing.
    """
    try:
        yield
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and package in EXTRAS:
            line = (
                f"this needs {EXTRAS[package]}: pip install '.[{package}]' in memcalc's repository"
            )
        else:
            line = f"a library cannot be imported: {error}"
        raise click.UsageError(line) from error
