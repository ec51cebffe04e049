"""``validate``: what a PyTorch layer saves for backward, compared with the ledger's tensors."""

import os
from collections import Counter
from dataclasses import replace
from typing import Any

import torch

from memcalc import resources, symbols
from memcalc.analysis.layers import layer_entries
from memcalc.analysis.segments import rounded
from memcalc.answers.notes import notes, recomputation, setting
from memcalc.config import IMPLEMENTATIONS, Config, Implementation
from memcalc.config.assumption import Assumption
from memcalc.errors import UsageError, nearest
from memcalc.progress import doing
from memcalc.report import Column, Report
from memcalc.units import format_bytes, format_flops
from memcalc.validation import (
    allocator,
    cuda,
    dtensor,
    families,
    hugging_face,
    megatron,
    ranks,
    timing,
)
from memcalc.validation.gradients import TOLERANCE
from memcalc.validation.match import (
    IGNORED,
    IGNORED_STORAGES,
    MATCHED,
    MISSING,
    UNEXPLAINED,
    Tie,
)
from memcalc.validation.modules import TYPES, lacking
from memcalc.validation.reduced import fewer_ranks, reduced
from memcalc.validation.room import out_of_memory, require_room
from memcalc.validation.witness import DEPTHS, Counted, Finding, as_on, observe

DEVICES = ("meta", "cpu", "cuda")
AGAINST = ("own", "megatron", "torch", "transformers")
TORCH = torch.__version__.partition("+")[0]  # without the build, which changes no byte
UNCONFIRMED = "--device cuda has not been tested on a GPU yet"

# What a row's status says, in the order of the notes.
STATUSES = {
    MATCHED: "the ledger and PyTorch have the same bytes",
    IGNORED: "saved by PyTorch, but not part of the layer",
    MISSING: "in the ledger, but not saved by PyTorch",
    UNEXPLAINED: "saved by PyTorch, but not in the ledger",
}


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
        against: Whose layer runs: ``own``, the one of ``memcalc.validation.modules``; ``torch``,
            one sharded by DTensor's tensor parallelism; ``transformers``, Hugging Face's; or
            ``megatron``, Megatron-core's local layer.
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
    config, against = _whose(config, against)
    if device is not None:
        require(config, device, against)
        if time:
            return _timings(config, device, full_size, against)
        return _witness(config, device, full_size, against)
    if time:
        return validate(config, "cuda" if cuda.available() else "cpu", full_size, against, time)
    if against == "transformers":
        return validate(config, "meta", full_size, against)
    if cuda.available() and against == "own":
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
    if device == "meta" or against != "own":
        raise UsageError("--time needs --device cpu or cuda, and --against own")
    if config.run.policy.regions:
        raise UsageError("--time runs every recompute policy: drop --recompute")
    config = _sized(config, device, full_size, against)
    with out_of_memory():
        return timing.timings(config, device)


def _sized(config: Config, device: str, full_size: bool, against: str) -> Config:
    """The config at the size that runs on a device, if that fits in its memory."""
    if device == "cpu" and not full_size:
        config = reduced(config, copies=against != "torch")
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
    failures = tuple(line for rank, each in enumerate(found) for line in _failures(rank, each))
    return Report(
        "validate",
        f"Saved for backward by one layer of {setting(config)}, {recomputation(config)}",
        (
            Column("tensor", "text"),
            Column("module", "text"),
            Column("op", "text", detail=True),
            Column("ledger_bytes", "bytes"),
            Column("measured_bytes", "bytes"),
            Column("status", "text"),
            Column("backend", "text", detail=True),
            Column("rank", "count", detail=True),
        ),
        tuple((*each, device, worst) for each in ties),
        symbols.values(config),
        (
            *_backend_notes(config, device),
            *_layer_notes(config, device, against),
            *_finding_notes(found, config, device),
            *_status_notes(ties),
            *_beyond_the_paper(as_on(config, device)),
            *notes(config, "exact"),
            f"torch {TORCH}",
        ),
        failures,
        answer=_answer(found, ties, device, failures),
        good=not failures,
    )


