"""``memcalc backtest``."""

import re
from pathlib import Path
from typing import Any

import click

import memcalc
from memcalc.cli.command import Command, Number, option
from memcalc.cli.options import SHOW, options, show


class Ratio(click.ParamType[float]):
    """A ratio, as a percentage or a number."""

    name = "ratio"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """``2%`` and ``0.02`` are 0.02."""
        if isinstance(value, float):
            return value
        if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,9})?%?", str(value)):
            self.fail(f"{str(value)[:40]!r} is not a ratio such as 2% or 0.02", param, ctx)
        number = float(str(value).rstrip("%"))
        return number / 100 if str(value).endswith("%") else number


@click.command(cls=Command, docs="docs/runs.md")
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("patterns", metavar="[PATTERN]...", nargs=-1)
@option(
    "--max-error",
    type=Ratio(),
    metavar="RATIO",
    common=True,
    help="Exit with status 1 if the median peak error of unflagged rows exceeds this, such as 2% "
    "or 0.02.  [default: none]",
)
@option(
    "--imbalance",
    type=Number(),
    default=1.0,
    group="Parallelism",
    help="Tokens routed to the busiest expert rank, as a multiple of a balanced share.  "
    "[default: 1]",
)
@options(*SHOW)
def backtest(
    file: Path,
    patterns: tuple[str, ...],
    max_error: float | None,
    imbalance: float,
    format_: str | None,
    output: Path | None,
) -> None:
    """Compare predicted with measured memory of real training runs.

    FILE has one run per line, as JSON: either Megatron-LM arguments with the measured peak and
    steady bytes of the last stage, or SimuMax's description of model, parallelism and run with the
    measured peak of every stage. PATTERN chooses runs whose id contains it, or matches it as a
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
    show(memcalc.backtest(file, max_error, imbalance, patterns), format_, output)
