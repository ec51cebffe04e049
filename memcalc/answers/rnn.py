"""``rnn``: recurrent networks: weights on chip, and training over time."""

from typing import Any

from memcalc.analysis import recurrent
from memcalc.analysis.activations import kept
from memcalc.analysis.onchip import (
    MEMORY,
    REGISTERS,
    SHARED,
    Chip,
    Storage,
    exact,
    fit,
    missing,
    states,
    storages,
)
from memcalc.blocks.rnn import rnn_graph
from memcalc.config.gpus import Gpu, gpu, gpus
from memcalc.config.recurrent import KERNELS, OnChip, Recurrent
from memcalc.errors import UsageError, nearest
from memcalc.lazy import resolve
from memcalc.report import Column, Report
from memcalc.units import counted, format_bytes, format_flops

MOST_SOURCES = 3  # GPUs whose sources the notes give
SCOPES = ("onchip", "training", "step", "formula")

ON_CHIP = (
    Column("gpu", "text"),
    Column("storage", "text"),
    Column("density_percent", "percent", detail=2),
    Column("bytes_per_nonzero", "ratio", detail=2),
    Column("weight_bytes", "bytes", detail=1),
    Column("weight_bytes_per_sm", "bytes", detail=2),
    Column("u_percent", "percent", title="register use %"),
    Column("weights_in", "text", choices=(REGISTERS, SHARED, MEMORY)),
    Column("largest_hidden", "count", least=0),
    Column("largest_hidden_with_shared", "count", detail=2, least=0),
    Column("largest_hidden_by_states", "count", detail=2, least=0, optional=True),
    Column("state_bytes_per_sm", "bytes", detail=2),
    Column("states_fit", "text", detail=2, choices=("yes", "no")),
    Column("step_flops", "flops", detail=2),
    Column("step_memory_bytes", "bytes", detail=2),
    Column("step_l2_bytes", "bytes", detail=2),
    Column("on_chip_seconds", "seconds", optional=True),
    Column("streamed_seconds", "seconds"),
    Column("speedup_bound", "ratio", optional=True),
)

TRAINING = (
    Column("checkpoints", "text", choices=("none", "asked", "best")),
    Column("every", "count", optional=True),
    Column("kept_bytes", "bytes"),
    Column("peak_bytes", "bytes"),
    Column("extra_flops", "flops"),
)

STEP = (
    Column("tensor", "text"),
    Column("op", "text"),
    Column("shape", "text"),
    Column("bytes", "bytes"),
    Column("reason", "text", detail=True),
    Column("source", "text", detail=True),
)

FORMULA = (Column("step", "text", title="quantity"), Column("formula", "formula"))


def rnn(
    config: Recurrent | None = None,
    options: OnChip | None = None,
    scope: str = "onchip",
    every: int | None = None,
) -> Report:
    """A recurrent network: which weights stay on chip, what training keeps, or closed forms.

    Args:
        config: The cells; by default the vanilla layer of Zhu et al. 2018's abstract.
        options: How a persistent kernel stores its weights; for ``onchip`` only.
        scope: ``onchip``: a row per GPU and storage of the weights; ``training``: a row per
            spacing of checkpoints; ``step``: a row per tensor that one step keeps; ``formula``:
            closed forms.
        every: For ``training``, steps between checkpoints, shown beside the best.

    Raises:
        UsageError: The scope is unknown or needs a sequence length, or a GPU does not have what
            the options ask for.
        ConfigError: A GPU is unknown.

    >>> report = rnn(Recurrent(hidden_size=2304), OnChip(gpus=("titan-x",)))
    >>> dict(zip(report.column("storage"), report.column("weights_in")))
    {'dense 4': 'memory', '30% 2+2': 'shared', '30% 4+4': 'memory'}
    """
    config = config or Recurrent()
    if scope not in SCOPES:
        raise UsageError(f"scope {str(scope)[:40]!r} is unknown; {nearest(str(scope), SCOPES)}")
    if scope == "onchip":
        return _on_chip(config, options or OnChip())
    if scope == "training":
        return _training(config, every)
    return _step(config) if scope == "step" else _formula(config)


def _on_chip(config: Recurrent, options: OnChip) -> Report:
    asked = {gpu(name).name: gpu(name) for name in options.gpus}
    found = list(asked.values()) or [each for each in gpus() if not missing(each)]
    rows = [_fit_row(config, options, each, way) for each in found for way in storages(options)]
    return Report(
        "rnn",
        f"Recurrent weights on chip: {_setting(config)}",
        ON_CHIP,
        tuple(rows),
        {},
        tuple(_on_chip_notes(config, options, found)),
        answer=_stays(rows),
    )


