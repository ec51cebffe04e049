"""Run memcalc's own layer on symbols of all its sizes: heads, widths, ranks and tokens."""

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from memcalc import symbols
from memcalc.config import Config
from memcalc.validation.deriving.derivation import derive_from
from memcalc.validation.deriving.derived import Derived
from memcalc.validation.layers.modules import TYPES, Layer, Place, hidden_state
from memcalc.validation.measuring import collectives


def derived_layer(config: Config) -> Derived:
    """The formula of what a layer saves for backward, in the letters of ``memcalc.symbols``.

    >>> from memcalc.config import load
    >>> derived_layer(load("175b", sp=True, recompute="full")).formula
    Formula(2*b*h*s/t)
    """
    base = _base(config)

    def build(at: Mapping[str, Any]) -> tuple[nn.Module, list[Any], dict[str, Any]]:
        sizes = whole_sizes(at)
        sized = _sized(config, sizes)
        place = Place("meta", TYPES[config.run.precision], sizes["t"], 0, config.parallel.sp)
        return _AmongRanks(Layer(sized, place), sizes["t"]), [hidden_state(sized, place)], {}

    derived = derive_from(build, base.example, written=base.written)
    # two formulas: ranks have key-value heads of their own, or several share copies of one
    k, t = symbols.symbol("k"), symbols.symbol("t")
    heads = ((k >= t,) if "K" in base.example else (k <= t,)) if _copyable(config) else ()
    return replace(
        derived,
        tensors=tuple(
            each._replace(module=each.module.removeprefix("layer").removeprefix("."))
            for each in derived.tensors
        ),
        sizes=symbols.values(config),
        conditions=(*heads, *derived.conditions),
    )


def sizes_apart(config: Config) -> dict[str, int]:
    """Sizes of the whole layer at which different formulas have different values."""
    return whole_sizes({name: _APART[name] for name in _base(config).example})


# At these sizes, different sums of a few products have different values. D is a
# multiple of R, and h of t; the others are primes.
_APART = {"b": 101, "D": 85, "k": 1009, "R": 5, "t": 13, "S": 10007, "s": 10009} | {
    "A": 19,
    "K": 23,
    "g": 29,
    "h": 13 * 2003,
    "F": 211,
}


def _copyable(config: Config) -> bool:
    return config.parallel.tp > 1 and config.model.kv_heads != config.model.heads


class _Base(NamedTuple):
    """The sizes of one rank. Those of the whole layer are products of them.

    Therefore t divides every size that it shards, and no size is rounded.

    Attributes:
        example: An example of each size.
        written: Each size in the letters of the whole layer.
    """

    example: Mapping[str, int]
    written: Mapping[str, Any]


def _base(config: Config) -> _Base:
    """The sizes of one rank of a config's layer."""
    model, t = config.model, config.parallel.tp
    letter = symbols.symbolic(config)
    copied = _copyable(config) and model.kv_heads < t
    found: dict[str, tuple[int, Any]] = {"b": (3, letter["b"]), "D": (4, letter["d"] / 2)}
    if copied:
        found |= {"k": (2, letter["k"]), "R": (2, letter["t"] / letter["k"])}
    elif t > 1:
        found["t"] = (2, letter["t"])
    if config.parallel.sp and t > 1:
        found["S"] = (16, letter["s"] / letter["t"])
    else:
        found["s"] = (16, letter["s"])
    if copied or model.kv_heads == model.heads:
        found["A"] = (6, letter["a"] / letter["t"])
    else:
        found |= {"K": (3, letter["k"] / letter["t"]), "g": (2, letter["a"] / letter["k"])}
    if model.heads * model.head_size != model.hidden_size:
        found["h"] = (40, letter["h"])
    if letter["f"].is_Symbol:
        found["F"] = (20, letter["f"] / letter["t"])
    return _Base({x: n for x, (n, _) in found.items()}, {x: w for x, (_, w) in found.items()})


def whole_sizes(at: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of the whole layer from those of one rank, numbers or symbols."""
    t = at["R"] * at["k"] if "R" in at else at.get("t", 1)
    a = (at["A"] if "A" in at else at["K"] * at["g"]) * t
    k = at["k"] if "k" in at else at["K"] * t if "K" in at else a
    d = 2 * at["D"]
    h = at["h"] if "h" in at else a * d
    f = at["F"] * t if "F" in at else 4 * h
    s = at["S"] * t if "S" in at else at["s"]
    return {"s": s, "b": at["b"], "h": h, "a": a, "k": k, "d": d, "f": f, "t": t}


class _AmongRanks(nn.Module):
    """A layer whose collectives run as if so many ranks existed."""

    def __init__(self, layer: Layer, ranks: Any) -> None:
        super().__init__()
        self.layer, self.ranks = layer, ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output."""
        with collectives.shapes_alone(self.ranks):
            out: torch.Tensor = self.layer(x)
        return out


def _sized(config: Config, sizes: Mapping[str, Any]) -> Config:
    """A config with other sizes, which may be symbols and are not checked."""
    model = _with(
        config.model,
        hidden_size=sizes["h"],
        heads=sizes["a"],
        kv_heads=sizes["k"],
        head_size=sizes["d"],
        ffn_size=sizes["f"],
    )
    run = _with(config.run, seq_length=sizes["s"], micro_batch_size=sizes["b"])
    return _with(config, model=model, run=run)


def _with(record: Any, **values: Any) -> Any:
    """A copy of a frozen record with other values, which are not checked."""
    made = copy(record)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made
