"""``validate``: a real PyTorch layer, what it keeps, and the ledger, tensor by tensor."""

from dataclasses import replace
from typing import NamedTuple

import torch

from memcalc import symbols
from memcalc.analysis.activations import counted, kept, total
from memcalc.answers.notes import notes, recomputation, setting
from memcalc.blocks.layer import layer_graph
from memcalc.config import IMPLEMENTATIONS, Config
from memcalc.errors import UsageError, nearest
from memcalc.report import Column, Report
from memcalc.validation import hugging_face, megatron, ranks
from memcalc.validation.gradients import TOLERANCE, gradient_error
from memcalc.validation.match import IGNORED, MISSING, UNEXPLAINED, Tie, tie
from memcalc.validation.measure import Measured, measure, peak_bytes
from memcalc.validation.modules import TYPES, Layer, Place, hidden_state
from memcalc.validation.room import require_room

DEVICES = ("meta", "cpu")
AGAINST = ("own", "megatron", "transformers")
DEPTHS = (2, 3)  # layers between whose peaks a further layer's bytes are found
TORCH = torch.__version__.partition("+")[0]  # without the build, which changes nothing here


class RankResult(NamedTuple):
    """What one rank found."""

    ties: list[Tie]
    measured: Measured
    gradient_error: float | None = None
    peaks: tuple[int, ...] = ()
    ledger_bytes: int = 0


def validate(
    config: Config, device: str = "meta", full_size: bool = False, against: str = "own"
) -> Report:
    """Run a layer in PyTorch, measure what autograd keeps, and hold the exact ledger against it.

    Args:
        config: The model, its parallelism and its run.
        device: ``meta``: full size, CUDA's choices of what is kept, no memory and no kernel;
            ``cpu``: real tensors and kernels, and a process for every rank.
        full_size: On the CPU, the model's own size rather than a small one of its shape.
        against: Whose layer runs: ``own``, that of ``memcalc.validation.modules``;
            ``transformers``, Hugging Face's; or ``megatron``, Megatron-core's local one.

    Raises:
        UsageError: The device or the implementation is not one that can be validated.
        RankError: A rank failed, died, or did not answer.
        MemcalcError: The layer does not fit this machine.

    >>> from memcalc.config import load
    >>> report = validate(load("22b", sp=True))
    >>> sorted(set(report.column("status"))), report.failures
    (['ignored', 'matched'], ())
    """
    if device not in DEVICES:
        raise UsageError(f"device {device!r} is unknown; {nearest(str(device), DEVICES)}")
    if against not in AGAINST:
        raise UsageError(f"a layer of {against!r} is unknown; {nearest(str(against), AGAINST)}")
    config, against = _whose(config, against)
    _require_module(config, device, against)
    lines: tuple[str, ...]
    if device == "meta":
        lines = ("backend meta: full size, no memory was allocated and no kernel ran",)
        with ranks.pretended(config.parallel.tp):
            results = [run(0, config, device, against)]
    else:
        if not full_size:
            config = reduced(config)
        require_room(config)
        results = ranks.on_each(config.parallel.tp, run, config, device, against)
        lines = (f"backend cpu: {config.parallel.tp} process(es), real kernels",)
        if against == "own":
            error = float(torch.tensor([result.gradient_error for result in results]).max())
            lines += (
                "in fp32 without dropout the ranks' gradients, of the input and of split weights, "
                f"are the unsplit layer's to {error:.1g} of the largest",
            )
    if against == "transformers":
        built = hugging_face.LAYERS[hugging_face.family(config)]
        lines += (
            f"layer: transformers' own {built}; stand-ins for CUDA's dropout and flash kernel",
        )
    if against == "megatron":
        lines += (
            "layer: Megatron-core's own local TransformerLayer; stand-ins for its norms and for "
            "CUDA's dropout",
        )
    if against == "own":
        lines += _stand_ins(config)
    lines += _peak_note(results[0], config)
    worst = max(range(len(results)), key=lambda rank: results[rank].measured.bytes)
    ties = results[worst].ties
    ledger_bytes = sum(each.ledger_bytes for each in ties)
    measured_bytes = sum(each.measured_bytes for each in ties if each.status != IGNORED)
    ignored = sum(each.measured_bytes for each in ties if each.status == IGNORED)
    return Report(
        "validate",
        f"What PyTorch keeps of one layer of {setting(config)}, {recomputation(config)}",
        (
            Column("tensor", "text"),
            Column("module", "text"),
            Column("op", "text", detail=True),
            Column("ledger_bytes", "bytes"),
            Column("measured_bytes", "bytes"),
            Column("status", "text"),
            Column("backend", "text", detail=True),
            Column("rank", "count", detail=True),
        ),
        tuple((*each, device, worst) for each in ties),
        symbols.values(config),
        (
            *lines,
            f"ledger {ledger_bytes} bytes, measured {measured_bytes}, difference "
            f"{measured_bytes - ledger_bytes}; ignored {ignored}; torch {TORCH}",
            *notes(config, "exact"),
        ),
        tuple(line for rank, result in enumerate(results) for line in _failures(rank, result)),
    )


