"""``memcalc layer``."""

from pathlib import Path
from typing import Any

import click

import memcalc
from memcalc.cli.command import Command
from memcalc.cli.effect import answered
from memcalc.cli.options import KERNELS, RUN, SHOW, model, options
from memcalc.cli.show import show

REFUSED = {
    name: f"layer always lists every technique; drop {name}, or use `memcalc ledger {name}`"
    for name in ("--sp", "--no-sp", "--recompute")
}


@click.command(cls=Command, docs="docs/layers.md", refused=REFUSED)
@model
@options(*RUN, *KERNELS, "accounting", *SHOW)
def layer(
    model: str, accounting: str, format_: str | None, output: Path | None, **settings: Any
) -> None:
    """Activation memory of one layer on one rank, under each technique.

    The rows are those of table 2 of Korthikanti et al. 2022, for this model.

    \b
    Examples:
      memcalc layer 175b
      memcalc layer llama-2-70b --tp 8 -s 4096
      memcalc layer path/to/config.json --tp 4 --format json
    """
    report = answered(model, settings, lambda config: memcalc.layer(config, accounting))
    show(report, format_, output)
