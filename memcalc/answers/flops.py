"""``flops``: the FLOPs of an iteration or of one layer, and the utilization."""

from collections.abc import Iterator
from fractions import Fraction

from memcalc import symbols
from memcalc.analysis import flops as count
from memcalc.answers.notes import batch_note, notes, recomputation, setting, whole_setting
from memcalc.blocks.layer import kinds, usual_kind
from memcalc.config import Config, fields
from memcalc.config.gpus import gpu
from memcalc.config.recompute import POLICIES
from memcalc.errors import UsageError, nearest
from memcalc.report import Column, Report
from memcalc.units import counted, format_flops

SCOPES = ("iteration", "layer")
OF_TORCH = ("torch", "transformers")  # whose recomputation is torch.utils.checkpoint's

COLUMNS = (
    Column("forward_flops", "flops"),
    Column("backward_flops", "flops"),
    Column("recompute_flops", "flops"),
    Column("model_flops", "flops"),
    Column("hardware_flops", "flops"),
    Column("mfu_percent", "percent", detail=True, title="MFU %", optional=True),
    Column("hfu_percent", "percent", detail=True, title="HFU %", optional=True),
    Column(
        "hfu_printed_percent",
        "percent",
        detail=True,
        title="HFU by eq. 8 as printed %",
        optional=True,
    ),
)


def flops(
    config: Config,
    scope: str = "iteration",
    iteration_time: float | None = None,
    gpus: int | None = None,
    causal: bool = False,
) -> Report:
    """FLOPs over all ranks, and their share of the GPUs' peak.

    Model FLOPs are those of forward and backward. Hardware FLOPs add those of recomputation.
    Without the time of an iteration the utilization is unknown (None).

    Args:
        config: The model, its parallelism and its run.
        scope: ``iteration``: all layers and the head, for the global batch; or ``layer``: one
            layer for one micro-batch.
        iteration_time: Seconds of an iteration.
        gpus: How many GPUs run it; by default, the ranks of the config.
        causal: Whether attention-score FLOPs count half.

    Raises:
        ConfigError: The number of GPUs is not a whole number in its range.
        UsageError: The time is out of range or of one layer, the GPU is unknown, the global batch
            of so many GPUs is unknown, or nothing has a causal mask.

    >>> from memcalc.config import load
    >>> row, = flops(load("530b"), iteration_time=37.83).records()
    >>> round(row["mfu_percent"], 1)
    56.0
    """
    if scope not in SCOPES:
        raise UsageError(f"scope {scope!r} is unknown; {nearest(str(scope), SCOPES)}")
    if iteration_time is None and gpus is not None:
        raise UsageError("--gpus needs --iteration-time")
    if iteration_time is not None and scope == "layer":
        raise UsageError("--iteration-time needs --scope iteration")
    if iteration_time is not None and not 1e-6 <= iteration_time <= 1e9:
        raise UsageError(
            f"--iteration-time {iteration_time:g} must be from 1e-6 to 1e9 seconds per iteration"
        )
    if scope == "iteration":
        config = config.padded
    if gpus is not None:
        fields.whole("gpus", gpus, 2**24)
        _whole_run(config, gpus)
    seconds = None if iteration_time is None else Fraction(str(iteration_time))
    done = getattr(count, scope)(config, causal)
    if causal and done == getattr(count, scope)(config):
        raise UsageError(f"--causal needs causal attention, which {setting(config)} does not have")
    printed = _printed(config) if scope == "iteration" and not causal else None
    mfu = _percent(done.model, config, seconds, gpus)
    return Report(
        "flops",
        f"FLOPs of {'one layer' if scope == 'layer' else 'an iteration'} of "
        f"{setting(config) if scope == 'layer' else whole_setting(config)}, "
        f"{recomputation(config)}",
        COLUMNS,
        (
            (
                done.forward,
                done.backward,
                done.recomputed,
                done.model,
                done.hardware,
                mfu,
                _percent(done.hardware, config, seconds, gpus),
                _percent(printed, config, seconds, gpus),
            ),
        ),
        symbols.values(config),
        (
            *notes(config),
            _scope_note(config, scope),
            *_conventions(config, causal, printed is not None),
            *_not_run(config, scope, causal, done),
            *_gpu_note(config, gpus, mfu),
        ),
        answer=_answer(done, scope, mfu, _percent(done.hardware, config, seconds, gpus)),
    )


