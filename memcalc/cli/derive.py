"""``memcalc derive``."""

import os
import re
from pathlib import Path
from typing import Any

import click

from memcalc.cli.command import Command, Word, option
from memcalc.cli.extras import installed
from memcalc.cli.names import as_option
from memcalc.cli.options import CHOICES, KERNELS, SHOW, options
from memcalc.cli.show import show, warn, write
from memcalc.config import IMPLEMENTATIONS, load
from memcalc.lazy import resolve
from memcalc.progress import progress

# Whose model -> the answer, and whether it loads the model itself.
FROM = {
    "own": ("memcalc.validation.deriving.derive:derive_layer", False),
    "transformers": ("memcalc.validation.deriving.derive:derive_model", True),
}
AGAINST = ("ledger",)
DEVICES = ("cuda", "cpu")
SIZES = ("run", "seq_length", "micro_batch_size", "tp")
FACTORY = re.compile(r"(?!hf:)[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class Letters(click.ParamType[dict[str, int]]):
    """Letters with their sizes, as in s=64,b=2."""

    name = "LETTER=SIZE,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> dict[str, int]:
        """The size of each letter."""
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
    type=Word(FROM),
    common=True,
    help="Whose model: memcalc's own layer (own), or Hugging Face's whole model (transformers).  "
    "[default: own]",
)
@option(
    "--against",
    type=Word(AGAINST),
    common=True,
    help="Compare with the exact ledger.  [default: none]",
)
@option(
    "--symbols",
    type=Letters(),
    help="For a factory: names for the sizes of its inputs, such as s=64,b=2.  [default: none]",
)
@option(
    "--at",
    type=Letters(),
    help="For a factory: evaluate the formula at these sizes, and check it by measurement.  "
    "[default: none]",
)
@option(
    "--device",
    type=Word(DEVICES),
    help="For a factory: the device whose kernels are counted.  [default: cuda]",
)
@option(
    "--latex", is_flag=True, group="Output", help="Print only the totals, in LaTeX.  [default: off]"
)
@option(
    "--python",
    is_flag=True,
    group="Output",
    help="Print only the totals, as Python functions.  [default: off]",
)
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
    """Derive the formula of the bytes that a module saves for backward, with PyTorch.

    TARGET is a MODEL, or your function that makes the module, as package.module:factory.

    The module runs on symbolic sizes, without memory or kernels. The forms of TARGET:

    \b
      MODEL                      memcalc's layer of that model, sizes symbolic
      MODEL --from transformers  Hugging Face's model: a formula per kind of layer
      package.module:factory     your function that returns (module, inputs)
                                 or (module, inputs, symbols)

    Only a factory TARGET runs your code.

    With --against ledger the exit status is 1 if the formulas differ. This command needs
    PyTorch: pip install '.[torch]' in memcalc's repository, or '.[transformers]' for
    --from transformers.

    \b
    Examples:
      memcalc derive 175b --sp --recompute selective
      memcalc derive llama-3-70b --tp 8 --sp --against ledger
      memcalc derive path/to/config.json --from transformers
      memcalc derive gpt2 --from transformers --attention unfused --against ledger
      memcalc derive my_package.blocks:make --symbols s=64,b=2 --at s=4096,b=1
    """
    if sum((latex, python, format_ is not None)) > 1:
        raise click.UsageError("choose one of --latex, --python and --format")
    with installed(), progress("loading PyTorch"):
        report = _derived(target, source, against, (symbols, at, device), settings)
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
    """The report of a factory, of a Hugging Face model, or of memcalc's own layer."""
    given = {name: value for name, value in settings.items() if value is not None}
    symbols, at, device = of_factory
    if FACTORY.fullmatch(target) and not os.path.exists(target):
        if given or source or against:
            raise click.UsageError("a factory TARGET takes only --symbols, --at and --device")
        made = resolve("memcalc.validation.deriving.derive:derive_target")
        return made(target, symbols or {}, at or {}, device or "cuda")
    if symbols or at or device:
        raise click.UsageError(
            "--symbols, --at and --device need a factory TARGET (package.module:factory)"
        )
    implied = IMPLEMENTATIONS[given.get("implementation", "megatron")].maker.layers
    answer, whole = FROM[source or implied]
    if whole:
        beside = sorted(set(given) & {"run", "tp", "sp", *CHOICES})
        if beside:
            raise click.UsageError(
                "--from transformers derives one rank without recomputation; drop "
                f"{as_option(beside[0])}"
            )
        return resolve(answer)(target, against, **given)
    return resolve(answer)(load(target, **settings), against)


def _name(row: dict[str, Any]) -> str:
    kind = re.sub(r"\W+", "_", row["layer_kind"])
    return f"{kind}_bytes" if kind else "kept_bytes"
