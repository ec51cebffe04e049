"""``validate``: a real PyTorch layer, what it keeps, and the ledger, tensor by tensor."""

import os
from dataclasses import replace
from typing import Any

import torch

from memcalc import resources, symbols
from memcalc.analysis.layers import layer_entries
from memcalc.analysis.segments import rounded
from memcalc.answers.notes import notes, recomputation, setting
from memcalc.config import IMPLEMENTATIONS, Config, Implementation
from memcalc.errors import UsageError, nearest
from memcalc.report import Column, Report
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
from memcalc.validation.match import IGNORED, MISSING, UNEXPLAINED
from memcalc.validation.modules import TYPES, lacking
from memcalc.validation.reduced import fewer_ranks, reduced
from memcalc.validation.room import RoomError, require_room
from memcalc.validation.witness import DEPTHS, Counted, Finding, as_on, observe

DEVICES = ("meta", "cpu", "cuda")
AGAINST = ("own", "megatron", "torch", "transformers")
TORCH = torch.__version__.partition("+")[0]  # without the build, which changes nothing here
UNCONFIRMED = "not yet confirmed on a GPU: no such run is part of memcalc so far"


def validate(
    config: Config,
    device: str | None = None,
    full_size: bool = False,
    against: str = "own",
    time: bool = False,
) -> Report:
    """Run a layer in PyTorch, measure what autograd keeps, and hold the exact ledger against it.

    Args:
        config: The model, its parallelism and its run.
        device: ``meta``: full size, CUDA's choices of what is kept, no memory and no kernel;
            ``cpu``: real tensors and kernels, and a process for every rank; ``cuda``: the same at
            full size, and what the allocator counts. By default ``cuda`` if there is a GPU and the
            layer is memcalc's own, else a small layer on ``cpu``, and the whole one on ``meta``.
        full_size: On the CPU, the model's own size rather than a small one of its shape.
        against: Whose layer runs: ``own``, that of ``memcalc.validation.modules``;
            ``torch``, one in DTensor's tensor parallelism; ``transformers``, Hugging Face's; or
            ``megatron``, Megatron-core's local one.
        time: How long the own layer takes under each policy, instead of what it keeps.

    Raises:
        UsageError: The device or the implementation is not one that can be validated.
        RankError: A rank failed, died, or did not answer.
        MemcalcError: The layer does not fit this machine.

    >>> from memcalc.config import load
    >>> report = validate(load("22b", sp=True), "meta")
    >>> sorted(set(report.column("status"))), report.failures
    (['ignored', 'matched'], ())
    """
    if device not in (None, *DEVICES):
        raise UsageError(f"device {device!r} is unknown; {nearest(str(device), DEVICES)}")
    if against not in AGAINST:
        raise UsageError(f"a layer of {against!r} is unknown; {nearest(str(against), AGAINST)}")
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
    """The reports of several devices as one, titled as the last; the notes of each say whose."""
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
        raise UsageError("times are of memcalc's own layer, on cuda or on the cpu")
    if config.run.policy.regions:
        raise UsageError("every policy has its times: choose no recomputation beside them")
    config = _sized(config, device, full_size, against)
    return timing.timings(config, device)


def _sized(config: Config, device: str, full_size: bool, against: str) -> Config:
    """The config at the size that runs on a device, after making sure that it fits."""
    if device == "cpu" and not full_size:
        config = reduced(config, copies=against != "torch")
    require_room(config, device)
    return config


def _witness(config: Config, device: str, full_size: bool, against: str) -> Report:
    """The report of one device."""
    t = config.parallel.tp
    if device == "meta":
        with ranks.pretended(t):
            found = [observe(0, config, device, against)]
    else:
        config = _sized(config, device, full_size, against)
        backend = "nccl" if device == "cuda" else "gloo"
        seconds = ranks.LONG_SECONDS if full_size else ranks.TIMEOUT_SECONDS
        try:
            found = ranks.on_each(
                t, observe, config, device, against, backend=backend, timeout=seconds
            )
        except torch.OutOfMemoryError as error:
            raise RoomError(
                f"the GPU has no memory left: {str(error).partition('.')[0]}"
            ) from error
    worst = max(range(len(found)), key=lambda rank: found[rank].measured.bytes)
    ties = found[worst].ties
    ledger_bytes = sum(each.ledger_bytes for each in ties)
    measured_bytes = sum(each.measured_bytes for each in ties if each.status != IGNORED)
    ignored = sum(each.measured_bytes for each in ties if each.status == IGNORED)
    return Report(
        "validate",
        f"What PyTorch keeps of one layer of {setting(config)}, {recomputation(config)}",
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
            f"ledger {ledger_bytes} bytes, measured {measured_bytes}, difference "
            f"{measured_bytes - ledger_bytes}; ignored {ignored}; torch {TORCH}",
            *_beyond_the_paper(as_on(config, device)),
            *notes(config, "exact"),
        ),
        tuple(line for rank, each in enumerate(found) for line in _failures(rank, each)),
    )


