"""``memcalc models``."""

from pathlib import Path

import click

from memcalc.answers import models as answer
from memcalc.cli.command import Command, option
from memcalc.cli.options import SHOW, optional_model, options
from memcalc.cli.show import show


@click.command(cls=Command)
@optional_model
@option("--show", "shown", metavar="MODEL", help="Same as MODEL.  [default: none]")
@options(*SHOW)
def models(model: str | None, shown: str | None, format_: str | None, output: Path | None) -> None:
    """List the catalog's models, or every fact about MODEL.

    \b
    Examples:
      memcalc models
      memcalc models deepseek-v3
      memcalc models --format csv
    """
    if model and shown:
        raise click.UsageError("--show means MODEL: drop one of them")
    name = model or shown
    show(answer.model(name) if name else answer.models(), format_, output)
