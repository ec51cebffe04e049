"""Call the code of a user: ``package.module:factory`` and what it makes."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from importlib import import_module
from typing import Any

from memcalc.errors import MemcalcError, UsageError
from memcalc.validation.measuring.valueless import error_text, warned


@contextmanager
def users_code(target: str, where: Callable[[], str] = str) -> Iterator[list[str]]:
    """Run code of a user's module, which may import from the working directory.

    What it prints goes to stderr, as stdout is for the answer. What ends the process cannot be
    caught: os._exit, a signal, a crash of a C extension.

    Args:
        target: The factory, as the user wrote it.
        where: Says where the code failed; asked only then.

    Yields:
        The warnings so far, as lines.

    Raises:
        UsageError: Whatever the code raises, in one line; memcalc's own errors stay as they are.
    """
    sys.path.insert(0, "")
    try:
        with redirect_stdout(sys.stderr), warned() as told:
            yield told
    except (KeyboardInterrupt, MemcalcError):
        raise
    except BaseException as error:
        raise UsageError(f"{target} failed{where()}: {error_text(error)}") from error
    finally:
        with suppress(ValueError):
            sys.path.remove("")


def factory(target: str) -> Callable[[], Any]:
    """The function that ``package.module:factory`` names. Call it within ``users_code``.

    >>> factory("collections:OrderedDict")()
    OrderedDict()
    """
    module, _, name = target.partition(":")
    found: Callable[[], Any] = getattr(import_module(module), name)
    return found


def types(made: Any) -> str:
    """The type of what a factory returned; for a tuple, the types of its first items.

    >>> types((1, "a")), types(())
    ('int, str', 'nothing')
    """
    if not isinstance(made, tuple):
        return type(made).__name__
    return ", ".join(type(each).__name__ for each in made[:4]) or "nothing"
