"""``memcalc models``."""

from pathlib import Path

import click

from memcalc.answers import models as answer
from memcalc.cli.options import options, show


@click.command()
@click.option("--show", "name", metavar="NAME", help="Every fact of one model.")
@options("format", "output")
def models(name: str | None, format_: str | None, output: Path | None) -> None:
    """List the catalogue's models, or every fact of one of them.

    \b
    Examples:
      memcalc models
      memcalc models --show deepseek-v3
      memcalc models --format csv
    """
    show(answer.model(name) if name else answer.models(), format_, output)
