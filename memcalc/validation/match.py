"""Tying what was measured to the ledger: every storage to its entries, every entry to its storage.

A ledger's tensor and a measured storage are the same thing if the same operation made them and
their bytes are equal; a storage may back several entries (packed q, k, v), whose bytes sum to it,
and a small entry may be two storages (seed and offset of a kernel's random numbers). What is alive
without being saved is tied to what a selective checkpoint caches alone.
What is left over on either side is a failure, unless the closed list below says why it is not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import NamedTuple

from memcalc.analysis.activations import SELECTIVE_CHECKPOINT, Entry
from memcalc.graph.graph import Graph, Tensor
from memcalc.validation.measure import Stored

MATCHED, IGNORED, MISSING, UNEXPLAINED = "matched", "ignored", "missing", "unexplained"

# The ledger's operations that are part of another module's work in ``modules``.
OPERATIONS = {
    "attention_enter": "qkv",
    "mlp_enter": "fc1",
    "attention_residual": ".",
}

NO_NAMES: dict[str, str] = {}

# The closed list of what may be kept without being in a layer's ledger: who made it, how many bytes
# it may have at the most (None: as many as it has), and why.
IGNORED_STORAGES: dict[str, tuple[int | None, str]] = {
    "later": (None, "the causal mask: one for the whole model"),
    "cos": (None, "the rotary positions' cosines: one table for the whole model"),
    "sin": (None, "the rotary positions' sines: one table for the whole model"),
    "turns": (None, "the rotary positions as complex numbers: one table for the whole model"),
    "alibi": (None, "ALiBi's slopes: one table for the whole model"),
    "": (8, "an int64 index that a list became, as Falcon takes key and value off one product"),
    "linear_qkv": (4, "Megatron-core's checkpoint keeps the kind of its mask as an int32"),
}


class Tie(NamedTuple):
    """A row of the comparison.

    Attributes:
        tensor: The ledger's tensor, or the shape of the storage.
        module: The module that made it.
        op: The operations, or the modules, that keep it.
        ledger_bytes: What the ledger says; 0 if it does not know it.
        measured_bytes: What was measured; 0 if it is not there. Of a storage that backs several
            entries, the entry's own part.
        status: ``matched``, ``ignored``, ``missing`` or ``unexplained``.
    """

    tensor: str
    module: str
    op: str
    ledger_bytes: int
    measured_bytes: int
    status: str


class Match(NamedTuple):
    """Entries of the ledger and storages that are the same, or what of either is left over.

    Attributes:
        module: The module that made them.
        entries: The ledger's entries, several where they are packed in one storage.
        stored: The storages, two where they are one small entry.
        status: As of ``Tie``.
    """

    module: str
    entries: tuple[Entry, ...]
    stored: tuple[Stored, ...]
    status: str

    def ties(self) -> list[Tie]:
        """A row for each entry, or for the storage that has none."""
        if not self.entries:
            each = self.stored[0]
            shape = " ".join(str(size) for size in each.shape)
            keepers = ", ".join(each.saved_by)
            return [Tie(f"({shape})", self.module, keepers, 0, each.bytes, self.status)]
        return [
            Tie(
                entry.tensor.name,
                self.module,
                ", ".join(entry.ops),
                entry.tensor.bytes,
                entry.tensor.bytes if self.stored else 0,
                self.status,
            )
            for entry in self.entries
        ]


def tie(
    graph: Graph,
    entries: Sequence[Entry],
    stored: Sequence[Stored],
    operations: Mapping[str, str] = OPERATIONS,
    modules: Mapping[str, str] = NO_NAMES,
    known: frozenset[str] = frozenset(),
) -> list[Tie]:
    """A row for every entry and every storage; the arguments are those of ``matches``."""
    found = matches(graph, entries, stored, operations, modules, known)
    return [row for each in found for row in each.ties()]


def matches(
    graph: Graph,
    entries: Sequence[Entry],
    stored: Sequence[Stored],
    operations: Mapping[str, str] = OPERATIONS,
    modules: Mapping[str, str] = NO_NAMES,
    known: frozenset[str] = frozenset(),
) -> list[Match]:
    """Every entry and every storage, matched with one another or left over.

    Args:
        graph: The ledger's graph.
        entries: What it keeps.
        stored: What was measured.
        operations: The module that does an operation's work, where it goes by another name.
        modules: What a module is called there, where it is a part of another's work.
        known: Names that mean the same there and in the ledger: what other ones of them keep is
            never tied.
    """
    stored = [replace(each, made_by=modules.get(each.made_by, each.made_by)) for each in stored]
    producer: dict[Tensor, str] = {}
    for op in graph.ops:
        for tensor in op.outputs:
            producer.setdefault(tensor, op.name)  # f hands on the tensor that it was given
    inputs = {tensor for op in graph.ops for tensor in op.inputs}
    found: list[Match] = []
    by_module: dict[str, list[Entry]] = {}
    for entry in entries:
        made = producer.get(entry.tensor)
        if made is None:  # an input of the graph, or a tensor that only its operation knows
            made = "" if entry.tensor in inputs else entry.ops[0]
        by_module.setdefault(operations.get(made, made), []).append(entry)
    for module in {**by_module, **{each.made_by: None for each in stored}}:
        mine = [each for each in stored if each.made_by == module]
        found += _within(module, by_module.get(module, []), mine, known)
    return found


def _within(
    module: str, entries: list[Entry], stored: list[Stored], known: frozenset[str]
) -> list[Match]:
    """The matches of what one module made.

    Equal bytes kept by the same operations come first, then equal bytes, then sums of entries.
    """
    found, left = [], list(entries)
    waiting = sorted(stored, key=lambda each: -each.bytes)
    for find in (_same_keepers, _same_bytes, _same_sum):
        for each in list(waiting):
            backed = find(each, [entry for entry in left if _may_be(entry, each, known)])
            if backed:
                for entry in backed:
                    left.remove(entry)
                waiting.remove(each)
                found.append(Match(module, tuple(backed), (each,), MATCHED))
    for entry in [entry for entry in left if entry.small]:
        for pair in _pairs(entry, waiting):
            left.remove(entry)
            waiting = [each for each in waiting if each not in pair]
            found.append(Match(module, (entry,), pair, MATCHED))
    for each in waiting:
        most = IGNORED_STORAGES.get(module, (0, ""))[0]
        status = IGNORED if most is None or each.bytes <= most else UNEXPLAINED
        found.append(Match(module, (), (each,), status))
    return found + [Match(module, (entry,), (), MISSING) for entry in left]


def _may_be(entry: Entry, each: Stored, known: frozenset[str]) -> bool:
    """Whether who keeps an entry and who saved a storage do not speak against each other."""
    if not each.saved_by:
        return entry.source == SELECTIVE_CHECKPOINT
    told = known.issuperset(entry.ops) and known.issuperset(each.saved_by)
    return not told or not set(entry.ops).isdisjoint(each.saved_by)


def _same_keepers(each: Stored, entries: list[Entry]) -> Sequence[Entry]:
    same = [e for e in entries if e.tensor.bytes == each.bytes and {*e.ops} == {*each.saved_by}]
    return same[:1]


def _same_bytes(each: Stored, entries: list[Entry]) -> Sequence[Entry]:
    return [entry for entry in entries if entry.tensor.bytes == each.bytes][:1]


def _same_sum(each: Stored, entries: list[Entry]) -> Sequence[Entry]:
    for count in range(2, min(len(entries), 3) + 1):
        for several in combinations(entries, count):
            if sum(entry.tensor.bytes for entry in several) == each.bytes:
                return several
    return ()


def _pairs(entry: Entry, stored: list[Stored]) -> list[tuple[Stored, Stored]]:
    """The first pair of storages that together are an entry, or none."""
    pairs = combinations(stored, 2)
    return [p for p in pairs if sum(each.bytes for each in p) == entry.tensor.bytes][:1]
