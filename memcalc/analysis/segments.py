"""The bytes that PyTorch's caching allocator counts as allocated beyond the requests.

The rules are those of ``memcalc.analysis.allocator``. Where a block is larger than its request, the
rest is split off, unless the request is larger than 1 MiB and the rest is not: then the whole block
counts as allocated.

Which blocks are free depends on the order of requests. Here this is the order of Megatron-core's
layers, with or without Transformer Engine:

- Dropout and the residual sum are one kernel (fused_bias_dropout.py).
- Queries, keys and values are views of the output of one GEMM, which attention.py
  (Attention.forward) refers to until it returns. FlashAttention, and context parallelism, copy them
  (dot_product_attention/backends.py: FlashAttention, FusedAttention).
- Keys and values sent around the ring are one block (context_parallel.py: AttnFuncWithCPAndKVP2P).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

from memcalc.analysis.activations import kept
from memcalc.analysis.allocator import SMALL, Allocator, Block, rounded
from memcalc.config.recompute import Policy
from memcalc.graph.graph import OF_WEIGHT, OVER_INPUT, OVER_INPUT_OF_ADD, Graph, Op, Tensor
from memcalc.graph.ops.elementwise import ADD

SOURCE = (
    "PyTorch c10/cuda/CUDACachingAllocator.cpp: should_split; Megatron-core's order of allocations"
)
MOST = 24  # passes that are walked; later ones are assumed to need as much


Key = Tensor | str  # a tensor, or the name of the operation that packs several


class Segments(Allocator):
    """The large pool of an allocator. The small pool always splits blocks and is not tracked.

    >>> segments = Segments()
    >>> first, other = segments.take(3 * 2**20), segments.take(4 * 2**20)
    >>> segments.give(first)
    >>> _ = segments.take(2 * 2**20)
    >>> segments.unsplit == 2**20
    True
    """

    def __init__(self) -> None:
        super().__init__()
        self._repeated = 0

    @property
    def unsplit(self) -> int:
        """The bytes that count as allocated beyond the requests."""
        return self.allocated - self.requested + self._repeated

    def take(self, size: int) -> Block | None:
        """A block for a request, or None for a request of the small pool."""
        return self.malloc(rounded(size)) if size > SMALL else None

    def give(self, block: Block | None) -> None:
        """Free a block."""
        if block is not None:
            self.free(block)

    def repeat(self, number: int, work: Callable[[], object]) -> None:
        """Repeat some work. Once it leaves the free blocks as they were, the rest is multiplied."""
        for done in range(1, number + 1):
            before, counted = [pool.free.copy() for pool in self.pools()], self.unsplit
            work()
            if [pool.free for pool in self.pools()] == before:
                self._repeated += (self.unsplit - counted) * (number - done)
                return


class Request(NamedTuple):
    """What an operation requests and frees.

    Attributes:
        scratch: Bytes that it needs only while it runs.
        takes: What it allocates, with the bytes of each.
        gives: What is freed when it ends.
    """

    scratch: int
    takes: Mapping[Key, int]
    gives: Sequence[Key]


def unsplit_passes(layers: Sequence[tuple[Graph, Policy, int]], copies: bool) -> tuple[int, bool]:
    """Bytes of unsplit blocks beyond the activations in them.

    The layers run forward one after another, for one micro-batch after another, as Megatron-core's
    do. No block is allocated before. Passes after the first ``MOST`` are assumed to need as much.

    Args:
        layers: The layers, each with its recomputation and with how many of its passes are in
            flight.
        copies: Whether attention copies queries, keys and values out of their packed tensor.

    Returns:
        The bytes, and whether all passes were walked.

    >>> from memcalc.blocks.layer import layer_graph
    >>> from memcalc.config import load
    >>> sizes = {"seq_length": 1024, "micro_batch_size": 4, "implementation": "megatron-local"}
    >>> config = load("gpt2-medium", tp=8, **sizes)
    >>> size, all_walked = unsplit_passes([(layer_graph(config), config.run.policy, 24)], False)
    >>> size / 2**20, all_walked
    (24.0, True)
    """
    number = sum(flying for _, _, flying in layers)
    passes = (
        (graph, policy)
        for micro in range(max((flying for _, _, flying in layers), default=0))
        for graph, policy, flying in layers
        if micro < flying
    )
    walked = tuple(islice(passes, MOST))
    return _unsplit(walked, copies) * number // max(len(walked), 1), number <= MOST


@lru_cache(256)
def _unsplit(passes: tuple[tuple[Graph, Policy], ...], copies: bool) -> int:
    """The bytes after these passes."""
    if len(set(passes)) == 1:
        return _of_alike(passes[0], copies)[len(passes) - 1]
    return _after_each(passes, copies)[-1] if passes else 0


@lru_cache(256)
def _of_alike(each: tuple[Graph, Policy], copies: bool) -> list[int]:
    """The bytes after one, two and up to ``MOST`` passes that are alike."""
    return _after_each((each,) * MOST, copies)


def _after_each(passes: Sequence[tuple[Graph, Policy]], copies: bool) -> list[int]:
    """The bytes after each of some passes."""
    segments = Segments()
    plans = {
        (graph, policy): _plan(graph.ops, [e.tensor for e in kept(graph, policy)], copies)
        for graph, policy in set(passes)
    }
    found = []
    for each in passes:
        _pass(segments, plans[each])
        found.append(segments.unsplit)
    return found


def _pass(segments: Segments, plan: Iterable[Request]) -> None:
    """Run a layer forward; afterwards only its saved tensors and outputs have blocks."""
    blocks: dict[Key, Block | None] = {}
    for step in plan:
        at_work = segments.take(step.scratch)
        blocks.update((key, segments.take(size)) for key, size in step.takes.items())
        segments.give(at_work)
        for key in step.gives:
            segments.give(blocks.pop(key))


def _plan(ops: Sequence[Op], kept_: Iterable[Tensor], copies: bool) -> list[Request]:
    """What each operation of a layer's forward pass requests and frees."""
    homes = _homes(ops, copies)
    last: dict[Key, int] = {}
    for index, op in enumerate(ops):
        used = (*op.inputs, *op.outputs, *op.holds)
        last.update(dict.fromkeys((homes.get(tensor, tensor) for tensor in used), index))
    for index, op in enumerate(ops):
        if _packs(op):
            last[op.name] = max(last.get(op.name, index), _next_gemm(ops, index))
    stay = {homes.get(tensor, tensor) for tensor in (*kept_, *ops[-1].outputs)}
    made: set[Key] = set()
    alive: list[Key] = []
    plan = []
    for index, op in enumerate(ops):
        takes = {k: size for k, size in _made(op, homes) if k not in made and size > SMALL}
        made.update(takes)
        alive += [key for key in takes if key not in stay]
        gives = [key for key in alive if last.get(key, index) <= index]
        alive = [key for key in alive if key not in gives]
        if takes or gives or op.scratch.forward > SMALL:
            plan.append(Request(op.scratch.forward, takes, gives))
    return plan


