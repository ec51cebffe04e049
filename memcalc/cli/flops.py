"""``memcalc flops``."""

from pathlib import Path
from typing import Any

import click

import memcalc
from memcalc.answers.flops import SCOPES
from memcalc.cli.command import Command, Number, Whole, Word, option
from memcalc.cli.effect import answered
from memcalc.cli.options import CHOICES, KERNELS, RUN, SHOW, WHOLE, model, options
from memcalc.cli.show import show


@click.command(cls=Command, docs="docs/layers.md")
@model
@options(*RUN, *WHOLE, "pp", "dp", "frozen", *CHOICES, *KERNELS, "gpu")
@option(
    "--iteration-time",
    type=Number(),
    metavar="SECONDS",
    group="Run",
    common=True,
    help="Seconds per iteration, for MFU and HFU.  [default: unknown]",
)
@option(
    "--gpus",
    type=Whole(1, 2**24),
    group="GPU",
    common=True,
    help="With --iteration-time: number of GPUs.  [default: --tp x --pp x --cp x --dp]",
)
@option(
    "--causal",
    is_flag=True,
    help="Count half of the attention-score FLOPs (causal mask).  [default: off]",
)
@option(
    "--scope",
    type=Word(SCOPES),
    default="iteration",
    help="Count a whole iteration, or one layer for one micro-batch.  [default: iteration]",
)
@options(*SHOW)
def flops(
    model: str,
    iteration_time: float | None,
    gpus: int | None,
    causal: bool,
    scope: str,
    format_: str | None,
    output: Path | None,
    **settings: Any,
) -> None:
    """FLOPs per iteration over all ranks, and with --iteration-time MFU and HFU.

    \b
    Examples:
      memcalc flops 530b --recompute selective --iteration-time 37.83 --gpus 280
      memcalc flops llama-3-8b -s 8192 --global-batch-size 128 --format json
      memcalc flops 175b --scope layer --recompute full
    """
    report = answered(
        model,
        settings,
        lambda config: memcalc.flops(config, scope, iteration_time, gpus, causal),
    )
    show(report, format_, output)
