"""``validate``: what a PyTorch layer saves for backward, compared with the ledger's tensors."""

from dataclasses import replace
from typing import Any

import torch

import memcalc.validation.step.link  # noqa: F401 - before the process's first backward pass
from memcalc import resources, symbols
from memcalc.analysis.layers import layer_entries
from memcalc.answers.notes import notes, recomputation, setting
from memcalc.config import IMPLEMENTATIONS, Config
from memcalc.errors import UsageError, nearest
from memcalc.progress import doing
from memcalc.report import Column, Report
from memcalc.units import format_bytes
from memcalc.validation import ranks, timing
from memcalc.validation.against import AGAINST, whose
from memcalc.validation.findings import failures_of, finding_notes, status_notes, verdict
from memcalc.validation.match import IGNORED, MATCHED, MISSING, UNEXPLAINED
from memcalc.validation.measuring import cuda
from memcalc.validation.measuring.room import out_of_memory, require_room
from memcalc.validation.reduced import fewer_ranks, reduced
from memcalc.validation.require import require
from memcalc.validation.witness import as_on, observe

DEVICES = ("meta", "cpu", "cuda")
TORCH = torch.__version__.partition("+")[0]  # without the build, which changes no byte
COLUMNS = (
    Column("tensor", "text"),
    Column("module", "text"),
    Column("op", "text", detail=True),
    Column("ledger_bytes", "bytes"),
    Column("measured_bytes", "bytes"),
    Column("status", "text", choices=(MATCHED, IGNORED, MISSING, UNEXPLAINED)),
    Column("backend", "text", detail=True, choices=DEVICES),
    Column("rank", "count", detail=True, least=0),
)
UNCONFIRMED = "--device cuda has not been tested on a GPU yet"


def validate(
    config: Config,
    device: str | None = None,
    full_size: bool = False,
    against: str = "own",
    time: bool = False,
) -> Report:
    """Run a layer in PyTorch, and compare what autograd saves for backward with the exact ledger.

    Args:
        config: The model, its parallelism and its run.
        device: ``meta``: full size, with the tensors that CUDA's kernels save, but no memory and no
            kernel; ``cpu``: real tensors and kernels, one process per rank; ``cuda``: the same at
            full size, and the allocator's count. By default ``cuda`` if there is a GPU and the
            layer is memcalc's own, else a small layer on ``cpu`` and the full one on ``meta``.
        full_size: On the CPU, run the model's own size, not a small layer of the same shape.
        against: Whose layer runs: ``own``, memcalc's (``memcalc.validation.layers``);
            ``torch``, one sharded by DTensor's tensor parallelism; ``transformers``, Hugging
            Face's; or ``megatron``, Megatron-core's local layer.
        time: Instead, time memcalc's own layer under each recompute policy.

    Raises:
        UsageError: This device or implementation cannot be validated.
        RankError: A rank failed, died, or did not answer.
        MemcalcError: The layer does not fit in this machine's memory.

    >>> from memcalc.config import load
    >>> report = validate(load("22b", sp=True), "meta")
    >>> sorted(set(report.column("status"))), report.failures
    (['ignored', 'matched'], ())
    """
    if device not in (None, *DEVICES):
        raise UsageError(f"device {device!r} is unknown; {nearest(str(device), DEVICES)}")
    if against not in AGAINST:
        raise UsageError(f"against {against!r} is unknown; {nearest(str(against), AGAINST)}")
    config, against = whose(config, against)
    if device is not None:
        require(config, device, against)
        if time:
            return _timings(config, device, full_size, against)
        return _witness(config, device, full_size, against)
    if time:
        return validate(config, "cuda" if cuda.available() else "cpu", full_size, against, time)
    devices = AGAINST[against].devices
    if "cpu" not in devices:
        return validate(config, "meta", full_size, against)
    if cuda.available() and "cuda" in devices:
        return validate(config, "cuda", full_size, against)
    if ranks.launched():
        return validate(config, "cpu", full_size, against)
    require(config, "meta", against)
    small = config if full_size else fewer_ranks(config)
    return _together(
        _witness(small, "cpu", full_size, against), _witness(config, "meta", full_size, against)
    )


