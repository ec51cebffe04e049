"""``gpus``: the catalogue of GPUs."""

from memcalc.config import gpus as catalogue
from memcalc.report import Column, Report


def gpus() -> Report:
    """The GPUs that memcalc knows, with their memory, peaks and bandwidths, and what is on chip.

    >>> dict(zip(gpus().column("name"), gpus().column("bf16_flops")))["a100-80gb"]
    312000000000000
    """
    found = catalogue.gpus()
    return Report(
        "gpus",
        f"{len(found)} GPUs",
        (
            Column("name", "text"),
            Column("memory_bytes", "bytes"),
            Column("bf16_flops", "flops"),
            Column("fp16_flops", "flops"),
            Column("fp8_flops", "flops"),
            Column("memory_bandwidth_bytes", "bytes", detail=True),
            Column("nvlink_bandwidth_bytes", "bytes", detail=True),
            Column("fp32_flops", "flops", detail=True),
            Column("sms", "count"),
            Column("register_bytes_per_sm", "bytes", detail=True),
            Column("shared_bytes_per_sm", "bytes", detail=True),
            Column("l2_bytes", "bytes", detail=True),
            Column("source", "text", detail=True),
            Column("chip_source", "text", detail=True),
        ),
        tuple(
            (
                each.name,
                each.memory_bytes,
                each.peaks["bf16"],
                each.peaks["fp16"],
                each.fp8_flops,
                each.memory_bandwidth,
                each.nvlink_bandwidth,
                each.fp32_flops,
                each.sms,
                each.register_bytes,
                each.shared_bytes,
                each.l2_bytes,
                each.source,
                each.chip_source,
            )
            for each in found
        ),
        {},
        (
            "memory as the driver reports it; FLOPs of dense tensor-core products (fp32: without "
            "them) and bytes of bandwidth are those of a second; register file and shared memory "
            "are those of one multiprocessor (SM)",
        ),
    )
