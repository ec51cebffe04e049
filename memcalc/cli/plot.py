"""``memcalc plot``."""

from pathlib import Path
from typing import Any

import click

from memcalc import files
from memcalc.cli.options import KERNELS, RUN, configure, model, options, refused
from memcalc.lazy import load

KINDS = ("techniques",)  # the keys of memcalc.render.figure.KINDS, without loading matplotlib


@click.command()
@click.argument("kind", type=click.Choice(KINDS))
@model
@options(*RUN, *KERNELS, "accounting")
@refused("--sp", "--no-sp", "--recompute", because="the techniques are this figure's bars")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    help="The figure's file: .png, .svg or .pdf.",
)
def plot(kind: str, model: str, accounting: str, output: Path, **settings: Any) -> None:
    """A figure. KIND is techniques: one layer's memory, stacked by its parts.

    \b
    Examples:
      memcalc plot techniques 175b -o 175b.png
      memcalc plot techniques llama-3-70b --tp 8 -s 8192 -o llama.pdf
    """
    config = configure(model, settings)
    figure = load("memcalc.render.figure:plot")(kind, config, accounting)
    files.write(output, load("memcalc.render.figure:encode")(figure, output.suffix))