def _whole_run(config: Config, gpus: int) -> None:
    """Refuse more or fewer GPUs than ranks where the global batch is that of the ranks."""
    parallel, run = config.parallel, config.run
    if run.global_batch_size is None and gpus != parallel.ranks:
        each = parallel.ranks // parallel.dp
        replicas = f"--dp {gpus // each} and " if gpus % each == 0 else ""
        raise UsageError(
            f"--gpus {gpus}, but the FLOPs are those of {counted(parallel.ranks, 'rank')}: pass "
            f"{replicas}--global-batch-size of the whole run"
        )


def _answer(done: count.Flops, scope: str, mfu: float | None, hfu: float | None) -> str:
    """Model FLOPs, hardware FLOPs, MFU and HFU."""
    per = "iteration" if scope == "iteration" else "layer and micro-batch"
    line = f"model FLOPs per {per}: {format_flops(done.model)}"
    if done.recomputed:
        line += f", {format_flops(done.hardware)} with recomputation"
    if mfu is not None and hfu is not None:
        line += f"; MFU {mfu:.1f} %, HFU {hfu:.1f} %"
    return line


def _percent(
    done: int | Fraction | None, config: Config, seconds: Fraction | None, gpus: int | None
) -> float | None:
    if done is None or seconds is None:
        return None
    return float(count.percent_of_peak(done, config, seconds, gpus))


def _printed(config: Config) -> Fraction | None:
    """Hardware FLOPs by the paper's equation 8, for the layer and policy that it is about."""
    model = config.model
    its_layer = (
        not model.gated
        and model.encoder_layers is None
        and model.vocab_size is not None
        and model.kv_heads == model.heads
        and model.head_size * model.heads == model.hidden_size
        and model.ffn_size == 4 * model.hidden_size
    )
    if its_layer and config.run.policy == POLICIES["selective"]:
        return count.printed_hardware(config)
    return None


def _gpu_note(config: Config, gpus: int | None, mfu: float | None) -> tuple[str, ...]:
    """The GPUs and the peak to which MFU and HFU refer."""
    if mfu is None:
        return ()
    found = gpu(str(config.run.gpu))
    ranks = config.parallel.ranks
    number = ranks if gpus is None else gpus
    peak = (found.peaks[config.run.precision] or 0) / 1e12
    lines: tuple[str, ...] = (
        f"MFU and HFU: of {number} x {found.name}, with a peak of {peak:g} TFLOP/s each "
        f"({found.source})",
    )
    if number != ranks:
        lines += (
            f"warning: --gpus {number}, but the FLOPs are those of a global batch of "
            f"{config.sequences} over {counted(ranks, 'rank')}: check --dp and --global-batch-size",
        )
    if mfu > 100:
        lines += ("warning: utilization above 100 %: check --iteration-time, --gpus and the batch",)
    return lines


def _scope_note(config: Config, scope: str) -> str:
    if scope == "layer":
        several = len(kinds(config)) > 1
        one = f"one {usual_kind(config)} layer" if several else "one layer"
        return f"{one}, one micro-batch, summed over tensor-parallel ranks"
    return f"all layers and the head, summed over all ranks, for {batch_note(config)}"


def _not_run(config: Config, scope: str, causal: bool, done: count.Flops) -> Iterator[str]:
    """What is counted here, but which some kernels or frameworks do not run."""
    if config.run.frozen:
        yield (
            "frozen: a linear that is not trained has no weight-gradient GEMM. Its input-gradient "
            "GEMM is counted, although backward stops at the first trained layer"
        )
    early = getattr(count, scope)(config, causal, early_stop=True).recomputed
    if config.run.implementation.name.startswith(OF_TORCH) and early < done.recomputed:
        yield (
            "torch.utils.checkpoint stops early by default: it runs "
            f"{float(100 * early / done.recomputed):.1f} % of the recompute FLOPs counted here"
        )
    hidden = count.beyond_windows(config, causal) if scope == "iteration" else 0
    if hidden:
        yield (
            "kernels that skip scores outside a sliding window run "
            f"{float(100 * hidden / done.forward):.1f} % fewer forward FLOPs"
        )


def _conventions(config: Config, causal: bool, printed: bool) -> tuple[str, ...]:
    scores = "half (causal mask)" if causal else "in full, with or without a causal mask"
    lines: tuple[str, ...] = (
        f"GEMMs only, two FLOPs per multiply-add; attention-score FLOPs are counted {scores}",
    )
    if config.run.implementation.fused_attention:
        lines += ("the scores that a flash kernel recomputes in its own backward are not counted",)
    if printed:
        lines += (
            "HFU by eq. 8 as printed: equation 8 of Korthikanti et al. 2022 counts the recomputed "
            "core attention three times instead of once (Megatron-LM issue 523)",
        )
    return lines
