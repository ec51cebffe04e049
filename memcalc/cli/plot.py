"""``memcalc plot``: a command per kind of figure, each with the options that change it."""

import os
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

import memcalc
from memcalc import figures, files
from memcalc.cli.command import Command, Decorated, option
from memcalc.cli.effect import answered
from memcalc.cli.options import (
    CHOICES,
    KERNELS,
    PIPELINE,
    RUN,
    STATES,
    WHOLE,
    configure,
    model,
    options,
    refused,
    warn,
)
from memcalc.config import Config
from memcalc.config.catalog import named
from memcalc.errors import nearest
from memcalc.figures import backend
from memcalc.lazy import resolve
from memcalc.report import Column, Report

LAYER = (*RUN, *KERNELS)
EVERY = (*LAYER, *WHOLE, *PIPELINE, *STATES, *CHOICES, "cross_entropy", "accounting", "gpu")


class Kinds(click.Group):
    """The kinds of figures, in the order in which they are defined."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in order."""
        return list(self.commands)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Refuse options before the kind: they are those of a kind."""
        first = args[0] if args else ""
        if first.startswith("-") and first not in ("-h", "--help", "--"):
            raise click.UsageError("KIND comes first: memcalc plot KIND [MODEL] -o FILE", ctx)
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The kind that the first argument names, or an error that leads to the nearest."""
        if args[0] not in self.commands and not args[0].startswith("-"):
            hint = nearest(args[0], self.commands)
            if named(args[0]) or os.path.exists(args[0]):
                hint = f"try `memcalc plot memory {shlex.quote(args[0])} -o FILE`"
            raise click.UsageError(f"no figure {args[0][:40]!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The kinds with the first lines of their helps."""
        with formatter.section("Kinds"):
            formatter.write_dl(
                [(name, (each.help or "").split("\n")[0]) for name, each in self.commands.items()]
            )


@click.command(
    cls=Kinds,
    options_metavar="",
    subcommand_metavar="KIND [MODEL] -o FILE [OPTIONS]",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Documentation: README.md in memcalc's repository.",
)
def plot() -> None:
    """Draw a figure: PNG, SVG or PDF, by the suffix of -o.

    `memcalc plot KIND --help` lists the options of a kind.

    \b
    Examples:
      memcalc plot techniques 175b -o 175b.png
      memcalc plot techniques llama-3-70b --tp 8 -s 8192 -o llama.pdf
      memcalc plot memory 175b --sp --recompute selective -o memory.png
      memcalc plot stages 530b --vpp 1 --recompute full -o stages.svg
      memcalc plot backtest runs.jsonl -o runs.png
      memcalc plot paper-7 -o figure7.png
    """


def kind(name: str, *settings: str) -> Callable[[Callable[..., None]], click.Command]:
    """A decorator that makes a kind of figure a command, with its own options and no other.

    Args:
        name: The kind.
        settings: The shared options that change the figure. All others are refused by name.
    """
    shown = CHOICES if name == "techniques" else ()
    others = [each for each in EVERY if each not in (*settings, *shown)]

    def add(draw: Callable[..., None]) -> click.Command:
        draw = _output(draw)
        draw = refused(*_names(others), because=f"{{option}} has no effect on {name}")(draw)
        draw = refused(
            *_names(shown),
            because=f"{{option}} has no effect on {name}: its bars show every choice",
        )(draw)
        draw = options(*settings, "force")(draw)
        return plot.command(name, cls=Command, options_metavar="-o FILE [OPTIONS]")(draw)

    return add


def _names(settings: Iterable[str]) -> list[str]:
    """The options of some settings, as they are written."""
    found = [f"--{setting.replace('_', '-')}" for setting in settings]
    return [*found, *["--no-sp"] * ("--sp" in found)]


def _output(command: Decorated) -> Decorated:
    return option(
        "-o",
        "--output",
        metavar="FILE",
        type=click.Path(path_type=Path),
        required=True,
        common=True,
        help="The figure's file: .png, .svg or .pdf.",
    )(command)


@kind("techniques", *LAYER, "accounting")
@model
def techniques(model: str, accounting: str, output: Path, **settings: Any) -> None:
    """Activation memory of one layer under each technique, by its parts.

    One panel per kind of layer. The bars are the rows of `memcalc layer`.

    \b
    Examples:
      memcalc plot techniques 175b -o 175b.png
      memcalc plot techniques llama-3-70b --tp 8 -s 8192 -o llama.pdf
    """
    _of_model("techniques", model, output, settings, accounting)


@kind("memory", *(name for name in EVERY if name != "accounting"))
@model
def memory(model: str, output: Path, **settings: Any) -> None:
    """Memory per GPU at every pipeline stage, and the GPU's size.

    A bar shows one stage of `memcalc memory`: allocated bytes at the peak, and above them,
    hatched on white, the estimates of reserved memory, CUDA context and NCCL.

    \b
    Examples:
      memcalc plot memory 175b --sp --recompute selective -o memory.png
      memcalc plot memory llama-3-8b -s 4096 --dp 8 --zero 1 --gpu h100 -o llama.svg
    """
    _of_model("memory", model, output, settings)


@kind("stages", *LAYER, *WHOLE, *PIPELINE, "dp", *CHOICES, "cross_entropy", "accounting")
@model
def stages(model: str, accounting: str, output: Path, **settings: Any) -> None:
    """Activations of every pipeline stage, at its peak and over time.

    With more than 8 stages, the curves over time show 8 of them.

    \b
    Examples:
      memcalc plot stages 530b --vpp 1 --recompute full -o stages.svg
      memcalc plot stages 175b --sp --recompute selective --accounting exact -o stages.png
    """
    _of_model("stages", model, output, settings, accounting)


@kind("backtest")
@click.argument("file", type=click.Path(path_type=Path))
def backtest(file: Path, output: Path) -> None:
    """Predicted against measured peaks of the runs in a file of `memcalc backtest`.

    \b
    Examples:
      memcalc plot backtest runs.jsonl -o runs.png
    """
    _write("backtest", file, None, output)


@kind("onchip")
def onchip(output: Path) -> None:
    """The largest recurrent layers whose weights fit on chip, and published ones.

    \b
    Examples:
      memcalc plot onchip -o onchip.png
    """
    _write("onchip", None, None, output)


@kind("paper-1")
def paper1(output: Path) -> None:
    """Figure 1 of Korthikanti et al. 2022: memory per GPU, ours and theirs.

    \b
    Examples:
      memcalc plot paper-1 -o figure1.png
    """
    _write("paper-1", None, None, output)


@kind("paper-7")
def paper7(output: Path) -> None:
    """Figure 7 of Korthikanti et al. 2022: activation memory of a layer, ours and theirs.

    \b
    Examples:
      memcalc plot paper-7 -o figure7.png
    """
    _write("paper-7", None, None, output)


@kind("paper-8")
def paper8(output: Path) -> None:
    """Figure 8 of Korthikanti et al. 2022: time of a layer, by FLOPs and measured.

    \b
    Examples:
      memcalc plot paper-8 -o figure8.png
    """
    _write("paper-8", None, None, output)


def _of_model(
    name: str, model: str, output: Path, settings: dict[str, Any], accounting: str | None = None
) -> None:
    """Draw a figure of a model and its run."""
    figures.check(output.suffix)  # before the work
    backend.load()
    report = answered(model, settings, lambda config: _numbers(name, config, accounting))
    warn(report.notes)
    _write(name, configure(model, settings), accounting, output)


def _numbers(name: str, config: Config, accounting: str | None) -> Report:
    """What a figure shows, as the answer to a question."""
    if name == "memory":
        return memcalc.memory(config)
    shown = resolve(f"memcalc.figures.{name}:numbers")(config, accounting)
    notes = tuple(f"warning: {line}" for line in config.warnings)
    return Report("plot", name, (Column("shown", "text"),), ((shown,),), notes=notes)


def _write(name: str, subject: Any, accounting: str | None, output: Path) -> None:
    """Draw a figure, and write it to its file."""
    figures.check(output.suffix)
    backend.load()
    files.write(output, figures.encode(figures.plot(name, subject, accounting), output.suffix))