def _answer(found: list[Finding], ties: list[Tie], device: str, failures: tuple[str, ...]) -> str:
    """The verdict in one line, over all ranks; matched tensors are those of the rank shown."""
    where = f"measured on {device}" + (f", over {len(found)} ranks" if len(found) > 1 else "")
    if not failures:
        matched = [each.measured_bytes for each in ties if each.status == MATCHED]
        total = format_bytes(sum(matched))
        return f"matches: {len(matched)} of {len(matched)} tensors, {total}, {where}"
    counts = Counter(tie.status for each in found for tie in each.ties)
    wrong = [f"{counts[status]} {status}" for status in (MISSING, UNEXPLAINED) if counts[status]]
    checks = len(failures) - counts[MISSING] - counts[UNEXPLAINED]
    if checks:
        wrong.append(f"{checks} other check{'s' if checks > 1 else ''} failed")
    return f"does not match: {', '.join(wrong)}, {where}"


def _status_notes(ties: list[Tie]) -> tuple[str, ...]:
    """The sums of the table, and what the statuses in it say."""
    ledger = sum(each.ledger_bytes for each in ties)
    measured = sum(each.measured_bytes for each in ties if each.status != IGNORED)
    there = [status for status in STATUSES if any(each.status == status for each in ties)]
    ignored = {
        f"{format_bytes(each.measured_bytes)}: {IGNORED_STORAGES[each.module][1]}": None
        for each in ties
        if each.status == IGNORED
    }
    return (
        f"ledger {format_bytes(ledger)}, measured {format_bytes(measured)}, difference "
        f"{format_bytes(measured - ledger)}",
        *(f"{status}: {STATUSES[status]}" for status in there if status != IGNORED),
        *((f"{IGNORED}: {STATUSES[IGNORED]} ({'; '.join(ignored)})",) if ignored else ()),
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


def _layer_notes(config: Config, device: str, against: str) -> tuple[str, ...]:
    """Whose layer ran, and which kernels were replaced by stand-ins."""
    if against == "transformers":
        built = families.FAMILIES[hugging_face.family(config)].layer
        return (
            f"layer: transformers' {built}; stand-ins replace CUDA's dropout and attention kernels",
        )
    if against == "megatron":
        return (
            "layer: Megatron-core's TransformerLayer (local spec); stand-ins replace its norms and "
            "CUDA's dropout",
        )
    return (*_torch_note(config, against), *_stand_ins(config, device))


def _torch_note(config: Config, against: str) -> tuple[str, ...]:
    if against != "torch":
        return ()
    t = config.parallel.tp
    return (
        f"layer: plain PyTorch modules sharded by DTensor over {t} tensor-parallel ranks; a "
        "stand-in replaces CUDA's dropout",
    )


def _stand_ins(config: Config, device: str) -> tuple[str, ...]:
    """Which fused kernels are replaced by functions that save the same tensors."""
    model, kernels = config.model, config.run.implementation
    flash = kernels.attention == "flash"
    fused = {
        "flash attention": flash and (device == "meta" or _math_on_cpu(config, device)),
        "RMSNorm": model.norm == "rmsnorm" and device != "cuda",
        "the gated activation": model.gated and kernels.fused_gate,
        "rotary positions": model.position == "rotary",
    }
    names = ", ".join(name for name, used in fused.items() if used)
    if not names:
        return ()
    return (f"stand-ins that save the same tensors replace these fused kernels: {names}",)


def _math_on_cpu(config: Config, device: str) -> bool:
    """Whether PyTorch would fall back to unfused attention: the CPU's kernel has no dropout."""
    return device == "cpu" and config.model.attention_dropout > 0


def _finding_notes(found: list[Finding], config: Config, device: str) -> tuple[str, ...]:
    first = found[0]
    lines: list[str] = []
    if first.gradient_error is not None:
        error = float(torch.tensor([each.gradient_error for each in found]).max())
        lines.append(
            "gradients of the input and of the sharded weights equal the unsharded layer's, in "
            f"fp32 without dropout, to within {error:.1g} of the largest"
        )
    if first.peaks:
        slope, rest = _slope(first.peaks), _rest(first.peaks)
        line = f"the peak of forward plus backward grows by {format_bytes(slope)} per layer"
        if config.run.implementation.attention == "unfused" or device != "meta":
            line += f"; {_temporary(rest)}"
        lines.append(line)
    if first.recomputed is not None:
        whole, stopped = map(format_flops, first.recomputed.measured)
        lines.append(
            f"recomputation adds {whole} per rank by PyTorch's counter, {stopped} with early stop "
            f"(torch.utils.checkpoint's default); {_likewise(first.recomputed)}"
        )
    taken = first.measured.allocated_bytes
    if taken is not None:
        least, most = map(format_bytes, _allocated(first))
        bounds = least if least == most else f"{least} to {most}"
        lines.append(
            f"the allocator counts {format_bytes(taken)} more after the forward pass; by its "
            f"rounding rules the saved tensors and the output take {bounds}"
        )
    if first.allocator_peaks:
        lines.append(
            f"the allocator's peak grows by {format_bytes(_slope(first.allocator_peaks))} per "
            f"layer; by its rounding rules the saved tensors take {format_bytes(_rounded(first))}; "
            f"{_temporary(_rest(first.allocator_peaks))}"
        )
    if taken is not None and allocator.unknown(os.environ):
        other = ", ".join(allocator.unknown(os.environ))
        lines.append(f"warning: the allocator's count is not checked when {other} is set")
    return tuple(lines)


def _temporary(rest: int) -> str:
    return f"temporary buffers take {format_bytes(rest)} more (measured; not in the ledger)"


def _likewise(counted: Counted) -> str:
    if counted.measured == counted.ledger:
        return "the ledger has the same"
    whole, stopped = map(format_flops, counted.ledger)
    return f"the ledger has {whole} and {stopped}"


def _beyond_the_paper(config: Config) -> tuple[str, ...]:
    """The bytes of paper accounting, and the tensors by which the exact count differs."""
    theirs, differences = _paper_differences(config)
    if not differences:
        return ()
    terms = ", ".join(
        f"{name} {'+' if n > 0 else '-'}{format_bytes(abs(n))}" for name, n in differences.items()
    )
    return (f"paper accounting: {format_bytes(theirs)}; differences: {terms}",)


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


def _whose(config: Config, against: str) -> tuple[Config, str]:
    """The config with the implementation of the layer that runs, and whose layer that is."""
    kernels = config.run.implementation
    if kernels.name.startswith("transformers-"):
        return config, "transformers" if against == "own" else against
    assumed = Assumption("implementation", kernels.name) in config.assumed
    if against == "torch" and (assumed or kernels.name == "paper"):  # no framework has that layer
        return _with(
            config, replace(IMPLEMENTATIONS["torch"], attention=kernels.attention)
        ), against
    if against != "transformers":
        return config, against
    if not assumed:
        raise UsageError(
            "--against transformers needs --implementation transformers-eager or "
            f"transformers-sdpa, not {kernels.name}"
        )
    name = "transformers-sdpa" if kernels.attention == "flash" else "transformers-eager"
    return _with(config, IMPLEMENTATIONS[name]), against


def _with(config: Config, kernels: Implementation) -> Config:
    """The config with an implementation that is assumed."""
    old = Assumption("implementation", config.run.implementation.name)
    others = (each for each in config.assumed if each != old)
    assumed = (*others, Assumption("implementation", kernels.name))
    return replace(config, run=replace(config.run, implementation=kernels), assumed=assumed)


def require(
    config: Config, device: str, against: str, instead: str = "--against transformers"
) -> None:
    """Refuse a layer that memcalc cannot run, and a device that this machine does not have.

    Args:
        config: The layer.
        device: The device.
        against: Whose layer runs.
        instead: What to choose where memcalc's own layer lacks something.

    Raises:
        UsageError: With what to choose instead.
    """
    kernels, model, t = config.run.implementation, config.model, config.parallel.tp
    require_precision(config.run.precision)
    if device == "cuda":
        if against != "own":
            raise UsageError("--device cuda runs memcalc's own layer only (--against own)")
        if not cuda.available():
            raise UsageError("PyTorch finds no GPU here; choose --device meta or --device cpu")
        if not ranks.launched() and torch.cuda.device_count() < t:
            raise UsageError(
                f"--tp {t} needs {t} GPUs, and this machine has {torch.cuda.device_count()}; "
                "choose a smaller --tp or --device meta, or start memcalc with torchrun"
            )
        if kernels.attention == "flash" and config.run.precision == "fp32":
            raise UsageError(
                "CUDA's flash attention needs --precision bf16 or fp16; choose one, or "
                "--attention unfused"
            )
    caches = "selective_op" in config.run.policy.cached
    if caches and (t > 1 or (device == "meta" and kernels.attention == "flash")):
        raise UsageError(
            "--recompute selective_op needs --tp 1, and with flash attention also "
            "--device cpu or cuda"
        )
    lacks = "" if against == "transformers" else lacking(config)
    if lacks:
        raise UsageError(
            f"memcalc's PyTorch layer does not support {lacks}{_way_out(config, instead)}"
        )
    if against == "megatron":
        megatron.require(config)
    if against == "torch":
        dtensor.require(config)
    if against == "transformers":
        hugging_face.require(config)
        parallel = config.parallel
        if device != "meta" or parallel.tp * parallel.cp > 1 or config.run.policy.regions:
            raise UsageError(
                "--against transformers needs --device meta, --tp 1, --cp 1 and --recompute none"
            )
        return
    grouped = model.kv_heads != model.heads
    if grouped and kernels.attention == "unfused" and not kernels.repeats_kv:
        raise UsageError(
            f"no PyTorch layer runs GQA with unfused attention as --implementation {kernels.name} "
            "counts it; choose --implementation megatron-local"
        )


def require_precision(precision: str) -> None:
    """Refuse a precision in which no layer can run.

    Raises:
        UsageError: With those that can.
    """
    if precision not in TYPES:
        raise UsageError(f"--precision {precision} cannot run here; choose from {', '.join(TYPES)}")


def _way_out(config: Config, instead: str) -> str:
    """What to choose where memcalc's own layer lacks something, if that has it."""
    _, different = hugging_face.nearest(config)
    if different:
        return ", and no known Hugging Face layer matches the model"
    return f"; try {instead}" + (" and --cp 1" if config.parallel.cp > 1 else "")


def _slope(peaks: tuple[int, ...]) -> int:
    return peaks[1] - peaks[0]


def _rest(peaks: tuple[int, ...]) -> int:
    return peaks[0] - DEPTHS[0] * _slope(peaks)


def _rounded(found: Finding) -> int:
    return sum(rounded(each.bytes) for each in found.measured.stored if each.made_by)


def _allocated(found: Finding) -> tuple[int, int]:
    return allocator.allocated(found.measured.sizes, cuda.segments_expand())


def _failures(rank: int, found: Finding) -> list[str]:
    lines = [
        f"rank {rank}: {each.tensor} of {each.module or 'the input'} is {each.status} "
        f"(ledger {each.ledger_bytes:,} bytes, measured {each.measured_bytes:,} bytes)"
        for each in found.ties
        if each.status in (MISSING, UNEXPLAINED)
    ]
    if found.peaks and _slope(found.peaks) != found.ledger_bytes:
        lines.append(
            f"rank {rank}: the peak grows by {_slope(found.peaks):,} bytes per layer, the ledger "
            f"has {found.ledger_bytes:,} bytes"
        )
    error = found.gradient_error
    if error is not None and not error <= TOLERANCE:
        lines.append(f"rank {rank}: gradients differ from the unsharded layer's by {error:.1g}")
    counted = found.recomputed
    if counted is not None and counted.measured != counted.ledger:
        lines.append(
            f"rank {rank}: recomputation adds {counted.measured[0]:,} FLOPs, or "
            f"{counted.measured[1]:,} with early stop; the ledger has {counted.ledger[0]:,} and "
            f"{counted.ledger[1]:,}"
        )
    taken = found.measured.allocated_bytes
    if taken is not None and not allocator.unknown(os.environ):
        least, most = _allocated(found)
        if not least <= taken <= most:
            lines.append(
                f"rank {rank}: the allocator counts {taken:,} bytes more after the forward pass; "
                f"by its rounding rules it is {least:,} to {most:,} bytes"
            )
    measured = found.measured
    if not measured.agrees:
        lines.append(
            f"rank {rank}: memcalc's two counts differ: {measured.live_bytes:,} bytes are alive, "
            f"but {measured.born_bytes:,} are saved and {measured.output_bytes:,} are outputs"
        )
    return lines
