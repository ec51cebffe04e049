"""The catalog of GPUs."""

import re
from functools import cache
from typing import NamedTuple

from memcalc import resources
from memcalc.config import fields
from memcalc.errors import ConfigError, nearest
from memcalc.units import MIB, parse_bytes

# What NVIDIA's driver keeps of the memory that nvidia-smi reports: the median of eleven GPUs of the
# catalog, between 0.26 GiB (v100-32gb) and 0.75 GiB (a100-80gb).
DRIVER_BYTES = 512 * MIB
ESTIMATED = "estimated: 0.5 GiB less than nvidia-smi reports, the median of eleven GPUs"

# Words of a driver's name for a GPU that do not tell GPUs apart.
_IGNORED = re.compile(
    r"nvidia|geforce|gtx|tesla|amd|instinct|generation|server|workstation|edition|oam|sxm\d?|hbm3e?"
)


class Gpu(NamedTuple):
    """A GPU, as its vendor states it. None is what it does not have, or what no source states.

    Attributes:
        name: Its name in the catalog.
        memory_bytes: Its memory, as its driver reports it.
        usable_bytes: What a process gets of it: ``total_memory`` in PyTorch.
        capability: Its CUDA compute capability, times 10; None if it is not NVIDIA's.
        peaks: Dense tensor-core FLOP/s, by the dtype of activations.
        fp8_flops: Dense tensor-core FLOP/s in fp8.
        fp32_flops: FLOP/s in fp32 without tensor cores.
        memory_bandwidth: Bytes per second from memory.
        nvlink_bandwidth: Bytes per second between GPUs, both directions together.
        sms: Streaming multiprocessors.
        register_bytes: Register file of one SM.
        shared_bytes: The most shared memory of one SM.
        l2_bytes: L2 cache.
        source: Where tensor-core peaks and bandwidths were seen.
        memory_source: Which tool reported the memory, and where that was seen.
        usable_source: Where the usable bytes were seen, or that they are estimated.
        chip_source: Where the fp32 peak, SMs, their memories and L2 were seen.
    """

    name: str
    memory_bytes: int
    usable_bytes: int
    capability: int | None
    peaks: dict[str, int | None]
    fp8_flops: int | None
    fp32_flops: int | None
    memory_bandwidth: int
    nvlink_bandwidth: int | None
    sms: int | None
    register_bytes: int | None
    shared_bytes: int | None
    l2_bytes: int | None
    source: str
    memory_source: str
    usable_source: str
    chip_source: str


def gpu(name: str) -> Gpu:
    """The GPU of a name, an alias, or the name that its driver gives it.

    Raises:
        ConfigError: The catalog has no such GPU.

    >>> gpu("a100").name, gpu("a100").peaks["bf16"]
    ('a100-80gb', 312000000000000)
    >>> gpu("NVIDIA A100-SXM4-80GB").name
    'a100-80gb'
    """
    fields.text("gpu", name)
    found = _found(name)
    if found is None:
        raise ConfigError(f"GPU {name[:40]!r} is unknown; {_hint(name)}")
    return found


def is_gpu(name: str) -> bool:
    """Whether the catalog has a GPU of this name or alias.

    >>> is_gpu("A100"), is_gpu("TPU")
    (True, False)
    """
    return _found(name) is not None


def budget(text: str) -> int:
    """The bytes of a size, or the usable memory of a GPU by its name.

    >>> budget("80GB"), budget("80GiB"), budget("h100") == gpu("h100").usable_bytes
    (80000000000, 85899345920, True)

    Raises:
        ConfigError: It is neither.
    """
    size = parse_bytes(text)
    if size is not None:
        return size
    found = _found(text)
    if found is None:
        raise ConfigError(
            f"--budget {text[:40]!r} must be a size with its unit, such as 80GB or 80GiB, or a "
            "GPU; "
            + ("`memcalc gpus` lists all" if re.match(r"[-+.]?[0-9]", text) else _hint(text))
        )
    return found.usable_bytes


def smallest(size: int, precision: str = "fp16") -> Gpu | None:
    """The GPU with the least usable memory that holds so many bytes, or None.

    Its tensor cores must support the precision; for fp32, any tensor cores will do.

    Only NVIDIA GPUs whose peak in this precision the catalog knows are considered: the buffers
    that memcalc counts are NVIDIA's. Of
    several with the same memory it is the first of the catalog.

    >>> smallest(70 * 2**30).name
    'h100-sxm'
    >>> smallest(2**60) is None
    True
    """
    kind = "fp16" if precision == "fp32" else precision
    found = [
        each
        for each in gpus()
        if each.capability and each.peaks[kind] and each.usable_bytes >= size
    ]
    return min(found, key=lambda each: each.usable_bytes, default=None)


def gpus() -> list[Gpu]:
    """Every GPU, in the order of the catalog.

    >>> gpus()[0].name
    'titan-x'
    """
    return [found for name, found in _by_name().items() if name == found.name]


def aliases(found: Gpu) -> list[str]:
    """The other names of a GPU.

    >>> aliases(gpu("a100-80gb"))
    ['a100']
    """
    return [name for name, each in _by_name().items() if each is found and name != found.name]


def _found(name: str) -> Gpu | None:
    return _by_key().get("".join(_words(name)))


def _words(name: str) -> list[str]:
    """The words of a name that tell GPUs apart: ``a100`` and ``80gb`` of NVIDIA A100-SXM4-80GB."""
    words = re.split(r"[\s_-]+", name[:100].lower())
    return [word for word in words if not _IGNORED.fullmatch(word)]


def _hint(name: str) -> str:
    """The nearest names and aliases to a mistyped one."""
    return nearest("-".join(_words(name)), _by_name(), "`memcalc gpus`")


@cache
def _by_key() -> dict[str, Gpu]:
    return {"".join(_words(name)): found for name, found in _by_name().items()}


@cache
def _by_name() -> dict[str, Gpu]:
    known = {}
    for row in resources.rows("gpus.csv"):
        numbers = {key: int(value) for key, value in row.items() if value.isdecimal()}
        kept = DRIVER_BYTES if "capability" in numbers else 0
        found = Gpu(
            row["name"],
            numbers["memory_bytes"],
            numbers.get("usable_bytes", numbers["memory_bytes"] - kept),
            numbers.get("capability"),
            {name: numbers.get(f"{name}_flops") for name in ("bf16", "fp16", "fp8")},
            numbers.get("fp8_flops"),
            numbers.get("fp32_flops"),
            numbers["memory_bandwidth"],
            numbers.get("nvlink_bandwidth"),
            numbers.get("sms"),
            numbers.get("register_bytes"),
            numbers.get("shared_bytes"),
            numbers.get("l2_bytes"),
            row["source"],
            row["memory_source"],
            row["usable_source"] or (ESTIMATED if kept else "as memory_bytes"),
            row["chip_source"],
        )
        for name in (row["name"], *row["aliases"].split()):
            known[name] = found
    return known
