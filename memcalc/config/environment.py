"""The environment of a run: settings of libraries that decide which buffers exist."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import fields as fields_of
from typing import Any

from memcalc.config import fields
from memcalc.errors import ConfigError, nearest

# What --versions calls a library, and the attribute of its version.
LIBRARIES = {"torch": "pytorch", "pytorch": "pytorch", "transformers": "transformers"}
MOST_TEXT = 200  # characters of --versions
VERSIONS = tuple(dict.fromkeys(LIBRARIES.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The settings of libraries.

    Attributes:
        pytorch: PyTorch's version; None is a recent version.
        transformers: Hugging Face transformers' version; None is a recent version.
        cublas_workspace: The value of ``CUBLAS_WORKSPACE_CONFIG``, as in ``:4096:8``, or None.
        deterministic: Whether kernels must be deterministic.
        fused_gradients: Whether weight-gradient GEMMs accumulate in place (Megatron-LM's gradient
            accumulation fusion).
        deferred_gradients: Micro-batches whose weight gradients of the head are computed late
            (Megatron-LM, ``--defer-embedding-wgrad-compute``).
        loader_mask: Whether the data loader makes an attention mask, a byte per pair of tokens.
        expandable_segments: Whether segments of PyTorch's allocator are expandable, so that every
            block is split (``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``).

    Raises:
        ConfigError: A value is out of range.

    >>> Environment(cublas_workspace=":4096:8").cublas_bytes
    33554432
    """

    pytorch: tuple[int, int] | None = None
    transformers: tuple[int, int] | None = None
    cublas_workspace: str | None = None
    deterministic: bool = False
    fused_gradients: bool = True
    deferred_gradients: int = 0
    loader_mask: bool = False
    expandable_segments: bool = False

    def __post_init__(self) -> None:
        flags = ("deterministic", "fused_gradients", "loader_mask", "expandable_segments")
        for name in flags:
            fields.flag(name, getattr(self, name))
        for name in VERSIONS:
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, _version(name, value))
        if type(self.deferred_gradients) is not int or self.deferred_gradients:
            fields.whole("deferred_gradients", self.deferred_gradients, 2**31)
        if self.cublas_workspace is not None:
            fields.text("cublas_workspace", self.cublas_workspace)
            if not re.fullmatch(r"(:[0-9]{1,7}:[0-9]{1,4})+", self.cublas_workspace):
                raise ConfigError(
                    "cublas_workspace must be :SIZE:COUNT pairs with SIZE in KiB, such as ':4096:8'"
                )

    @property
    def cublas_bytes(self) -> int | None:
        """Bytes per cuBLAS workspace of PyTorch, or None where it is not set."""
        if self.cublas_workspace is None:
            return None
        pairs = re.findall(r":([0-9]+):([0-9]+)", self.cublas_workspace)
        return sum(int(size) * int(number) * 2**10 for size, number in pairs)


def environment(value: Any) -> Environment:
    """An environment, or its attributes by their names.

    Raises:
        ConfigError: It is neither, or an attribute is unknown or out of range.

    >>> environment({"pytorch": "2.12"}).pytorch
    (2, 12)
    """
    if isinstance(value, Environment):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(f"environment must be an object of settings, not {fields.shown(value)}")
    known = [each.name for each in fields_of(Environment)]
    for name in value:
        if name not in known:
            raise ConfigError(
                f"environment has no setting {str(name)[:40]!r}; {nearest(str(name)[:40], known)}"
            )
    return Environment(**value)


def versions(text: Any) -> dict[str, Any]:
    """The versions in the text of ``--versions``, by the names of ``Environment``'s attributes.

    >>> versions("transformers=4.57.6,torch=2.9")
    {'transformers': '4.57.6', 'pytorch': '2.9'}

    Raises:
        ConfigError: It is not NAME=VERSION pairs, or a name is unknown.
    """
    found: dict[str, Any] = {}
    if not isinstance(text, str) or len(text) > MOST_TEXT:
        raise ConfigError(f"--versions must be library=version pairs, not {fields.shown(text)}")
    for pair in filter(None, text.split(",")):
        name, _, version = pair.strip().partition("=")
        if name not in LIBRARIES:
            hint = nearest(name[:40], LIBRARIES)
            raise ConfigError(
                f"--versions has library=version pairs, not {pair.strip()[:40]!r}; {hint}"
            )
        found[LIBRARIES[name]] = version
    return found


def _version(name: str, value: Any) -> tuple[int, int]:
    """A version's first two numbers, from a text or two whole numbers."""
    if isinstance(value, str) and re.fullmatch(
        r"[0-9]{1,4}\.[0-9]{1,4}(\.[0-9a-z+.]{1,20})?", value
    ):
        value = tuple(int(part) for part in value.split(".")[:2])
    numbers = isinstance(value, (tuple, list)) and len(value) == 2
    if not numbers or not all(type(part) is int and 0 <= part < 10_000 for part in value):
        raise ConfigError(f"{name} must be a version, such as 2.12, not {fields.shown(value)}")
    return value[0], value[1]
