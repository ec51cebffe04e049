"""``memcalc gpus``."""

from pathlib import Path

import click

import memcalc
from memcalc.cli.command import Command
from memcalc.cli.options import SHOW, options
from memcalc.cli.show import show


@click.command(cls=Command, docs="docs/gpu.md")
@options(*SHOW)
def gpus(format_: str | None, output: Path | None) -> None:
    """List the GPUs that --gpu and --budget accept, with memory, peaks and bandwidths.

    \b
    Examples:
      memcalc gpus
      memcalc gpus --format json
    """
    show(memcalc.gpus(), format_, output)
