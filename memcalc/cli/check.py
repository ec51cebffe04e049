"""``memcalc check``."""

from pathlib import Path

import click

import memcalc
from memcalc.cli.options import SHOW, options, show


@click.command()
@options(*SHOW)
def check(format_: str | None, output: Path | None) -> None:
    """Every printed number of Korthikanti et al. 2022, and of others, against the engine.

    The exit status is 1 where a verdict is not the expected one.

    \b
    Examples:
      memcalc check
      memcalc check --format json -o check.json
    """
    show(memcalc.check(), format_, output)
