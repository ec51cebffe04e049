"""Printed formulas as functions: letters, whole numbers, + - * / ** and brackets.

Python's own parser reads the text, and nothing else is accepted in the tree; nothing is run.
"""

import ast
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from memcalc.errors import InputError


def formula(text: str) -> Callable[[SimpleNamespace], Any]:
    """A printed formula as a function of its letters.

    >>> from fractions import Fraction
    >>> formula("s*(10 + 24/t)")(SimpleNamespace(s=2, t=Fraction(8)))
    Fraction(26, 1)

    Raises:
        InputError: The text contains anything else.
    """
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise InputError(f"not a formula: {text[:60]!r}") from error
    return lambda letters: _value(tree, letters)


def _value(node: ast.AST, letters: SimpleNamespace) -> Any:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=letter):
            return getattr(letters, letter)
        case ast.BinOp(left=left, op=op, right=right):
            return _operate(op, _value(left, letters), _value(right, letters))
    raise InputError(f"a formula may not contain {ast.unparse(node)[:60]!r}")


def _operate(op: ast.operator, a: Any, b: Any) -> Any:
    match op:
        case ast.Add():
            return a + b
        case ast.Sub():
            return a - b
        case ast.Mult():
            return a * b
        case ast.Div():
            return a / b
        case ast.Pow():
            return a**b
    raise InputError(f"a formula may not contain {type(op).__name__}")
