"""What ``validate`` says of its findings: the verdict, the notes and the failures."""

import os
from collections import Counter

import torch

from memcalc.analysis.allocator import rounded
from memcalc.config import Config
from memcalc.units import format_bytes, format_flops
from memcalc.validation.gradients import TOLERANCE
from memcalc.validation.match import (
    IGNORED,
    IGNORED_STORAGES,
    MATCHED,
    MISSING,
    UNEXPLAINED,
    Tie,
)
from memcalc.validation.measuring import allocator, cuda
from memcalc.validation.witness import DEPTHS, Counted, Finding

# What a row's status says, in the order of the notes.
STATUSES = {
    MATCHED: "the ledger and PyTorch have the same bytes",
    IGNORED: "saved by PyTorch, but not part of the layer",
    MISSING: "in the ledger, but not saved by PyTorch",
    UNEXPLAINED: "saved by PyTorch, but not in the ledger",
}


def verdict(found: list[Finding], ties: list[Tie], device: str, failures: tuple[str, ...]) -> str:
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


def status_notes(ties: list[Tie]) -> tuple[str, ...]:
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


def finding_notes(found: list[Finding], config: Config, device: str) -> tuple[str, ...]:
    """What was measured beside the tensors: gradients, peaks, FLOPs and the allocator's count."""
    first = found[0]
    lines: list[str] = []
    if first.gradient_error is not None:
        error = float(torch.tensor([each.gradient_error for each in found]).max())
        lines.append(
            "gradients of the input and of the sharded weights agree with the unsharded layer's, "
            f"in fp32 without dropout, to {error:.1g} of the largest gradient"
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


def _slope(peaks: tuple[int, ...]) -> int:
    return peaks[1] - peaks[0]


def _rest(peaks: tuple[int, ...]) -> int:
    return peaks[0] - DEPTHS[0] * _slope(peaks)


def _rounded(found: Finding) -> int:
    return sum(rounded(each.bytes) for each in found.measured.stored if each.made_by)


def _allocated(found: Finding) -> tuple[int, int]:
    return allocator.allocated(found.measured.sizes, cuda.segments_expand())


def failures_of(rank: int, found: Finding) -> list[str]:
    """What is wrong on a rank, a line each."""
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
