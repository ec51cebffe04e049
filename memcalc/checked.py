"""Public functions begin here: they refuse arguments of other types than they say."""

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, get_args

from memcalc.config.fields import plain, shown
from memcalc.errors import UsageError

# Types by their names, in words. An argument of any other is looked at where it is used.
WORDS = {
    "str": "text",
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "Path": "a Path",
    "Config": "a Config (memcalc.load gives one)",
    "Recurrent": "a Recurrent",
    "OnChip": "an OnChip",
    "NoneType": "None",
}


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which refuses an argument that is not of its annotated types.

    Numbers of other libraries come to it as Python's own.

    Raises:
        UsageError: When called: the message names the argument and what it must be.

    >>> def half(number: int | None = None) -> int: ...
    >>> checked(half)("4")
    Traceback (most recent call last):
        ...
    memcalc.errors.UsageError: number must be a whole number or None, not '4'
    """
    says = signature(function)
    kinds = {name: _kinds(parameter.annotation) for name, parameter in says.parameters.items()}

    @wraps(function)
    def asked(*args: Any, **kwargs: Any) -> Any:
        given = says.bind(*args, **kwargs)
        for name, value in given.arguments.items():
            if kinds[name]:
                given.arguments[name] = _argument(name, value, kinds[name])
        return function(*given.args, **given.kwargs)

    return asked


def _kinds(annotation: Any) -> tuple[type, ...]:
    """The types that an annotation allows; none where one of them is not of the table."""
    kinds = get_args(annotation) or (annotation,)
    return kinds if all(getattr(kind, "__name__", "") in WORDS for kind in kinds) else ()


def _argument(name: str, value: Any, kinds: tuple[type, ...]) -> Any:
    value = plain(value)
    if any(_fits(value, kind) for kind in kinds):
        return value
    words = " or ".join(WORDS[kind.__name__] for kind in kinds)
    raise UsageError(f"{name} must be {words}, not {shown(value)}")


def _fits(value: Any, kind: type) -> bool:
    """Whether a value is of a type; a whole number is a number too, and true is none."""
    return type(value) in (int, kind) if kind in (int, float) else isinstance(value, kind)
