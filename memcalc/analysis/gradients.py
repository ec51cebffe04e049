"""Gradients that autograd makes in backward: which of them exist at which moment of a step.

Where a framework has a place for every gradient in a buffer, all of them exist all the time.
Elsewhere a gradient is made when backward reaches its weight, and freed after the step. Gradients
of an earlier micro-batch of the same step exist from the start: later ones are added to them.
"""

from collections.abc import Sequence

from memcalc.analysis.parts import Part
from memcalc.analysis.rank import EMBEDDING, HEAD, Rank, table
from memcalc.analysis.states import (
    GRADIENTS,
    in_root,
    recipe,
    unit_gradients,
    weight_dtype,
)
from memcalc.config import Config

TIED_HEAD = "head: gradient of the tied embedding"
SO_FAR = "gradients of all layers and the head"
ENGINE = "PyTorch torch/csrc/autograd/functions/accumulate_grad.h: accumulateGrad"
TIED = "PyTorch torch/csrc/autograd/input_buffer.cpp: InputBuffer::add"


def in_backward(config: Config) -> bool:
    """Whether backward makes the gradients, and the step's end frees them.

    Gradients that are accumulated in another dtype than autograd's have a buffer.

    >>> from memcalc.config import load
    >>> settings = {"main_grads": "bf16", "main_params": "none", "moments": "bf16"}
    >>> in_backward(load("llama-3-8b", implementation="torch", **settings))
    True
    >>> in_backward(load("llama-3-8b", implementation="torch")), in_backward(load("llama-3-8b"))
    (False, False)
    """
    sharded = config.parallel.sharding.own_master  # reduced into shards of the master weights
    same = recipe(config.run).gradient == weight_dtype(config.run)
    return config.framework.gradients_in_backward and (sharded or same)


def before_backward(config: Config) -> bool:
    """Whether all gradients exist while a micro-batch passes: from another one, or kept."""
    return config.run.keep_gradients or config.microbatches > 1


def made(rank: Rank, names: Sequence[str]) -> int:
    """The bytes of the gradients of some units of a rank: layers, ``embedding`` or ``head``."""
    return sum(unit_gradients(rank, name) for name in names)


def made_so_far(rank: Rank, chunk: int) -> list[str]:
    """The units whose backward is done when that of a chunk's layers begins."""
    after = [number for number, place in enumerate(rank.places) if place > rank.places[chunk]]
    layers = [name for number in after for name in rank.chunks[number]]
    return layers + [HEAD] * (rank.head and not in_root(rank.config))


def part(name: str, size: int) -> Part:
    """Gradients that exist at a moment."""
    return Part(name, size, GRADIENTS, "exact", ENGINE)


def of_tied_head(rank: Rank) -> int:
    """The bytes of a tied table's gradient that the head made: it waits for the embedding's."""
    model = rank.config.model
    both = rank.head and rank.embedding and model.tied_embeddings and model.classes is None
    frozen = {EMBEDDING, HEAD} & set(rank.config.run.frozen)
    return table(rank.config) * rank.config.run.activation_bytes if both and not frozen else 0


def waiting(size: int) -> Part:
    """The gradient of a tied table, while it waits for the embedding's backward."""
    return Part(TIED_HEAD, size, GRADIENTS, "exact", TIED)


def unsharded_head(rank: Rank) -> int:
    """The bytes of the head's gradients before they are reduced: FSDP2's root waits for its end."""
    trained = sum(n for kind, n in rank.unit(HEAD) if kind.trained) if rank.head else 0
    return trained * rank.config.run.activation_bytes
