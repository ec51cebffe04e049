"""``rnn``: recurrent networks, on chip and over time."""

from typing import Any

from memcalc.analysis import recurrent
from memcalc.analysis.activations import kept
from memcalc.analysis.onchip import Chip, Storage, exact, fit, missing, states, storages
from memcalc.blocks.rnn import rnn_graph
from memcalc.config.gpus import Gpu, gpu, gpus
from memcalc.config.recurrent import KERNELS, OnChip, Recurrent
from memcalc.errors import UsageError, nearest
from memcalc.lazy import resolve
from memcalc.report import Column, Report
from memcalc.units import format_bytes

SCOPES = ("onchip", "training", "step", "formula")


def rnn(
    config: Recurrent | None = None,
    options: OnChip | None = None,
    scope: str = "onchip",
    every: int | None = None,
) -> Report:
    """A recurrent network: what fits on a chip, what training keeps, or the formulas of both.

    Args:
        config: The cells; by default the vanilla layer of Zhu et al. 2018's abstract.
        options: How a persistent kernel holds its weights; only for ``onchip`` is it asked.
        scope: ``onchip``: a row a GPU and storage of the weights; ``training``: a row a spacing of
            checkpoints; ``step``: a row a tensor that one step keeps; ``formula``: closed forms.
        every: For ``training``, steps between checkpoints that get a row beside the best.

    Raises:
        UsageError: There is no such scope; it needs a sequence length; or a GPU has not what the
            options ask for.
        ConfigError: There is no such GPU.

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
        (
            Column("gpu", "text"),
            Column("storage", "text"),
            Column("density_percent", "percent", detail=True),
            Column("bytes_per_nonzero", "ratio", detail=True),
            Column("weight_bytes", "bytes"),
            Column("weight_bytes_per_sm", "bytes", detail=True),
            Column("u_percent", "percent"),
            Column("weights_in", "text"),
            Column("largest_hidden", "count"),
            Column("largest_hidden_with_shared", "count", detail=True),
            Column("largest_hidden_by_states", "count", detail=True),
            Column("state_bytes_per_sm", "bytes", detail=True),
            Column("states_fit", "text", detail=True),
            Column("step_flops", "flops", detail=True),
            Column("step_memory_bytes", "bytes", detail=True),
            Column("step_l2_bytes", "bytes", detail=True),
            Column("on_chip_seconds", "seconds"),
            Column("streamed_seconds", "seconds"),
            Column("speedup_bound", "ratio", detail=True),
        ),
        tuple(rows),
        {},
        tuple(_on_chip_notes(config, options, found)),
    )


def _fit_row(config: Recurrent, options: OnChip, found: Gpu, way: Storage) -> tuple[Any, ...]:
    held = fit(config, Chip.of(found, options), way, options)
    resident = held.resident_seconds
    return (
        found.name,
        way.label,
        float(100 * way.density),
        float(way.value_bytes + way.index_bytes),
        round(held.weight_bytes),
        round(held.weight_bytes_per_sm),
        float(100 * held.weight_bytes_per_sm / (found.register_bytes or 0)),
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
    """What a table of fits rests on; what was assumed names the option that sets it."""
    used = f"{options.sms}" if options.sms else "all"
    width = options.activation_bytes
    where = (
        f"each multiprocessor holds the whole states, {width:g} bytes an element, in shared memory"
        if width
        else "no state is held in shared memory"
    )
    pairs = " and ".join(f"{v:g} + {i:g}" for v, i in options.pairs)
    guessed = "assumed" if len(options.pairs) > 1 else "as asked"
    held = "assumed" if width == OnChip().activation_bytes else "as asked"
    peak = f"{options.peak_flops:g} FLOP/s" if options.peak_flops else "its plain fp32 peak"
    l2 = (
        f"L2 gives {options.l2_bandwidth:g} bytes a second (--l2-bandwidth)"
        if options.l2_bandwidth
        else "traffic through L2 bounds nothing (vendors do not state it: --l2-bandwidth)"
    )
    lines = [
        f"largest hidden: weights fill a share u = {options.usable:g} of the registers of {used} "
        "multiprocessors, spread evenly; u = 1 is the bound, and the published dense kernels used "
        "0.844 to 0.875 (--usable, --sms)",
        "storage: the density, and the bytes of a value and its index; u percent: the share of "
        "these registers that the weights need",
        f"{guessed}: a sparse weight is stored as value + index of {pairs} bytes; the published "
        "packing could not be seen (--value-bytes, --index-bytes)",
        f"{held}: {where} (--activation-bytes); weights may fill what is left there (weights in: "
        "shared)",
        f"assumed: {_layers(config)} on chip at once (--layers); products with inputs are made "
        "beforehand",
        f"seconds: rooflines of a step, bounds from below; products at {peak} of these "
        f"multiprocessors (--peak-flops), memory at its data sheet's bandwidth, {l2}, grid-wide "
        f"synchronisation {options.sync_seconds:g} s (--sync)",
        "streamed: weights are read in every step, from memory or, where they fit, from L2; "
        "speedup bound: the most that residence gains over a streamed kernel at its own bound",
    ]
    usual = OnChip()
    published = [
        *(["its layer (h 2304, b 4)"] if config == Recurrent() else []),
        *(["its density of 30 %"] if options.densities == usual.densities else []),
        *(["a P100, which only its submission names"] if options.gpus == usual.gpus else []),
    ]
    if published:
        lines.append(
            f"assumed, as in Zhu et al. 2018's abstract: {', '.join(published)} (--hidden-size, "
            "--batch-size, --density, --gpu)"
        )
    lines += _states_note(config, options, found)
    return lines + [f"{each.name}: {each.chip_source}" for each in found]


def _states_note(config: Recurrent, options: OnChip, found: list[Gpu]) -> list[str]:
    """The GPUs whose shared memory does not hold the states."""
    size = states(config, config.hidden_size, exact(options.activation_bytes))
    small = [each.name for each in found if size > Chip.of(each, options).shared_bytes]
    if not small:
        return []
    return [
        f"does not fit: the states ({format_bytes(round(size))}) exceed the shared memory of a "
        f"multiprocessor of {', '.join(small)}; a kernel would have to split them"
    ]


def _layers(config: Recurrent) -> str:
    return "one layer is" if config.layers == 1 else f"all {config.layers} layers are"


def _training(config: Recurrent, every: int | None) -> Report:
    steps = config.seq_length
    if steps is None:
        raise UsageError("the scope training needs a sequence length (-s)")
    if every is not None and not 1 <= every <= steps:
        raise UsageError(f"checkpoints every {every} steps: choose 1 to {steps}")
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
        (
            Column("checkpoints", "text"),
            Column("every", "count"),
            Column("kept_bytes", "bytes"),
            Column("peak_bytes", "bytes"),
            Column("extra_flops", "flops"),
        ),
        tuple(rows),
        {},
        (
            *_kernel_notes(config),
            "kept: after the forward pass; peak: the most in backward, with the steps of one "
            "segment made again, and without gradients",
            "best: the spacing with the least peak; of several the widest",
            f"parameters: {recurrent.parameters(config):,}; FLOPs of the forward pass: {extra:,}",
        ),
    )


def _step(config: Recurrent) -> Report:
    entries = kept(rnn_graph(config, 1))
    size = sum(entry.tensor.bytes for entry in entries)
    costs = recurrent.costs(config)
    return Report(
        "rnn",
        f"What one time step keeps: {_setting(config)}, {config.precision}: {format_bytes(size)}",
        (
            Column("tensor", "text"),
            Column("op", "text"),
            Column("shape", "text"),
            Column("bytes", "bytes"),
            Column("reason", "text", detail=True),
            Column("source", "text", detail=True),
        ),
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
            f"every further step keeps {costs.input + costs.step:,} bytes: the states that it "
            "starts from are kept as those of the step before",
        ),
    )


def _formula(config: Recurrent) -> Report:
    forms = resolve("memcalc.rnn_formulas:steps")(config)
    return Report(
        "rnn",
        f"Closed forms: {_cells(config)}, {config.precision}",
        (Column("step", "text"), Column("formula", "formula")),
        tuple(forms),
        {},
        (
            *_kernel_notes(config),
            f"letters: {resolve('memcalc.rnn_formulas:legend')(forms)}",
            "on chip, the weights of all multiprocessors spread evenly, and each holds all states",
        ),
    )


def _kernel_notes(config: Recurrent) -> tuple[str, ...]:
    return (f"kernels: {config.kernels} ({KERNELS[config.kernels]})",)


def _cells(config: Recurrent) -> str:
    return f"{config.cell} cell" if config.layers == 1 else f"{config.layers} {config.cell} cells"


def _setting(config: Recurrent) -> str:
    """The cells and their sizes, for a title."""
    input_ = "" if config.input_size is None else f"input {config.input_size}, "
    return f"{_cells(config)}, {input_}h {config.hidden_size}, b {config.batch_size}"
