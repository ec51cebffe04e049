"""``memcalc flops``."""

from pathlib import Path
from typing import Any

import click

import memcalc
from memcalc.answers.flops import SCOPES
from memcalc.cli.options import CHOICES, KERNELS, RUN, SHOW, WHOLE, configure, model, options, show

OF_ITERATION = (*WHOLE, "pp", "dp")  # options, of which a layer has no use


@click.command()
@model
@options(*RUN, *OF_ITERATION, "frozen", *CHOICES, *KERNELS, "gpu")
@click.option("--iteration-time", type=float, metavar="SECONDS", help="Time of an iteration.")
@click.option("--gpus", type=click.IntRange(1, 2**24), help="GPUs that run it.")
@click.option("--causal", is_flag=True, help="Count half of the attention's own products.")
@click.option(
    "--scope",
    type=click.Choice(SCOPES),
    default="iteration",
    show_default=True,
    help="The whole iteration, or one layer for one micro-batch.",
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
    """FLOPs of an iteration over all ranks; with its time, model and hardware FLOPs utilisation.

    \b
    Examples:
      memcalc flops 530b --recompute selective --iteration-time 37.83 --gpus 280
      memcalc flops llama-3-8b -s 8192 --global-batch-size 128 --format json
      memcalc flops 175b --scope layer --recompute full
    """
    given = [name for name in OF_ITERATION if settings[name] is not None]
    unused = [
        f"--{name.replace('_', '-')} has no effect with --scope layer: one layer, one micro-batch"
        for name in (given if scope == "layer" else ())
    ]
    config = configure(model, settings, *unused)
    report = memcalc.flops(config, scope, iteration_time, gpus, causal)
    show(report, format_, output)
