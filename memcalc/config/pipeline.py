"""Pipelines: the schedules, and how a model's layers are split into chunks.

A pipeline is a sequence of model chunks, from the embedding to the loss. A pipeline rank has one or
several: ``memcalc.analysis.schedule`` says which.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from memcalc.config import fields
from memcalc.errors import ConfigError
from memcalc.units import counted

# Large models have some 200 layers, DeepNet (arXiv 2203.00555) 1,000, and pipelines up to 128
# stages. Each layer and stage is walked: with more than these an answer would take seconds.
MOST = 4096  # layers of a stack of a model, or model chunks of a pipeline
MOST_STAGES = 1024


Refusal = tuple[str, list[int]]  # why micro-batches cannot run, and the nearest numbers that can


def any_number(stages: int, group: int, number: int) -> Refusal | None:
    """Most schedules run any number of micro-batches."""
    return None


def whole_groups(stages: int, group: int, number: int) -> Refusal | None:
    """Interleaved 1F1B needs a group, and a last group that is as long as the pipeline.

    Megatron-core, pipeline_parallel/schedules.py: forward_backward_pipelining_with_interleaving.

    Args:
        stages: p, the stages of the pipeline.
        group: Micro-batches that run through a chunk before the next one's turn.
        number: The micro-batches of an iteration.

    >>> whole_groups(8, 8, 12)
    ('12 micro-batches in groups of 8 leave a last group of 4, fewer than the 8 stages', [8, 16])
    >>> whole_groups(8, 8, 64)
    """
    if number < group:
        return f"a group has {group} micro-batches, but an iteration only {number}", [group]
    whole, last = number - number % group, number % group
    if 0 < last < stages:
        left = f"{number} micro-batches in groups of {group} leave a last group of {last}"
        return f"{left}, fewer than the {stages} stages", [whole, whole + stages]
    return None


def two_per_stage(stages: int, group: int, number: int) -> Refusal | None:
    """DualPipe needs two micro-batches per stage, as many from either end.

    deepseek-ai/DualPipe, dualpipe.py: step.

    >>> two_per_stage(4, 4, 9)
    ('the number of micro-batches must be even, not 9', [8, 10])
    """
    if number < 2 * stages:
        least = 2 * stages
        return f"{stages} stages need at least {least} micro-batches, not {number}", [least]
    if number % 2:
        return f"the number of micro-batches must be even, not {number}", [number - 1, number + 1]
    return None


class Schedule(NamedTuple):
    """A pipeline schedule.

    Attributes:
        summary: What it does, in a line.
        order: The function that yields a stage's steps, as ``module:name``. It takes the stage, the
            number of stages and of micro-batches; an interleaved one also the model chunks per rank
            and the micro-batches per group.
        chunks: Model chunks per rank; None where ``--vpp`` says how many: it is interleaved.
        ranks_per_chunk: Pipeline ranks that hold each chunk, each for a part of the micro-batches.
        splits_backward: Whether input gradients and weight gradients are computed apart.
        filling: Micro-batches per stage that fill the pipeline; None is one per chunk of a rank.
        rounds: Rounds of micro-batches that are walked, since a full pipeline repeats itself. A
            round is a group if interleaved, else one micro-batch per stage and rank of a chunk;
            None is all of them.
        walks_full: Whether its order is that of a full pipeline without the missing micro-batches.
        refuses: Why it cannot run a number of micro-batches, and the nearest numbers that it can.
    """

    summary: str
    order: str
    chunks: int | None
    ranks_per_chunk: int
    splits_backward: bool
    filling: int | None
    rounds: int | None
    walks_full: bool
    refuses: Callable[[int, int, int], Refusal | None]


ONE_CHUNK, SEVERAL_CHUNKS = "1f1b", "interleaved"  # what runs where nobody names a schedule

SCHEDULES = {
    "gpipe": Schedule(
        "all micro-batches forward, then all backward",
        "memcalc.analysis.schedule:gpipe",
        chunks=1,
        ranks_per_chunk=1,
        splits_backward=False,
        filling=None,
        rounds=None,  # all of them are in flight
        walks_full=False,
        refuses=any_number,
    ),
    "1f1b": Schedule(
        "forwards until the pipeline is full, then one forward, one backward",
        "memcalc.analysis.schedule:one_f_one_b",
        chunks=1,
        ranks_per_chunk=1,
        splits_backward=False,
        filling=None,
        rounds=1,
        walks_full=False,
        refuses=any_number,
    ),
    "interleaved": Schedule(
        "1F1B over several model chunks per rank",
        "memcalc.analysis.schedule:interleaved",
        chunks=None,
        ranks_per_chunk=1,
        splits_backward=False,
        filling=None,
        rounds=3,
        walks_full=False,
        refuses=whole_groups,
    ),
    "zb-h1": Schedule(
        "zero bubble ZB-H1: backward is split, and weight gradients fill the bubbles; every rank "
        "holds up to p micro-batches",
        "memcalc.analysis.schedule:zb_h1",
        chunks=1,
        ranks_per_chunk=1,
        splits_backward=True,
        filling=None,
        rounds=4,
        walks_full=False,
        refuses=any_number,
    ),
    "zb-h2": Schedule(
        "zero bubble ZB-H2: as zb-h1, with up to 2p-1 micro-batches in flight, so that no "
        "bubble is left",
        "memcalc.analysis.schedule:zb_h2",
        chunks=1,
        ranks_per_chunk=1,
        splits_backward=True,
        filling=2,
        rounds=4,
        walks_full=False,
        refuses=any_number,
    ),
    "zb-v": Schedule(
        "two model chunks per rank in a V (rank 0 holds the first and the last); split backward",
        "memcalc.analysis.schedule:zb_v",
        chunks=2,
        ranks_per_chunk=1,
        splits_backward=True,
        filling=None,
        rounds=4,
        walks_full=True,
        refuses=any_number,
    ),
    "dualpipe": Schedule(
        "bidirectional: micro-batches enter at both ends; every rank i holds the weights of two "
        "stages, i and p-1-i",
        "memcalc.analysis.schedule:dualpipe",
        chunks=2,
        ranks_per_chunk=2,
        splits_backward=True,
        filling=None,
        rounds=4,
        walks_full=False,
        refuses=two_per_stage,
    ),
}


class Chunk(NamedTuple):
    """The layers of one model chunk.

    Attributes:
        layers: Transformer layers.
        further: Multi-token prediction layers.
    """

    layers: int
    further: int = 0


def layout(value: Any) -> tuple[Chunk, ...]:
    """Chunks in the order of the pipeline, from their numbers of layers or Megatron-LM's letters.

    The letters are those of ``--pipeline-model-parallel-layout``: E the embedding, t a layer, m one
    of multi-token prediction, L the loss, and a bar between chunks. (The embedding is always in the
    first chunk, the loss in the last.)

    >>> [chunk.layers for chunk in layout("1,2,2,3")]
    [1, 2, 2, 3]
    >>> layout("Et*2|(tt|)*2tmL")[-1], len(layout("Et*2|(tt|)*2tmL"))
    (Chunk(layers=1, further=1), 4)

    Raises:
        ConfigError: The value is not a layout, or has too many layers.
    """
    if isinstance(value, str) and len(value) <= 2 * MOST:
        text = "".join(value.split())
        if not re.fullmatch(r"[0-9]{1,6}(,[0-9]{1,6})*", text):
            return _letters(text)
        value = [int(number) for number in text.split(",")]
    listed = isinstance(value, (list, tuple)) and 0 < len(value) <= MOST
    if listed and all(isinstance(each, Chunk) for each in value):
        return tuple(value)
    if not listed or not all(type(each) is int and 0 <= each <= MOST for each in value):
        raise ConfigError(
            "--layout must be layers per chunk, such as 1,2,2,3, or Megatron's letters, such as "
            f"Et|(tt|)*2tL, not {fields.shown(value)}"
        )
    return tuple(Chunk(each) for each in value)


def _letters(text: str) -> tuple[Chunk, ...]:
    """Chunks from Megatron-LM's letters (its pipeline_parallel_layer_layout.py)."""
    text = text.replace(",", "")
    # first what is in parentheses is repeated, then single letters
    for pattern in (r"\(([^()]+)\)\*([0-9]{1,6})", r"([EtmL|])\*([0-9]{1,6})"):
        length = sum(len(m[1]) * int(m[2]) for m in re.finditer(pattern, text))
        if length > MOST:
            raise ConfigError(f"--layout must have at most {MOST} layers and chunks")
        text = re.sub(pattern, lambda m: m[1] * int(m[2]), text)
    if not re.fullmatch(r"\|*E[tm|]*L\|*", text):
        raise ConfigError(
            "--layout must be layers per chunk, such as 1,2,2,3, or letters: E (embedding, first), "
            "t (layer), m (multi-token prediction), L (loss, last), with | between chunks; not "
            f"{fields.shown(text)}"
        )
    chunks = text.split("|")
    if "E" not in chunks[0] or "L" not in chunks[-1]:
        raise ConfigError("--layout must have E in its first chunk and L in its last")
    if "t" in text[text.find("m") :] and "m" in text:
        raise ConfigError("--layout must have every layer (t) before multi-token prediction (m)")
    return tuple(Chunk(chunk.count("t"), chunk.count("m")) for chunk in chunks)


