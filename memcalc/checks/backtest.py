"""``backtest``: measured memory of real training runs, compared with memcalc's predictions."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from math import ceil, inf
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from memcalc.analysis.device import StageMemory, stage_memory
from memcalc.analysis.parts import GROUPS
from memcalc.checks.patterns import chosen, listed
from memcalc.checks.runs import Measured, MeasuredRun, read
from memcalc.config import Config
from memcalc.config.readers.megatron.names import NOTHING, unmodelled
from memcalc.config.run import UNBALANCED
from memcalc.errors import ConfigError, UsageError
from memcalc.progress import progress
from memcalc.report import Column, Report
from memcalc.units import counted, format_bytes

LARGEST = 3  # parts of a stage that the text table names
BALANCED = 1.0  # the default imbalance of routed tokens: that of a balanced router
ODD = 0.1  # relative difference that rows with the same arguments may have
BY_IMBALANCE = "predicted_peak_bytes_by_imbalance"

# Options that flag a row although the reader of the arguments models them in part, and options that
# do not flag it although they are not modeled: what is counted instead takes the same bytes.
MORE_FLAGS = {
    "encoder-num-layers": "encoder-decoder models are modeled only in part",
    "fp8-format": "fp8 copies of activations and gradients are counted in part only",
}
NO_FLAGS = (
    "--hierarchical-context-parallel-sizes",
    "--cp-comm-type a2a+p2p",
    "--softmax-type off-by-one",
)
UNKNOWN_WORLD = "unknown world size"
# Their bytes depend on the world size.
SHARDED = ("use-distributed-optimizer", "expert-model-parallel-size")

COLUMNS = (
    Column("id", "text"),
    Column("stage", "count", detail=True, least=0),
    Column("measured_peak_bytes", "bytes"),
    Column("predicted_peak_bytes", "bytes", optional=True),
    Column("peak_error", "ratio", optional=True),
    Column("measured_steady_bytes", "bytes", detail=True, optional=True),
    Column("predicted_steady_bytes", "bytes", detail=True, optional=True),
    Column("steady_error", "ratio", optional=True),
    Column(
        "unmodelled",
        "text",
        title="not modeled",
        description="Options that flag the row, separated by commas.",
    ),
    Column("stages", "text", detail=True, definition="backtest_stages"),
)

# The records in the column stages, and those of their parts.
STAGE = (
    Column("stage", "count", least=0),
    Column("measured_peak_bytes", "bytes"),
    Column("predicted_peak_bytes", "bytes"),
    Column("peak_error", "ratio"),
    Column("phase", "text", description="The phase of the step with the peak."),
    Column("parts", "text", definition="backtest_parts"),
)
PART = (
    Column("name", "text"),
    Column("group", "text", choices=GROUPS),
    Column("bytes", "bytes", least=-inf),
)


class Stages(tuple[Any, ...]):
    """What is known of every measured stage of a row; as text, the largest parts of its peak."""

    def __str__(self) -> str:
        return "; ".join(
            f"stage {each['stage']}, {each['phase']}: "
            + ", ".join(f"{p['name']} {format_bytes(p['bytes'])}" for p in each["parts"][:LARGEST])
            for each in self
        )


class ComparedRun(NamedTuple):
    """A run, predicted.

    Attributes:
        run: The run.
        measured: What was measured on the stage with the highest measured peak.
        predicted: What is predicted for a rank of that stage; None if memcalc refuses the run.
        flags: The options of the run that memcalc does not model, from its arguments alone.
        stages: Measured and predicted values of every measured stage.
    """

    run: MeasuredRun
    measured: Measured
    predicted: StageMemory | None
    flags: Sequence[str]
    stages: Stages

    @property
    def peak(self) -> int | None:
        """The predicted peak; None if memcalc refuses the run."""
        return self.predicted.peak.bytes if self.predicted else None

    @property
    def steady(self) -> int | None:
        """The predicted bytes between steps."""
        return self.predicted.steady.bytes if self.predicted else None

    @property
    def peak_error(self) -> float | None:
        """(predicted - measured) / measured for the peak."""
        return None if self.peak is None else error(self.peak, self.measured.peak)

    @property
    def steady_error(self) -> float | None:
        """The same for the bytes between steps; None if they were not measured."""
        if self.steady is None or self.measured.steady is None:
            return None
        return error(self.steady, self.measured.steady)


def error(predicted: int, measured: int) -> float:
    """The signed relative error of a prediction.

    >>> error(98, 100)
    -0.02
    """
    return float(Fraction(predicted - measured, measured))


def rows(
    path: Path, imbalance: float = BALANCED, patterns: str | Sequence[str] = ()
) -> list[ComparedRun]:
    """The runs of a file, each with its prediction.

    Args:
        path: The file.
        imbalance: Tokens routed to the busiest expert rank, as a multiple of a balanced share.
        patterns: Only runs whose id contains one of these, or matches it as a shell pattern; all
            runs if there are none.

    Raises:
        InputError: The file cannot be read, or a row has neither form.
        UsageError: No run matches.
    """
    runs = read(path)
    names = chosen((run.id for run in runs), patterns)
    if not names:
        raise UsageError(f"{path}: no run has an id like {listed(patterns)}")
    with progress("predicting runs", len(names)) as step:
        found = []
        for run in runs:
            if run.id in names:
                found.append(_row(run, imbalance))
                step()
    return found


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


def backtest(
    path: Path,
    max_error: float | None = None,
    imbalance: float = BALANCED,
    patterns: str | Sequence[str] = (),
) -> Report:
    """One row per run: measured and predicted memory of the stage with the highest measured peak.

    Args:
        path: A file of JSON lines: runs of Megatron-LM's functional tests, or SimuMax's.
        max_error: The largest median absolute error, as a ratio, that the peaks of unflagged rows
            may have; above it the report has a failure.
        imbalance: Tokens routed to the busiest expert rank, as a multiple of a balanced share.
        patterns: Only runs whose id contains one of these, or matches it as a shell pattern; all
            runs if there are none.

    Raises:
        InputError: The file cannot be read, or a row has neither form.
        ConfigError: The imbalance is less than a balanced share.
        UsageError: No run matches.

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
    found = rows(path, imbalance, patterns)
    unflagged = [row for row in found if not row.flags]
    flagged = len(found) - len(unflagged)
    failures = _failures(unflagged, max_error)
    return Report(
        "backtest",
        "Peak memory of training runs, predicted and measured",
        COLUMNS,
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
            *_flagged(flagged, len(found)),
            *_counted("assumed", [row.run.notes for row in found]),
            *_counted("warning", [row.run.met for row in unflagged]),
            *_routed(found, imbalance),
            *_odd(found),
        ),
        failures,
        answer=_answer(unflagged, flagged),
        good=None if max_error is None else not failures,
    )


