"""``memcalc recompute``."""

from pathlib import Path
from typing import Any

import click

import memcalc
from memcalc.cli.command import Command
from memcalc.cli.effect import answered
from memcalc.cli.options import (
    CHOICES,
    KERNELS,
    LOSS,
    PIPELINE,
    RUN,
    SHOW,
    STATES,
    WHOLE,
    budget,
    fill,
    margin,
    model,
    options,
)
from memcalc.cli.show import show


@click.command(cls=Command, docs="docs/layers.md")
@model
@options(*RUN, *WHOLE, *PIPELINE, *STATES, *CHOICES, *KERNELS, *LOSS, "accounting", "gpu")
@fill
@budget(
    help="With --fill: memory per GPU to fill: 80GB, 80GiB, h100.  [default: that of --gpu]",
)
@margin
@options(*SHOW)
def recompute(
    model: str,
    accounting: str,
    fill: bool,
    budget: str | None,
    margin: str | None,
    format_: str | None,
    output: Path | None,
    **settings: Any,
) -> None:
    """What each recompute policy saves in one layer, and the FLOPs that it adds.

    There is one row per policy and per region; --recompute adds one for a set of regions, and
    --fill one per stage.

    \b
    Examples:
      memcalc recompute 175b
      memcalc recompute 530b --sp --recompute attention,mlp
      memcalc recompute 530b --sp --recompute selective --fill --budget 80GB
    """
    for option, value in (("--budget", budget), ("--margin", margin)):
        if value is not None and not fill:
            raise click.UsageError(f"{option} needs --fill")
    report = answered(
        model, settings, lambda config: memcalc.recompute(config, accounting, budget, fill, margin)
    )
    show(report, format_, output)
