"""On chip: whether recurrent weights, pruned or not, stay in a GPU over all time steps.

A persistent kernel holds them in its multiprocessors' registers (Diamos et al. 2016), pruned ones
as pairs of value and index (Zhu et al. 2018). Here weights spread evenly over multiprocessors,
which is a bound: whole rows on each need a little more. Times are rooflines, bounds from below.
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
MOST = 2**25  # no hidden size above it is looked for; the sparsest and narrowest fit below it


class Storage(NamedTuple):
    """How recurrent weights are stored.

    Attributes:
        density: The share of them that is stored.
        value_bytes: Bytes of one.
        index_bytes: Bytes of its index; dense ones have none.
    """

    density: Size
    value_bytes: Size
    index_bytes: Size = Fraction(0)

    @property
    def label(self) -> str:
        """What is stored, with the bytes of a value and, of a pair, of its index.

        >>> Storage(Fraction(1, 10), Fraction(2), Fraction(2)).label
        '10% 2+2'
        >>> Storage(Fraction(1), Fraction(4)).label
        'dense 4'
        """
        index = f"+{float(self.index_bytes):g}" if self.index_bytes else ""
        stored = "dense" if self.density == 1 and not index else f"{float(100 * self.density):g}%"
        return f"{stored} {float(self.value_bytes):g}{index}"

    def bytes(self, weights: Size) -> Size:
        """Bytes of so many weights, before they are pruned.

        >>> float(Storage(Fraction(3, 10), Fraction(4), Fraction(4)).bytes(2304**2))
        12740198.4
        """
        return weights * self.density * (self.value_bytes + self.index_bytes)


class Chip(NamedTuple):
    """What of a GPU a persistent kernel has.

    Attributes:
        sms: Its multiprocessors.
        register_bytes: Registers of each that weights may fill.
        shared_bytes: Shared memory of each.
        flops: FLOP/s of these multiprocessors.
        memory_bandwidth: Bytes a second from memory.
        l2_bytes: The L2 cache.
        l2_bandwidth: Bytes a second from it, or None.
    """

    sms: int
    register_bytes: Fraction
    shared_bytes: int
    flops: Fraction
    memory_bandwidth: int
    l2_bytes: int
    l2_bandwidth: Fraction | None

    @classmethod
    def of(cls, gpu: Gpu, options: OnChip) -> "Chip":
        """The part of a GPU that options leave.

        Raises:
            UsageError: The GPU has not as many multiprocessors, or not as much shared memory, or
                nobody states what it has.
        """
        if lacking := missing(gpu):
            raise UsageError(f"rnn needs of {gpu.name} what is not known: {', '.join(lacking)}")
        assert gpu.sms
        assert gpu.register_bytes
        assert gpu.shared_bytes
        assert gpu.l2_bytes
        assert gpu.fp32_flops
        sms = options.sms or gpu.sms
        shared = options.shared_bytes or gpu.shared_bytes
        if sms > gpu.sms:
            raise UsageError(f"{gpu.name} has {gpu.sms} multiprocessors, not {sms}")
        if shared > gpu.shared_bytes:
            raise UsageError(
                f"{gpu.name} has {gpu.shared_bytes} bytes of shared memory on a multiprocessor, "
                f"not {shared}"
            )
        peak = exact(options.peak_flops) if options.peak_flops else Fraction(gpu.fp32_flops)
        return cls(
            sms,
            exact(options.usable) * gpu.register_bytes,
            shared,
            peak * sms / gpu.sms,
            gpu.memory_bandwidth,
            gpu.l2_bytes,
            exact(options.l2_bandwidth) if options.l2_bandwidth else None,
        )

    def from_memory(self, read: Fraction) -> Fraction:
        """Of bytes that every step reads, those that come from memory: none that L2 can hold."""
        return read if read > self.l2_bytes else Fraction(0)


def missing(gpu: Gpu) -> list[str]:
    """What a fit needs and the catalogue does not have of a GPU.

    >>> from memcalc.config.gpus import gpu
    >>> missing(gpu("gb200")), missing(gpu("h100"))
    (['SMs', 'fp32 FLOP/s'], [])
    """
    needs = {
        "SMs": gpu.sms,
        "registers per SM": gpu.register_bytes,
        "shared memory per SM": gpu.shared_bytes,
        "L2 cache": gpu.l2_bytes,
        "fp32 FLOP/s": gpu.fp32_flops,
    }
    return [name for name, value in needs.items() if value is None]


class Fit(NamedTuple):
    """How one storage of a network's recurrent weights stands to a chip.

    Attributes:
        weight_bytes: Bytes of all recurrent weights.
        weight_bytes_per_sm: The even share of them of one multiprocessor.
        state_bytes_per_sm: Bytes of the states that each multiprocessor holds whole.
        states_fit: Whether these fit in shared memory.
        resident_in: Where the weights stay: in ``registers``, in these and ``shared`` memory, or in
            ``memory``, from which every step then reads them.
        largest: The largest hidden size whose weights fit in registers.
        largest_with_shared: The same with the shared memory that the states leave.
        largest_states: The largest hidden size whose states fit in shared memory; None if any does.
        flops: FLOPs of a step, of the weights that are stored.
        memory_bytes: Weights that a step reads from memory: none that stay, or that L2 holds.
        l2_traffic_bytes: What a step moves through L2: every multiprocessor reads all states, which
            are written once.
        resident_seconds: A bound of a step whose weights stay on chip; None where they do not.
        streamed_seconds: A bound of a step that reads its weights, from memory or, where they fit,
            from L2.
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
    """A dense storage, and a sparse one for each density and pair of widths."""
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
    """The weights that every step multiplies a state with, of all layers, without biases.

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
    """Bytes of weights on each multiprocessor."""
    return storage.bytes(weights) / sms


def states(config: Recurrent, hidden: Size, width: Size, batch: Size | None = None) -> Size:
    """Bytes of the states (b, h) of all layers, that every multiprocessor reads."""
    return config.layers * hidden * (config.batch_size if batch is None else batch) * width


def fit(config: Recurrent, chip: Chip, storage: Storage, options: OnChip) -> Fit:
    """How a storage of a network's recurrent weights stands to a chip.

    >>> from memcalc.config.gpus import gpu
    >>> options = OnChip(densities=(0.3,))
    >>> dense, *sparse = storages(options)
    >>> config, chip = Recurrent(hidden_size=2304), Chip.of(gpu("p100"), options)
    >>> [fit(config, chip, each, options).resident_in for each in (dense, *sparse)]
    ['memory', 'registers', 'registers']
    >>> fit(config, chip, dense, options).largest
    1915
    """
    of_one = recurrent_weights(config, {"b": 1, "h": 1, "i": 1})  # of h they are h^2 times it
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
    """The roofline of a step: the longest of its products, its traffic through L2 and from memory.

    Weights that are read and fit in L2 are read from there; what L2 gives a second is not always
    known, and then bounds nothing.
    """
    times = [flops / chip.flops, chip.from_memory(read) / chip.memory_bandwidth]
    if chip.l2_bandwidth is not None:
        times.append((l2_bytes + read) / chip.l2_bandwidth)
    return max(times)


def largest(fits: Callable[[int], bool]) -> int:
    """The largest size up to ``MOST`` that fits, where all smaller ones do; 0 if none does.

    >>> largest(lambda h: h * h <= 10**6)
    1000
    """
    low, high = 0, MOST + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