def _homes(ops: Sequence[Op], copies: bool) -> dict[Tensor, Key]:
    """Tensors without memory of their own, each with the tensor or operation that owns it."""
    homes: dict[Tensor, Key] = {}
    for index, op in enumerate(ops):
        following = [each for each in ops[index + 1 : index + 2] if each.kind is ADD]
        over = op.kind.output == OVER_INPUT or (
            op.kind.output == OVER_INPUT_OF_ADD
            and any(op.outputs[0] in each.inputs for each in following)
        )
        if over:
            for tensor in set(op.outputs).difference(op.inputs):
                homes[tensor] = homes.get(op.inputs[0], op.inputs[0])
        elif _packs(op) and not copies:
            homes.update(dict.fromkeys(op.outputs, op.name))
        if _goes_round(op):
            homes.update(dict.fromkeys(op.inputs, op.name))
    return homes


def _made(op: Op, homes: Mapping[Tensor, Key]) -> Iterator[tuple[Key, int]]:
    """What an operation allocates, with its bytes."""
    if _packs(op):
        yield op.name, sum(tensor.bytes for tensor in op.outputs)
    if _goes_round(op):
        size = sum(tensor.bytes for tensor in op.inputs)
        yield f"{op.name}: sent", size
        yield op.name, size
    for save in op.saves:
        if save.tensor not in op.inputs and save.tensor.kept_as is None:
            yield save.tensor, save.tensor.bytes
    for tensor in op.outputs:
        if tensor not in homes and tensor not in op.inputs:
            yield tensor, tensor.bytes


def _packs(op: Op) -> bool:
    """Whether one GEMM computes several tensors, which are views of its output."""
    return op.kind.gemm == OF_WEIGHT and len(op.outputs) > 1


def _goes_round(op: Op) -> bool:
    """Whether it packs keys and values in a block and sends that around the ring."""
    return any(move.collective == "send_receive" for move in op.moves)


def _next_gemm(ops: Sequence[Op], index: int) -> int:
    """The next GEMM with a weight: until then the caller refers to the packed tensor."""
    gemms = (later for later in range(index + 1, len(ops)) if ops[later].kind.gemm == OF_WEIGHT)
    return next(gemms, index)
