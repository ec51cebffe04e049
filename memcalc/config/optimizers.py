"""The optimizers: what each keeps per parameter, and what files call it."""

from typing import NamedTuple

ALL, MATRICES, OTHERS = "all weights", "matrices of the layers", "all other weights"


class Moments(NamedTuple):
    """Moments that an optimizer keeps of some weights, in the dtype of ``Run.moments``.

    Attributes:
        name: What they are called in a table.
        weights: Of which weights: ``ALL``, ``MATRICES`` or ``OTHERS``.
        number: How many of them there are per parameter.
        source: Where they are allocated.
    """

    name: str
    weights: str
    number: int
    source: str


class Optimizer(NamedTuple):
    """An optimizer, as a new one is added: by one record.

    Attributes:
        summary: What it keeps, in a line.
        moments: What it keeps between steps, beside the master weights.
        aliases: What DeepSpeed, gpt-neox, nanotron and Megatron-LM call it too, in lower case.
        step_bytes: Bytes per trained parameter that its step needs beside its moments.
        not_counted: What its step needs that is not counted, or nothing.
    """

    summary: str
    moments: tuple[Moments, ...]
    aliases: tuple[str, ...]
    step_bytes: int
    not_counted: str


ADAM = "PyTorch optim/adam.py, Apex FusedAdam: exp_avg and exp_avg_sq"
SGD = "PyTorch optim/sgd.py: momentum_buffer"
MUON = "Megatron-core optimizer/muon.py: matrices that are no embedding and no head"

OPTIMIZERS = {
    "adam": Optimizer(
        "two moments per parameter (Adam, AdamW)",
        moments=(Moments("Adam's moments", ALL, 2, ADAM),),
        aliases=("adamw", "fusedadam"),
        step_bytes=0,  # one kernel updates a weight in place
        not_counted="",
    ),
    "sgd": Optimizer(
        "a momentum per parameter",
        moments=(Moments("momentum", ALL, 1, SGD),),
        aliases=(),
        step_bytes=0,
        not_counted="",
    ),
    "muon": Optimizer(
        "a momentum per weight of the layers' matrices, Adam's moments for all others",
        moments=(
            Moments("Muon's momentum", MATRICES, 1, MUON),
            Moments("Adam's moments", OTHERS, 2, ADAM),
        ),
        aliases=("dist_muon",),
        step_bytes=0,
        not_counted="temporary buffers of Muon's Newton-Schulz steps, a few copies of one matrix",
    ),
}

# The names that files use, each with the key of its record.
NAMES = {name: key for key, each in OPTIMIZERS.items() for name in (key, *each.aliases)}
