"""``memcalc formula``."""

from pathlib import Path
from typing import Any

import click

import memcalc
from memcalc.cli.options import CHOICES, KERNELS, RUN, SHOW, configure, model, options, show, write


@click.command()
@model
@options(*RUN, *CHOICES, *KERNELS, "accounting", *SHOW)
@click.option("--latex", is_flag=True, help="Only the whole layer's formula, in LaTeX.")
def formula(
    model: str,
    accounting: str,
    format_: str | None,
    output: Path | None,
    latex: bool,
    **settings: Any,
) -> None:
    """The closed form of one layer's activation memory, tensor by tensor and as a whole.

    \b
    Examples:
      memcalc formula 175b
      memcalc formula 175b --sp --recompute selective --latex
      memcalc formula llama-3-70b --tp 8 --accounting exact
    """
    if latex and format_:
        raise click.UsageError("--latex and --format are two answers to one question")
    report = memcalc.formula(configure(model, settings), accounting)
    if latex:
        write(f"{report.column('formula')[-1].latex()}\n", output)
    else:
        show(report, format_, output)
