"""``memcalc validate``."""

from pathlib import Path
from typing import Any

import click

from memcalc.cli.options import CHOICES, KERNELS, RUN, SHOW, configure, model, options, show
from memcalc.lazy import resolve

DEVICES = ("meta", "cpu")
AGAINST = ("own", "megatron", "torch", "transformers")


@click.command()
@model
@options(*RUN, *CHOICES, *KERNELS)
@click.option(
    "--device",
    type=click.Choice(DEVICES),
    default="meta",
    show_default=True,
    help="meta: full size, nothing is allocated; cpu: real tensors, a process a rank.",
)
@click.option("--full-size", is_flag=True, help="On the CPU, the model's own size.")
@click.option(
    "--against",
    type=click.Choice(AGAINST),
    default="own",
    show_default=True,
    help="Whose layer runs: memcalc's own, Megatron-core's local one, one that torch's DTensor "
    "splits, or Hugging Face's.",
)
@options(*SHOW)
def validate(
    model: str,
    device: str,
    full_size: bool,
    against: str,
    format_: str | None,
    output: Path | None,
    **settings: Any,
) -> None:
    """Run a real PyTorch layer, and hold the ledger against what autograd keeps of it.

    The exit status is 1 where a tensor is missing or unexplained. It needs the extra "torch".

    \b
    Examples:
      memcalc validate 175b
      memcalc validate 1t --sp --recompute selective
      memcalc validate llama-3-70b --tp 2 --sp --device cpu
      memcalc validate llama-3-8b --against transformers
      memcalc validate 175b --sp --recompute selective --against megatron
      memcalc validate llama-3-70b --tp 8 --sp --against torch

    \b
    On ranks that are launched already (here two, tensor parallel 2):
      torchrun --nproc-per-node 2 -m memcalc validate 22b --tp 2 --device cpu
    """
    config = configure(model, settings)
    try:
        report = resolve("memcalc.validation.validate:validate")(config, device, full_size, against)
    except ModuleNotFoundError as error:
        extra = (error.name or "").partition(".")[0]
        if extra not in ("torch", "transformers", "megatron"):
            raise
        message = f"this needs {extra}: pip install 'activation-memcalc[{extra}]'"
        raise click.UsageError(message) from error
    if device == "meta" or resolve("memcalc.validation.ranks:is_first")():
        show(report, format_, output)
    elif report.failures:
        raise click.exceptions.Exit(1)
