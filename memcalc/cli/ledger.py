"""``memcalc ledger``."""

from pathlib import Path
from typing import Any

import click

import memcalc
from memcalc.cli.command import Command
from memcalc.cli.effect import answered
from memcalc.cli.options import CHOICES, KERNELS, RUN, SHOW, model, options
from memcalc.cli.show import show


@click.command(cls=Command, docs="docs/layers.md")
@model
@options(*RUN, *CHOICES, *KERNELS, "accounting", *SHOW)
def ledger(
    model: str, accounting: str, format_: str | None, output: Path | None, **settings: Any
) -> None:
    """Every tensor that one layer keeps for backward on one rank, and the operations that need it.

    \b
    Examples:
      memcalc ledger 22b
      memcalc ledger llama-3-70b --tp 8 --sp -s 4096 --accounting exact
      memcalc ledger 175b --recompute selective --format json
    """
    report = answered(model, settings, lambda config: memcalc.ledger(config, accounting))
    show(report, format_, output)
