"""``memcalc backtest``."""

import re
from pathlib import Path
from typing import Any

import click

import memcalc
from memcalc.cli.options import SHOW, options, show


class Share(click.ParamType[float]):
    """A share, in percent or as a number."""

    name = "share"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """``2%`` and ``0.02`` are 0.02."""
        if isinstance(value, float):
            return value
        if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,9})?%?", str(value)):
            self.fail(f"{str(value)[:40]!r} is no share, such as 2% or 0.02", param, ctx)
        number = float(str(value).rstrip("%"))
        return number / 100 if str(value).endswith("%") else number


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--max-error",
    type=Share(),
    metavar="SHARE",
    help="Fail where the median error of the unflagged rows' peaks is more, such as 2%.",
)
@click.option(
    "--imbalance",
    type=float,
    default=1.0,
    show_default=True,
    metavar="X",
    help="Routed tokens of the busiest rank of experts, over its even share.",
)
@options(*SHOW)
def backtest(
    file: Path, max_error: float | None, imbalance: float, format_: str | None, output: Path | None
) -> None:
    """Measured training runs against their predictions.

    FILE has a run on each line, as JSON: arguments of Megatron-LM with the peak and the steady
    bytes of the allocator on the last stage, or a model, its parallelism and its run with the peaks
    of every stage. See docs/runs.md for both forms, and for what flags a row as unmodelled.

    \b
    Examples:
      memcalc backtest runs.jsonl
      memcalc backtest runs.jsonl --max-error 20%
      memcalc plot backtest runs.jsonl -o runs.png
    """
    show(memcalc.backtest(file, max_error, imbalance), format_, output)
