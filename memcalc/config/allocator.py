"""The settings of PyTorch's CUDA caching allocator: the text of PYTORCH_ALLOC_CONF.

The rules are those of PyTorch 2.13: c10/core/AllocatorConfig.cpp for the settings of every
accelerator, c10/cuda/CUDAAllocatorConfig.cpp for those of CUDA. Sizes ending in ``_mb`` are in MiB.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from memcalc.config import fields
from memcalc.errors import ConfigError, nearest
from memcalc.units import MIB

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
LONGEST = 4096  # characters that are read

MIN_BLOCK = 512  # kMinBlockSize: every size is a multiple of it
LARGE_SEGMENT = 20 * MIB  # large_segment_size_
MIN_LARGE_ALLOC = 10 * MIB  # kMinLargeAlloc: larger requests get a segment of their own size
DIVISIONS = 16  # kRoundUpPowerOfTwoIntervals: from 1 MiB (kRoundUpPowerOfTwoStart) to 64 GiB

# Settings that change nothing that is counted here: the host's memory, locks and CUDA graphs.
IGNORED = (
    "graph_capture_record_stream_reuse",
    "pinned_free_catch_all",
    "pinned_max_cached_size_mb",
    "pinned_max_round_threshold_mb",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register",
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
    "throw_on_cudamalloc_oom",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorConf:
    """The settings of the allocator that decide which memory it reserves.

    Attributes:
        backend: ``native``, or ``cudaMallocAsync``, which is another allocator.
        expandable_segments: Whether a segment grows by pages.
        large_segment_size: Bytes of a segment for requests of 1 to 10 MiB, and of a page of an
            expandable segment of the large pool.
        max_split_size: Bytes from which blocks are not split; None if all are.
        max_non_split_rounding: Bytes by which an unsplit block may be larger than its request, if
            that is at least ``max_split_size``; None is ``large_segment_size``.
        roundup_power2_divisions: Parts of each interval between powers of two to which requests are
            rounded up, from 1 MiB on; 0 and 1 round to 512 bytes alone.
        garbage_collection_threshold: Part of the allowed memory from which unused segments are
            freed before new ones are made; 0 is never.
        per_process_memory_fraction: Part of the GPU's memory that is allowed.

    Raises:
        ConfigError: A value is out of range.

    >>> AllocatorConf.parse("expandable_segments:True, max_split_size_mb:128").max_split_size
    134217728
    """

    backend: str = "native"
    expandable_segments: bool = False
    large_segment_size: int = LARGE_SEGMENT
    max_split_size: int | None = None
    max_non_split_rounding: int | None = None
    roundup_power2_divisions: tuple[int, ...] = (0,) * DIVISIONS
    garbage_collection_threshold: float = 0.0
    per_process_memory_fraction: float = 1.0

    def __post_init__(self) -> None:
        if self.backend not in ("native", "cudaMallocAsync"):
            raise ConfigError(
                f"backend must be native or cudaMallocAsync, not {fields.shown(self.backend)}"
            )
        fields.flag("expandable_segments", self.expandable_segments)
        _more("large_segment_size", self.large_segment_size, MIN_LARGE_ALLOC + 1)
        for name in ("max_split_size", "max_non_split_rounding"):
            if (value := getattr(self, name)) is not None:
                _more(name, value, self.large_segment_size)
        _check_divisions(self.roundup_power2_divisions)
        _share("garbage_collection_threshold", self.garbage_collection_threshold)
        _share("per_process_memory_fraction", self.per_process_memory_fraction)
        if self.garbage_collection_threshold == 1:
            raise ConfigError("garbage_collection_threshold must be less than 1")

    @classmethod
    def parse(cls, text: str) -> Self:
        """The settings of a text as in PYTORCH_ALLOC_CONF.

        Raises:
            ConfigError: A key is unknown, or a value is not one of its key.

        >>> AllocatorConf.parse("roundup_power2_divisions:[64:8,>:1]").roundup(5 * 2**20 - 1)
        5242880
        >>> AllocatorConf.parse("expandable_segment:True")
        Traceback (most recent call last):
            ...
        memcalc.errors.ConfigError: PYTORCH_ALLOC_CONF has no key 'expandable_segment'; did you \
