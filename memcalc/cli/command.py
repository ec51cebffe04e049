"""A command: help in groups, a short help, other tools' names, and errors with suggestions."""

import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import zip_longest
from pathlib import Path
from textwrap import wrap
from typing import Any, TypeVar

import click

from memcalc.cli import names
from memcalc.errors import UsageError, nearest
from memcalc.terminal import say

GROUPS = (
    *("Answer", "Model", "Run", "Parallelism", "Pipeline", "Sharding and optimizer"),
    *("Recomputation", "Kernels", "GPU", "Output"),
)
INPUTS = ("model", "shown", "target", "run", "file")  # parameters that name a file to read

LEFT_OUT = (
    "An option that is not given takes its value from MODEL's file or catalog entry. "
    "[default: ...] applies if MODEL has no value."
)
NUMBER = r"-?([0-9]{1,30}(\.[0-9]{0,30})?|\.[0-9]{1,30})([eE][+-]?[0-9]{1,3})?"
COLUMN = 26  # the width of the options' names in help

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


class Option(click.Option):
    """An option with its heading in --help.

    Args:
        group: The heading: one of ``GROUPS``, or a command's own.
        common: Whether -h shows it too, or the shorter help that it shows.
    """

    def __init__(
        self, *args: Any, group: str = "Answer", common: bool | str = False, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.group, self.common = group, common


def option(*declarations: str, **attributes: Any) -> Callable[[Decorated], Decorated]:
    """A decorator that adds an ``Option``."""
    return click.option(*declarations, cls=Option, **attributes)


class Whole(click.ParamType[int]):
    """A whole number between two bounds, in ASCII digits."""

    name = "N"

    def __init__(self, least: int, most: int) -> None:
        self.least, self.most = least, most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number; no other digits, spaces or underscores."""
        if isinstance(value, int):
            return value
        if re.fullmatch(r"-?[0-9]{1,30}", value) and self.least <= int(value) <= self.most:
            return int(value)
        bounds = f"from {self.least:,} to {self.most:,}"
        raise _unlike(f"a whole number {bounds}", value, param, ctx)


class Number(click.ParamType[float]):
    """A number in ASCII, with or without a point or an exponent."""

    name = "X"
    what = "a number"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The number, without a check of its bounds."""
        if isinstance(value, (int, float)):
            return value
        if re.fullmatch(NUMBER, value):
            return float(value)
        raise _unlike(self.what, value, param, ctx)


class Ratio(Number):
    """A ratio, as a percentage or a number."""

    name = "RATIO"
    what = "a ratio such as 2% or 0.02"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """``2%`` and ``0.02`` are 0.02."""
        if not isinstance(value, str):
            return super().convert(value, param, ctx)
        number, percent, rest = value.partition("%")
        if rest or not re.fullmatch(NUMBER, number) or not 0 <= float(number) < 1e6:
            raise _unlike(self.what, value, param, ctx)
        return float(number) / 100 if percent else float(number)


class Word(click.Choice[str]):
    """One of some words, in other tools' spelling too; an error suggests the nearest ones."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The word in memcalc's spelling."""
        if value in self.choices:
            return str(value)
        for word in (str(value).lower(), names.spelled(str(value))):
            for each in (word, word.replace("-", "_"), word.replace("_", "-")):
                if each in self.choices:
                    return each
        name = max(param.opts, key=len) if param else "a value"
        hint = nearest(str(value), self.choices)
        raise click.UsageError(f"{name} {str(value)[:40]!r} is unknown; {hint}", ctx)


def _unlike(
    what: str, value: str, param: click.Parameter | None, ctx: click.Context | None
) -> click.UsageError:
    name = max(param.opts, key=len) if param else "a value"
    shown = repr(value) if len(value) <= 40 else f"{value[:20]!r}... of {len(value)} characters"
    return click.UsageError(f"{name} must be {what}, not {shown}", ctx)


def _brief(ctx: click.Context, option: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        assert isinstance(ctx.command, Command)
        click.echo(ctx.command.brief_help(ctx))
        ctx.exit()


def remember(ctx: click.Context, option: click.Parameter, value: bool) -> None:
    """A callback of a flag that is not a parameter of commands; ``remembered`` reads it."""
    ctx.meta[f"memcalc.{option.name}"] = value


def remembered(flag: str) -> bool:
    """Whether a flag was given to the command that runs."""
    return bool(click.get_current_context().meta.get(f"memcalc.{flag}"))


BRIEF = click.Option(
    ["-h", "brief_help"],
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_brief,
    help="Show a short help and exit.",
)


class Command(click.Command):
    """A command of memcalc.

    Args:
        docs: The page of documentation that --help points to.
        refused: Options of other commands that this one refuses, each with the message.
    """

    def __init__(
        self,
        *args: Any,
        docs: str = "README.md",
        refused: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.context_settings["help_option_names"] = ["--help"]  # -h is the short one
        self.docs, self.refused = docs, refused or {}

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The parameters, with those for help last."""
        *own, full = super().get_params(ctx)
        return [*own, BRIEF, full]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, with other tools' names translated; errors suggest the right option."""
        own = {name for each in _options(self, ctx) for name in _names(each)}
        once = [each for each in _options(self, ctx) if not each.multiple]
        options = {name: max(each.opts, key=len) for each in once for name in _names(each)}
        flags = {name for each in once if each.is_flag for name in _names(each)}
        try:
            args = names.canonical(args, own | self.refused.keys(), options, flags)
        except UsageError as error:
            raise click.UsageError(str(error), ctx) from error
        try:
            return super().parse_args(ctx, list(args))
        except click.NoSuchOption as error:
            wrong = names.written(error.option_name, args)
            if wrong in self.refused:
                raise click.UsageError(self.refused[wrong], ctx) from error
            hint = names.hint(wrong, own, ctx.command_path)
            raise click.UsageError(f"no option {wrong}; {hint}", ctx) from error
        except click.MissingParameter as error:
            if not isinstance(error.param, click.Argument):
                raise
            usage = " ".join((ctx.command_path, *self.collect_usage_pieces(ctx)))
            raise click.UsageError(
                f"{error.param.human_readable_name} is missing: usage: {usage}; "
                f"try `{ctx.command_path} -h`",
                ctx,
            ) from error

    def invoke(self, ctx: click.Context) -> Any:
        """Run, unless the output would replace a file that is read."""
        output, force = ctx.params.get("output"), remembered("force")
        if force and str(output or "-") == "-":
            say("memcalc: warning: --force has no effect without -o FILE")
        for name in INPUTS:
            if output and not force and _same(ctx.params.get(name), output):
                raise click.UsageError(
                    f"-o {output} would replace the input file; choose another name, or add "
                    "--force",
                    ctx,
                )
        return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The options under their headings."""
        options = _options(self, ctx)
        if _has_settings(options):
            formatter.write_paragraph()
            with formatter.indentation():
                formatter.write_text(LEFT_OUT)
        groups = dict.fromkeys((*(each.group for each in _own(options)), GROUPS[-1]))
        for group in sorted(groups, key=lambda name: GROUPS.index(name) if name in GROUPS else 0):
            rows = _rows(ctx, [each for each in options if _group(each) == group])
            _write(formatter, group, rows)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Which other names work, and where the documentation is."""
        formatter.write_paragraph()
        options = _options(self, ctx)
        if any(each.name == "tp" for each in options):
            formatter.write_text(
                names.examples({name for each in options for name in _names(each)})
            )
            formatter.write_paragraph()
        formatter.write_text(f"Documentation: {self.docs} in memcalc's repository.")

    def brief_help(self, ctx: click.Context) -> str:
        """The usage, what the command answers, its arguments, examples and most used options."""
        formatter = ctx.make_formatter()
        self.format_usage(ctx, formatter)
        options = _options(self, ctx)
        paragraphs = inspect.cleandoc(self.help or "").split("\n\n")
        arguments = tuple(
            f"{each.human_readable_name} "
            for each in self.get_params(ctx)
            if isinstance(each, click.Argument)
        )
        more = [each for each in paragraphs if "Examples:" in each or each.startswith(arguments)]
        for text in (paragraphs[0], *more):
            formatter.write_paragraph()
            with formatter.indentation():
                formatter.write_text(text)
        rows = [
            (name, each.common if isinstance(each.common, str) else text)
            for each in _own(options)
            if each.common
            for name, text in _rows(ctx, [each])
        ]
        _write(formatter, "Most used options", rows)
        formatter.write_paragraph()
        if _has_settings(options):
            formatter.write_text(
                "An option that is not given takes MODEL's value, if MODEL has one."
            )
        formatter.write_text(f"`{ctx.command_path} --help` shows all {len(options)} options.")
        return formatter.getvalue().rstrip("\n")


def _options(command: click.Command, ctx: click.Context) -> list[click.Option]:
    return [each for each in command.get_params(ctx) if isinstance(each, click.Option)]


def _own(options: Iterable[click.Option]) -> list[Option]:
    return [each for each in options if isinstance(each, Option)]


def _has_settings(options: Iterable[click.Option]) -> bool:
    """Whether options replace what MODEL says of its run."""
    return any(each.name == "seq_length" and each.group == "Run" for each in _own(options))


def _group(option: click.Option) -> str:
    return option.group if isinstance(option, Option) else GROUPS[-1]


def _names(param: click.Parameter) -> list[str]:
    return [*param.opts, *param.secondary_opts]


def _rows(ctx: click.Context, options: Iterable[click.Option]) -> list[tuple[str, str]]:
    """The names and the help of options."""
    return [record for each in options if (record := each.get_help_record(ctx))]


def _write(formatter: click.HelpFormatter, heading: str, rows: list[tuple[str, str]]) -> None:
    """Write a section; unlike click's own, it never breaks a name at its hyphens."""
    width = formatter.width - COLUMN - 4
    with formatter.section(heading):
        for name, text in rows:
            lines = wrap(text, width, break_on_hyphens=False, break_long_words=False)
            if len(name) > COLUMN:
                lines.insert(0, "")
            for left, right in zip_longest([name], lines, fillvalue=""):
                formatter.write(f"  {left:{COLUMN}}  {right}".rstrip() + "\n")


def _same(source: Any, output: Path) -> bool:
    """Whether the output is the input file, or the config.json of the input folder."""
    if not isinstance(source, (str, Path)):
        return False
    try:
        candidates = (source, Path(source) / "config.json")
        return any(os.path.samefile(each, output) for each in candidates if os.path.exists(each))
    except (OSError, ValueError):  # the output does not exist yet
        return False
