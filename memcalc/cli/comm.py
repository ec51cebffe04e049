"""``memcalc comm``."""

from pathlib import Path
from typing import Any

import click

import memcalc
from memcalc.cli.command import Command
from memcalc.cli.effect import answered
from memcalc.cli.options import CHOICES, KERNELS, PIPELINE, RUN, SHARDS, SHOW, WHOLE, model, options
from memcalc.cli.show import show


@click.command(cls=Command, docs="docs/layers.md")
@model
@options(*RUN, *WHOLE, *PIPELINE, *SHARDS, *CHOICES, *KERNELS, *SHOW)
def comm(model: str, format_: str | None, output: Path | None, **settings: Any) -> None:
    """Collectives per layer and per iteration, with the bytes that one rank sends.

    \b
    Examples:
      memcalc comm 175b
      memcalc comm 175b --sp --format json
      memcalc comm llama-3-70b --tp 8 --sp --pp 4 --dp 2 --global-batch-size 128
      memcalc comm llama-3-8b --dp 8 --sharder fsdp2 --global-batch-size 64
    """
    show(answered(model, settings, memcalc.comm), format_, output)
