"""``memcalc flops``."""

from pathlib import Path
from typing import Any

import click

import memcalc
from memcalc.cli.options import CHOICES, KERNELS, RUN, SHOW, configure, model, options, show


@click.command()
@model
@options(*RUN, *CHOICES, *KERNELS, *SHOW)
def flops(model: str, format_: str | None, output: Path | None, **settings: Any) -> None:
    """FLOPs of one layer for one micro-batch, over all tensor-parallel ranks.

    \b
    Examples:
      memcalc flops 175b --recompute selective
      memcalc flops llama-3-8b -s 8192 --format json
    """
    show(memcalc.flops(configure(model, settings)), format_, output)
