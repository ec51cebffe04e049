"""``memcalc recompute``."""

from pathlib import Path
from typing import Any

import click

import memcalc
from memcalc.cli.command import Command, option
from memcalc.cli.effect import answered
from memcalc.cli.options import (
    CHOICES,
    KERNELS,
    PIPELINE,
    RUN,
    SHOW,
    STATES,
    WHOLE,
    complete_gpus,
    model,
    options,
    show,
)


@click.command(cls=Command, docs="docs/layers.md")
@model
@options(*RUN, *WHOLE, *PIPELINE, *STATES, *CHOICES, *KERNELS, "accounting", "gpu")
@option(
    "--fill",
    is_flag=True,
    group="Recomputation",
    help="Use free memory: skip recomputation for as many in-flight micro-batches as fit. One "
    "row per stage.  [default: off]",
)
@option(
    "--budget",
    metavar="SIZE|GPU",
    group="Recomputation",
    shell_complete=complete_gpus,
    help="With --fill: memory per GPU to fill: 80GB, 80GiB, h100.  [default: that of --gpu]",
)
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
    """What each recompute policy saves in one layer, and the FLOPs that it adds.

    There is one row per policy and per region; --recompute adds one for a set of regions.

    \b
    Examples:
      memcalc recompute 175b
      memcalc recompute 530b --sp --recompute attention,mlp
      memcalc recompute 530b --sp --recompute selective --fill --budget 80GB
    """
    if budget is not None and not fill:
        raise click.UsageError("--budget needs --fill")
    report = answered(
        model, settings, lambda config: memcalc.recompute(config, accounting, budget, fill)
    )
    show(report, format_, output)
