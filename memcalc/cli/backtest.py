"""``memcalc backtest``."""

from pathlib import Path

import click

import memcalc
from memcalc.cli.command import Command, Ratio, option
from memcalc.cli.options import SHOW, options
from memcalc.cli.show import show


@click.command(cls=Command, docs="docs/runs.md")
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("patterns", metavar="[PATTERN]...", nargs=-1)
@option(
    "--max-error",
    type=Ratio(),
    common=True,
    help="Exit with status 1 if the median peak error of unflagged rows exceeds this, such as 2% "
    "or 0.02.  [default: none]",
)
@options("imbalance", *SHOW)
def backtest(
    file: Path,
    patterns: tuple[str, ...],
    max_error: float | None,
    imbalance: float | None,
    format_: str | None,
    output: Path | None,
) -> None:
    """Compare predicted with measured memory of real training runs.

    FILE has one run per line, as JSON: either Megatron-LM arguments with the measured peak and
    steady bytes of the last stage, or SimuMax's description of model, parallelism and run with the
    measured peak of every stage. PATTERN selects runs whose id contains it, or matches it as a
    shell pattern.

    A row is flagged if its run uses an option that memcalc does not model. docs/runs.md describes
    both formats and lists these options.

    \b
    Examples:
      memcalc backtest runs.jsonl
      memcalc backtest runs.jsonl '*tp2*'
      memcalc backtest runs.jsonl --max-error 20%
      memcalc plot backtest runs.jsonl -o runs.png
    """
    busiest = 1.0 if imbalance is None else imbalance
    show(memcalc.backtest(file, max_error, busiest, patterns), format_, output)