def _backend_notes(config: Config, device: str) -> tuple[str, ...]:
    if device == "meta":
        return ("backend meta: full size, no memory was allocated and no kernel ran",)
    t = config.parallel.tp
    if device == "cpu":
        return (f"backend cpu: {t} process(es), real kernels; {setting(config)}",)
    unconfirmed = () if any(resources.names("measured", ".json")) else (UNCONFIRMED,)
    return (f"backend cuda: {t} GPU(s), {cuda.described()}", *unconfirmed)


def _layer_notes(config: Config, device: str, against: str) -> tuple[str, ...]:
    """Whose layer ran, and what stood in for kernels."""
    if against == "transformers":
        built = families.FAMILIES[hugging_face.family(config)].layer
        return (
            f"layer: transformers' own {built}; stand-ins for CUDA's dropout and attention kernels",
        )
    if against == "megatron":
        return (
            "layer: Megatron-core's own local TransformerLayer; stand-ins for its norms and for "
            "CUDA's dropout",
        )
    return (*_torch_note(config, against), *_stand_ins(config, device))


def _torch_note(config: Config, against: str) -> tuple[str, ...]:
    if against != "torch":
        return ()
    t = config.parallel.tp
    return (
        f"layer: plain PyTorch modules under DTensor's own tensor parallelism of {t}; a stand-in "
        "for CUDA's dropout",
    )


def _stand_ins(config: Config, device: str) -> tuple[str, ...]:
    """Which fused kernels are stood in for, by functions that keep what those keep."""
    model, kernels = config.model, config.run.implementation
    flash = kernels.attention == "flash"
    fused = {
        "flash attention": flash and (device == "meta" or _math_on_cpu(config, device)),
        "RMSNorm": model.norm == "rmsnorm" and device != "cuda",
        "the gate": model.gated and kernels.fused_gate,
        "rotary positions": model.position == "rotary",
    }
    names = ", ".join(name for name, used in fused.items() if used)
    if not names:
        return ()
    return (f"stand-ins, written to keep what the fused kernels' sources say, for: {names}",)


def _math_on_cpu(config: Config, device: str) -> bool:
    """Whether attention would fall back to its math form: the CPU's kernel has no dropout."""
    return device == "cpu" and config.model.attention_dropout > 0


def _finding_notes(found: list[Finding], config: Config, device: str) -> tuple[str, ...]:
    first = found[0]
    lines: list[str] = []
    if first.gradient_error is not None:
        error = float(torch.tensor([each.gradient_error for each in found]).max())
        lines.append(
            "in fp32 without dropout the ranks' gradients, of the input and of split weights, "
            f"are the unsplit layer's to {error:.1g} of the largest"
        )
    if first.peaks:
        slope, rest = _slope(first.peaks), _rest(first.peaks)
        line = f"the peak of forward and backward grows by {slope} bytes a layer"
        if config.run.implementation.attention == "unfused" or device != "meta":
            line += f"; {rest} bytes come and go besides (measured, not predicted)"
        lines.append(line)
    if first.recomputed is not None:
        whole, stopped = first.recomputed.measured
        lines.append(
            f"recomputation adds {whole} FLOPs on a rank by PyTorch's counter, {stopped} with its "
            f"checkpoint's default early stop; {_likewise(first.recomputed)}"
        )
    taken = first.measured.allocated_bytes
    if taken is not None:
        least, most = _allocated(first)
        bounds = f"{least}" if least == most else f"{least} to {most}"
        lines.append(
            f"the allocator counts {taken} bytes more after the forward pass, where its rules give "
            f"{bounds} for what is kept and the output"
        )
    if first.allocator_peaks:
        lines.append(
            f"by the allocator the peak grows by {_slope(first.allocator_peaks)} bytes a layer, "
            f"where its rules give {_rounded(first)} for what is kept; "
            f"{_rest(first.allocator_peaks)} bytes come and go besides (reported, not checked)"
        )
    if taken is not None and allocator.unknown(os.environ):
        other = ", ".join(allocator.unknown(os.environ))
        lines.append(f"warning: {other}: not the allocator whose rules are known; not checked")
    return tuple(lines)


def _likewise(counted: Counted) -> str:
    if counted.measured == counted.ledger:
        return "the ledger has the same"
    return f"the ledger has {counted.ledger[0]} and {counted.ledger[1]}"


def _beyond_the_paper(config: Config) -> tuple[str, ...]:
    """Term by term, what is kept beside or without what the paper's way of counting has."""
    kernels = IMPLEMENTATIONS["paper"]
    paper = replace(config, run=replace(config.run, implementation=kernels))
    theirs = _bytes_by_name(paper, "paper")
    ours = _bytes_by_name(config, "exact")
    terms = [
        f"{name} {ours.get(name, 0) - theirs.get(name, 0):+d}"
        for name in {**theirs, **ours}
        if ours.get(name, 0) != theirs.get(name, 0)
    ]
    if not terms:
        return ()
    return (
        f"the paper's way of counting has {sum(theirs.values())} bytes; to these: "
        f"{', '.join(terms)}",
    )


