"""``trace``: the memory of a training step of one's own, run on fake CUDA tensors."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memcalc.analysis.headroom import CONTEXT_BYTES, VERDICTS
from memcalc.config.allocator import AllocatorConf
from memcalc.config.gpus import budget as size_of
from memcalc.config.gpus import gpu, is_gpu, smallest
from memcalc.report import Column, Report, scales
from memcalc.units import counted, in_scale
from memcalc.validation.measuring.valueless import operation
from memcalc.validation.step.need import Need
from memcalc.validation.step.storages import KINDS, Peak, Storage
from memcalc.validation.step.tracker import Tracker
from memcalc.validation.traced import Traced, called_as, run

REST, BESIDE = "rest", "not allocated"
SHOWN = 20  # rows of the table; one more sums the others
GPU = "a100"
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
OWNED = ("weights", "gradients", "optimizer", "buffers")  # kinds with a name of a parameter

COLUMNS = (
    Column("module", "text", description="* stands for the numbers of layers."),
    Column("kind", "text", choices=(*KINDS, REST, BESIDE)),
    Column("tensor", "text"),
    Column("op", "text", detail=1),
    Column("storages", "count", detail=2),
    Column("bytes", "bytes"),
    # of the whole run
    Column("verdict", "text", detail=5, optional=True, choices=tuple(VERDICTS)),
    Column("fits", "text", detail=5, optional=True, definition="flag"),
)
Size = Callable[[int], str]


def trace(
    target: str | Callable[[], Any],
    gpu_name: str | None = None,
    budget: str | None = None,
    steps: int = 2,
    alloc_conf: str | None = None,
    workspaces: bool = True,
    every_row: bool = False,
    ranks: int = 1,
) -> Report:
    """The most memory that steps of a user's training loop allocate and reserve, and for what.

    Args:
        target: A function, or its name as ``package.module:factory``. It is called on the fake
            device, and returns ``(model, inputs, optimizer)``, a function that runs one step, or an
            object with these.
        gpu_name: The GPU to choose kernels for, which the steps should fit.
        budget: A size with its unit, or a GPU, that the steps should fit; if not, it is a failure.
        steps: How many steps run. Optimizers make their states in the first one.
        alloc_conf: The settings of PyTorch's allocator, as in PYTORCH_ALLOC_CONF.
        workspaces: Whether the memory that kernels allocate for themselves counts.
        every_row: Whether every row is in the table, and not only the largest.
        ranks: Ranks of the process group, of which rank 0 runs; with 1 there is no process group.

    Raises:
        ConfigError: There is no such GPU, size or setting.
        UsageError: The factory fails or returns something else, or a step fails; or PyTorch is not
            of a version that was tried.

    >>> from memcalc.validation.step.example import make
    >>> report = trace(make, budget="h100")
    >>> report.answer[:27], report.records()[0]["op"]
    ('fits h100 (79.11 GiB): 76.2', '_log_softmax')
    """
    conf = AllocatorConf.parse(alloc_conf or "")
    limit = size_of(budget) if budget is not None else None
    known = gpu_name or (budget if budget is not None and is_gpu(budget) else None)
    name = budget if limit is not None else known and gpu(known).name
    if limit is None and known:
        limit = gpu(known).usable_bytes
    traced = run(target, known or GPU, steps, workspaces, ranks)
    called = called_as(target)
    peak = traced.tracker.peak()
    need = Need.of(traced.tracker, peak, conf, limit)
    shown = _rows(peak, traced.tracker, None if every_row else SHOWN)
    rows = tuple((*row, need.verdict, need.fits) for row in (*shown, *_beside(need)))
    scale = scales(COLUMNS, rows)["bytes"]

    def size(value: int) -> str:
        return in_scale(value, scale)

    answer = _answer(need, name, traced, peak, size)
    return Report(
        "trace",
        f"At the peak of {called} ({counted(steps, 'step')} on a fake {traced.gpu.name})",
        COLUMNS,
        rows,
        {},
        tuple(_notes(traced, peak, need, conf, known is None, size)),
        (answer,) if budget is not None and not need.fits else (),
        answer,
        need.fits,
    )


def _answer(need: Need, name: str | None, traced: Traced, peak: Peak, size: Size) -> str:
    """The first line: the peak, and whether it fits."""
    at = _moment(traced, peak)
    parts = (
        f"{size(need.allocated)} allocated + {size(need.reserved - need.allocated)} reserved, not "
        f"allocated + {size(CONTEXT_BYTES)} CUDA context"
    )
    if need.limit is None:
        line = (
            f"peak of {size(need.allocated)} allocated ({at}), {size(need.reserved)} reserved, "
            f"{size(need.bytes)} with the CUDA context: "
        )
        found = smallest(need.bytes)
        if found is None:
            return f"{line}no NVIDIA GPU of the catalogue holds that"
        return (
            f"{line}the smallest NVIDIA GPU that fits is {found.name} ({size(found.usable_bytes)})"
        )
    limit = f"{name} ({size(need.limit)})"
    if need.verdict == "fits":
        return (
            f"fits {limit}: {size(need.limit - need.bytes)} stay free at the peak ({at}), which "
            f"needs {size(need.bytes)}: {parts}"
        )
    if need.verdict == "allocated_only":
        return (
            f"does not fit {limit}: {size(need.bytes - need.limit)} short with reserved memory and "
            f"CUDA context; the {size(need.allocated)} allocated alone would fit ({at})"
        )
    kind, largest = max(peak.parts.items(), key=lambda item: item[1])
    return (
        f"does not fit {limit}: {size(need.bytes - need.limit)} more are needed, with "
        f"{size(need.allocated)} allocated at the peak ({at}); largest part: {kind}, "
        f"{size(largest)}"
    )


def _moment(traced: Traced, peak: Peak) -> str:
    """The step, phase, operation and module of a peak, in words."""
    step = sum(end <= peak.event for end in traced.ends) + 1
    op = operation(peak.op) if peak.op else "nothing allocated since"
    module = f" of {peak.module}" if peak.module not in ("", ".") else ""
    return f"step {min(step, len(traced.ends))}, {peak.phase}, {op}{module}"


def _rows(peak: Peak, tracker: Tracker, most: int | None) -> tuple[tuple[Any, ...], ...]:
    """What is alive at a peak, alike storages together, the largest first."""
    sizes: Counter[tuple[str, str, str, str]] = Counter()
    number: Counter[tuple[str, str, str, str]] = Counter()
    for each in peak.storages:
        key = _alike(each, tracker.kind(each))
        sizes[key] += each.rounded
        number[key] += 1
    rows = [(*key, number[key], size) for key, size in sizes.most_common()]
    if most is None or len(rows) <= most + 1:
        return tuple(rows)
    rest = rows[most:]
    last = ("", REST, counted(len(rest), "more row"), "", sum(x[4] for x in rest))
    return (*rows[:most], (*last, sum(x[5] for x in rest)))


def _beside(need: Need) -> Iterator[tuple[Any, ...]]:
    """What a GPU needs beyond the storages."""
    yield "", BESIDE, "reserved by the allocator", "", 1, need.reserved - need.allocated
    yield "", BESIDE, "CUDA context (estimated)", "", 1, CONTEXT_BYTES


def _alike(storage: Storage, kind: str) -> tuple[str, str, str, str]:
    """The module, kind, tensor and operation that alike storages have in common."""
    if kind in OWNED and storage.name:
        parameter, _, state = storage.name.partition(" ")
        module, _, tensor = parameter.rpartition(".")
        return _any_layer(module) or ".", kind, f"{tensor} {state}".strip(), ""
    shape = " x ".join(map(str, storage.shape))
    dtype = DTYPES.get(storage.dtype, storage.dtype)
    tensor = storage.name or f"{dtype} {shape}".strip()
    return _any_layer(storage.module) or ".", kind, tensor, operation(storage.op)


def _any_layer(module: str) -> str:
    """A module's name with a star for each number of a layer.

    >>> _any_layer("model.layers.11.mlp")
    'model.layers.*.mlp'
    """
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", module)


def _notes(
    traced: Traced, peak: Peak, need: Need, conf: AllocatorConf, assumed: bool, size: Size
) -> Iterator[str]:
    kinds = ", ".join(f"{kind} {size(each)}" for kind, each in peak.parts.most_common())
    yield f"by kind: {kinds}"
    peaks = [traced.tracker.peak(until=end).bytes for end in traced.ends]
    if len(peaks) > 1:
        until = (f"{size(each)} after step {number}" for number, each in enumerate(peaks, 1))
        yield f"highest peak so far: {', '.join(until)}"
    segments = "expandable" if conf.expandable_segments else "not expandable"
    yield (
        f"reserved {size(need.reserved)}: PyTorch's caching allocator replayed, with segments that "
        f"are {segments}; it counts {size(need.blocks)} as allocated, with the rest of blocks that "
        "it does not split"
    )
    if need.retries:
        yield (
            f"warning: it fits only as the allocator frees its cached blocks "
            f"{counted(need.retries, 'time')}, which takes time"
        )
    if need.stopped:
        yield f"replayed with this limit: {need.stopped}"
    yield from traced.notes
    yield "saved: made in a forward pass and alive at its end; temporary: what has no other kind"
    yield (
        "not counted: memory while the factory runs; workspaces of memory-efficient attention's "
        "backward, of cuDNN and of NCCL"
    )
    if assumed:
        yield f"assumed: kernels of {traced.gpu.name} (--gpu)"
    yield "no memory was allocated and no kernel ran: fake CUDA tensors have no values"
    yield f"torch {torch.__version__.partition('+')[0]}"
