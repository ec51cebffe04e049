"""The quantities that claims on persistent RNNs are about (Diamos et al. 2016, Zhu et al. 2018).

A quantity is a function of a GPU and of what its row assumes, such as ``density=0.3 pair=4+4
usable=0.875``: ``h`` and ``b`` of the layer; its ``density``; the bytes per value and index
(``pair``), or per value if it is dense; ``usable``, ``sms`` and ``shared`` of the GPU.
"""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

from memcalc.analysis import recurrent
from memcalc.analysis.onchip import Chip, Fit, fit, recurrent_weights, step_seconds, storages
from memcalc.config.gpus import gpu
from memcalc.config.recurrent import OnChip, Recurrent

TERA = 10**12
DENSE_BYTES = 4  # per weight of the dense fp32 layer that the claims compare with


def largest(name: str, assumed: str) -> int:
    """The largest hidden size that fits in registers."""
    return _fit(name, assumed).largest


def largest_states(name: str, assumed: str) -> int | None:
    """The largest hidden size whose hidden states fit in shared memory."""
    return _fit(name, assumed).largest_states


def size_ratio(assumed: str) -> Fraction:
    """Weights of a pruned layer, over those of a dense fp32 layer with the same bytes."""
    *_, storage = storages(_options(assumed))
    weights = recurrent_weights(Recurrent())
    ratio: Fraction = DENSE_BYTES * weights / storage.bytes(weights)
    return ratio


def speedup(name: str, assumed: str) -> Fraction:
    """Roofline seconds of streaming dense fp32 weights, over those with weights on chip."""
    config = _network(assumed)
    size = Fraction(DENSE_BYTES * recurrent_weights(config))
    whole = Chip.of(gpu(name), OnChip())
    streamed = step_seconds(whole, _dense_flops(config), Fraction(0), size)
    return streamed / _resident_seconds(name, assumed)


def dense_tflops(name: str, assumed: str) -> Fraction:
    """TFLOP/s of the roofline, counted as if weights were dense, as the authors count."""
    return _dense_flops(_network(assumed)) / (_resident_seconds(name, assumed) * TERA)


def peak_percent(name: str, tflops: str) -> Fraction:
    """TFLOP/s in percent of a GPU's fp32 peak without tensor cores."""
    peak = gpu(name).fp32_flops
    assert peak is not None
    return 100 * Fraction(tflops) * TERA / peak


def batch_ratio(batches: str) -> Fraction:
    """What a network keeps over time with the first batch size, over the second."""
    kept = [
        recurrent.costs(Recurrent(batch_size=int(batch))).whole(100) for batch in batches.split("/")
    ]
    return Fraction(kept[0], kept[1])


QUANTITIES: dict[str, Callable[..., Any]] = {
    "batch_ratio": batch_ratio,
    "dense_tflops": dense_tflops,
    "largest": largest,
    "largest_states": largest_states,
    "peak_percent": peak_percent,
    "size_ratio": size_ratio,
    "speedup": speedup,
}


def words(assumed: str) -> dict[str, str]:
    """What a row assumes, by name.

    >>> words("density=0.3 pair=4+4")
    {'density': '0.3', 'pair': '4+4'}
    """
    return dict(word.split("=") for word in assumed.split())


def _options(assumed: str) -> OnChip:
    """What a row assumes of the kernel."""
    said = words(assumed)
    value, _, index = said.get("pair", "4").partition("+")
    return OnChip(
        densities=(float(said.get("density", 1)),),
        value_bytes=float(value),
        index_bytes=float(index or 0),
        usable=float(said.get("usable", 1)),
        sms=int(said["sms"]) if "sms" in said else None,
        shared_bytes=int(said["shared"]) if "shared" in said else None,
    )


def _network(assumed: str) -> Recurrent:
    """What a row says of the layer."""
    said = words(assumed)
    return Recurrent(hidden_size=int(said.get("h", 2304)), batch_size=int(said.get("b", 4)))


def _fit(name: str, assumed: str) -> Fit:
    options = _options(assumed)
    *_, storage = storages(options)
    return fit(_network(assumed), Chip.of(gpu(name), options), storage, options)


def _resident_seconds(name: str, assumed: str) -> Fraction:
    resident = _fit(name, assumed).resident_seconds
    assert resident is not None, f"the weights do not fit on {name}: {assumed}"
    return resident


def _dense_flops(config: Recurrent) -> Fraction:
    """FLOPs of a step's recurrent GEMM without pruning."""
    return Fraction(2 * config.batch_size * recurrent_weights(config))
