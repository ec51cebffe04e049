"""Closed forms of recurrent networks: what they keep over time, and what fits on a chip.

No formula is typed in: the cells run on symbols, and sympy solves for what is asked.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import sympy

from memcalc.analysis import recurrent
from memcalc.analysis.onchip import Storage, needed, recurrent_weights, states
from memcalc.config.recurrent import Recurrent
from memcalc.formulas import Plain

LETTERS = {
    "s": "time steps",
    "b": "batch size",
    "h": "hidden size",
    "i": "input size",
    "k": "steps between checkpoints",
    "u": "share of the registers that weights may fill",
    "M": "SMs",
    "R": "register bytes per SM",
    "S": "shared memory bytes per SM",
    "D": "density",
    "B": "bytes per stored weight, with its index",
    "w": "bytes per element of a hidden state on chip",
}
s, b, h, i, k, u, M, R, S, D, B, w = (sympy.Symbol(x, positive=True) for x in LETTERS)

Step = tuple[str, Any]


def steps(config: Recurrent) -> list[tuple[str, Plain]]:
    """Every closed form, by its name.

    >>> dict(steps(Recurrent()))["k with the lowest peak"]
    Formula(sqrt(s))
    """
    return [(name, Plain(value)) for name, value in (*over_time(config), *on_chip(config))]


def legend(forms: Iterable[tuple[str, Plain]]) -> str:
    """The letters of closed forms, in words.

    >>> legend(steps(Recurrent())[:1])
    'b batch size, h hidden size'
    """
    used = {x.name for _, form in forms for x in form.expression.free_symbols}
    return ", ".join(f"{x} {meaning}" for x, meaning in LETTERS.items() if x in used)


def over_time(config: Recurrent) -> Iterator[Step]:
    """What all layers keep over s steps, the k with the lowest peak, parameters and FLOPs.

    >>> dict(over_time(Recurrent(cell="lstm", precision="fp16")))["kept per later step"]
    16*b*h
    """
    sizes = _sizes(config)
    costs = recurrent.costs(config, sizes)
    peak = costs.even_peak(s, k)
    (best,) = sympy.solve(sympy.diff(peak, k), k)
    yield "kept per later step", _plain(costs.input + costs.step)
    yield "kept over s steps", _plain(costs.whole(s))
    yield "kept with a checkpoint every k steps", _plain(costs.checkpointed(s, s / k))
    yield "peak during backward with these checkpoints", _plain(peak)
    yield "k with the lowest peak", _root(best)
    yield "lowest peak", _plain(peak.subs(k, best))
    yield "parameters", _plain(recurrent.parameters(config, sizes))
    yield (
        "forward FLOPs (twice that with checkpoints)",
        _plain(recurrent.forward_flops(config, s, sizes)),
    )


def on_chip(config: Recurrent) -> Iterator[Step]:
    """What fits on a chip, solved for hidden size, density and share of registers.

    >>> dict(on_chip(Recurrent(cell="gru")))["largest hidden size"]
    sqrt(M*R*u/(3*B*D))
    """
    weights = recurrent_weights(config, _sizes(config))
    on_each = needed(weights, Storage(D, B), M)
    of_states = states(config, h, w, b)
    yield "recurrent weights", weights
    yield "recurrent weight bytes per SM", on_each
    yield "largest hidden size", _solved(on_each - u * R, h)
    yield "largest density", _solved(on_each - u * R, D)
    yield "share of registers needed", _solved(on_each - u * R, u)
    yield (
        "largest hidden size, registers and shared memory",
        _solved(on_each + of_states - u * R - S, h),
    )
    yield "largest hidden size whose hidden states fit", _solved(of_states - S, h)


def _sizes(config: Recurrent) -> dict[str, Any]:
    return {"b": b, "h": h, "i": h if config.input_size is None else i}


def _plain(value: Any) -> Any:
    """A sum with its common factors in front."""
    return sympy.factor_terms(sympy.expand(value))


def _solved(zero: Any, letter: Any) -> Any:
    """The positive value of a letter at which an expression is zero."""
    found = sympy.solve(zero, letter)
    (value,) = (each for each in found if each.subs(dict.fromkeys(each.free_symbols, 1)) > 0)
    return _root(value)


def _root(value: Any) -> Any:
    """A product of roots as the root of a product; any other value as it is."""
    square = value**2
    if value.is_rational_function() or not square.is_rational_function() or square.has(sympy.Add):
        return value
    return sympy.Pow(square, sympy.S.Half, evaluate=False)
