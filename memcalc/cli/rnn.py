"""``memcalc rnn``."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import click

import memcalc
from memcalc.answers.rnn import SCOPES
from memcalc.cli.command import Command, Number, Whole, option
from memcalc.cli.options import SHOW, options, show
from memcalc.config.recurrent import CELLS, KERNELS, PRECISIONS, OnChip

COUNT = Whole(0, 2**63)  # bounds are those of the configuration

# Option -> the scopes that ask for it, where not all do.
ASKED: dict[str, tuple[str, ...]] = {
    **{field.name: ("onchip",) for field in fields(OnChip)},
    **dict.fromkeys(("seq_length", "every"), ("training",)),
    **dict.fromkeys(("hidden_size", "batch_size"), ("onchip", "training", "step")),
    **dict.fromkeys(("input_size", "kernels"), ("training", "step", "formula")),
}


@click.command(cls=Command, docs="docs/recurrent.md")
@option("--cell", type=click.Choice(CELLS), help="The cell.  [default: vanilla]")
@option("--hidden-size", type=COUNT, help="Width of a state.  [default: 2304, as Zhu et al. 2018]")
@option("--input-size", type=COUNT, help="Width of a step's input.  [default: the hidden size]")
@option("--layers", type=COUNT, help="Cells on top of one another.  [default: 1]")
@option("-b", "--batch-size", type=COUNT, help="Sequences at once.  [default: 4]")
@option("--precision", type=click.Choice(PRECISIONS), help="Type of activations.  [default: fp32]")
@option(
    "--kernels", type=click.Choice(list(KERNELS)), help="Whose cells train.  [default: torch-cpu]"
)
@option(
    "--scope",
    type=click.Choice(SCOPES),
    default="onchip",
    show_default=True,
    help="What fits on a chip, what training keeps over time, what one step keeps, or the closed "
    "forms.",
)
@option("-s", "--seq-length", type=COUNT, help="For training: time steps.")
@option(
    "--checkpoint-every", "every", type=COUNT, metavar="K", help="For training: steps a checkpoint."
)
@option(
    "--gpu",
    "gpus",
    multiple=True,
    help="A GPU, by its name in `memcalc gpus`; several, or `all`.  [default: p100]",
)
@option(
    "--density",
    "densities",
    type=Number(),
    multiple=True,
    help="Share of weights that pruning leaves; several are allowed.  [default: 0.3]",
)
@option(
    "--value-bytes", type=Number(), help="Bytes of a weight.  [default: 4; pruned, both 2 and 4]"
)
@option("--index-bytes", type=Number(), help="Bytes of its index.  [default: as many as its value]")
@option("--usable", type=Number(), help="Share of registers for weights.  [default: 1]")
@option("--sms", type=COUNT, help="Multiprocessors of the kernel.  [default: all]")
@option(
    "--activation-bytes",
    type=Number(),
    help="Bytes of an element of the states in shared memory; 0: not there.  [default: 4]",
)
@option(
    "--shared-bytes", type=COUNT, help="Shared memory of a multiprocessor.  [default: the GPU's]"
)
@option("--sync", "sync_seconds", type=Number(), metavar="SECONDS", help="A step's grid-wide wait.")
@option("--l2-bandwidth", type=Number(), metavar="BYTES", help="A second, from L2.")
@option(
    "--peak-flops", type=Number(), help="FLOP/s of the GPU.  [default: fp32 without tensor cores]"
)
@options(*SHOW)
def rnn(scope: str, format_: str | None, output: Path | None, **settings: Any) -> None:
    """Recurrent networks: whether their weights stay on chip, and what training them keeps.

    A persistent kernel holds the recurrent weights, dense or pruned, in the registers of a GPU over
    all time steps (Diamos et al. 2016, Zhu et al. 2018). Training keeps what every time step does,
    or checkpoints of the states. What is assumed is listed, and can be set.

    \b
    Examples:
      memcalc rnn
      memcalc rnn --hidden-size 1792 --density 0.1 --density 0.3 --usable 0.875 --gpu v100
      memcalc rnn --cell lstm --hidden-size 1024 --layers 4 --gpu all --format csv
      memcalc rnn --cell lstm --hidden-size 1024 -b 64 -s 1000 --scope training
      memcalc rnn --cell gru --scope formula
    """
    given = {name: value for name, value in settings.items() if value not in (None, ())}
    shown = {str(each.name): max(each.opts, key=len) for each in rnn.params}
    for name in given:
        if scope not in ASKED.get(name, SCOPES):
            raise click.UsageError(
                f"{shown[name]} has no place in the scope {scope}: it is for "
                f"{', '.join(ASKED[name])}"
            )
    every = given.pop("every", None)
    chip = {field.name: given.pop(field.name) for field in fields(OnChip) if field.name in given}
    if "all" in chip.get("gpus", ()):
        chip["gpus"] = ()
    config, on_chip = memcalc.Recurrent(**given), memcalc.OnChip(**chip)
    show(memcalc.rnn(config, on_chip, scope, every), format_, output)
