"""``memcalc memory``."""

from pathlib import Path
from typing import Any

import click

import memcalc
from memcalc.cli.command import Command, option
from memcalc.cli.options import (
    CHOICES,
    KERNELS,
    PIPELINE,
    RUN,
    SHOW,
    STATES,
    WHOLE,
    complete_gpus,
    configure,
    model,
    options,
    show,
)


@click.command(cls=Command, docs="docs/gpu.md")
@model
@options(*RUN, *WHOLE, *PIPELINE, *STATES, *CHOICES, *KERNELS, "cross_entropy", "gpu")
@option(
    "--budget",
    metavar="SIZE|GPU",
    common=True,
    shell_complete=complete_gpus,
    help="Exit with 1 if a stage needs more: 80GB, 80GiB, h100.  [default: none]",
)
@option(
    "--explain",
    is_flag=True,
    common=True,
    help="List every part of the peaks, and how sure it is.  [default: off]",
)
@option(
    "--fill",
    is_flag=True,
    group="Recomputation",
    help="Spend free memory: skip recomputation for as many in-flight micro-batches as fit.  "
    "[default: off]",
)
@options(*SHOW)
def memory(
    model: str,
    budget: str | None,
    explain: bool,
    fill: bool,
    format_: str | None,
    output: Path | None,
    **settings: Any,
) -> None:
    """A GPU's memory at every pipeline stage: its parts at its peak, and whether that fits.

    Columns are bytes allocated by PyTorch; reserved memory is estimated separately.

    \b
    Examples:
      memcalc memory 175b --sp --recompute selective
      memcalc memory llama-3-70b --tp 8 --sp --pp 4 --dp 8 --zero 1 -s 8192 --gpu h100
      memcalc memory 530b --sp --recompute selective --fill --budget 80GB
      memcalc memory deepseek-v3 --pp 16 --ep 8 --dp 8 --zero 1 -s 4096 --explain
    """
    report = memcalc.memory(configure(model, settings), budget, explain, fill)
    show(report, format_, output)
