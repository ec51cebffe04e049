"""``memcalc memory``."""

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
@options(*RUN, *WHOLE, *PIPELINE, *STATES, *CHOICES, *KERNELS, "cross_entropy", "gpu")
@click.option(
    "--budget",
    metavar="SIZE|GPU",
    help="Exit with 1 where a stage's peak is above it: 80GB, 80GiB, h100.",
)
@click.option("--explain", is_flag=True, help="Every part of the peaks, and how sure it is.")
@click.option(
    "--fill",
    is_flag=True,
    help="Keep as many micro-batches whole as the memory that is free holds.",
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

    Bytes are those of the allocator; what it reserves beyond them is estimated, and apart.

    \b
    Examples:
      memcalc memory 175b --sp --recompute selective
      memcalc memory llama-3-70b --tp 8 --sp --pp 4 --dp 8 --zero 1 -s 8192 --gpu h100
      memcalc memory 530b --sp --recompute selective --fill --budget 80GB
      memcalc memory deepseek-v3 --pp 16 --ep 8 --dp 8 --zero 1 -s 4096 --explain
    """
    report = memcalc.memory(configure(model, settings), budget, explain, fill)
    show(report, format_, output)
