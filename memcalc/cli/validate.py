"""``memcalc validate``."""

from pathlib import Path
from typing import Any

import click

from memcalc.cli.command import Command, Word, option
from memcalc.cli.extras import installed
from memcalc.cli.options import CHOICES, KERNELS, RUN, SHOW, model, options
from memcalc.cli.show import show
from memcalc.config import load
from memcalc.lazy import resolve
from memcalc.progress import progress

DEVICES = ("meta", "cpu", "cuda")
AGAINST = ("own", "megatron", "torch", "transformers")


@click.command(cls=Command, docs="docs/pytorch.md")
@model
@options(*RUN, *CHOICES, *KERNELS)
@options("optimizer", "optimizer_step", "momentum", "main_grads", "main_params", "moments")
@options("keep_gradients", "holds_logits", "global_batch_size")
@option(
    "--device",
    type=Word(DEVICES),
    common=True,
    help="meta: full size, no memory, no kernels; cpu: a small layer of this shape, one process "
    "per rank; cuda: full size, one GPU per rank.  [default: cuda with a GPU, else cpu and meta]",
)
@option(
    "--full-size", is_flag=True, help="Run the layer at full size on the CPU too.  [default: off]"
)
@option(
    "--against",
    type=Word(AGAINST),
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
    help="Time the layer under each recompute policy instead.  [default: off]",
)
@option(
    "--step",
    "whole_step",
    is_flag=True,
    help="Run whole training steps of a Hugging Face model on fake CUDA tensors, and compare "
    "each phase's most bytes with memory's timeline. Needs no GPU. Weights, gradients and moments "
    "are in --precision unless their options say otherwise.  [default: off]",
)
@options(*SHOW)
def validate(
    model: str,
    device: str | None,
    full_size: bool,
    against: str,
    timed: bool,
    whole_step: bool,
    format_: str | None,
    output: Path | None,
    **settings: Any,
) -> None:
    """Run a layer in PyTorch, and compare the tensors it saves for backward with the ledger.

    The exit status is 1 if a tensor is missing or unexplained, or another check fails. This
    command needs PyTorch: pip install '.[torch]' in memcalc's repository. --device cuda has not
    been tested on a GPU yet.

    \b
    Examples:
      memcalc validate 175b --device meta
      memcalc validate 1t --sp --recompute selective --device meta
      memcalc validate llama-3-70b --tp 2 --sp --device cpu
      memcalc validate llama-3-8b --against transformers
      memcalc validate 175b --sp --against megatron --device meta
      memcalc validate llama-3-70b --tp 8 --sp --against torch --device meta
      memcalc validate 22b --tp 1 --device cpu --time
      memcalc validate gpt2 --step
      memcalc validate llama-3.2-1b -s 2048 --step --recompute full

    \b
    On ranks that torchrun starts:
      torchrun --nproc-per-node 2 -m memcalc validate 22b --tp 2
    """
    if whole_step:
        settings = _as_a_script(settings)
    config = load(model, **settings)
    with installed(), progress("loading PyTorch"):
        if whole_step:
            report = resolve("memcalc.validation.step.compare:step")(config)
        else:
            validated = resolve("memcalc.validation.validate:validate")
            report = validated(config, device, full_size, against, timed)
    if resolve("memcalc.validation.ranks:is_first")():
        show(report, format_, output)
    elif report.failures:
        raise click.exceptions.Exit(1)


def _as_a_script(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a script of one's own: one dtype for weights, gradients and moments."""
    dtype = settings.get("precision") or "bf16"
    usual = {
        "implementation": "transformers-sdpa",
        "main_grads": dtype,
        "main_params": "none",
        "moments": dtype,
    }
    return settings | {key: settings.get(key) or value for key, value in usual.items()}
