"""Match measured storages with the entries of the ledger.

An entry and a storage match if the same operation made them and their bytes are equal. One storage
may hold several entries (packed q, k and v), whose bytes then sum to it, and a small entry may be
two storages (seed and offset of a kernel's random numbers). A storage that is alive but not saved
matches only what a selective checkpoint caches. What is left over on either side is a failure,
unless ``IGNORED_STORAGES`` gives a reason.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import NamedTuple

from memcalc.analysis.activations import SELECTIVE_CHECKPOINT, Entry
from memcalc.graph.graph import Graph, Tensor
from memcalc.validation.measuring.measure import Stored

MATCHED, IGNORED, MISSING, UNEXPLAINED = "matched", "ignored", "missing", "unexplained"

# Operations of the ledger that run in a module of memcalc's own layer with another name.
OPERATIONS = {
    "attention_enter": "qkv",
    "mlp_enter": "fc1",
    "attention_residual": ".",
}

NO_NAMES: dict[str, str] = {}

# All that may be saved for backward without being in a layer's ledger: the name of its buffer or
# module, its largest size in bytes (None: any size), and the reason.
IGNORED_STORAGES: dict[str, tuple[int | None, str]] = {
    "later": (None, "the causal mask, one per model"),
    "cos": (None, "the table of rotary cosines, one per model"),
    "sin": (None, "the table of rotary sines, one per model"),
    "turns": (None, "the table of rotary positions as complex numbers, one per model"),
    "alibi": (None, "the table of ALiBi slopes, one per model"),
    "": (8, "an int64 index that Falcon's code makes from a list"),
    "linear_qkv": (4, "an int32 with the mask's kind, saved by Megatron-core's checkpoint"),
}


class Tie(NamedTuple):
    """A row of the comparison.

    Attributes:
        tensor: The tensor's name in the ledger, or the shape of a storage that is not in it.
        module: The module that made it.
        op: The operations or the modules that save it.
        ledger_bytes: Its bytes in the ledger; 0 if it is not in it.
        measured_bytes: Its bytes as measured; 0 if there is no such storage. For a storage that
            holds several entries, the entry's part.
        status: ``matched``, ``ignored``, ``missing`` or ``unexplained``.
    """

    tensor: str
    module: str
    op: str
    ledger_bytes: int
    measured_bytes: int
    status: str


class Match(NamedTuple):
    """Entries and storages that match, or one that is left over.

    Attributes:
        module: The module that made them.
        entries: The ledger's entries: several if one storage holds them.
        stored: The storages: two if they are one small entry.
        status: As in ``Tie``.
    """

    module: str
    entries: tuple[Entry, ...]
    stored: tuple[Stored, ...]
    status: str

    def ties(self) -> list[Tie]:
        """One row per entry, or one for a storage without entries."""
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
    """One row per entry and per storage that is left over; the arguments are ``matches``'s."""
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
    """Match entries with storages.

    Args:
        graph: The ledger's graph.
        entries: The tensors that it saves for backward.
        stored: The measured storages.
        operations: The module that does an operation, where their names differ.
        modules: Another name for a module, under which it does an operation.
        known: Names that operations and modules share. An entry and a storage never match if
            different ones of these save them.
    """
    stored = [replace(each, made_by=modules.get(each.made_by, each.made_by)) for each in stored]
    producer: dict[Tensor, str] = {}
    for op in graph.ops:
        for tensor in op.outputs:
            producer.setdefault(tensor, op.name)  # the collective f returns its own input
    inputs = {tensor for op in graph.ops for tensor in op.inputs}
    found: list[Match] = []
    by_module: dict[str, list[Entry]] = {}
    for entry in entries:
        made = producer.get(entry.tensor)
        if made is None:  # an input of the graph, or a tensor inside an operation
            made = "" if entry.tensor in inputs else entry.ops[0]
        by_module.setdefault(operations.get(made, made), []).append(entry)
    for module in {**by_module, **{each.made_by: None for each in stored}}:
        mine = [each for each in stored if each.made_by == module]
        found += _within(module, by_module.get(module, []), mine, known)
    return found


def _within(
    module: str, entries: list[Entry], stored: list[Stored], known: frozenset[str]
) -> list[Match]:
    """The matches of one module.

    Equal bytes saved by the same operations come first, then equal bytes, then sums of entries.
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
        status = IGNORED if _is_ignored(module, each.bytes) else UNEXPLAINED
        found.append(Match(module, (), (each,), status))
    return found + [Match(module, (entry,), (), MISSING) for entry in left]


def _is_ignored(module: str, size: int) -> bool:
    """Whether a storage of a module is listed, and no larger than the list says."""
    if module not in IGNORED_STORAGES:
        return False
    most = IGNORED_STORAGES[module][0]
    return most is None or size <= most


def _may_be(entry: Entry, each: Stored, known: frozenset[str]) -> bool:
    """Whether an entry and a storage can be the same tensor, by the operations that save them."""
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
    """The first pair of storages whose bytes sum to an entry's, or none."""
    pairs = combinations(stored, 2)
    return [p for p in pairs if sum(each.bytes for each in p) == entry.tensor.bytes][:1]
