"""``memcalc plot``."""

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from memcalc import figures, files
from memcalc.cli.command import Command, option
from memcalc.cli.options import (
    CHOICES,
    KERNELS,
    PIPELINE,
    RUN,
    STATES,
    WHOLE,
    configure,
    optional_model,
    options,
    warn,
)
from memcalc.config import Config
from memcalc.figures import backend


@click.command(cls=Command)
@click.argument("kind", type=click.Choice(list(figures.ALL)))
@optional_model
@options(
    *RUN,
    *WHOLE,
    *PIPELINE,
    *STATES,
    *CHOICES,
    *KERNELS,
    "cross_entropy",
    "accounting",
    "gpu",
    "force",
)
@option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path),
    required=True,
    common=True,
    help="The figure's file: .png, .svg or .pdf.",
)
@click.pass_context
def plot(
    ctx: click.Context,
    /,
    kind: str,
    model: str | None,
    accounting: str,
    output: Path,
    **settings: Any,
) -> None:
    """A figure.

    \b
    KIND is one of
      techniques  one layer's memory under each technique, by its parts
      memory      a GPU's memory at every pipeline stage, and what there is room for
      stages      the activations of every pipeline stage at its peak, and over time
      onchip      the largest recurrent layers that GPUs hold, and the published ones
      backtest    predicted against measured peaks; MODEL is the file of `memcalc backtest`
      paper-1     figures of Korthikanti et al. 2022, ours beside theirs
      paper-7     (these, and onchip, have models of their own)
      paper-8

    \b
    Examples:
      memcalc plot techniques 175b -o 175b.png
      memcalc plot techniques llama-3-70b --tp 8 -s 8192 -o llama.pdf
      memcalc plot stages 530b --vpp 1 --recompute full -o stages.svg
      memcalc plot memory 175b --sp --recompute selective -o memory.png
      memcalc plot backtest runs.jsonl -o runs.png
      memcalc plot paper-7 -o figure7.png
    """
    figures.check(output.suffix)
    if kind == "techniques":
        for name in CHOICES:
            if settings[name] is not None:
                raise click.UsageError(f"--{name} has no place here: it is among the figure's bars")
    given = [name for name, value in settings.items() if value is not None]
    if given and (model is None or kind in figures.RUNS):
        raise click.UsageError(
            f"{kind} has models of its own: {', '.join(given)} has no place here"
        )
    said = ctx.get_parameter_source("accounting") is not ParameterSource.DEFAULT
    if said and kind not in figures.ACCOUNTED:
        raise click.UsageError(f"--accounting has no place here: {kind} has no choice of it")
    backend.load()
    subject: Config | Path | None = None
    if model is not None:
        subject = Path(model) if kind in figures.RUNS else configure(model, settings)
    if isinstance(subject, Config):
        warn(f"warning: {line}" for line in subject.warnings)
    figure = figures.plot(kind, subject, accounting if kind in figures.ACCOUNTED else None)
    files.write(output, figures.encode(figure, output.suffix))
