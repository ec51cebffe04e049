"""``flops``: the FLOPs of an iteration, or of one layer, and the utilisation that they mean."""

from memcalc import paper, symbols
from memcalc.analysis import flops as count
from memcalc.answers.notes import notes, recomputation, setting
from memcalc.config import Config
from memcalc.config.gpus import gpu
from memcalc.config.recompute import POLICIES
from memcalc.errors import UsageError, nearest
from memcalc.report import Column, Report

SCOPES = ("iteration", "layer")


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
        UsageError: The time has no meaning, or no GPU is named.

    >>> from memcalc.config import load
    >>> row, = flops(load("530b"), iteration_time=37.83).records()
    >>> round(row["mfu_percent"], 1)
    56.0
    """
    if scope not in SCOPES:
        raise UsageError(f"scope {scope!r} is unknown; {nearest(str(scope), SCOPES)}")
    if iteration_time is not None and (scope == "layer" or not iteration_time > 0):
        raise UsageError("an iteration's time is a positive number, and for the whole iteration")
    done = getattr(count, scope)(config, causal)
    share, lines = _utilisation(config, iteration_time, gpus)
    printed = _printed(config) if scope == "iteration" and not causal else None
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
                share * done.model if share else None,
                share * done.hardware if share else None,
                share * printed if share and printed else None,
            ),
        ),
        symbols.values(config),
        (*notes(config), _scope_note(config, scope), *_conventions(config, causal), *lines),
    )


def _utilisation(
    config: Config, seconds: float | None, gpus: int | None
) -> tuple[float | None, tuple[str, ...]]:
    """The percent of the GPUs' peak that one FLOP is, and what that rests on."""
    if seconds is None:
        return None, ()
    if config.run.gpu is None:
        raise UsageError("utilisation needs the name of a GPU (--gpu)")
    number = config.parallel.ranks if gpus is None else gpus
    found = gpu(config.run.gpu)
    peak = found.peaks.get(config.run.precision)
    if peak is None:
        raise UsageError(f"{found.name} has no known peak for {config.run.precision}")
    line = f"utilisation of {number} x {found.name} at {peak / 1e12:g} TFLOP/s ({found.source})"
    ranks = config.parallel.ranks
    if number % ranks:
        line += f"; {number} GPUs are no multiple of the model's {ranks} ranks"
    return 100 / (seconds * number * peak), (line,)


def _printed(config: Config) -> float | None:
    """Hardware FLOPs by the paper's equation 8, for the layer and the policy that it counts."""
    model = config.model
    its_layer = (
        not model.gated
        and model.kv_heads == model.heads
        and model.head_size * model.heads == model.hidden_size
        and model.ffn_size == 4 * model.hidden_size
    )
    if not its_layer or config.run.regions != POLICIES["selective"]:
        return None
    batch = config.microbatches * config.run.micro_batch_size * config.parallel.dp
    return float(paper.EQUATIONS[8](paper.exact({**symbols.values(config), "B": batch})))


def _scope_note(config: Config, scope: str) -> str:
    if scope == "layer":
        return "one layer, one micro-batch, all tensor-parallel ranks together"
    batch = config.microbatches * config.run.micro_batch_size * config.parallel.dp
    assumed = "" if config.run.global_batch_size else " (assumed)"
    return f"all layers and the head, over all ranks, for a global batch of {batch}{assumed}"


def _conventions(config: Config, causal: bool) -> tuple[str, ...]:
    mask = "counts half of the attention's own products" if causal else "saves none"
    lines: tuple[str, ...] = (
        f"matrix products only, a multiply-add is two FLOPs, a causal mask {mask}",
    )
    if config.run.implementation.attention == "flash":
        lines += ("what the flash kernel's own backward computes again (QK^T) is not counted",)
    if config.run.regions == POLICIES["selective"]:
        lines += (
            "hfu printed is by the paper's equation 8, which counts the repeated core three times "
            "(Megatron-LM issue 523)",
        )
    return lines
