"""``backtest``: the memory of training runs that really happened, held against the engine."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from math import ceil
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from memcalc.analysis.device import StageMemory, stage_memory
from memcalc.checks.runs import Measured, MeasuredRun, read
from memcalc.config import Config
from memcalc.config.readers.megatron import unmodelled
from memcalc.config.readers.megatron_names import NOTHING
from memcalc.config.run import UNBALANCED
from memcalc.errors import ConfigError
from memcalc.report import Column, Report
from memcalc.units import format_bytes

LARGEST = 3  # parts of a stage that its text names
# How many times its even share of routed tokens the busiest rank receives under a balanced router,
# which is what a row is predicted by; under another both are shown.
BALANCED = 1.0
ODD = 0.1  # apart that rows of the same arguments may be
BY_IMBALANCE = "predicted_peak_bytes_by_imbalance"

# What flags a row beside what the reader of the arguments does not model; and what of that does
# not, for the bytes are those of what is counted instead.
MORE_FLAGS = {
    "encoder-num-layers": "two stacks of layers",
    "fp8-format": "quantised copies of activations, and of gradients",
}
NO_FLAGS = (
    "--hierarchical-context-parallel-sizes",
    "--cp-comm-type a2a+p2p",
    "--softmax-type off-by-one",
)
UNKNOWN_WORLD = "unknown world size"
SHARDED = ("use-distributed-optimizer", "expert-model-parallel-size")  # where it matters


class Stages(tuple[Any, ...]):
    """What a row says of every stage that was measured; as a text, where the memory goes."""

    def __str__(self) -> str:
        return "; ".join(
            f"stage {each['stage']}, {each['phase']}: "
            + ", ".join(f"{p['name']} {format_bytes(p['bytes'])}" for p in each["parts"][:LARGEST])
            for each in self
        )


class Row(NamedTuple):
    """A run, predicted.

    Attributes:
        run: The run.
        measured: What was measured on the stage with the highest measured peak.
        predicted: What a rank of that stage holds; None where memcalc refuses what was run.
        flags: The unmodelled options that it has, from its arguments alone.
        stages: The same of every stage that was measured.
    """

    run: MeasuredRun
    measured: Measured
    predicted: StageMemory | None
    flags: Sequence[str]
    stages: Stages

    @property
    def peak(self) -> int | None:
        """The predicted peak; None where memcalc refuses what was run."""
        return self.predicted.peak.bytes if self.predicted else None

    @property
    def steady(self) -> int | None:
        """What is predicted to stay between steps."""
        return self.predicted.steady.bytes if self.predicted else None

    @property
    def peak_error(self) -> float | None:
        """(predicted - measured) / measured, of the peak."""
        return None if self.peak is None else error(self.peak, self.measured.peak)

    @property
    def steady_error(self) -> float | None:
        """The same of what stays between steps; None where that was not measured."""
        if self.steady is None or self.measured.steady is None:
            return None
        return error(self.steady, self.measured.steady)


def error(predicted: int, measured: int) -> float:
    """The signed relative error of a prediction.

    >>> error(98, 100)
    -0.02
    """
    return float(Fraction(predicted - measured, measured))


def rows(path: Path, imbalance: float = BALANCED) -> list[Row]:
    """The runs of a file, each with what is predicted of it.

    Args:
        path: The file.
        imbalance: How many times its even share of routed tokens the busiest rank of experts
            receives.

    Raises:
        InputError: The file cannot be read, or a row of it is of neither form.
    """
    return [_row(run, imbalance) for run in read(path)]


def flags(values: Mapping[str, str], world: int | None) -> list[str]:
    """The unmodelled options of a launch, from its arguments alone.

    >>> flags({"fp8-format": "hybrid", "moe-token-dispatcher-type": "alltoall"}, 8)
    ['--fp8-format']
    >>> flags({"use-distributed-optimizer": "True"}, None)
    ['unknown world size']
    """
    found = [what for what, _ in unmodelled(values) if what not in NO_FLAGS]
    found += [f"--{name}" for name in MORE_FLAGS if values.get(name) not in (None, *NOTHING)]
    if world is None and any(name in values for name in SHARDED):
        found.append(UNKNOWN_WORLD)
    return found


def backtest(path: Path, max_error: float | None = None, imbalance: float = BALANCED) -> Report:
    """A row a run: what was measured and what is predicted, of the stage that held most.

    Args:
        path: A file of JSON lines: runs of Megatron-LM's functional tests, or SimuMax's.
        max_error: The most that the median absolute error of the peak of unflagged rows may be, as
            a ratio; where it is more, the report has a failure.
        imbalance: How many times its even share of routed tokens the busiest rank of experts
            receives.

    Raises:
        InputError: The file cannot be read, or a row of it is of neither form.
        ConfigError: The imbalance is less than an even share.

    >>> import json, tempfile
    >>> sizes = {"num-layers": 2, "hidden-size": 64, "num-attention-heads": 4, "seq-length": 128}
    >>> row = {"id": "gpt.tiny", "gpu": "A100", "image": "dev", "gpus": 1, "env": {}}
    >>> row |= {"args": {**sizes, "micro-batch-size": 1, "global-batch-size": 1, "bf16": True}}
    >>> row |= {"vocabulary": {"size": 50257}}
    >>> row |= {"measured": {"peak_bytes": 1 << 28, "steady_bytes": 1 << 27}}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "runs.jsonl")
    ...     _ = path.write_text(json.dumps(row))
    ...     report = backtest(path)
    >>> report.column("id"), report.column("unmodelled")
    (['gpt.tiny'], [''])
    """
    found = rows(path, imbalance)
    unflagged = [row for row in found if not row.flags]
    return Report(
        "backtest",
        f"{len(found)} measured runs against their predictions",
        (
            Column("id", "text"),
            Column("stage", "count"),
            Column("measured_peak_bytes", "bytes"),
            Column("predicted_peak_bytes", "bytes"),
            Column("peak_error", "ratio"),
            Column("measured_steady_bytes", "bytes", detail=True),
            Column("predicted_steady_bytes", "bytes", detail=True),
            Column("steady_error", "ratio"),
            Column("unmodelled", "text"),
            Column("stages", "text", detail=True),
        ),
        tuple(
            (
                row.run.id,
                row.measured.stage,
                row.measured.peak,
                row.peak,
                row.peak_error,
                row.measured.steady,
                row.steady,
                row.steady_error,
                ", ".join(row.flags),
                row.stages,
            )
            for row in found
        ),
        {},
        (
            *_summary("unflagged", unflagged),
            *_summary("all", found),
            f"{len(found) - len(unflagged)} of {len(found)} rows flagged as unmodelled "
            f"({100 * (len(found) - len(unflagged)) / len(found):.1f} %), by their arguments",
            *_counted("assumed of", [row.run.notes for row in found]),
            *_counted("met in", [row.run.met for row in unflagged]),
            *_routed(found, imbalance),
            *_odd(found),
        ),
        _failures(unflagged, max_error),
    )


def _row(run: MeasuredRun, imbalance: float) -> Row:
    if run.config is not None and run.config.model.experts is not None:
        run = run._replace(config=unbalanced(run.config, imbalance))
    highest = max(run.measured, key=lambda each: each.peak)
    found = [*flags(run.values, run.world), *run.flags]
    refused, predicted = run.refused, {}
    if run.config is not None:
        try:
            predicted = {each.stage: stage_memory(run.config, each.stage) for each in run.measured}
        except ConfigError as error_:
            refused = str(error_)
    if run.config is None or not predicted:
        return Row(run, highest, None, [*found, f"refused: {refused}"], Stages())
    stages = Stages(_stage(run.config, each, predicted[each.stage]) for each in run.measured)
    return Row(run, highest, predicted[highest.stage], found, stages)


def _stage(config: Config, measured: Measured, predicted: StageMemory) -> dict[str, Any]:
    """What is said of one stage: its error, the phase of its peak, its parts by size."""
    parts = sorted(predicted.peak.parts, key=lambda part: -part.bytes)
    found = {
        "stage": measured.stage,
        "measured_peak_bytes": measured.peak,
        "predicted_peak_bytes": predicted.peak.bytes,
        "peak_error": error(predicted.peak.bytes, measured.peak),
        "phase": predicted.peak.name,
        "parts": [{"name": p.name, "group": p.group, "bytes": p.bytes} for p in parts],
    }
    if config.model.experts is not None:
        found[BY_IMBALANCE] = {
            f"{share:g}": stage_memory(unbalanced(config, share), measured.stage).peak.bytes
            for share in (BALANCED, UNBALANCED)
        }
    return found


def unbalanced(config: Config, imbalance: float) -> Config:
    """The same run with another imbalance of routed tokens, if its experts are spread over ranks.

    Raises:
        ConfigError: The imbalance is less than an even share.
    """
    share = imbalance if config.parallel.ep > 1 else BALANCED
    return replace(config, run=replace(config.run, imbalance=share))


def _summary(name: str, found: Sequence[Row]) -> list[str]:
    """The distribution of the absolute errors, in %."""
    peaks = [abs(row.peak_error) for row in found if row.peak_error is not None]
    steady = [abs(row.steady_error) for row in found if row.steady_error is not None]
    return [
        f"{name} rows, absolute error of {len(errors)} {what}: {_distribution(errors)}"
        for what, errors in (("peaks", peaks), ("steady bytes", steady))
        if errors
    ]


def _distribution(errors: Iterable[float]) -> str:
    ordered = sorted(errors)
    ninetieth = ordered[ceil(0.9 * len(ordered)) - 1]
    numbers = {
        "median": median(ordered),
        "mean": mean(ordered),
        "90th percentile": ninetieth,
        "maximum": ordered[-1],
    }
    return ", ".join(f"{name} {100 * value:.2f} %" for name, value in numbers.items())


def _counted(words: str, said: Iterable[Sequence[str]]) -> list[str]:
    """What is said of rows, a line for each with the number of rows."""
    counts = Counter(note for notes in said for note in notes)
    return [f"{words} {number} rows: {note}" for note, number in counts.items()]


def _routed(found: Sequence[Row], imbalance: float) -> list[str]:
    """The error of unflagged rows with experts, under both shares of routed tokens."""
    errors: dict[str, list[float]] = {}
    for row in found:
        for stage in row.stages:
            if not row.flags and stage["stage"] == row.measured.stage:
                for share, predicted in stage.get(BY_IMBALANCE, {}).items():
                    errors.setdefault(share, []).append(error(predicted, row.measured.peak))
    lines = [
        f"experts, imbalance {share}: {len(values)} unflagged rows, peaks off by "
        f"{100 * median(values):+.2f} % in the median, absolute {_distribution(map(abs, values))}"
        for share, values in errors.items()
    ]
    share = "an even share" if imbalance == BALANCED else f"{imbalance:g} times an even share"
    taken = f"experts: the busiest rank is taken to receive {share}"
    return [taken, *lines] if lines else []


def _odd(found: Iterable[Row]) -> list[str]:
    """Rows of the same arguments on the same GPU whose peaks are far apart: one is stale, or odd.

    The kernels and workspaces of container families differ by a few per cent.
    """
    alike: dict[tuple[Any, ...], list[Row]] = {}
    for row in found:
        if row.run.config is not None:
            environment = replace(row.run.config.run.environment, pytorch=None)
            words = tuple(sorted(row.run.values.items()))
            alike.setdefault((row.run.gpu, row.run.world, words, environment), []).append(row)
    lines = []
    for same in alike.values():
        low, *_, high = sorted([*same, *same[:1]], key=lambda row: row.measured.peak)
        apart = error(high.measured.peak, low.measured.peak)
        if apart > ODD:
            lines.append(
                f"the same arguments, {100 * apart:.0f} % apart, so that one is stale or odd: "
                f"{low.run.id} and {high.run.id}"
            )
    return lines


def _failures(unflagged: Sequence[Row], max_error: float | None) -> tuple[str, ...]:
    if max_error is None:
        return ()
    if not unflagged:
        return ("no row is unflagged, and so none can be held to a bound",)
    middle = median(abs(row.peak_error) for row in unflagged if row.peak_error is not None)
    if middle <= max_error:
        return ()
    return (
        f"the median error of {len(unflagged)} unflagged peaks is {100 * middle:.2f} %, above the "
        f"{100 * max_error:g} % that are allowed",
    )
