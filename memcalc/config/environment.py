"""What runs around a training run: libraries and settings that decide which buffers there are."""

import re
from dataclasses import dataclass

from memcalc.config import fields
from memcalc.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The settings of libraries.

    Attributes:
        pytorch: PyTorch's version; None is a recent one.
        cublas_workspace: The value of ``CUBLAS_WORKSPACE_CONFIG``, as in ``:4096:8``, or None.
        deterministic: Whether kernels must give the same numbers each time.
        fused_gradients: Whether products add the gradient of a weight to those before
            (Megatron-LM's gradient accumulation fusion).
        deferred_gradients: Micro-batches whose gradients of the head's weight are made late
            (Megatron-LM, ``--defer-embedding-wgrad-compute``).
        loader_mask: Whether the data loader makes a mask of each pair of tokens, a byte each.

    Raises:
        ConfigError: A value is out of its bounds.

    >>> Environment(cublas_workspace=":4096:8").cublas_bytes
    33554432
    """

    pytorch: tuple[int, int] | None = None
    cublas_workspace: str | None = None
    deterministic: bool = False
    fused_gradients: bool = True
    deferred_gradients: int = 0
    loader_mask: bool = False

    def __post_init__(self) -> None:
        for name in ("deterministic", "fused_gradients", "loader_mask"):
            fields.flag(name, getattr(self, name))
        if type(self.deferred_gradients) is not int or self.deferred_gradients:
            fields.whole("deferred_gradients", self.deferred_gradients, 2**31)
        if self.cublas_workspace is not None:
            fields.text("cublas_workspace", self.cublas_workspace)
            if not re.fullmatch(r"(:[0-9]{1,7}:[0-9]{1,4})+", self.cublas_workspace):
                raise ConfigError(
                    "cublas_workspace must be sizes in KiB with numbers of them, as ':4096:8'"
                )

    @property
    def cublas_bytes(self) -> int | None:
        """The bytes of one of PyTorch's cuBLAS workspaces, where it was said."""
        if self.cublas_workspace is None:
            return None
        pairs = re.findall(r":([0-9]+):([0-9]+)", self.cublas_workspace)
        return sum(int(size) * int(number) * 2**10 for size, number in pairs)
