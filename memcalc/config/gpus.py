"""The catalogue of GPUs."""

from functools import cache
from typing import NamedTuple

from memcalc import resources
from memcalc.config import fields
from memcalc.errors import ConfigError, nearest
from memcalc.units import parse_bytes


class Gpu(NamedTuple):
    """A GPU, as its vendor states it; what it has not, or nobody states, is None.

    Attributes:
        name: Its name.
        memory_bytes: Its memory, as its driver reports it.
        capability: Its compute capability, times 10.
        peaks: FLOP/s of dense tensor-core products, by the type of activations.
        fp8_flops: The same for 8-bit numbers.
        fp32_flops: FLOP/s of plain fp32, without tensor cores.
        memory_bandwidth: Bytes a second from memory.
        nvlink_bandwidth: Bytes a second between GPUs, both directions together.
        sms: Its streaming multiprocessors.
        register_bytes: The register file of each of them.
        shared_bytes: The most shared memory of each of them.
        l2_bytes: Its L2 cache.
        source: Where memory, tensor-core peaks and bandwidths were seen.
        chip_source: Where the fp32 peak and what is on the chip were seen.
    """

    name: str
    memory_bytes: int
    capability: int
    peaks: dict[str, int | None]
    fp8_flops: int | None
    fp32_flops: int | None
    memory_bandwidth: int
    nvlink_bandwidth: int | None
    sms: int | None
    register_bytes: int
    shared_bytes: int
    l2_bytes: int | None
    source: str
    chip_source: str


def gpu(name: str) -> Gpu:
    """The GPU of a name, or of an alias.

    Raises:
        ConfigError: There is none.

    >>> gpu("a100").name, gpu("a100").peaks["bf16"]
    ('a100-80gb', 312000000000000)
    """
    fields.text("gpu", name)
    known = _by_name()
    if name.lower() not in known:
        hint = nearest(name, known, "`memcalc gpus`")
        raise ConfigError(f"GPU {name[:40]!r} is unknown; {hint}")
    return known[name.lower()]


def is_gpu(name: str) -> bool:
    """Whether there is a GPU of a name, or of an alias.

    >>> is_gpu("A100"), is_gpu("TPU")
    (True, False)
    """
    return name.lower() in _by_name()


def budget(text: str) -> int:
    """The bytes of a size, or of a GPU by its name, as its driver reports them.

    >>> budget("80GB"), budget("80GiB"), budget("h100") == gpu("h100").memory_bytes
    (80000000000, 85899345920, True)

    Raises:
        ConfigError: It is neither.
    """
    size = parse_bytes(text)
    if size is not None:
        return size
    known = _by_name()
    if text.lower() not in known:
        hint = nearest(text, known, "`memcalc gpus`")
        raise ConfigError(
            f"budget {text[:40]!r} is neither a size with its unit, as 80GB or 80GiB, nor a GPU; "
            f"{hint}"
        )
    return known[text.lower()].memory_bytes


def gpus() -> list[Gpu]:
    """All of them, in the order of their catalogue.

    >>> gpus()[0].name
    'titan-x'
    """
    return [found for name, found in _by_name().items() if name == found.name]


@cache
def _by_name() -> dict[str, Gpu]:
    known = {}
    for row in resources.rows("gpus.csv"):
        numbers = {key: int(value) for key, value in row.items() if value.isdecimal()}
        found = Gpu(
            row["name"],
            numbers["memory_bytes"],
            numbers["capability"],
            {name: numbers.get(f"{name}_flops") for name in ("bf16", "fp16", "fp8")},
            numbers.get("fp8_flops"),
            numbers.get("fp32_flops"),
            numbers["memory_bandwidth"],
            numbers.get("nvlink_bandwidth"),
            numbers.get("sms"),
            numbers["register_bytes"],
            numbers["shared_bytes"],
            numbers.get("l2_bytes"),
            row["source"],
            row["chip_source"],
        )
        for name in (row["name"], *row["aliases"].split()):
            known[name] = found
    return known
