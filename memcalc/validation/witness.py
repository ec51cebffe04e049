"""One rank's measurement of a layer, matched with the ledger."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from memcalc.analysis import flops
from memcalc.analysis.activations import counted, kept, total
from memcalc.blocks.layer import layer_graph
from memcalc.config import Config
from memcalc.graph.graph import Graph
from memcalc.validation.against import AGAINST
from memcalc.validation.gradients import gradient_error
from memcalc.validation.layers.modules import TYPES, Layer, Place, hidden_state
from memcalc.validation.match import Tie, tie
from memcalc.validation.measuring import cuda
from memcalc.validation.measuring.kernels import FLASH_RNG_BYTES
from memcalc.validation.measuring.measure import Measured, peak_bytes

DEPTHS = (2, 3)  # numbers of layers, whose peaks differ by the bytes of one layer


class Counted(NamedTuple):
    """The FLOPs that recomputation adds on one rank.

    Attributes:
        measured: By PyTorch's counter: without early stop, and with it.
        ledger: The same by the ledger.
    """

    measured: tuple[int, int]
    ledger: tuple[int, int]


class Finding(NamedTuple):
    """What one rank found.

    Attributes:
        ties: The rows of the comparison.
        measured: What the forward pass saves.
        ledger_bytes: The ledger's total.
        gradient_error: The largest difference from the unsharded layer's gradients, if compared.
        peaks: The peak of forward plus backward for each of ``DEPTHS``, if it is deterministic.
        allocator_peaks: The same by CUDA's allocator.
        recomputed: The FLOPs that recomputation adds, if counted.
    """

    ties: list[Tie]
    measured: Measured
    ledger_bytes: int
    gradient_error: float | None = None
    peaks: tuple[int, ...] = ()
    allocator_peaks: tuple[int, ...] = ()
    recomputed: Counted | None = None


def observe(rank: int, config: Config, device: str, against: str = "own") -> Finding:
    """Measure one rank's layer and match it with the ledger."""
    config = as_on(config, device)
    if device == "cuda":
        cuda.prepare(rank)
    parallel = config.parallel
    graph = layer_graph(config)
    entries = counted(kept(graph, config.run.policy), "exact")
    place = Place(device, TYPES[config.run.precision], parallel.tp, rank, parallel.sp)
    layer = AGAINST[against]
    measured, operations, modules = layer.measured(config, place)
    # the own layer's modules have the names of the ledger's operations
    known = frozenset(op.name for op in graph.ops) if layer.own else frozenset()
    ties = tie(graph, entries, measured.stored, operations, modules, known)
    finding = Finding(ties, measured, total(entries))
    if device == "cpu" and parallel.tp > 1 and layer.build:
        finding = finding._replace(gradient_error=gradient_error(rank, config, layer.build))
    if not layer.own:
        return finding
    # real collectives free their tensors at any time, which changes the peak
    steady = device == "meta" or parallel.tp == 1
    return finding._replace(
        peaks=tuple(_peak(config, place, depth) for depth in DEPTHS) if steady else (),
        allocator_peaks=tuple(_allocator_peak(config, place, depth) for depth in DEPTHS)
        if device == "cuda" and steady
        else (),
        recomputed=_recomputed(graph, config, place) if device == "meta" else None,
    )


def as_on(config: Config, device: str) -> Config:
    """The config with the kernels of a device."""
    kernels = config.run.implementation
    if device == "cpu":
        native = not config.model.attention_dropout  # the CPU's flash kernel has no dropout
        rng_bytes = 0 if native else kernels.rng_bytes
        kernels = replace(kernels, fp32_statistics=False, rng_bytes=rng_bytes)
    if device == "cuda":
        kernels = replace(kernels, rng_bytes=FLASH_RNG_BYTES)
    return replace(config, run=replace(config.run, implementation=kernels))


def _chain(config: Config, place: Place, depth: int) -> tuple[list[Layer], Tensor]:
    return [Layer(config, place) for _ in range(depth)], hidden_state(config, place)


def _peak(config: Config, place: Place, depth: int) -> int:
    return peak_bytes(*_chain(config, place, depth))


def _allocator_peak(config: Config, place: Place, depth: int) -> int:
    layers, x = _chain(config, place, depth)
    return cuda.peak_of(lambda: peak_bytes(layers, x))


def _recomputed(graph: Graph, config: Config, place: Place) -> Counted | None:
    """The FLOPs that recomputation adds, if every GEMM is sharded over the ranks."""
    run, t = config.run, place.t
    if not run.policy.regions or config.model.kv_heads < t:
        return None
    without = replace(config, run=run.recomputing("none"))
    base = _backward_flops(Layer(without, place), config, place)
    measured, ledger = [], []
    for early_stop in (False, True):
        layer = Layer(config, place)
        layer.early_stop = early_stop
        measured.append(_backward_flops(layer, config, place) - base)
        ledger.append(flops.recomputed(graph, run.policy, early_stop=early_stop) // t)
    return Counted((measured[0], measured[1]), (ledger[0], ledger[1]))


def _backward_flops(layer: Layer, config: Config, place: Place) -> int:
    # the counter decomposes operations, so it must be on in the forward pass too
    with FlopCounterMode(display=False):
        y = layer(hidden_state(config, place))
    with FlopCounterMode(display=False) as counter:
        y.backward(torch.empty_like(y))
    return counter.get_total_flops()