def _bytes_by_name(config: Config, accounting: str) -> dict[str, Any]:
    return {entry.tensor.name: entry.tensor.bytes for entry in layer_entries(config, accounting)}


def _whose(config: Config, against: str) -> tuple[Config, str]:
    """The config with the implementation that a layer is, and whose layer runs."""
    kernels = config.run.implementation
    if kernels.name.startswith("transformers-"):
        return config, "transformers" if against == "own" else against
    said = f"implementation {kernels.name}"
    assumed = said in config.assumed
    if against == "torch" and (assumed or kernels.name == "paper"):  # which no framework's layer is
        return _with(
            config, replace(IMPLEMENTATIONS["torch"], attention=kernels.attention)
        ), against
    if against != "transformers":
        return config, against
    if not assumed:
        raise UsageError(f"{said} is not Hugging Face's: choose transformers-eager or -sdpa")
    name = "transformers-sdpa" if kernels.attention == "flash" else "transformers-eager"
    return _with(config, IMPLEMENTATIONS[name]), against


def _with(config: Config, kernels: Implementation) -> Config:
    """The config with an implementation that nobody asked for."""
    old = f"implementation {config.run.implementation.name}"
    assumed = (*(line for line in config.assumed if line != old), f"implementation {kernels.name}")
    return replace(config, run=replace(config.run, implementation=kernels), assumed=assumed)


def require(config: Config, device: str, against: str) -> None:
    """Refuse a layer that is not there, and a device that is not.

    Raises:
        UsageError: With what is there.
    """
    kernels, model, t = config.run.implementation, config.model, config.parallel.tp
    if config.run.precision not in TYPES:
        raise UsageError(f"{config.run.precision} is not validated: choose from {', '.join(TYPES)}")
    if device == "cuda":
        if against != "own":
            raise UsageError("on cuda, memcalc's own layer is validated")
        if not cuda.available():
            raise UsageError("PyTorch finds no GPU here; choose from 'cpu', 'meta'")
        if not ranks.launched() and torch.cuda.device_count() < t:
            raise UsageError(
                f"tensor parallel {t} needs {t} GPUs, where there are {torch.cuda.device_count()}; "
                "choose --tp or --device meta, or start it with torchrun over several machines"
            )
        if kernels.attention == "flash" and config.run.precision == "fp32":
            raise UsageError("CUDA's flash kernel takes bf16 and fp16; choose --attention unfused")
    caches = "flash_attention" in config.run.policy.cached
    if caches and (t > 1 or (device == "meta" and kernels.attention == "flash")):
        raise UsageError(
            "selective_op is validated with real flash kernels, on the cpu or cuda, and on one rank"
        )
    lacks = "" if against == "transformers" else lacking(config)
    if lacks:
        raise UsageError(f"no layer here has {lacks}: Hugging Face's may (transformers)")
    if against == "megatron":
        megatron.require(config)
    if against == "torch":
        dtensor.require(config)
    if against == "transformers":
        hugging_face.require(config)
        if device != "meta" or config.parallel.tp > 1 or config.run.policy.regions:
            raise UsageError(
                "Hugging Face's layers are validated on meta, with one rank and nothing recomputed"
            )
        return
    grouped = model.kv_heads != model.heads
    if grouped and kernels.attention == "unfused" and not kernels.repeats_kv:
        raise UsageError(
            f"implementation {kernels.name} with grouped queries and unfused attention is a way of "
            "counting that no module has; choose megatron-local"
        )


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
        f"(ledger {each.ledger_bytes} bytes, measured {each.measured_bytes})"
        for each in found.ties
        if each.status in (MISSING, UNEXPLAINED)
    ]
    if found.peaks and _slope(found.peaks) != found.ledger_bytes:
        lines.append(
            f"rank {rank}: the peak grows by {_slope(found.peaks)} bytes a layer, where the ledger "
            f"has {found.ledger_bytes}"
        )
    error = found.gradient_error
    if error is not None and not error <= TOLERANCE:
        lines.append(f"rank {rank}: gradients differ from the unsplit layer's by {error:.1g}")
    counted = found.recomputed
    if counted is not None and counted.measured != counted.ledger:
        lines.append(
            f"rank {rank}: recomputation adds {counted.measured[0]} FLOPs, and "
            f"{counted.measured[1]} with early stop, where the ledger has {counted.ledger[0]} and "
            f"{counted.ledger[1]}"
        )
    taken = found.measured.allocated_bytes
    if taken is not None and not allocator.unknown(os.environ):
        least, most = _allocated(found)
        if not least <= taken <= most:
            lines.append(
                f"rank {rank}: the allocator counts {taken} bytes more after the forward pass, "
                f"where its rules give {least} to {most}"
            )
    measured = found.measured
    if not measured.agrees:
        lines.append(
            f"rank {rank}: two counts differ: {measured.live_bytes} bytes are alive, "
            f"{measured.born_bytes} kept and {measured.output_bytes} of outputs"
        )
    return lines
