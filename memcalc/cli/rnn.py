"""``memcalc rnn``."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import click

import memcalc
from memcalc.answers.rnn import SCOPES
from memcalc.cli.command import Command, Number, Whole, Word, option
from memcalc.cli.options import SHOW, complete_gpus, options
from memcalc.cli.show import show
from memcalc.config.recurrent import CELLS, KERNELS, PRECISIONS, WHOLE, OnChip

SIZE, STEPS = Whole(1, 2**24), Whole(1, 2**20)

# Option -> the scopes that it is for, where it is not for all.
ASKED: dict[str, tuple[str, ...]] = {
    **{field.name: ("onchip",) for field in fields(OnChip)},
    **dict.fromkeys(("seq_length", "every"), ("training",)),
    **dict.fromkeys(("hidden_size", "batch_size"), ("onchip", "training", "step")),
    **dict.fromkeys(("input_size", "kernels"), ("training", "step", "formula")),
}


ANSWER, NETWORK = "Answer", "Network"
TRAINING, CHIP = "Training over time", "Weights on chip"


@click.command(cls=Command, docs="docs/recurrent.md")
@option(
    "--scope",
    type=Word(SCOPES),
    default="onchip",
    group=ANSWER,
    common=True,
    help="What to answer: onchip, which weights stay in registers; training, what "
    "backpropagation through time keeps; step, every tensor that one time step keeps; formula, "
    "the closed forms.  [default: onchip]",
)
@option(
    "--cell",
    type=Word(CELLS),
    group=NETWORK,
    common=True,
    help="Recurrent cell.  [default: vanilla]",
)
@option(
    "--hidden-size",
    type=SIZE,
    group=NETWORK,
    common=True,
    help="Hidden size.  [default: 2304, as in Zhu et al. 2018]",
)
@option(
    "--input-size",
    type=SIZE,
    group=NETWORK,
    help="Input size of the first layer.  [default: the hidden size]",
)
@option("--layers", type=Whole(1, 1000), group=NETWORK, help="Stacked cells.  [default: 1]")
@option(
    "-b",
    "--batch-size",
    type=SIZE,
    group=NETWORK,
    common=True,
    help="Sequences per batch.  [default: 4]",
)
@option(
    "--precision",
    type=Word(PRECISIONS),
    group=NETWORK,
    help="Dtype of activations.  [default: fp32]",
)
@option(
    "-s",
    "--seq-length",
    type=STEPS,
    group=TRAINING,
    common=True,
    help="With --scope training: time steps (required).",
)
@option(
    "--checkpoint-every",
    "every",
    type=STEPS,
    group=TRAINING,
    help="With --scope training: add a row with a checkpoint every N steps.  "
    "[default: rows without checkpoints and with the best N]",
)
@option(
    "--kernels",
    type=Word(KERNELS),
    group=TRAINING,
    help="PyTorch's cells, operation by operation (torch-cpu) or fused (torch-cuda).  "
    "[default: torch-cpu]",
)
@option(
    "--gpu",
    "gpus",
    metavar="NAME",
    multiple=True,
    group=CHIP,
    common=True,
    shell_complete=complete_gpus,
    help="GPU: a name from `memcalc gpus`, or all; may be repeated.  [default: p100]",
)
@option(
    "--density",
    "densities",
    type=Number(),
    multiple=True,
    group=CHIP,
    common=True,
    help="Share of weights left after pruning; may be repeated.  [default: 0.3]",
)
@option(
    "--value-bytes",
    type=Number(),
    group=CHIP,
    help="Bytes per stored weight.  [default: 4 if dense, both 2 and 4 if pruned]",
)
@option(
    "--index-bytes",
    type=Number(),
    group=CHIP,
    help="Bytes per index of a pruned weight.  [default: as --value-bytes]",
)
@option(
    "--usable",
    type=Number(),
    group=CHIP,
    help="Share of the registers that weights may fill.  [default: 1]",
)
@option(
    "--sms",
    type=Whole(1, WHOLE["sms"]),
    group=CHIP,
    help="SMs that the kernel uses.  [default: all]",
)
@option(
    "--activation-bytes",
    type=Number(),
    group=CHIP,
    help="Bytes per element of the hidden states in shared memory; 0 if not in shared memory.  "
    "[default: 4]",
)
@option(
    "--shared-bytes",
    type=Whole(1, WHOLE["shared_bytes"]),
    group=CHIP,
    help="Shared memory per SM in bytes.  [default: the GPU's]",
)
@option(
    "--sync",
    "sync_seconds",
    type=Number(),
    metavar="SECONDS",
    group=CHIP,
    help="Grid synchronization per step, in seconds.  [default: 0]",
)
@option(
    "--l2-bandwidth",
    type=Number(),
    group=CHIP,
    help="L2 bandwidth in bytes per second.  [default: unlimited]",
)
@option(
    "--peak-flops",
    type=Number(),
    group=CHIP,
    help="FLOP/s of the whole GPU.  [default: its fp32 peak without tensor cores]",
)
@options(*SHOW)
def rnn(scope: str, format_: str | None, output: Path | None, **settings: Any) -> None:
    """Recurrent networks: which weights stay on chip, and what training keeps over time.

    A persistent kernel keeps the recurrent weights, dense or pruned, in a GPU's registers over all
    time steps (Diamos et al. 2016, Zhu et al. 2018). Training saves the activations of every time
    step for backward, or checkpoints the hidden states. The notes list every assumption, with the
    option that changes it.

    \b
    Examples:
      memcalc rnn
      memcalc rnn --hidden-size 1792 --density 0.1 --usable 0.875 --gpu v100
      memcalc rnn --cell lstm --hidden-size 1024 --layers 4 --gpu all --format csv
      memcalc rnn --cell lstm --hidden-size 1024 -b 64 -s 1000 --scope training
      memcalc rnn --cell gru --scope formula
    """
    given = {name: value for name, value in settings.items() if value not in (None, ())}
    shown = {str(each.name): max(each.opts, key=len) for each in rnn.params}
    for name in given:
        if scope not in ASKED.get(name, SCOPES):
            *first, last = ASKED[name]
            scopes = f"{', '.join(first)} or {last}" if first else last
            raise click.UsageError(f"{shown[name]} needs --scope {scopes}, not {scope}")
    every = given.pop("every", None)
    chip = {field.name: given.pop(field.name) for field in fields(OnChip) if field.name in given}
    if "all" in chip.get("gpus", ()):
        chip["gpus"] = ()
    config, on_chip = memcalc.Recurrent(**given), memcalc.OnChip(**chip)
    show(memcalc.rnn(config, on_chip, scope, every), format_, output)
