"""``validate --time``: the seconds of a layer's passes under each recompute policy."""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from math import inf

import torch

from memcalc import resources, symbols
from memcalc.answers.notes import notes, setting
from memcalc.config import Config
from memcalc.progress import doing
from memcalc.report import Column, Report
from memcalc.units import counted
from memcalc.validation import ranks
from memcalc.validation.layers.modules import TYPES, Layer, Place, hidden_state
from memcalc.validation.measuring import cuda
from memcalc.validation.witness import as_on

POLICIES = ("none", "selective", "full", "save_linear")
WARM_UP, REPEATS = 3, 10

# The paper's rows of table 4, by recompute policy and sequence parallelism.
TABLE_4 = {
    ("none", False): "baseline",
    ("none", True): "sequence",
    ("full", False): "full",
    ("selective", False): "selective",
    ("selective", True): "selective+sequence",
}

COLUMNS = (
    Column("policy", "text"),
    Column("forward_seconds", "seconds"),
    Column("backward_seconds", "seconds"),
    Column("combined_seconds", "seconds"),
    Column("recompute_seconds", "seconds", least=-inf),
    Column("overhead_percent", "percent", least=-inf),
    Column("paper_overhead_percent", "percent", least=-inf, optional=True),
)


def timings(config: Config, device: str) -> Report:
    """The seconds of one layer under each recompute policy, on the slowest rank.

    Args:
        config: The model, its parallelism and its run, without recomputation.
        device: ``cuda`` or ``cpu``.
    """
    doing(f"timing one layer of {config.model.name} under {len(POLICIES)} recompute policies")
    backend = "nccl" if device == "cuda" else "gloo"
    answers = ranks.on_each(
        config.parallel.tp, timed, config, device, backend=backend, timeout=ranks.LONG_SECONDS
    )
    slowest = [
        (max(forward for forward, _ in row), max(backward for _, backward in row))
        for row in zip(*answers, strict=True)
    ]
    forward_, backward_ = slowest[0]
    its_model = config.model.name.partition(",")[0] == "22b"
    printed = {row["id"]: row for row in resources.rows("paper/table4.csv")}
    rows = []
    for policy, (forward, backward) in zip(POLICIES, slowest, strict=True):
        both = forward + backward
        overhead = 100 * (both / (forward_ + backward_) - 1)
        row = TABLE_4.get((policy, config.parallel.sp)) if its_model else None
        line = f"table4/{row}/overhead"
        theirs = float(printed[line]["printed"]) if line in printed else None
        rows.append((policy, forward, backward, both, backward - backward_, overhead, theirs))
    most = max(slowest[1:], key=sum)
    threads = torch.get_num_threads() if config.parallel.tp == 1 else 1
    where = (
        cuda.hardware() if device == "cuda" else f"the CPU, {counted(threads, 'thread')} per rank"
    )
    return Report(
        "validate",
        f"Seconds of one layer of {setting(config)}",
        COLUMNS,
        tuple(rows),
        symbols.values(config),
        (
            f"measured on {where}; torch {torch.__version__}; {time.strftime('%Y-%m-%d')}",
            f"medians of {REPEATS} passes, after {WARM_UP} warm-up passes",
            "recompute: what the policy adds to the backward pass, with early stop "
            "(torch.utils.checkpoint's default)",
            "overhead: forward plus backward, compared with the first row",
            "paper overhead: table 4 of Korthikanti et al. 2022, the 22b model on eight A100 GPUs, "
            "compared with no recomputation and no sequence parallelism",
            *notes(config),
        ),
        answer=(
            f"{1000 * sum(slowest[0]):,.1f} ms per layer without recomputation; slowest policy: "
            f"{POLICIES[slowest.index(most)]}, {1000 * sum(most):,.1f} ms"
        ),
    )


def timed(rank: int, config: Config, device: str) -> list[tuple[float, float]]:
    """One rank's median seconds, forward and backward, under each recompute policy."""
    config = as_on(config, device)
    if device == "cuda":
        cuda.prepare(rank)
    parallel = config.parallel
    place = Place(device, TYPES[config.run.precision], parallel.tp, rank, parallel.sp)
    clock = _cuda_clock if device == "cuda" else _clock
    found = []
    for policy in POLICIES:
        run = config.run.recomputing(policy)
        layer = Layer(replace(config, run=run), place)
        layer.early_stop = True  # PyTorch's default
        x = hidden_state(config, place)
        passes = [_timed_pass(layer, x, clock) for _ in range(WARM_UP + REPEATS)][WARM_UP:]
        forward, backward = zip(*passes, strict=True)
        found.append((statistics.median(forward), statistics.median(backward)))
    return found


Clock = Callable[[Callable[[], torch.Tensor | None]], tuple[float, torch.Tensor | None]]


def _timed_pass(layer: Layer, x: torch.Tensor, clock: Clock) -> tuple[float, float]:
    layer.zero_grad(set_to_none=True)
    x.grad = None
    forward, y = clock(lambda: layer(x))
    assert y is not None
    dy = torch.ones_like(y)
    backward, _ = clock(lambda: y.backward(dy))
    return forward, backward


def _clock(
    function: Callable[[], torch.Tensor | None],
) -> tuple[float, torch.Tensor | None]:
    start = time.perf_counter()
    made = function()
    return time.perf_counter() - start, made


def _cuda_clock(
    function: Callable[[], torch.Tensor | None],
) -> tuple[float, torch.Tensor | None]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    made = function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000, made
