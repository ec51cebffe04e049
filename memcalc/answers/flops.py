"""``flops``: the FLOPs of an iteration, or of one layer, and the utilisation that they mean."""

from collections.abc import Iterator
from fractions import Fraction

from memcalc import symbols
from memcalc.analysis import flops as count
from memcalc.answers.notes import batch_note, notes, recomputation, setting
from memcalc.blocks.layer import kinds, usual_kind
from memcalc.config import Config, fields
from memcalc.config.gpus import gpu
from memcalc.config.recompute import POLICIES
from memcalc.errors import UsageError, nearest
from memcalc.report import Column, Report

SCOPES = ("iteration", "layer")
OF_TORCH = ("torch", "transformers")  # whose recomputation is torch.utils.checkpoint's


def flops(
    config: Config,
    scope: str = "iteration",
    iteration_time: float | None = None,
    gpus: int | None = None,
    causal: bool = False,
) -> Report:
    """FLOPs over all ranks, and their share of what the GPUs could do.

    Model FLOPs are those of forward and backward; hardware FLOPs are those and what is recomputed.
    Without the time of an iteration the utilisation is unknown (None).

    Args:
        config: The model, its parallelism and its run.
        scope: ``iteration``: all layers and the head, for the global batch; or ``layer``: one
            layer for one micro-batch.
        iteration_time: Seconds of an iteration.
        gpus: How many GPUs run it; by default, the ranks of the config.
        causal: Whether the attention's own products count half.

    Raises:
        ConfigError: The number of GPUs is none.
        UsageError: The time has no meaning, or no GPU is named, or there is no causal mask.

    >>> from memcalc.config import load
    >>> row, = flops(load("530b"), iteration_time=37.83).records()
    >>> round(row["mfu_percent"], 1)
    56.0
    """
    if scope not in SCOPES:
        raise UsageError(f"scope {scope!r} is unknown; {nearest(str(scope), SCOPES)}")
    if iteration_time is None and gpus is not None:
        raise UsageError("the number of GPUs has no meaning without an iteration's time")
    if iteration_time is not None and (scope == "layer" or not 1e-6 <= iteration_time <= 1e9):
        raise UsageError(
            "an iteration's time is a number of seconds from 1e-6 to 1e9, for the whole iteration"
        )
    if scope == "iteration":
        config = config.padded
    if gpus is not None:
        fields.whole("gpus", gpus, 2**24)
    seconds = None if iteration_time is None else Fraction(str(iteration_time))
    done = getattr(count, scope)(config, causal)
    if causal and done == getattr(count, scope)(config):
        raise UsageError(f"no attention counted here has a causal mask: {setting(config)}")
    printed = _printed(config) if scope == "iteration" and not causal else None
    mfu = _percent(done.model, config, seconds, gpus)
    return Report(
        "flops",
        f"FLOPs of {'one layer' if scope == 'layer' else 'an iteration'} of {setting(config)}, "
        f"{recomputation(config)}",
        (
            Column("forward_flops", "flops"),
            Column("backward_flops", "flops"),
            Column("recompute_flops", "flops"),
            Column("model_flops", "flops"),
            Column("hardware_flops", "flops"),
            Column("mfu_percent", "percent", detail=True),
            Column("hfu_percent", "percent", detail=True),
            Column("hfu_printed_percent", "percent", detail=True),
        ),
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
    )


def _percent(
    done: int | Fraction | None, config: Config, seconds: Fraction | None, gpus: int | None
) -> float | None:
    if done is None or seconds is None:
        return None
    return float(count.percent_of_peak(done, config, seconds, gpus))


def _printed(config: Config) -> Fraction | None:
    """Hardware FLOPs by the paper's equation 8, for the layer and the policy that it counts."""
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
    """What a utilisation rests on."""
    if mfu is None:
        return ()
    found = gpu(str(config.run.gpu))
    ranks = config.parallel.ranks
    number = ranks if gpus is None else gpus
    peak = (found.peaks[config.run.precision] or 0) / 1e12
    lines: tuple[str, ...] = (
        f"utilisation of {number} x {found.name} at {peak:g} TFLOP/s ({found.source})",
    )
    if number != ranks:
        lines += (
            f"warning: {number} GPUs share the work of a config of {ranks} ranks; set --dp and "
            "--global-batch-size if they work on more",
        )
    if mfu > 100:
        lines += (
            "warning: more than the peak: the time, the batch or the GPUs are not this run's",
        )
    return lines


def _scope_note(config: Config, scope: str) -> str:
    if scope == "layer":
        several = len(kinds(config)) > 1
        one = f"one {usual_kind(config)} layer" if several else "one layer"
        return f"{one}, one micro-batch, all tensor-parallel ranks together"
    return f"all layers and the head, over all ranks; {batch_note(config)}"


def _not_run(config: Config, scope: str, causal: bool, done: count.Flops) -> Iterator[str]:
    """What is counted, and some kernels or frameworks leave out."""
    if config.run.frozen:
        yield (
            "frozen weights: backward has one product for each of theirs, not two (none, where "
            "nothing before them is trained, which is not counted)"
        )
    early = getattr(count, scope)(config, causal, early_stop=True).recomputed
    if config.run.implementation.name.startswith(OF_TORCH) and early < done.recomputed:
        yield (
            "torch.utils.checkpoint stops early by default: then "
            f"{float(100 * early / done.recomputed):.1f} % of what is recomputed here runs"
        )
    hidden = count.beyond_windows(config, causal) if scope == "iteration" else 0
    if hidden:
        yield (
            "kernels that leave out what sliding windows hide run "
            f"{float(100 * hidden / done.forward):.1f} % less of forward's FLOPs"
        )


def _conventions(config: Config, causal: bool, printed: bool) -> tuple[str, ...]:
    mask = "counts half of the attention's own products" if causal else "saves none"
    lines: tuple[str, ...] = (
        f"matrix products only, a multiply-add is two FLOPs, a causal mask {mask}",
    )
    if config.run.implementation.attention == "flash":
        lines += ("what the flash kernel's own backward computes again (QK^T) is not counted",)
    if printed:
        lines += (
            "hfu printed is by the paper's equation 8, which counts the repeated core three times "
            "(Megatron-LM issue 523)",
        )
    return lines
