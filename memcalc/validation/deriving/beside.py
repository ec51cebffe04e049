"""Compare derived formulas with the ledger's, tensor by tensor and in total."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import sympy

from memcalc import symbols
from memcalc.analysis.activations import Entry, counted, kept
from memcalc.blocks.layer import layer_graph
from memcalc.config import Config
from memcalc.formulas import Formula
from memcalc.graph.graph import Graph
from memcalc.graph.mesh import Size
from memcalc.validation import match
from memcalc.validation.deriving.derived import BUFFER, INPUT, Kept, total
from memcalc.validation.deriving.symbolic_layer import sizes_apart
from memcalc.validation.layers import families
from memcalc.validation.measuring.measure import Stored


class ComparedTensor(NamedTuple):
    """Tensors that the ledger and PyTorch have in common, or one that only one of them has.

    Attributes:
        tensor: Their names in the ledger, or the shape of a tensor that is not in it.
        module: The modules that made them.
        op: The operations that made them.
        derived: The bytes that PyTorch saves, or 0.
        ledger: The bytes in the ledger, or 0.
    """

    tensor: str
    module: str
    op: str
    derived: Formula
    ledger: Formula

    @property
    def difference(self) -> Formula:
        """PyTorch's bytes minus the ledger's."""
        return Formula(sympy.expand(self.derived.expression - self.ledger.expression))


def beside_layer(config: Config, tensors: Sequence[Kept]) -> list[ComparedTensor]:
    """Compare memcalc's own layer with the ledger, in all sizes; the last row is the total."""
    known = frozenset(op.name for op in layer_graph(config).ops)
    at = {**symbols.values(config), **sizes_apart(config)}
    names = _Names(match.OPERATIONS, {"layer": "."}, known)
    return _beside(config, None, tensors, at, symbols.symbolic(config), names)


def beside_hugging_face(
    config: Config, kind: str, family: str, tensors: Sequence[Kept], letters: Collection[str] = "sb"
) -> list[ComparedTensor]:
    """Compare a Hugging Face layer with the ledger, in some letters; the last row is the total.

    If b is a letter, the ledger is that of two sequences: for a single one PyTorch does not copy
    the heads.
    """
    batch = 2 if "b" in letters else config.run.micro_batch_size
    config = replace(config, run=replace(config.run, micro_batch_size=batch))
    at = {**symbols.values(config), **{x: size for x, size in _APART.items() if x in letters}}
    forms = {**at, **{x: symbols.symbol(x) for x in letters}}
    ops = layer_graph(config, kind=kind).ops
    if family in families.FAMILIES:
        names = families.parts(family, kind)
        # a layer's input is the output of the layer before it
        last = names.get(ops[-1].name, names.get("layer", "."))
        return _beside(config, kind, tensors, at, forms, _Names({**names, "": last}, names))
    all_as_one = {"": ".", **{op.name: "." for op in ops}, **{_maker(x): "." for x in tensors}}
    return _beside(config, kind, tensors, at, forms, _Names(all_as_one, all_as_one))


# Primes so far apart that different sums of a few products of them have different values.
_APART = {"s": 10007, "b": 101}


class _Names(NamedTuple):
    operations: Mapping[str, str]
    modules: Mapping[str, str]
    known: frozenset[str] = frozenset()


def _beside(
    config: Config,
    kind: str | None,
    tensors: Sequence[Kept],
    at: Mapping[str, int],
    letters: Mapping[str, Any],
    names: _Names,
) -> list[ComparedTensor]:
    """The rows, matched at sizes at which different formulas have different values."""
    mine = [each for each in tensors if each.kind != BUFFER]
    stored = [
        Stored(int(each.formula.value(at)), _maker(each), each.saved_by, (), path=str(number))
        for number, each in enumerate(mine)
    ]
    graph, entries = _ledger(config, at, kind)
    _, in_letters = _ledger(config, letters, kind)
    form = {
        entry.tensor: _on_one_side(each.tensor.bytes, at)
        for entry, each in zip(entries, in_letters, strict=True)
    }
    rows = []
    for each in match.matches(graph, entries, stored, *names):
        found = [mine[int(storage.path)] for storage in each.stored]
        rows.append(
            ComparedTensor(
                ", ".join(entry.tensor.name for entry in each.entries) or found[0].tensor,
                ", ".join(dict.fromkeys(storage.module for storage in found)) or each.module,
                ", ".join(dict.fromkeys(storage.op for storage in found)),
                total(found),
                Formula(sum(form[entry.tensor] for entry in each.entries)),
            )
        )
    return [*rows, ComparedTensor("total", "", "", total(mine), Formula(sum(form.values())))]


def _ledger(
    config: Config, sizes: Mapping[str, Size], kind: str | None
) -> tuple[Graph, list[Entry]]:
    graph = layer_graph(config, sizes, kind)
    return graph, counted(kept(graph, config.run.policy), "exact")


def _maker(each: Kept) -> str:
    """The module's name, as ``match`` expects it."""
    return "" if each.kind == INPUT else each.module.rpartition(".")[2] or "layer"


def _on_one_side(expression: Any, at: Mapping[str, int]) -> Any:
    """An expression with each maximum replaced by its largest argument at given sizes."""
    values = {symbols.symbol(letter): size for letter, size in at.items()}
    largest = {
        each: max(each.args, key=lambda arg: arg.subs(values))
        for each in sympy.sympify(expression).atoms(sympy.Max)
    }
    return sympy.sympify(expression).xreplace(largest)
