"""``memcalc check``."""

from pathlib import Path

import click

import memcalc
from memcalc.checks.claims import VERDICTS
from memcalc.cli.command import Command, Word, option
from memcalc.cli.options import SHOW, options
from memcalc.cli.show import show


@click.command(cls=Command)
@click.argument("patterns", metavar="[PATTERN]...", nargs=-1)
@option(
    "--verdict",
    type=Word(VERDICTS),
    metavar="VERDICT",
    common=True,
    help=f"Show only claims with this verdict: {', '.join(VERDICTS)}.  [default: all]",
)
@options(*SHOW)
def check(
    patterns: tuple[str, ...],
    verdict: str | None,
    format_: str | None,
    output: Path | None,
) -> None:
    """Compare numbers printed in papers with memcalc's own.

    The papers are Korthikanti et al. 2022, Li et al. 2021 and two on persistent RNNs. PATTERN
    chooses claims whose id contains it, or matches it as a shell pattern.

    The columns difference and tolerance are in the unit of their row. The exit status
    is 1 if a claim that PATTERN selects has a verdict other than the expected one, whether
    --verdict shows it or not.

    \b
    Examples:
      memcalc check
      memcalc check table5
      memcalc check 'table5/*/mfu' --format json -o mfu.json
      memcalc check --verdict paper_slip
    """
    show(memcalc.check(patterns, verdict), format_, output)
