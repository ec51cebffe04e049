"""``memcalc plot``."""

import os
from pathlib import Path
from typing import Any

import click

from memcalc import figures, files
from memcalc.cli.options import KERNELS, RUN, configure, model, options, refused


@click.command()
@click.argument("kind", type=click.Choice(list(figures.KINDS)))
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
    figures.check(output.suffix)
    os.environ["MPLBACKEND"] = "agg"  # a file needs no window, whatever the user's sessions need
    figure = figures.plot(kind, configure(model, settings), accounting)
    files.write(output, figures.encode(figure, output.suffix))