def _stays(rows: list[tuple[Any, ...]]) -> str:
    """In how many rows weights stay on chip, and the row with the largest speedup bound."""
    number = sum(row[7] != MEMORY for row in rows)
    line = f"weights stay on chip in {number} of {len(rows)} rows"
    best = max(rows, key=lambda row: row[-1] or 0)
    if best[-1]:
        line += f"; the largest speedup bound is {best[-1]:.3g} ({best[1]} on {best[0]})"
    return line


def _fit_row(config: Recurrent, options: OnChip, found: Gpu, way: Storage) -> tuple[Any, ...]:
    chip = Chip.of(found, options)
    held = fit(config, chip, way, options)
    resident = held.resident_seconds
    return (
        found.name,
        way.label,
        float(100 * way.density),
        float(way.value_bytes + way.index_bytes),
        round(held.weight_bytes),
        round(held.weight_bytes_per_sm),
        float(100 * held.weight_bytes_per_sm / chip.registers),
        held.resident_in,
        held.largest,
        held.largest_with_shared,
        held.largest_states,
        round(held.state_bytes_per_sm),
        "yes" if held.states_fit else "no",
        round(held.flops),
        round(held.memory_bytes),
        round(held.l2_traffic_bytes),
        None if resident is None else float(resident),
        float(held.streamed_seconds),
        None if not resident else float(held.streamed_seconds / resident),
    )


def _on_chip_notes(config: Recurrent, options: OnChip, found: list[Gpu]) -> list[str]:
    """What the columns mean, and each assumption with the option that changes it."""
    usual = OnChip()
    sms = f"{options.sms} SMs" if options.sms else "all SMs"
    width = options.activation_bytes
    states_ = (
        f"every SM keeps all hidden states in shared memory, {width:g} bytes per element; weights "
        "may fill the rest of it (weights in: shared)"
        if width
        else "hidden states are not in shared memory; weights may fill all of it (weights in: "
        "shared)"
    )
    pairs = " or ".join(f"{value:g} + {index:g}" for value, index in options.pairs)
    packing = "; the papers do not say how they store it" if len(options.pairs) > 1 else ""
    peak = f"{options.peak_flops:g} FLOP/s" if options.peak_flops else "the fp32 peak"
    l2 = (
        f"L2 at {options.l2_bandwidth:g} bytes per second (--l2-bandwidth)"
        if options.l2_bandwidth
        else "no limit from L2, whose bandwidth vendors do not state (--l2-bandwidth)"
    )
    layers = "one layer on chip"
    if config.layers > 1:
        layers = f"{config.layers} layers on chip at the same time"
    lines = [
        "storage: density, then bytes per value + bytes per index",
        f"register use: share of the registers of {sms} that the weights need",
        f"largest hidden: the largest hidden size whose weights fit in {100 * options.usable:g} % "
        f"of the registers of {sms}, evenly distributed (--usable, --sms); published dense kernels "
        "use 84.4 to 87.5 %",
        "on chip, streamed: lower bounds per time step, from a roofline; on chip: weights stay in "
        "registers or shared memory; streamed: every step reads them from memory, or from L2 if "
        "they fit there",
        f"roofline: {peak} of {sms} (--peak-flops), memory at the data sheet's bandwidth, {l2}, "
        f"and {options.sync_seconds:g} s of grid synchronization (--sync)",
        "speedup bound: streamed seconds over on-chip seconds",
        f"{_said(len(options.pairs) == 1)}: a pruned weight takes {pairs} bytes, value + "
        f"index{packing} (--value-bytes, --index-bytes)",
        f"{_said(width != usual.activation_bytes)}: {states_} (--activation-bytes)",
        f"assumed: {layers} (--layers); the GEMMs of the inputs run beforehand",
    ]
    published = [
        *(["h 2304 and b 4 (--hidden-size, --batch-size)"] if config == Recurrent() else []),
        *(["a density of 30 % (--density)"] if options.densities == usual.densities else []),
        *(
            ["a P100, as in the abstract's first version (--gpu)"]
            if options.gpus == usual.gpus
            else []
        ),
    ]
    if published:
        lines.append(f"assumed, from the abstract of Zhu et al. 2018: {', '.join(published)}")
    lines += _states_note(config, options, found)
    if len(found) > MOST_SOURCES:
        return [*lines, "sources of what is on each chip: `memcalc gpus --format json`"]
    return lines + [f"source of {each.name}: {each.chip_source}" for each in found]


