"""``memcalc derive``."""

import os
import re
from pathlib import Path
from typing import Any

import click

from memcalc.cli.command import Command, option
from memcalc.cli.options import CHOICES, KERNELS, SHOW, configure, options, show, warn, write
from memcalc.lazy import resolve

FROM = ("own", "transformers")
AGAINST = ("ledger",)
DEVICES = ("cuda", "cpu")
SIZES = ("run", "seq_length", "micro_batch_size", "tp")
FACTORY = re.compile(r"(?!hf:)[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class Letters(click.ParamType[dict[str, int]]):
    """Letters with their sizes, as in s=64,b=2."""

    name = "LETTERS"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> dict[str, int]:
        """The sizes by letter."""
        if isinstance(value, dict):
            return value
        found = re.findall(r"([A-Za-z_]\w{0,20})=(\d{1,10})(?:,|$)", value)
        if ",".join("=".join(pair) for pair in found) != value:
            self.fail(f"{value[:60]!r} is not of the form s=64,b=2", param, ctx)
        return {letter: int(size) for letter, size in found}


@click.command(cls=Command, docs="docs/pytorch.md")
@click.argument("target")
@options(*SIZES, *CHOICES, *KERNELS)
@option(
    "--from",
    "source",
    type=click.Choice(FROM),
    common=True,
    help="Whose module: memcalc's own layer, or Hugging Face's whole model.  [default: own]",
)
@option(
    "--against",
    type=click.Choice(AGAINST),
    common=True,
    help="Compare with the exact ledger.  [default: none]",
)
@option(
    "--symbols",
    type=Letters(),
    help="For a factory: name sizes of its inputs, as s=64,b=2.  [default: none]",
)
@option(
    "--at",
    type=Letters(),
    help="For a factory: evaluate the formula at these sizes, and measure there too.  "
    "[default: none]",
)
@option(
    "--device",
    type=click.Choice(DEVICES),
    help="For a factory: whose kernels run.  [default: cuda]",
)
@option("--latex", is_flag=True, help="Print only the sums, in LaTeX.  [default: off]")
@option("--python", is_flag=True, help="Print only the sums, as Python functions.  [default: off]")
@options(*SHOW)
def derive(
    target: str,
    source: str | None,
    against: str | None,
    symbols: dict[str, int] | None,
    at: dict[str, int] | None,
    device: str | None,
    latex: bool,
    python: bool,
    format_: str | None,
    output: Path | None,
    **settings: Any,
) -> None:
    """The closed form of what a module keeps, from PyTorch run on sizes that are symbols.

    TARGET is a MODEL as of other commands, of which memcalc's own layer is derived in all its
    sizes; with --from transformers, a Hugging Face config.json, of whose model every kind of layer
    is derived in s and b; or package.module:factory, a callable of your own that returns a module
    and its inputs, and may return their letters as a third. A factory's code is run, and it alone.

    With --against ledger the exit status is 1 where the two forms differ. It needs the extra
    "torch", and --from transformers that of its name.

    \b
    Examples:
      memcalc derive 175b --sp --recompute selective
      memcalc derive llama-3-70b --tp 8 --sp --against ledger
      memcalc derive path/to/config.json --from transformers
      memcalc derive llama-3-8b --from transformers --attention unfused --against ledger
      memcalc derive my_package.blocks:make --symbols s=64,b=2 --at s=4096,b=1
    """
    if sum((latex, python, format_ is not None)) > 1:
        raise click.UsageError("--latex, --python and --format contradict each other")
    try:
        report = _derived(target, source, against, (symbols, at, device), settings)
    except ModuleNotFoundError as error:
        extra = (error.name or "").partition(".")[0]
        if extra not in ("torch", "transformers"):
            raise
        message = f"this needs {extra}: pip install 'activation-memcalc[{extra}]'"
        raise click.UsageError(message) from error
    if not (latex or python):
        show(report, format_, output)
        return
    warn(report.notes)
    sums = [row for row in report.records() if row["tensor"] == "total"]
    write(
        "".join(
            f"{row['formula'].latex() if latex else row['formula'].python(_name(row))}\n\n"
            for row in sums
        ).removesuffix("\n"),
        output,
    )


def _derived(
    target: str,
    source: str | None,
    against: str | None,
    of_factory: tuple[dict[str, int] | None, dict[str, int] | None, str | None],
    settings: dict[str, Any],
) -> Any:
    """The report of a factory, of a model of Hugging Face, or of memcalc's own layer."""
    given = {name: value for name, value in settings.items() if value is not None}
    symbols, at, device = of_factory
    if FACTORY.fullmatch(target) and not os.path.exists(target):
        if given or source or against:
            raise click.UsageError("a factory takes --symbols, --at and --device alone")
        answer = resolve("memcalc.validation.derive:derive_target")
        return answer(target, symbols or {}, at or {}, device or "cuda")
    if symbols or at or device:
        raise click.UsageError("--symbols, --at and --device are a factory's")
    implied = str(given.get("implementation", "")).startswith("transformers-")
    if source == "transformers" or (source is None and implied):
        beside = sorted(set(given) & {"run", "tp", "sp", *CHOICES})
        if beside:
            name = beside[0].replace("_", "-")
            raise click.UsageError(f"--{name} has no place here: one rank, nothing recomputed")
        return resolve("memcalc.validation.derive:derive_model")(target, against, **given)
    return resolve("memcalc.validation.derive:derive_layer")(configure(target, settings), against)


def _name(row: dict[str, Any]) -> str:
    kind = re.sub(r"\W+", "_", row["layer_kind"])
    return f"{kind}_bytes" if kind else "kept_bytes"