def _row(run: MeasuredRun, imbalance: float) -> ComparedRun:
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
        return ComparedRun(run, highest, None, [*found, f"refused: {refused}"], Stages())
    stages = Stages(_stage(run.config, each, predicted[each.stage]) for each in run.measured)
    return ComparedRun(run, highest, predicted[highest.stage], found, stages)


def _stage(config: Config, measured: Measured, predicted: StageMemory) -> dict[str, Any]:
    """One stage: its error, the phase of its peak, and the parts of the peak, the largest first."""
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
    """The same run with another imbalance of routed tokens, if its experts are sharded over ranks.

    Raises:
        ConfigError: The imbalance is less than a balanced share.
    """
    share = imbalance if config.parallel.ep > 1 else BALANCED
    return replace(config, run=replace(config.run, imbalance=share))


def _answer(unflagged: Sequence[ComparedRun], flagged: int) -> str:
    """The median and the worst error of the peaks of unflagged rows."""
    errors = {row.run.id: row.peak_error for row in unflagged if row.peak_error is not None}
    if not errors:
        return f"no peak error: {counted(flagged, 'row')}, all flagged"
    worst = max(errors, key=lambda name: abs(errors[name]))
    return (
        f"median peak error {100 * median(map(abs, errors.values())):.2f} % over "
        f"{counted(len(errors), 'row')}, worst {100 * errors[worst]:+.2f} % ({worst})"
        + (f"; {counted(flagged, 'row')} flagged and left out" if flagged else "")
    )


def _flagged(number: int, total: int) -> Iterator[str]:
    """How many rows are flagged, and what flags a row."""
    if number:
        yield (
            f"{number} of {counted(total, 'row')} ({100 * number / total:.1f} %) flagged: options "
            "that memcalc does not model, unknown GPUs, or configurations that memcalc refuses"
        )


def _summary(name: str, found: Sequence[ComparedRun]) -> list[str]:
    """The distribution of the absolute errors, in %."""
    peaks = [abs(row.peak_error) for row in found if row.peak_error is not None]
    steady = [abs(row.steady_error) for row in found if row.steady_error is not None]
    return [
        f"{name} rows, absolute {what} error: {_distribution(errors)} "
        f"({counted(len(errors), 'row')})"
        for what, errors in (("peak", peaks), ("steady", steady))
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
    """One line per note, with the number of rows that have it."""
    counts = Counter(note for notes in said for note in notes)
    return [f"{words} in {counted(number, 'row')}: {note}" for note, number in counts.items()]


def _routed(found: Sequence[ComparedRun], imbalance: float) -> list[str]:
    """The peak errors of unflagged rows with experts, with and without imbalance."""
    errors: dict[str, list[float]] = {}
    for row in found:
        for stage in row.stages:
            if not row.flags and stage["stage"] == row.measured.stage:
                for share, predicted in stage.get(BY_IMBALANCE, {}).items():
                    errors.setdefault(share, []).append(error(predicted, row.measured.peak))
    lines = [
        f"experts, imbalance {share}: median peak error "
        f"{100 * median(values):+.2f} %; absolute: {_distribution(map(abs, values))} "
        f"({counted(len(values), 'row')}, unflagged)"
        for share, values in errors.items()
    ]
    share = "a balanced share" if imbalance == BALANCED else f"{imbalance:g} x a balanced share"
    taken = f"experts: predicted with {share} of routed tokens on the busiest expert rank"
    return [taken, *lines] if lines else []


def _odd(found: Iterable[ComparedRun]) -> list[str]:
    """Rows with the same arguments and GPU but very different peaks: one of them may be stale.

    Kernels and workspaces of different container families differ by a few per cent only.
    """
    alike: dict[tuple[Any, ...], list[ComparedRun]] = {}
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
                f"{low.run.id} and {high.run.id} have the same arguments but peaks "
                f"{100 * apart:.0f} % apart: one may be stale"
            )
    return lines


def _failures(unflagged: Sequence[ComparedRun], max_error: float | None) -> tuple[str, ...]:
    if max_error is None:
        return ()
    if not unflagged:
        return ("every row is flagged, so there is no error to compare with --max-error",)
    middle = median(abs(row.peak_error) for row in unflagged if row.peak_error is not None)
    if middle <= max_error:
        return ()
    return (
        f"the median absolute peak error of {counted(len(unflagged), 'unflagged row')} is "
        f"{100 * middle:.2f} %, above --max-error {100 * max_error:g}%",
    )