def _said(asked: bool) -> str:
    return "as asked" if asked else "assumed"


def _states_note(config: Recurrent, options: OnChip, found: list[Gpu]) -> list[str]:
    """The GPUs whose shared memory does not hold the hidden states."""
    size = states(config, config.hidden_size, exact(options.activation_bytes))
    small = [each.name for each in found if size > Chip.of(each, options).shared_bytes]
    if not small:
        return []
    return [
        f"does not fit: hidden states ({format_bytes(round(size))}) exceed the shared memory of "
        f"an SM of {', '.join(small)}; a kernel would have to distribute them over SMs"
    ]


def _training(config: Recurrent, every: int | None) -> Report:
    steps = config.seq_length
    if steps is None:
        raise UsageError("--scope training needs --seq-length")
    if every is not None and not 1 <= every <= steps:
        raise UsageError(f"--checkpoint-every {every} must be from 1 to --seq-length = {steps}")
    costs = recurrent.costs(config)
    extra = recurrent.forward_flops(config, steps)
    whole = costs.whole(steps)
    rows: list[tuple[Any, ...]] = [("none", None, whole, whole, 0)]
    best = costs.best(steps)
    asked = {"asked": every} if every and every != best else {}
    for name, spacing in (*asked.items(), ("best", best)):
        segments = -(-steps // spacing)
        held = costs.checkpointed(steps, segments)
        rows.append((name, spacing, held, costs.peak(steps, spacing), extra))
    return Report(
        "rnn",
        f"Backpropagation through time, {steps} steps: {_setting(config)}, {config.precision}",
        TRAINING,
        tuple(rows),
        {},
        (
            *_kernel_notes(config),
            "kept: bytes saved for backward when the forward pass ends; peak: the most bytes "
            "during backward, kept bytes and one recomputed segment, without gradients",
            "best: the checkpoint spacing with the lowest peak; of several, the widest",
            f"parameters: {recurrent.parameters(config):,}; forward FLOPs: {extra:,}",
        ),
        answer=_lowest(costs.peak(steps, best), best, whole, extra),
    )


def _lowest(peak: int, every: int, whole: int, flops: int) -> str:
    """The checkpoint spacing with the lowest peak, if that is lower than without checkpoints."""
    if peak >= whole:
        return f"the peak is {format_bytes(whole)}; checkpoints do not lower it"
    return (
        f"a checkpoint every {counted(every, 'step')} has the lowest peak: {format_bytes(peak)} "
        f"instead of {format_bytes(whole)}, for {format_flops(flops)}"
    )


def _step(config: Recurrent) -> Report:
    entries = kept(rnn_graph(config, 1))
    size = sum(entry.tensor.bytes for entry in entries)
    costs = recurrent.costs(config)
    later = costs.input + costs.step
    return Report(
        "rnn",
        f"Tensors that one time step keeps: {_setting(config)}, {config.precision}",
        STEP,
        tuple(
            (
                entry.tensor.name,
                ", ".join(entry.ops),
                entry.tensor.shape,
                entry.tensor.bytes,
                entry.reason,
                entry.source,
            )
            for entry in entries
        ),
        {},
        (
            *_kernel_notes(config),
            f"every later step keeps {format_bytes(later)}"
            + (", since the previous step keeps its initial states" if later < size else ""),
        ),
        answer=f"one time step keeps {format_bytes(size)} in {len(entries)} tensors",
    )


def _formula(config: Recurrent) -> Report:
    forms = resolve("memcalc.rnn_formulas:steps")(config)
    return Report(
        "rnn",
        f"Closed forms: {_cells(config)}, {config.precision}",
        FORMULA,
        tuple(forms),
        {},
        (
            *_kernel_notes(config),
            f"letters: {resolve('memcalc.rnn_formulas:legend')(forms)}",
            "on chip: SMs hold equal shares of the weights, and every SM keeps all hidden states",
        ),
        answer=f"{forms[0][0]}: {forms[0][1]} bytes",
    )


def _kernel_notes(config: Recurrent) -> tuple[str, ...]:
    return (f"kernels: {config.kernels} ({KERNELS[config.kernels].summary})",)


def _cells(config: Recurrent) -> str:
    return f"{config.cell} cell" if config.layers == 1 else f"{config.layers} {config.cell} cells"


def _setting(config: Recurrent) -> str:
    """The cells and their sizes, as a title says them."""
    input_ = "" if config.input_size is None else f"input {config.input_size}, "
    return f"{_cells(config)}, {input_}h {config.hidden_size}, b {config.batch_size}"
