"""``memcalc memory``."""

from pathlib import Path
from typing import Any

import click

import memcalc
from memcalc.cli.command import Command, option
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


@click.command(cls=Command, docs="docs/gpu.md")
@model
@options(*RUN, *WHOLE, *PIPELINE, *STATES, *CHOICES, *KERNELS, *LOSS, "gpu")
@budget(
    help="Memory per GPU: 80GB, 80GiB, h100. Exit with status 1 if a stage does not fit.  "
    "[default: no check]",
)
@margin
@option(
    "--allocated-only",
    is_flag=True,
    group="GPU",
    help="Compare allocated bytes alone, the same as --margin 0%.  [default: off]",
)
@option(
    "--explain",
    is_flag=True,
    common=True,
    help="One row per part of each peak, with its certainty and source.  [default: off]",
)
@fill
@options(*SHOW)
def memory(
    model: str,
    budget: str | None,
    margin: str | None,
    allocated_only: bool,
    explain: bool,
    fill: bool,
    format_: str | None,
    output: Path | None,
    **settings: Any,
) -> None:
    """Memory per GPU at every pipeline stage, and whether it fits.

    The first line is the verdict: fits; does not fit, but allocated bytes alone would (without the
    estimated reserved memory, CUDA context and NCCL buffers); or does not fit. Columns are bytes
    allocated by PyTorch at the peak of each stage; "reserved estimated" is what PyTorch's allocator
    reserves then (torch.cuda.max_memory_reserved), estimated.

    \b
    Examples:
      memcalc memory 175b --sp --recompute selective
      memcalc memory llama-3-70b -s 8192 --tp 8 --sp --pp 4 --dp 8 --gpu h100
      memcalc memory llama-3-8b --dp 8 --zero 1 --budget h100 --margin 6GiB
      memcalc memory 530b --sp --recompute selective --fill --budget 80GB
      memcalc memory deepseek-v3 --pp 16 --ep 8 --dp 8 --zero 1 -s 4096 --explain
    """
    if allocated_only and margin is not None:
        raise click.UsageError("--allocated-only means --margin 0%: drop one of them")
    margin = "0%" if allocated_only else margin
    report = answered(
        model, settings, lambda config: memcalc.memory(config, budget, explain, fill, margin)
    )
    show(report, format_, output)
