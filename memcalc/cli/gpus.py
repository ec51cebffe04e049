"""``memcalc gpus``."""

from pathlib import Path

import click

import memcalc
from memcalc.cli.command import Command
from memcalc.cli.options import SHOW, complete_gpus, options
from memcalc.cli.show import show


@click.command(cls=Command, docs="docs/gpu.md")
@click.argument("name", required=False, shell_complete=complete_gpus)
@options(*SHOW)
def gpus(name: str | None, format_: str | None, output: Path | None) -> None:
    """List the GPUs that --gpu and --budget accept, with memory, peaks and bandwidths; or one.

    \b
    Examples:
      memcalc gpus
      memcalc gpus h100
      memcalc gpus --format json
    """
    show(memcalc.gpus(name), format_, output)