def even(layers: int, chunks: int, embedding: bool = False, loss: bool = False) -> list[int]:
    """The layers of each chunk of an even split; the first ones have the remainder.

    Embedding and loss may count as layers (Megatron-LM's
    ``--account-for-embedding-in-pipeline-split`` and ``-loss-``).

    >>> even(10, 4), even(6, 8, embedding=True, loss=True)
    ([3, 3, 2, 2], [0, 1, 1, 1, 1, 1, 1, 0])
    """
    each, rest = divmod(layers + embedding + loss, chunks)
    found = [each + (number < rest) for number in range(chunks)]
    found[0] -= embedding
    found[-1] -= loss
    return found


def uneven(
    layers: int, stages: int, virtual: int, first: int | None, last: int | None
) -> list[int]:
    """The layers of each chunk where the first or last rank has its own number of layers.

    As Megatron-LM's ``--decoder-first-pipeline-num-layers`` and ``-last-``.

    >>> uneven(8, 4, 1, first=1, last=3)
    [1, 2, 2, 3]

    Raises:
        ConfigError: The other ranks do not divide the rest, or chunks the layers of a rank.
    """
    of = {0: first, stages - 1: last}
    own = {rank: number for rank, number in of.items() if number is not None}
    rest, others = layers - sum(own.values()), stages - len(own)
    if rest < 0 or (others == 0 and rest):
        said = " and ".join(map(str, own.values()))
        raise ConfigError(
            f"--first-stage-layers and --last-stage-layers ({said}) do not fit the model's "
            f"{layers} layers"
        )
    if others and rest % others:
        raise ConfigError(
            f"{counted(rest, 'layer')} cannot be split evenly over the other {others} stages: "
            "change --first-stage-layers or --last-stage-layers"
        )
    ranks = [own.get(rank, rest // max(1, others)) for rank in range(stages)]
    for number in ranks:
        fields.divides(("--vpp", virtual), ("layers per stage", number))
    return [number // virtual for number in ranks] * virtual
