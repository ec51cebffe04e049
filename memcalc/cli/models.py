"""``memcalc models``."""

from pathlib import Path

import click

from memcalc.answers.models import models as answer
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
    show(answer(), format_, output)
