"""On chip: whether recurrent weights, dense or pruned, stay in a GPU over all time steps.

A persistent kernel keeps weights in the registers of the streaming multiprocessors (SMs; Diamos et
al. 2016), and pruned weights as pairs of a value and an index (Zhu et al. 2018). Here every SM has
the same share of the weights; a kernel that gives whole rows to SMs needs a little more. Times are
lower bounds, from rooflines.
"""

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import NamedTuple

from memcalc.blocks.rnn import RECURRENT, rnn_graph
from memcalc.config.gpus import Gpu
from memcalc.config.recurrent import OnChip, Recurrent
from memcalc.errors import UsageError
from memcalc.graph.mesh import Size, elements

REGISTERS, SHARED, MEMORY = "registers", "shared", "memory"
MOST = 2**25  # the largest hidden size that is searched; no GPU holds a larger one


class Storage(NamedTuple):
    """How recurrent weights are stored.

    Attributes:
        density: Share of the weights that is stored.
        value_bytes: Bytes per stored weight.
        index_bytes: Bytes per index; dense weights have none.
    """

    density: Size
    value_bytes: Size
    index_bytes: Size = Fraction(0)

    @property
    def label(self) -> str:
        """Density, and bytes per value and index.

        >>> Storage(Fraction(1, 10), Fraction(2), Fraction(2)).label
        '10% 2+2'
        >>> Storage(Fraction(1), Fraction(4)).label
        'dense 4'
        """
        index = f"+{float(self.index_bytes):g}" if self.index_bytes else ""
        stored = "dense" if self.density == 1 and not index else f"{float(100 * self.density):g}%"
        return f"{stored} {float(self.value_bytes):g}{index}"

    def bytes(self, weights: Size) -> Size:
        """Bytes of so many weights, of which pruning leaves a share of ``density``.

        >>> float(Storage(Fraction(3, 10), Fraction(4), Fraction(4)).bytes(2304**2))
        12740198.4
        """
        return weights * self.density * (self.value_bytes + self.index_bytes)


class Chip(NamedTuple):
    """The part of a GPU that a persistent kernel uses.

    Attributes:
        sms: SMs.
        registers: Bytes of registers per SM.
        usable: The share of these that weights may fill.
        shared_bytes: Shared memory per SM.
        flops: FLOP/s of these SMs.
        memory_bandwidth: Bytes per second from memory.
        l2_bytes: L2 cache.
        l2_bandwidth: Bytes per second from L2, or None.
    """

    sms: int
    registers: int
    usable: Fraction
    shared_bytes: int
    flops: Fraction
    memory_bandwidth: int
    l2_bytes: int
    l2_bandwidth: Fraction | None

    @classmethod
    def of(cls, gpu: Gpu, options: OnChip) -> "Chip":
        """The part of a GPU that options allow.

        Raises:
            UsageError: The GPU has fewer SMs or less shared memory, or the catalog does not know
                what it has.
        """
        if lacking := missing(gpu):
            raise UsageError(
                f"rnn cannot answer for {gpu.name}: the catalog lacks its {', '.join(lacking)}"
            )
        all_sms, registers, all_shared, l2, fp32 = (size for size in _needed(gpu).values() if size)
        sms = options.sms or all_sms
        shared = options.shared_bytes or all_shared
        if sms > all_sms:
            raise UsageError(f"--sms {sms} is more than the {all_sms} SMs of {gpu.name}")
        if shared > all_shared:
            raise UsageError(
                f"--shared-bytes {shared} is more than the {all_shared} bytes per SM of {gpu.name}"
            )
        peak = exact(options.peak_flops) if options.peak_flops else Fraction(fp32)
        return cls(
            sms,
            registers,
            exact(options.usable),
            shared,
            peak * sms / all_sms,
            gpu.memory_bandwidth,
            l2,
            exact(options.l2_bandwidth) if options.l2_bandwidth else None,
        )

    @property
    def register_bytes(self) -> Fraction:
        """Registers per SM that weights may fill."""
        return self.usable * self.registers

    def from_memory(self, read: Fraction) -> Fraction:
        """The part of the bytes read per step that comes from memory: none if L2 holds them all."""
        return read if read > self.l2_bytes else Fraction(0)


def missing(gpu: Gpu) -> list[str]:
    """What a fit needs and the catalog does not have of a GPU.

    >>> from memcalc.config.gpus import gpu
    >>> missing(gpu("gb200")), missing(gpu("h100"))
    (['SMs', 'fp32 FLOP/s'], [])
    """
    return [name for name, size in _needed(gpu).items() if size is None]


def _needed(gpu: Gpu) -> dict[str, int | None]:
    """What a fit needs to know of a GPU."""
    return {
        "SMs": gpu.sms,
        "registers per SM": gpu.register_bytes,
        "shared memory per SM": gpu.shared_bytes,
        "L2 cache": gpu.l2_bytes,
        "fp32 FLOP/s": gpu.fp32_flops,
    }