def run(rank: int, config: Config, device: str, against: str = "own") -> RankResult:
    """One rank's layer, measured and tied to the ledger."""
    parallel = config.parallel
    graph = layer_graph(_as_on(config, device))
    entries = counted(kept(graph, config.run.regions), "exact")
    place = Place(device, TYPES[config.run.precision], parallel.tp, rank, parallel.sp)
    x = hidden_state(config, place)
    if against == "transformers":
        measured = measure(hugging_face.HuggingFaceLayer(config), x.transpose(0, 1).contiguous())
        names = hugging_face.MODULES[hugging_face.family(config)]
        return RankResult(tie(graph, entries, measured.stored, names, names), measured)
    if against == "megatron":
        with megatron.groups(place):
            measured = measure(megatron.MegatronLayer(config, place), x)
        ties = tie(graph, entries, measured.stored, megatron.OPERATIONS, megatron.MODULES)
        return RankResult(ties, measured)
    measured = measure(Layer(config, place), x)
    error = gradient_error(rank, config) if device == "cpu" else None
    # real collectives let go of their tensors when they please, which blurs a peak
    steady = device == "meta" or parallel.tp == 1
    depths = DEPTHS if steady else ()
    peaks = tuple(
        peak_bytes([Layer(config, place) for _ in range(depth)], hidden_state(config, place))
        for depth in depths
    )
    ties = tie(graph, entries, measured.stored)
    return RankResult(ties, measured, error, peaks, total(entries))


