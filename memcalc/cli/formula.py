"""``memcalc formula``."""

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

import memcalc
from memcalc.cli.command import Command, Word, option
from memcalc.cli.effect import answered
from memcalc.cli.options import CHOICES, KERNELS, RUN, SHOW, optional_model, options
from memcalc.cli.show import show, warn, write
from memcalc.lazy import resolve

PAPERS = ("li2021",)


@click.command(cls=Command, docs="docs/layers.md")
@optional_model
@options(*RUN, *CHOICES, *KERNELS, "accounting", *SHOW)
@option(
    "--latex",
    group="Output",
    is_flag=True,
    common=True,
    help="Print only the whole layer's formula, in LaTeX.  [default: off]",
)
@option(
    "--paper",
    type=Word(PAPERS),
    help="Show a paper's formulas instead of MODEL's. li2021: the sequence parallelism of Li et "
    "al. 2021.  [default: none]",
)
def formula(
    model: str | None,
    accounting: str,
    format_: str | None,
    output: Path | None,
    latex: bool,
    paper: str | None,
    **settings: Any,
) -> None:
    """The closed form of one layer's activation memory, tensor by tensor and as a whole.

    \b
    Examples:
      memcalc formula 175b
      memcalc formula 175b --sp --recompute selective --latex
      memcalc formula llama-3-70b --tp 8 --accounting exact
      memcalc formula --paper li2021
    """
    if (model is None) == (paper is None):
        raise click.UsageError("formula needs either MODEL or --paper")
    source = click.get_current_context().get_parameter_source("accounting")
    given = source is not ParameterSource.DEFAULT or any(v is not None for v in settings.values())
    if model is None and (latex or given):
        raise click.UsageError("--paper takes no options except --format, --wide, -o and --force")
    if latex and format_:
        raise click.UsageError("--latex cannot be combined with --format")
    if model is None:
        report = resolve("memcalc.answers.li2021:li2021")()
    else:
        report = answered(model, settings, lambda config: memcalc.formula(config, accounting))
    if latex:
        warn(report.notes)
        write(f"{report.column('formula')[-1].latex()}\n", output)
    else:
        show(report, format_, output)
