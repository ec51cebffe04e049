"""The group of commands, and the one place where an error becomes a line and an exit status."""

import os
import sys
from collections.abc import Sequence

import click

import memcalc
from memcalc.errors import MemcalcError, nearest
from memcalc.lazy import resolve

# Command -> where it lives, and its help in one line (so that --help imports none of them).
COMMANDS = {
    "layer": ("memcalc.cli.layer:layer", "Activation memory of one layer, by technique."),
    "ledger": ("memcalc.cli.ledger:ledger", "The same, tensor by tensor."),
    "recompute": ("memcalc.cli.recompute:recompute", "What each recompute policy saves and costs."),
    "flops": ("memcalc.cli.flops:flops", "FLOPs of an iteration, MFU and HFU."),
    "comm": ("memcalc.cli.comm:comm", "Collectives of a layer and of an iteration."),
    "memory": ("memcalc.cli.memory:memory", "A GPU's memory at every pipeline stage."),
    "formula": ("memcalc.cli.formula:formula", "The closed form, step by step."),
    "rnn": ("memcalc.cli.rnn:rnn", "Recurrent networks: on chip, and over time."),
    "plot": ("memcalc.cli.plot:plot", "Figures, as PNG, SVG or PDF."),
    "validate": ("memcalc.cli.validate:validate", "Real PyTorch tensors against the ledger."),
    "derive": ("memcalc.cli.derive:derive", "The closed form of any module, from PyTorch."),
    "check": ("memcalc.cli.check:check", "The papers' printed numbers against ours."),
    "backtest": ("memcalc.cli.backtest:backtest", "Measured training runs against ours."),
    "models": ("memcalc.cli.models:models", "The catalogue of models."),
    "gpus": ("memcalc.cli.gpus:gpus", "The catalogue of GPUs."),
}


class LazyGroup(click.Group):
    """A group that imports a command when it is called, not when it is listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command itself, imported now."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = resolve(COMMANDS[cmd_name][0])
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that the first argument names, or an error that leads to the nearest."""
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            hint = nearest(args[0], COMMANDS, "`memcalc --help`")
            raise click.UsageError(f"no command {args[0][:40]!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands with their one-line helps, from the table."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


@click.command(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 90},
    epilog="""Examples:

\b
  memcalc layer 175b                        the paper's table 2 for GPT-3
  memcalc ledger llama-3-70b --tp 8 --sp    every tensor that a layer keeps
  memcalc layer path/to/config.json -s 4096 a Hugging Face config
""",
)
@click.version_option(memcalc.__version__, prog_name="memcalc")
def cli() -> None:
    """The activation memory of transformer training, exactly.

    MODEL is a name of the catalogue (see `memcalc models`), or the path of a file: memcalc's own
    JSON, a Hugging Face config.json (or its folder), or a launch file: a Megatron-LM script or
    YAML, or a YAML of gpt-neox or nanotron.
    """


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    0: answered. 1: a check failed. 2: bad usage or input, with one line on stderr that says why.
    """
    try:
        with cli.make_context("memcalc", list(sys.argv[1:] if args is None else args)) as context:
            cli.invoke(context)
        if sys.stdout:
            sys.stdout.flush()
        return 0
    except click.exceptions.Exit as done:  # --help and --version
        return done.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return 2
    except click.ClickException as error:
        where = getattr(error, "ctx", None)
        return _fail(where.command_path if where else "memcalc", error.format_message())
    except MemcalcError as error:
        return _fail("memcalc", str(error))
    except MemoryError:
        return _fail("memcalc", "this machine has not enough memory to answer")
    except BrokenPipeError:  # who reads us has heard enough
        _close_stdout()
        return 0
    except OSError as error:
        _close_stdout()
        return _fail("memcalc", f"the answer cannot be printed: {error.strerror}")
    except (KeyboardInterrupt, click.Abort):
        return 130


def _close_stdout() -> None:
    """Keep python from writing what is left, and complaining once more, when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(where: str, message: str) -> int:
    click.echo(f"{where}: {' '.join(message.split())}", err=True)
    return 2
