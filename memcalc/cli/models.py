"""``memcalc models``."""

from pathlib import Path

import click

import memcalc
from memcalc.cli.options import SHOW, options, show


@click.command()
@options(*SHOW)
def models(format_: str | None, output: Path | None) -> None:
    """The models that memcalc knows by name, with their sizes and sources.

    \b
    Examples:
      memcalc models
      memcalc models --format csv -o models.csv
    """
    show(memcalc.models(), format_, output)