class Fit(NamedTuple):
    """How the recurrent weights of a network fit on a chip, in one storage.

    Attributes:
        weight_bytes: Bytes of all recurrent weights.
        weight_bytes_per_sm: Bytes of weights per SM, in even shares.
        state_bytes_per_sm: Bytes of hidden states per SM; every SM keeps all of them.
        states_fit: Whether these fit in shared memory.
        resident_in: Where the weights stay: ``registers``, registers and ``shared`` memory, or
            ``memory``, from which every step reads them.
        largest: The largest hidden size whose weights fit in registers.
        largest_with_shared: The same with the shared memory that hidden states leave free.
        largest_states: The largest hidden size whose hidden states fit in shared memory; None if
            they are not kept there.
        flops: FLOPs per step, of the stored weights.
        memory_bytes: Bytes of weights read from memory per step: 0 if they stay on chip or in L2.
        l2_traffic_bytes: Bytes of hidden states through L2 per step: they are written once, and
            every SM reads all of them.
        resident_seconds: Lower bound of a step whose weights stay on chip; None if they do not.
        streamed_seconds: Lower bound of a step that reads its weights from memory, or from L2 if
            they fit there.
    """

    weight_bytes: Fraction
    weight_bytes_per_sm: Fraction
    state_bytes_per_sm: Fraction
    states_fit: bool
    resident_in: str
    largest: int
    largest_with_shared: int
    largest_states: int | None
    flops: Fraction
    memory_bytes: Fraction
    l2_traffic_bytes: Fraction
    resident_seconds: Fraction | None
    streamed_seconds: Fraction


def exact(value: float) -> Fraction:
    """A number as it was written."""
    return Fraction(str(value))


def storages(options: OnChip) -> list[Storage]:
    """A dense storage, and a pruned one per density and pair of widths."""
    dense = Storage(Fraction(1), exact(options.value_bytes or 4))
    return [
        dense,
        *(
            Storage(exact(density), exact(value), exact(index))
            for density in dict.fromkeys(options.densities)
            for value, index in options.pairs
        ),
    ]


def recurrent_weights(config: Recurrent, sizes: Mapping[str, Size] | None = None) -> Size:
    """The number of weights that multiply hidden states, of all layers, without biases.

    >>> recurrent_weights(Recurrent(cell="lstm", hidden_size=1000)) == 4 * 1000**2
    True
    """
    return sum(
        elements(weight.axes)
        for op in rnn_graph(config, 1, None, sizes).ops
        for weight in op.weights
        if weight.name.endswith(f"{RECURRENT}.weight")
    )


def needed(weights: Size, storage: Storage, sms: Size) -> Size:
    """Bytes of weights per SM."""
    return storage.bytes(weights) / sms


def states(config: Recurrent, hidden: Size, width: Size, batch: Size | None = None) -> Size:
    """Bytes of the hidden states (b, h) of all layers, which every SM reads."""
    return config.layers * hidden * (config.batch_size if batch is None else batch) * width


def fit(config: Recurrent, chip: Chip, storage: Storage, options: OnChip) -> Fit:
    """How the recurrent weights of a network fit on a chip, in one storage.

    >>> from memcalc.config.gpus import gpu
    >>> options = OnChip(densities=(0.3,))
    >>> dense, *sparse = storages(options)
    >>> config, chip = Recurrent(hidden_size=2304), Chip.of(gpu("p100"), options)
    >>> [fit(config, chip, each, options).resident_in for each in (dense, *sparse)]
    ['memory', 'registers', 'registers']
    >>> fit(config, chip, dense, options).largest
    1915
    """
    of_one = recurrent_weights(config, {"b": 1, "h": 1, "i": 1})  # all grow with h^2
    width = exact(options.activation_bytes)

    def in_registers(h: int) -> bool:
        return bool(needed(of_one * h**2, storage, chip.sms) <= chip.register_bytes)

    def with_shared(h: int) -> bool:
        left = max(0, chip.shared_bytes - states(config, h, width))
        return bool(needed(of_one * h**2, storage, chip.sms) <= chip.register_bytes + left)

    def with_states(h: int) -> bool:
        return bool(states(config, h, width) <= chip.shared_bytes)

    h = config.hidden_size
    where = REGISTERS if in_registers(h) else SHARED if with_shared(h) else MEMORY
    weights = recurrent_weights(config)
    held = states(config, h, width)
    flops = 2 * config.batch_size * storage.density * weights
    traffic = (chip.sms + 1) * states(config, h, Fraction(config.activation_bytes))
    size = storage.bytes(weights)
    sync = exact(options.sync_seconds)
    return Fit(
        size,
        needed(weights, storage, chip.sms),
        held,
        with_states(h),
        where,
        largest(in_registers),
        largest(with_shared),
        largest(with_states) if width else None,
        flops,
        Fraction(0) if where != MEMORY else chip.from_memory(size),
        traffic,
        None if where == MEMORY else sync + step_seconds(chip, flops, traffic, Fraction(0)),
        sync + step_seconds(chip, flops, traffic, size),
    )


def step_seconds(chip: Chip, flops: Fraction, l2_bytes: Fraction, read: Fraction) -> Fraction:
    """The roofline of a step: the longest of its GEMMs, its L2 traffic and its memory traffic.

    Weights that fit in L2 are read from there. An unknown L2 bandwidth is no limit.
    """
    times = [flops / chip.flops, chip.from_memory(read) / chip.memory_bandwidth]
    if chip.l2_bandwidth is not None:
        times.append((l2_bytes + read) / chip.l2_bandwidth)
    return max(times)


def largest(fits: Callable[[int], bool]) -> int:
    """The largest size up to ``MOST`` that fits, if all smaller ones fit too; 0 if none does.

    >>> largest(lambda h: h * h <= 10**6)
    1000
    """
    low, high = 0, MOST + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
