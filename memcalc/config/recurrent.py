"""Recurrent networks, and how a kernel keeps their weights on a GPU, validated."""

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

from memcalc.config import fields
from memcalc.config.run import PRECISION_BYTES

CELLS = ("vanilla", "gru", "lstm")
PRECISIONS = ("fp32", "fp16", "bf16")


class Kernels(NamedTuple):
    """Which kernels run a recurrent cell.

    Attributes:
        summary: What they are, in a line.
        fused: Whether a cell behind its GEMMs is one kernel, which also keeps its inputs.
    """

    summary: str
    fused: bool


KERNELS = {
    "torch-cpu": Kernels("PyTorch's cells, operation by operation, as on a CPU", fused=False),
    "torch-cuda": Kernels(
        "PyTorch's fused CUDA cells, which also keep their inputs; not cuDNN's", fused=True
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrent:
    """A stack of recurrent cells, and the sequences that it trains on.

    Attributes:
        cell: ``vanilla`` (a tanh), ``gru`` or ``lstm``.
        hidden_size: h, the hidden size.
        input_size: Input size of the first layer; by default h.
        layers: L, stacked cells.
        batch_size: b, sequences per batch.
        seq_length: s, time steps; None if the question does not need them.
        precision: Dtype of activations: ``fp32``, ``fp16`` or ``bf16``.
        kernels: Which cells of PyTorch run: a key of ``KERNELS``.

    Raises:
        ConfigError: A value is out of range, or a word is unknown.

    >>> Recurrent(cell="lstm", hidden_size=1024).layer_inputs
    (1024,)
    """

    cell: str = "vanilla"
    hidden_size: int = 2304
    input_size: int | None = None
    layers: int = 1
    batch_size: int = 4
    seq_length: int | None = None
    precision: str = "fp32"
    kernels: str = "torch-cpu"

    def __post_init__(self) -> None:
        fields.settle(self)
        fields.word("cell", self.cell, CELLS)
        fields.whole("hidden size", self.hidden_size, 2**24)
        if self.input_size is not None:
            fields.whole("input size", self.input_size, 2**24)
        fields.whole("layers", self.layers, 1000)
        fields.whole("batch size", self.batch_size, 2**24)
        if self.seq_length is not None:
            fields.whole("sequence length", self.seq_length, 2**20)
        fields.word("precision", self.precision, PRECISIONS)
        fields.word("kernels", self.kernels, KERNELS)

    @property
    def activation_bytes(self) -> int:
        """Bytes per element of an activation."""
        return PRECISION_BYTES[self.precision]

    @property
    def layer_inputs(self) -> tuple[int, ...]:
        """The input size of each layer."""
        first = self.hidden_size if self.input_size is None else self.input_size
        return (first, *[self.hidden_size] * (self.layers - 1))


# Bounds of ``OnChip``'s fields: the maximum of whole numbers, minimum and maximum of others.
WHOLE = {"sms": 2**16, "shared_bytes": 2**30}
RANGES: dict[str, tuple[float, float]] = {
    "value_bytes": (1 / 8, 8),
    "index_bytes": (0, 8),
    "usable": (1e-6, 1),
    "activation_bytes": (0, 8),  # if not 0, at least one bit
    "sync_seconds": (0, 1),
    "l2_bandwidth": (1, 1e21),
    "peak_flops": (1, 1e21),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OnChip:
    """How a persistent kernel keeps recurrent weights on a GPU, and what limits its step.

    Whatever the papers do not say of their kernels is a field here.

    Attributes:
        gpus: Names of GPUs, or one; an empty tuple is every GPU whose SMs, memories and
            fp32 peak the catalog has.
        sms: SMs that the kernel uses; None is all.
        densities: Shares of weights left after pruning, or one.
        value_bytes: Bytes per stored weight; None is 4 if dense, and both 2 and 4 if pruned.
        index_bytes: Bytes per index of a pruned weight; None is as many as for its value.
        usable: u, the share of the registers that weights may fill.
        activation_bytes: Bytes per element of the hidden states that every SM keeps in shared
            memory; 0 if it does not.
        shared_bytes: Shared memory per SM that the kernel may use; None is all.
        sync_seconds: Grid synchronization per step, in seconds.
        l2_bandwidth: L2 bandwidth in bytes per second; None is no limit.
        peak_flops: FLOP/s of the whole GPU; None is its fp32 peak without tensor cores.

    Raises:
        ConfigError: A value is out of range.

    >>> OnChip(value_bytes=2).pairs
    ((2, 2),)
    >>> OnChip().pairs
    ((2, 2), (4, 4))
    """

    gpus: tuple[str, ...] = ("p100",)
    sms: int | None = None
    densities: tuple[float, ...] = (0.3,)
    value_bytes: float | None = None
    index_bytes: float | None = None
    usable: float = 1
    activation_bytes: float = 4
    shared_bytes: int | None = None
    sync_seconds: float = 0
    l2_bandwidth: float | None = None
    peak_flops: float | None = None

    def __post_init__(self) -> None:
        fields.settle(self)
        if isinstance(self.gpus, str):
            object.__setattr__(self, "gpus", (self.gpus,))
        if isinstance(self.densities, int | float):
            object.__setattr__(self, "densities", (self.densities,))
        for density in self.densities:
            fields.between("density", density, 1e-6, 1)
        for field in dataclasses.fields(self):
            value, name = getattr(self, field.name), field.name.replace("_", " ")
            if value is None and field.default is None:
                continue
            if field.name in WHOLE:
                fields.whole(name, value, WHOLE[field.name])
            elif field.name in RANGES:
                fields.between(name, value, *RANGES[field.name])
        if self.activation_bytes:
            fields.between("activation bytes", self.activation_bytes, 1 / 8, 8)

    @property
    def pairs(self) -> tuple[tuple[float, float], ...]:
        """Bytes per value and index of a pruned weight; both guesses, if nothing is given."""
        if self.value_bytes is None and self.index_bytes is None:
            return ((2, 2), (4, 4))
        value = self.value_bytes or self.index_bytes or 4
        return ((value, value if self.index_bytes is None else self.index_bytes),)