def _together(*reports: Report) -> Report:
    """The reports of several devices as one, with the last one's title; notes name their device."""
    last = reports[-1]
    common = [note for note in last.notes if all(note in report.notes for report in reports)]
    own = [
        f"{_device(report)}: {note.removeprefix(f'backend {_device(report)}: ')}"
        for report in reports
        for note in report.notes
        if note not in common
    ]
    return replace(
        last,
        columns=tuple(
            replace(column, detail=column.name in ("module", "op", "rank"))
            for column in last.columns
        ),
        rows=tuple(row for report in reports for row in report.rows),
        answer="; ".join(report.answer for report in reports),
        good=all(report.good for report in reports),
        notes=(*own, *common),
        failures=tuple(
            f"{_device(report)}: {line}" for report in reports for line in report.failures
        ),
    )


def _device(report: Report) -> str:
    found: str = report.column("backend")[0]
    return found


def _timings(config: Config, device: str, full_size: bool, against: str) -> Report:
    if device == "meta" or not AGAINST[against].own:
        raise UsageError("--time needs --device cpu or cuda, and --against own")
    if config.run.policy.regions:
        raise UsageError("--time runs every recompute policy: drop --recompute")
    config = _sized(config, device, full_size, against)
    with out_of_memory():
        return timing.timings(config, device)


def _sized(config: Config, device: str, full_size: bool, against: str) -> Config:
    """The config at the size that runs on a device, if that fits in its memory."""
    if device == "cpu" and not full_size:
        config = reduced(config, copies=AGAINST[against].replicates_kv)
    require_room(config, device)
    return config


def _witness(config: Config, device: str, full_size: bool, against: str) -> Report:
    """The report of one device."""
    t = config.parallel.tp
    doing(f"running one layer of {config.model.name} on {device}")
    if device == "meta":
        with ranks.pretended(t):
            found = [observe(0, config, device, against)]
    else:
        config = _sized(config, device, full_size, against)
        backend = "nccl" if device == "cuda" else "gloo"
        seconds = ranks.LONG_SECONDS if full_size else ranks.TIMEOUT_SECONDS
        with out_of_memory():
            found = ranks.on_each(
                t, observe, config, device, against, backend=backend, timeout=seconds
            )
    worst = max(range(len(found)), key=lambda rank: found[rank].measured.bytes)
    ties = found[worst].ties
    failures = tuple(line for rank, each in enumerate(found) for line in failures_of(rank, each))
    return Report(
        "validate",
        f"Saved for backward by one layer of {setting(config)}, {recomputation(config)}",
        COLUMNS,
        tuple((*each, device, worst) for each in ties),
        symbols.values(config),
        (
            *_backend_notes(config, device),
            *AGAINST[against].notes(config, device),
            *finding_notes(found, config, device),
            *status_notes(ties),
            *_beyond_the_paper(as_on(config, device)),
            *notes(config, "exact"),
            f"torch {TORCH}",
        ),
        failures,
        answer=verdict(found, ties, device, failures),
        good=not failures,
    )


def _backend_notes(config: Config, device: str) -> tuple[str, ...]:
    if device == "meta":
        return ("backend meta: full size; no memory is allocated and no kernel runs",)
    t = config.parallel.tp
    if device == "cpu":
        ranks_ = "1 process" if t == 1 else f"{t} processes"
        return (f"backend cpu: {ranks_}, real kernels; {setting(config)}",)
    unconfirmed = () if any(resources.names("measured", ".json")) else (UNCONFIRMED,)
    gpus = "1 GPU" if t == 1 else f"{t} GPUs"
    return (f"backend cuda: {gpus}, {cuda.hardware()}", *unconfirmed)


def _beyond_the_paper(config: Config) -> tuple[str, ...]:
    """The bytes of paper accounting, and the tensors by which the exact count differs."""
    theirs, differences = _paper_differences(config)
    if not differences:
        return ()
    terms = ", ".join(
        f"{name} {'+' if n > 0 else '-'}{format_bytes(abs(n))}" for name, n in differences.items()
    )
    return (
        f"--implementation paper --accounting paper: {format_bytes(theirs)}; this layer differs "
        f"by: {terms}",
    )


def _paper_differences(config: Config) -> tuple[int, dict[str, int]]:
    """The bytes of paper accounting, and what the exact count has more or less, by tensor."""
    kernels = IMPLEMENTATIONS["paper"]
    paper = replace(config, run=replace(config.run, implementation=kernels))
    theirs = _bytes_by_name(paper, "paper")
    ours = _bytes_by_name(config, "exact")
    differences = {name: ours.get(name, 0) - theirs.get(name, 0) for name in {**theirs, **ours}}
    return sum(theirs.values()), {name: n for name, n in differences.items() if n}


def _bytes_by_name(config: Config, accounting: str) -> dict[str, Any]:
    return {entry.tensor.name: entry.tensor.bytes for entry in layer_entries(config, accounting)}
