"""docs/cli.md: the commands with their options, from the command line itself."""

import inspect
import re
from collections.abc import Iterator
from itertools import groupby

import click

from memcalc.cli.command import GROUPS, Command, Option
from memcalc.cli.main import COMMANDS, cli
from memcalc.cli.names import ALIASES

HEAD = """\
# The command line

Every command with its options, as `--help` shows them. `tests/docs/refresh.py` writes this page.

| exit status | meaning |
|---|---|
| 0 | answered |
| 1 | a check failed; stderr says what |
| 2 | bad usage or input, or an error in memcalc; one line on stderr says why |
| 130 | interrupted |

Status 1 comes from `memory --budget`, `check`, `validate`, `derive --against` and
`backtest --max-error`.

MODEL is a catalog name or a file. An option that is not given takes its value from MODEL's file
or catalog entry; a default applies if MODEL has no value. `memcalc COMMAND -h` shows the most
used options. [Other tools' names](#other-tools-names) of options work too.
"""
OTHER_NAMES = """\
## Other tools' names

Each works in every command that has the option. `_` in a name is read as `-`.
"""


def page() -> str:
    """The whole page."""
    root = click.Context(cli, info_name="memcalc")
    commands = [(name, cli.get_command(root, name)) for name in COMMANDS]
    parts = [HEAD, _table("command", "answers", *((_link(n), COMMANDS[n][1]) for n in COMMANDS))]
    for name, command in commands:
        assert command
        parts += _command(command, name, root, "##")
    return "\n".join([*parts, OTHER_NAMES, _aliases()])


def _command(command: click.Command, name: str, parent: click.Context, mark: str) -> Iterator[str]:
    """A command's heading, help, usage, examples and options, then the commands under it."""
    ctx = click.Context(command, parent, name, max_content_width=1000, terminal_width=1000)
    usage = " ".join((ctx.command_path, *command.collect_usage_pieces(ctx)))
    yield f"{mark} {ctx.command_path}\n"
    yield f"```\n{usage}\n```\n"
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        if "\b" not in paragraph:
            yield _escaped(" ".join(paragraph.split())) + "\n"
            continue
        text = paragraph.replace("\b\n", "")
        if text.startswith(" "):  # rows without a heading
            yield f"```\n{inspect.cleandoc(text)}\n```\n"
            continue
        heading, _, lines = text.partition("\n")
        yield f"{heading}\n\n```sh\n{inspect.cleandoc(lines)}\n```\n"
    if isinstance(command, click.Group):
        for each in command.list_commands(ctx):
            found = command.get_command(ctx, each)
            assert found
            yield from _command(found, each, ctx, mark + "#")
    elif isinstance(command, Command):
        options = [each for each in command.get_params(ctx) if isinstance(each, click.Option)]
        for group, some in groupby(sorted(options, key=_order), _group):
            records = [record for each in some if (record := each.get_help_record(ctx))]
            yield _table(group, "meaning", "default", *(_row(*record) for record in records))


def _group(option: click.Option) -> str:
    return option.group if isinstance(option, Option) else GROUPS[-1]


def _order(option: click.Option) -> int:
    """A command's own headings first, as in --help."""
    group = _group(option)
    return GROUPS.index(group) if group in GROUPS else -1


def _row(names: str, text: str) -> tuple[str, str, str]:
    """An option, its meaning and its default; click ends the help of others with [required]."""
    text, required, _ = text.partition("[required]")
    meaning, _, default = text.partition("[default: ")
    default = "required" if required else default.removesuffix("]")
    names = names.replace("|", r"\|")
    return f"`{names}`", _escaped(meaning.strip()), _escaped(default)


def _table(*cells: str | tuple[str, ...]) -> str:
    """A table of its heads and its rows."""
    heads = tuple(cell for cell in cells if isinstance(cell, str))
    rows = [cell for cell in cells if isinstance(cell, tuple)]
    lines = [heads, ("---",) * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _escaped(text: str) -> str:
    """A text in which markdown finds no markup but code."""
    return re.sub(r"([|*<])", r"\\\1", text)


def _link(name: str) -> str:
    return f"[`{name}`](#memcalc-{name})"


def _aliases() -> str:
    """The other names, by what they mean."""
    found: dict[str, list[str]] = {}
    for alias, meaning in ALIASES.items():
        found.setdefault(" ".join(meaning), []).append(f"`{alias}`")
    rows = ((f"`{meaning}`", ", ".join(aliases)) for meaning, aliases in found.items())
    return _table("option", "other names", *rows)
