"""``memcalc recompute``."""

from pathlib import Path
from typing import Any

import click

import memcalc
from memcalc.cli.options import CHOICES, KERNELS, RUN, SHOW, configure, model, options, show


@click.command()
@model
@options(*RUN, *CHOICES, *KERNELS, "accounting", *SHOW)
def recompute(
    model: str, accounting: str, format_: str | None, output: Path | None, **settings: Any
) -> None:
    """What each recompute policy keeps of one layer, and the FLOPs that it adds.

    Policies and single regions are rows of their own; --recompute adds a row for a set of regions.

    \b
    Examples:
      memcalc recompute 175b
      memcalc recompute 530b --sp --recompute attention,mlp
    """
    show(memcalc.recompute(configure(model, settings), accounting), format_, output)
