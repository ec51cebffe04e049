"""``memcalc recompute``."""

from pathlib import Path
from typing import Any

import click

import memcalc
from memcalc.cli.options import (
    CHOICES,
    KERNELS,
    PIPELINE,
    RUN,
    SHOW,
    STATES,
    WHOLE,
    configure,
    model,
    options,
    show,
)


@click.command()
@model
@options(*RUN, *WHOLE, *PIPELINE, *STATES, *CHOICES, *KERNELS, "accounting", "gpu")
@click.option(
    "--fill",
    is_flag=True,
    help="Rows of stages that keep as many micro-batches whole as the free memory holds.",
)
@click.option("--budget", metavar="SIZE|GPU", help="The memory to fill.  [default: the GPU's]")
@options(*SHOW)
def recompute(
    model: str,
    accounting: str,
    fill: bool,
    budget: str | None,
    format_: str | None,
    output: Path | None,
    **settings: Any,
) -> None:
    """What each recompute policy keeps of one layer, and the FLOPs that it adds.

    Policies and single regions are rows of their own; --recompute adds a row for a set of regions.

    \b
    Examples:
      memcalc recompute 175b
      memcalc recompute 530b --sp --recompute attention,mlp
      memcalc recompute 530b --sp --recompute selective --fill --budget 80GB
    """
    if budget is not None and not fill:
        raise click.UsageError("--budget has no meaning here without --fill")
    report = memcalc.recompute(configure(model, settings), accounting, budget, fill)
    show(report, format_, output)
