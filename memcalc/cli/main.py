"""The group of commands; errors become one line on stderr and an exit status."""

import os
import platform
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module

import click
from click.shell_completion import CompletionItem, shell_complete

import memcalc
from memcalc.errors import MemcalcError, nearest
from memcalc.lazy import resolve
from memcalc.terminal import abandon, say, tell

DEBUG = "MEMCALC_DEBUG"  # the environment variable that turns on tracebacks
COMPLETE = "_MEMCALC_COMPLETE"  # the environment variable with which a shell asks for completions

# Command -> where it is defined, and its help in one line (so that --help imports none of them).
COMMANDS = {
    "memory": ("memcalc.cli.memory:memory", "Memory per GPU, and whether it fits."),
    "layer": (
        "memcalc.cli.layer:layer",
        "Activation memory of one layer under TP, SP and recomputation.",
    ),
    "ledger": ("memcalc.cli.ledger:ledger", "Every tensor that one layer keeps for backward."),
    "formula": ("memcalc.cli.formula:formula", "The closed form of one layer's memory."),
    "recompute": ("memcalc.cli.recompute:recompute", "What each recompute policy saves and costs."),
    "flops": ("memcalc.cli.flops:flops", "FLOPs per iteration, MFU and HFU."),
    "comm": ("memcalc.cli.comm:comm", "Collectives per layer and per iteration."),
    "rnn": ("memcalc.cli.rnn:rnn", "Recurrent networks: weights on chip, memory over time."),
    "plot": ("memcalc.cli.plot:plot", "Figures, as PNG, SVG or PDF."),
    "validate": ("memcalc.cli.validate:validate", "Compare the ledger with real PyTorch layers."),
    "derive": ("memcalc.cli.derive:derive", "Derive the closed form of any PyTorch module."),
    "trace": ("memcalc.cli.trace:trace", "Memory of a training step of your own, without a GPU."),
    "check": ("memcalc.cli.check:check", "Compare numbers printed in papers with memcalc's."),
    "backtest": ("memcalc.cli.backtest:backtest", "Compare measured runs with predictions."),
    "models": ("memcalc.cli.models:models", "The models that memcalc knows by name."),
    "gpus": ("memcalc.cli.gpus:gpus", "The GPUs that memcalc knows by name."),
}


def _version(ctx: click.Context, option: click.Parameter, value: bool) -> None:
    """Print the versions of memcalc, Python and torch; torch itself is not loaded."""
    if not value or ctx.resilient_parsing:
        return
    metadata = import_module("importlib.metadata")
    try:
        torch = f"torch {metadata.version('torch')}"
    except metadata.PackageNotFoundError:
        torch = "torch is not installed"
    click.echo(f"memcalc {memcalc.__version__} (Python {platform.python_version()}, {torch})")
    ctx.exit()


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
        """The command that the first argument names, or an error that suggests one."""
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            named = resolve("memcalc.config.catalog:named")
            if named(args[0]) or os.path.exists(args[0]):
                model = shlex.quote(args[0])
                hint = f"for a model, try `memcalc memory {model}` or `memcalc layer {model}`"
            else:
                hint = nearest(args[0], COMMANDS, "`memcalc --help`")
            raise click.UsageError(f"no command {args[0][:40]!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, with ``help COMMAND`` for ``COMMAND --help``."""
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The commands and options that begin with ``incomplete``, from the table."""
        commands = [
            CompletionItem(name, help=line)
            for name, (_, line) in COMMANDS.items()
            if name.startswith(incomplete)
        ]
        return [*commands, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands with their one-line helps, from the table."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


@click.command(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 90},
    epilog="""Examples:

\b
  memcalc memory llama-3-8b --dp 8 --zero 1 --gpu h100
  memcalc layer 175b
  memcalc layer path/to/config.json -s 4096

`memcalc COMMAND -h` shows the most used options, `--help` all of them. README.md in memcalc's
repository describes the commands and shell completion.
""",
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_version,
    help="Show the versions of memcalc, Python and torch and exit.",
)
def cli() -> None:
    """Memory, FLOPs and communication of transformer training, from shapes and source code.

    MODEL is a catalog name (see `memcalc models`) or a file: memcalc's own JSON, a Hugging Face
    config.json or its folder, or a launch file (Megatron-LM script or YAML, gpt-neox or nanotron
    YAML).
    """


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    0: answered. 1: a check failed. 2: bad usage or input, or an error in memcalc itself; one line
    on stderr says why (with ``MEMCALC_DEBUG``, an error in memcalc is a traceback). The caller
    handles KeyboardInterrupt.
    """
    if sys.stdout is None:  # closed: writing an answer must fail, not be skipped
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")
    if args is None and (instruction := os.environ.get(COMPLETE)):
        try:
            if shell_complete(cli, {}, "memcalc", COMPLETE, instruction) == 0:
                return 0
        except (
            click.UsageError
        ):  # no completions after a wrong word; a message would disturb the prompt
            return 0
        except (KeyError, ValueError):
            return _fail(
                "COMP_WORDS must be a command line, and COMP_CWORD the index of a word in it"
            )
        return _fail(f"{COMPLETE} must be bash_source, zsh_source or fish_source")
    try:
        with cli.make_context("memcalc", list(sys.argv[1:] if args is None else args)) as context:
            cli.invoke(context)
        sys.stdout.flush()
        return 0
    except click.exceptions.Exit as done:  # --help and --version
        return done.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        tell(error.format_message())
        return 2
    except click.ClickException as error:
        where = getattr(error, "ctx", None)
        return _fail(error.format_message(), where.command_path if where else "memcalc")
    except MemcalcError as error:
        return _fail(str(error))
    except MemoryError:
        return _fail("this machine has too little memory to answer")
    except BrokenPipeError:  # the reader of stdout has closed it
        abandon(sys.stdout)
        return 0
    except OSError as error:
        abandon(sys.stdout)
        of_stdout = error.errno is not None and error.filename is None
        return _fail(f"the answer cannot be printed: {error.strerror}" if of_stdout else str(error))
    except Exception as error:
        if os.environ.get(DEBUG):
            raise
        what = f"{type(error).__name__}: {error}"
        return _fail(f"an error in memcalc, please report it ({DEBUG}=1 shows where): {what}")


def _fail(message: str, where: str = "memcalc") -> int:
    say(f"{where}: {message}")
    return 2