def reduced(config: Config) -> Config:
    """A config of the same shape that runs in a second on a CPU.

    >>> from memcalc.config import load
    >>> small = reduced(load("llama-3-70b", tp=8))
    >>> small.model.heads, small.model.kv_heads, small.model.hidden_size
    (8, 1, 256)
    """
    model, run_, t = config.model, config.run, config.parallel.tp
    group = model.heads // model.kv_heads
    # the fewest key-value heads that t divides, or that divide t, with query heads that t divides
    kv_heads = next(
        k
        for k in range(1, 2 * t + 1)
        if group * k % t == 0 and group * k > 1 and 0 in (k % t, t % k)
    )
    heads = group * kv_heads
    head_size = 32
    hidden = heads * head_size if model.heads * model.head_size == model.hidden_size else 192
    ffn = 4 * hidden if model.ffn_size == 4 * model.hidden_size else t * (hidden * 11 // (4 * t))
    small = replace(
        model,
        name=f"{model.name}, reduced",
        layers=config.parallel.pp * config.parallel.vpp,
        hidden_size=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        ffn_size=ffn,
        window_layers=None,
        moe_layers=None,
    )
    length = 16 * t if 16 * t >= 64 else 64
    return replace(
        config,
        model=small,
        run=replace(run_, seq_length=length, micro_batch_size=2, global_batch_size=None),
        assumed=(f"a small model of the shape of {model.name}",),
    )


def _as_on(config: Config, device: str) -> Config:
    """The config with what a device does in its own way."""
    if device != "cpu":
        return config
    kernels = replace(config.run.implementation, fp32_statistics=False)
    return replace(config, run=replace(config.run, implementation=kernels))


def _whose(config: Config, against: str) -> tuple[Config, str]:
    """The config with the implementation that a layer is, and whose layer runs."""
    kernels = config.run.implementation
    if kernels.name.startswith("transformers-"):
        return config, "transformers" if against == "own" else against
    if against != "transformers":
        return config, against
    said = f"implementation {kernels.name}"
    if said not in config.assumed:
        raise UsageError(f"{said} is not Hugging Face's: choose transformers-eager or -sdpa")
    name = "transformers-sdpa" if kernels.attention == "flash" else "transformers-eager"
    assumed = tuple(line for line in config.assumed if line != said)
    run_ = replace(config.run, implementation=IMPLEMENTATIONS[name])
    return replace(config, run=run_, assumed=(*assumed, f"implementation {name}")), against


def _require_module(config: Config, device: str, against: str) -> None:
    kernels, model = config.run.implementation, config.model
    if against == "megatron":
        megatron.require(config)
    if against == "transformers":
        hugging_face.require(config)
        if device != "meta" or config.parallel.tp > 1 or config.run.regions:
            raise UsageError(
                "Hugging Face's layers are validated on meta, with one rank and nothing recomputed"
            )
        return
    grouped = model.kv_heads != model.heads
    if grouped and kernels.attention == "unfused" and not kernels.repeats_kv:
        raise UsageError(
            f"implementation {kernels.name} with grouped queries and unfused attention is a way of "
            "counting that no module has; choose megatron-local"
        )


def _slope(result: RankResult) -> int:
    return result.peaks[1] - result.peaks[0]


def _stand_ins(config: Config) -> tuple[str, ...]:
    """Which fused kernels are stood in for, by functions that keep what those keep."""
    model, kernels = config.model, config.run.implementation
    fused = {
        "flash attention": kernels.attention == "flash",
        "RMSNorm": model.norm == "rmsnorm",
        "the gate": model.gated and kernels.fused_gate,
        "rotary positions": model.position == "rotary",
    }
    names = ", ".join(name for name, used in fused.items() if used)
    if not names:
        return ()
    return (f"stand-ins, written to keep what the fused kernels' sources say, for: {names}",)


def _peak_note(result: RankResult, config: Config) -> tuple[str, ...]:
    if not result.peaks:
        return ()
    if config.run.implementation.attention == "flash":  # its stand-in's own scores come and go
        return (f"the peak of forward and backward grows by {_slope(result)} bytes a layer",)
    rest = result.peaks[0] - DEPTHS[0] * _slope(result)
    return (
        f"the peak of forward and backward grows by {_slope(result)} bytes a layer; {rest} bytes "
        "come and go besides (measured, not predicted)",
    )


def _failures(rank: int, result: RankResult) -> list[str]:
    lines = [
        f"rank {rank}: {each.tensor} of {each.module or 'the input'} is {each.status} "
        f"(ledger {each.ledger_bytes} bytes, measured {each.measured_bytes})"
        for each in result.ties
        if each.status in (MISSING, UNEXPLAINED)
    ]
    if result.peaks and _slope(result) != result.ledger_bytes:
        lines.append(
            f"rank {rank}: the peak grows by {_slope(result)} bytes a layer, where the ledger has "
            f"{result.ledger_bytes}"
        )
    error = result.gradient_error
    if error is not None and not error <= TOLERANCE:
        lines.append(f"rank {rank}: gradients differ from the unsplit layer's by {error:.1g}")
    measured = result.measured
    if not measured.agrees:
        lines.append(
            f"rank {rank}: two counts differ: {measured.live_bytes} bytes are alive, "
            f"{measured.born_bytes} saved and {measured.output_bytes} of outputs"
        )
    return lines
