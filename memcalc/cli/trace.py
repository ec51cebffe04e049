"""``memcalc trace``."""

import os
from pathlib import Path
from typing import Any

import click

from memcalc.cli.command import Command, Whole, option
from memcalc.cli.derive import FACTORY
from memcalc.cli.extras import installed
from memcalc.cli.options import SHOW, budget, complete_gpus, options
from memcalc.cli.show import show
from memcalc.lazy import resolve
from memcalc.progress import progress

MOST_STEPS, MOST_RANKS = 100, 2**20


@click.command(cls=Command, docs="docs/pytorch.md")
@click.argument("target")
@option(
    "--steps",
    type=Whole(1, MOST_STEPS),
    default=2,
    group="Run",
    common=True,
    help="Steps to run; optimizers make their states in the first.  [default: 2]",
)
@option(
    "--ranks",
    type=Whole(1, MOST_RANKS),
    default=1,
    group="Parallelism",
    help="Ranks of the process group, of which rank 0 runs.  [default: 1, without a group]",
)
@option(
    "--gpu",
    "gpu_name",
    group="GPU",
    metavar="NAME",
    common=True,
    shell_complete=complete_gpus,
    help="GPU to choose kernels for: a name from `memcalc gpus`.  "
    "[default: a100, without a verdict]",
)
@budget(
    help="Memory of the GPU: 80GB, 80GiB, h100. Exit with status 1 if the steps do not fit.  "
    "[default: no check]",
)
@option(
    "--alloc-conf",
    group="GPU",
    metavar="SETTINGS",
    common=True,
    help="Settings of PyTorch's allocator, as in PYTORCH_ALLOC_CONF.  [default: PyTorch's]",
)
@option(
    "--workspaces/--no-workspaces",
    default=True,
    group="Kernels",
    help="Count the memory that kernels allocate for themselves.  [default: on]",
)
@option("--all", "every_row", is_flag=True, help="Show every row.  [default: the 20 largest]")
@options(*SHOW)
def trace(
    target: str,
    steps: int,
    ranks: int,
    gpu_name: str | None,
    budget: str | None,
    alloc_conf: str | None,
    workspaces: bool,
    every_row: bool,
    format_: str | None,
    output: Path | None,
    **settings: Any,
) -> None:
    """Memory of a training step of your own, on fake CUDA tensors: no GPU is needed.

    TARGET is package.module:factory, a function of yours that is called on a fake CUDA device. It
    returns (model, inputs, optimizer), a function that runs one step, or an object with a function
    step or with model, inputs and optimizer.

    The first line is the peak of the allocated bytes, its moment, and whether the GPU holds it
    with the memory that PyTorch's allocator reserves. The table has what is allocated at that
    moment, the largest first. Your code runs, but no kernel does.

    This command needs PyTorch 2.13.0: pip install '.[torch]' in memcalc's repository.

    \b
    Examples:
      memcalc trace my_package.training:make
      memcalc trace my_package.training:make --gpu h100 --all
      memcalc trace my_package.training:make --budget 24GiB
      memcalc trace my_package.training:make --alloc-conf expandable_segments:True
    """
    if not FACTORY.fullmatch(target) or os.path.exists(target):
        raise click.UsageError(
            f"TARGET must be package.module:factory, not {target[:60]!r}; for a model of the "
            "catalogue or a file, see `memcalc memory`"
        )
    with installed(), progress("loading PyTorch"):
        answer = resolve("memcalc.validation.trace:trace")
        report = answer(target, gpu_name, budget, steps, alloc_conf, workspaces, every_row, ranks)
    show(report, format_, output)
