"""Integer arithmetic of bounded size."""

import re


def whole(text: str) -> int | None:
    """The value of integer arithmetic, or None for anything else.

    >>> whole("8 * (2 + 2)"), whole("2 ** 99999"), whole("1 / 0")
    (32, None, None)
    """
    tokens = re.findall(r"[0-9]+|[-+*/%()]", text)
    if "".join(tokens) != "".join(text.split()) or len(tokens) > 100:
        return None
    try:
        value = _sum(tokens)
    except (IndexError, ValueError, ZeroDivisionError):
        return None
    return value if not tokens and abs(value) < 10**18 else None


def _sum(tokens: list[str]) -> int:
    value = _product(tokens)
    while tokens and tokens[0] in "+-":
        value = value + _product(tokens) if tokens.pop(0) == "+" else value - _product(tokens)
    return value


def _product(tokens: list[str]) -> int:
    value = _atom(tokens)
    while tokens and tokens[0] in "*/%":
        sign = tokens.pop(0)
        other = _atom(tokens)
        value = value * other if sign == "*" else value // other if sign == "/" else value % other
        if abs(value) > 10**18:
            raise ValueError
    return value


def _atom(tokens: list[str]) -> int:
    token = tokens.pop(0)
    if token != "(":
        return int(token) if len(token) <= 18 else int("")
    value = _sum(tokens)
    if tokens.pop(0) != ")":
        raise ValueError
    return value