mean 'expandable_segments'?
        """
        return cls(**settings(text))

    def roundup(self, size: int) -> int:
        """The bytes that a request is rounded up to (``round_size``).

        >>> AllocatorConf().roundup(1), AllocatorConf().roundup(1025)
        (512, 1536)
        """
        if size >= MIN_BLOCK:
            power = size.bit_length() - 1
            divisions = self.roundup_power2_divisions[min(max(power - 20, 0), DIVISIONS - 1)]
            if divisions > 1 and size > MIN_BLOCK * divisions:
                step = (1 << power) // divisions
                return -(-size // step) * step
        return max(-(-size // MIN_BLOCK), 1) * MIN_BLOCK


def settings(text: str) -> dict[str, Any]:
    """What a text as in PYTORCH_ALLOC_CONF says, as arguments of ``AllocatorConf``.

    Raises:
        ConfigError: A key is unknown, or a value is not one of its key.

    >>> settings("max_split_size_mb:64,pinned_num_register_threads:8")
    {'max_split_size': 67108864}
    """
    if len(text) > LONGEST:
        raise ConfigError(f"PYTORCH_ALLOC_CONF must have at most {LONGEST} characters")
    found: dict[str, Any] = {}
    for key, value in _pairs(re.sub(r"\s", "", text)):
        if key in _READERS:
            name, read = _READERS[key]
            found[name] = read(key, value)
        elif key not in IGNORED:
            raise ConfigError(
                f"PYTORCH_ALLOC_CONF has no key {fields.shown(key)}; "
                f"{nearest(key[:40], (*_READERS, *IGNORED))}"
            )
    return found


def said(environment: Mapping[str, str]) -> str:
    """The text that PyTorch reads: of the first of its variables that is set.

    >>> said({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    'expandable_segments:True'
    """
    return next((environment[name] for name in VARIABLES if name in environment), "")


def expandable(environment: Mapping[str, str]) -> bool | None:
    """Whether environment variables ask for expandable segments; None where they do not say.

    Raises:
        ConfigError: PyTorch would refuse the variable.

    >>> expandable({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    True
    >>> expandable({}) is None
    True
    """
    found: bool | None = settings(said(environment)).get("expandable_segments")
    return found


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    """The keys and values of a text without spaces; a comma may end it."""
    while text:
        match = re.match(r"([^:,\[\]]+):([^:,\[\]]+|\[[^\[\]]*\])(?:,|$)", text)
        if match is None:
            raise ConfigError(
                "PYTORCH_ALLOC_CONF must be key:value pairs with commas between them, "
                f"not {fields.shown(text)}"
            )
        yield match[1], match[2]
        text = text[match.end() :]


def _whole(key: str, value: str) -> int:
    if not re.fullmatch("[0-9]{1,18}", value):
        raise ConfigError(f"{key} must be a whole number, not {fields.shown(value)}")
    return int(value)


def _mib(key: str, value: str) -> int:
    return _whole(key, value) * MIB


def _flag(key: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise ConfigError(f"{key} must be True or False, not {fields.shown(value)}")
    return value == "True"


def _number(key: str, value: str) -> float:
    if not re.fullmatch(r"[0-9]{0,9}\.?[0-9]{1,18}", value):
        raise ConfigError(f"{key} must be a number from 0 to 1, not {fields.shown(value)}")
    return float(value)


def _divisions(key: str, value: str) -> tuple[int, ...]:
    """A number for all sizes, or a list, each from a size in MiB on: ``[256:1,512:2,>:4]``."""
    if not value.startswith("["):
        return (_whole(key, value),) * DIVISIONS
    found = [0] * DIVISIONS
    last = None
    for part in filter(None, value[1:-1].split(",")):
        start, _, number = part.partition(":")
        each = _whole(key, number)
        if start == ">":
            begin = 1 if last is None else last + 1  # std::next of last_index, which starts at 0
            found[begin:] = [each] * (DIVISIONS - begin)
            continue
        if (size := _whole(key, start)).bit_count() != 1:
            raise ConfigError(f"{key} must start intervals at powers of two, not at {size}")
        place = min(size.bit_length() - 1, DIVISIONS - 1)
        if last is None:
            found[:place] = [each] * place
        found[place] = each
        last = place
    return tuple(found)


def _as_it_is(key: str, value: str) -> str:
    return value


_READERS: dict[str, tuple[str, Any]] = {
    "backend": ("backend", _as_it_is),
    "expandable_segments": ("expandable_segments", _flag),
    "large_segment_size_mb": ("large_segment_size", _mib),
    "max_split_size_mb": ("max_split_size", _mib),
    "max_non_split_rounding_mb": ("max_non_split_rounding", _mib),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
    "garbage_collection_threshold": ("garbage_collection_threshold", _number),
    "per_process_memory_fraction": ("per_process_memory_fraction", _number),
}


def _more(name: str, value: int, least: int) -> None:
    if type(value) is not int or value < least:
        raise ConfigError(f"{name} must be at least {least} bytes, not {fields.shown(value)}")


def _share(name: str, value: float) -> None:
    if type(value) not in (int, float) or not 0 <= value <= 1:
        raise ConfigError(f"{name} must be a number from 0 to 1, not {fields.shown(value)}")


def _check_divisions(value: tuple[int, ...]) -> None:
    right = type(value) is tuple and len(value) == DIVISIONS
    if not right or not all(type(each) is int and each.bit_count() < 2 for each in value):
        raise ConfigError(
            f"roundup_power2_divisions must be {DIVISIONS} numbers, each 0 or a power of two, "
            f"not {fields.shown(value)}"
        )
