"""``memcalc plot``: a command per kind of figure, each with the options that change it."""

import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from memcalc import figures, files
from memcalc.answers.warnings import warnings
from memcalc.cli.command import Command, Decorated, option
from memcalc.cli.effect import checked
from memcalc.cli.names import as_option
from memcalc.cli.options import CHOICES, KERNELS, LOSS, PIPELINE, RUN, STATES, WHOLE, model, options
from memcalc.cli.show import warn
from memcalc.config.catalog import named
from memcalc.errors import nearest
from memcalc.figures import backend
from memcalc.lazy import resolve

LAYER = (*RUN, *KERNELS)
EVERY = (*LAYER, *WHOLE, *PIPELINE, *STATES, *CHOICES, *LOSS, "accounting", "gpu")


class Kinds(click.Group):
    """The kinds of figures, in the order in which they are defined."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in order."""
        return list(self.commands)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Refuse options before the kind; every option belongs to a kind."""
        first = args[0] if args else ""
        if first.startswith("-") and first not in ("-h", "--help", "--"):
            raise click.UsageError("KIND comes first: memcalc plot KIND [MODEL] -o FILE", ctx)
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The kind that the first argument names, or an error that suggests one."""
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
      memcalc plot step gpt2 --implementation transformers-eager --precision fp32 -o s.png
      memcalc plot backtest runs.jsonl -o runs.png
      memcalc plot paper-7 -o figure7.png
    """


def kind(name: str, *settings: str) -> Callable[[Callable[..., None]], click.Command]:
    """A decorator that makes a kind of figure a command, with its own options and no other.

    Args:
        name: The kind.
        settings: The shared options that change the figure. All others are refused by name.
    """
    refused = {}
    for setting in EVERY:
        if setting not in settings:
            shown = name == "techniques" and setting in CHOICES
            why = ": its bars show every choice" if shown else ""
            for each in (setting, *["no_sp"] * (setting == "sp")):
                refused[as_option(each)] = f"{as_option(each)} has no effect on {name}{why}"

    def add(draw: Callable[..., None]) -> click.Command:
        command = plot.command(
            name, cls=Command, options_metavar="-o FILE [OPTIONS]", refused=refused
        )
        return command(options(*settings, "force")(_output(draw)))

    return add


def _output(command: Decorated) -> Decorated:
    return option(
        "-o",
        "--output",
        group="Output",
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
    """Memory per GPU at every pipeline stage, and the GPU's memory.

    A bar shows one stage of `memcalc memory`: allocated bytes at the peak, and above them,
    hatched on white, the estimates of reserved memory, CUDA context and NCCL.

    \b
    Examples:
      memcalc plot memory 175b --sp --recompute selective -o memory.png
      memcalc plot memory llama-3-8b -s 4096 --dp 8 --zero 1 --gpu h100 -o llama.svg
    """
    _of_model("memory", model, output, settings)


@kind("stages", *LAYER, *WHOLE, *PIPELINE, "dp", *CHOICES, *LOSS, "accounting")
@model
def stages(model: str, accounting: str, output: Path, **settings: Any) -> None:
    """Activations of every pipeline stage, at its peak and over time.

    Over time, at most 8 different curves are drawn, each of all stages that share it.

    \b
    Examples:
      memcalc plot stages 530b --vpp 1 --recompute full -o stages.svg
      memcalc plot stages 175b --sp --recompute selective --accounting exact -o stages.png
    """
    _of_model("stages", model, output, settings, accounting)


@kind("step", *(name for name in EVERY if name != "accounting"))
@model
def step(model: str, output: Path, **settings: Any) -> None:
    """What one iteration has allocated and reserved, event by event.

    From left to right: the allocations and frees of a training step in PyTorch. Their order is
    known on one GPU, or with DDP, where autograd makes the gradients.

    \b
    Examples:
      memcalc plot step gpt2 --implementation transformers-eager --precision fp32 -o s.png
    """
    _of_model("step", model, output, settings)


@kind("backtest")
@click.argument("file", type=click.Path(path_type=Path))
def backtest(file: Path, output: Path) -> None:
    """Predicted against measured peaks of the runs in a file of `memcalc backtest`.

    \b
    Examples:
      memcalc plot backtest runs.jsonl -o runs.png
    """
    _of_none("backtest", file, output)


@kind("onchip")
def onchip(output: Path) -> None:
    """The largest recurrent layers whose weights fit on chip, and published ones.

    \b
    Examples:
      memcalc plot onchip -o onchip.png
    """
    _of_none("onchip", None, output)


@kind("paper-1")
def paper1(output: Path) -> None:
    """Figure 1 of Korthikanti et al. 2022: memory per GPU, ours and theirs.

    \b
    Examples:
      memcalc plot paper-1 -o figure1.png
    """
    _of_none("paper-1", None, output)


@kind("paper-7")
def paper7(output: Path) -> None:
    """Figure 7 of Korthikanti et al. 2022: activation memory of a layer, ours and theirs.

    \b
    Examples:
      memcalc plot paper-7 -o figure7.png
    """
    _of_none("paper-7", None, output)


@kind("paper-8")
def paper8(output: Path) -> None:
    """Figure 8 of Korthikanti et al. 2022: time of a layer, by FLOPs and measured.

    \b
    Examples:
      memcalc plot paper-8 -o figure8.png
    """
    _of_none("paper-8", None, output)


def _of_model(
    name: str, model: str, output: Path, settings: dict[str, Any], accounting: str | None = None
) -> None:
    """Draw a figure of a model and its run."""
    _prepare(output)
    numbers = resolve(f"memcalc.figures.{name}:numbers")
    config, _, lines = checked(
        model, settings, lambda each: numbers(each, accounting), lambda shown: shown
    )
    warn([*(f"warning: {line}" for line in warnings(config)), *lines])
    _write(name, config, accounting, output)


def _of_none(name: str, subject: Path | None, output: Path) -> None:
    """Draw a figure of published or measured runs."""
    _prepare(output)
    _write(name, subject, None, output)


def _prepare(output: Path) -> None:
    """Check the file's suffix before any work, and load matplotlib."""
    figures.check(output.suffix)
    backend.load()


def _write(name: str, subject: Any, accounting: str | None, output: Path) -> None:
    """Draw a figure, and write it to its file."""
    files.write(output, figures.encode(figures.plot(name, subject, accounting), output.suffix))
