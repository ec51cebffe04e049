"""``gpus``: the catalog of GPUs."""

from memcalc.config import gpus as catalog
from memcalc.report import Column, Report
from memcalc.units import format_bytes

COLUMNS = (
    Column("name", "text"),
    Column("aliases", "text"),
    Column("memory_bytes", "bytes", detail=1),
    Column("usable_bytes", "bytes"),
    Column("bf16_flops", "flops", title="bf16 {unit}/s", optional=True),
    Column("fp16_flops", "flops", title="fp16 {unit}/s", optional=True),
    Column("fp8_flops", "flops", title="fp8 {unit}/s", optional=True),
    Column(
        "memory_bandwidth_bytes",
        "bytes",
        title="memory bandwidth {unit}/s",
        detail=True,
        optional=True,
    ),
    Column(
        "nvlink_bandwidth_bytes",
        "bytes",
        title="NVLink bandwidth {unit}/s",
        detail=True,
        optional=True,
    ),
    Column("fp32_flops", "flops", title="fp32 {unit}/s", detail=True, optional=True),
    Column("sms", "count", detail=True, optional=True),
    Column("register_bytes_per_sm", "bytes", detail=True, optional=True),
    Column("shared_bytes_per_sm", "bytes", detail=True, optional=True),
    Column("l2_bytes", "bytes", detail=True, optional=True),
    Column("source", "text", detail=True),
    Column("memory_source", "text", detail=True),
    Column("usable_source", "text", detail=True),
    Column("chip_source", "text", detail=True),
)


def gpus(name: str | None = None) -> Report:
    """The GPUs that memcalc knows: other names, memory, peaks, bandwidths and what is on the chip.

    Args:
        name: One of them; by default all.

    Raises:
        ConfigError: There is no such GPU.

    >>> dict(zip(gpus().column("name"), gpus().column("bf16_flops")))["a100-80gb"]
    312000000000000
    """
    found = catalog.gpus() if name is None else [catalog.gpu(name)]
    return Report(
        "gpus",
        "GPUs of the catalog",
        COLUMNS,
        tuple(
            (
                each.name,
                ", ".join(catalog.aliases(each)),
                each.memory_bytes,
                each.usable_bytes,
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
                each.memory_source,
                each.usable_source,
                each.chip_source,
            )
            for each in found
        ),
        {},
        (
            "name: the names that PyTorch and nvidia-smi print, such as 'NVIDIA A100-SXM4-80GB', "
            "are accepted too",
            "memory: as reported by the driver (nvidia-smi); usable: what a process gets "
            "(total_memory in PyTorch), with which verdicts compare",
            "FLOP/s: dense peak on tensor cores, in the column fp32 without them",
            "-: not supported by the GPU, or not in the sources of this catalog",
            "mi250x: one of its two dies, because PyTorch sees each die as a GPU",
        ),
        answer=f"{len(found)} GPUs; --gpu and --budget take their names"
        if name is None
        else f"{found[0].name} has {format_bytes(found[0].memory_bytes)} of memory",
    )
