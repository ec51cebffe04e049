"""``memcalc validate``."""

from pathlib import Path
from typing import Any

import click

from memcalc.cli.command import Command, option
from memcalc.cli.options import CHOICES, KERNELS, RUN, SHOW, configure, model, options, show
from memcalc.lazy import resolve

DEVICES = ("meta", "cpu", "cuda")
AGAINST = ("own", "megatron", "torch", "transformers")


@click.command(cls=Command, docs="docs/pytorch.md")
@model
@options(*RUN, *CHOICES, *KERNELS)
@option(
    "--device",
    type=click.Choice(DEVICES),
    common=True,
    help="meta: full size, nothing is allocated; cpu: real tensors, one process per rank; cuda: "
    "real tensors at full size, one GPU per rank.  [default: cuda with a GPU, else cpu and meta]",
)
@option("--full-size", is_flag=True, help="On the CPU, keep the model's own sizes.  [default: off]")
@option(
    "--against",
    type=click.Choice(AGAINST),
    default="own",
    metavar="NAME",
    common=True,
    help="Whose layer runs: own (memcalc's), megatron (Megatron-core's local layers), torch "
    "(sharded by DTensor), or transformers (Hugging Face's).  [default: own]",
)
@option(
    "--time",
    "timed",
    is_flag=True,
    help="Instead, time the layer under each recompute policy.  [default: off]",
)
@options(*SHOW)
def validate(
    model: str,
    device: str | None,
    full_size: bool,
    against: str,
    timed: bool,
    format_: str | None,
    output: Path | None,
    **settings: Any,
) -> None:
    """Run a real PyTorch layer, and hold the ledger against what autograd keeps of it.

    The exit status is 1 where a tensor is missing or unexplained. It needs the extra "torch". What
    --device cuda finds is not yet confirmed on a GPU: no such run is part of memcalc so far.

    \b
    Examples:
      memcalc validate 175b --device meta
      memcalc validate 1t --sp --recompute selective --device meta
      memcalc validate llama-3-70b --tp 2 --sp --device cpu
      memcalc validate llama-3-8b --against transformers
      memcalc validate 175b --sp --recompute selective --against megatron --device meta
      memcalc validate llama-3-70b --tp 8 --sp --against torch --device meta
      memcalc validate 22b --tp 1 --device cpu --time

    \b
    On ranks that are launched already (here two, tensor parallel 2):
      torchrun --nproc-per-node 2 -m memcalc validate 22b --tp 2
    """
    config = configure(model, settings)
    try:
        validated = resolve("memcalc.validation.validate:validate")
        report = validated(config, device, full_size, against, timed)
    except ModuleNotFoundError as error:
        extra = (error.name or "").partition(".")[0]
        if extra not in ("torch", "transformers", "megatron"):
            raise
        message = f"this needs {extra}: pip install 'activation-memcalc[{extra}]'"
        raise click.UsageError(message) from error
    if resolve("memcalc.validation.ranks:is_first")():
        show(report, format_, output)
    elif report.failures:
        raise click.exceptions.Exit(1)
