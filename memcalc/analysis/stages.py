"""The activations of every pipeline stage: chunks weighed by what they hold, orders walked."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from memcalc.analysis import activations
from memcalc.analysis.layers import layer_bytes
from memcalc.analysis.schedule import order, peak
from memcalc.blocks.embedding import embedding_graph
from memcalc.blocks.head import head_graph
from memcalc.blocks.layer import MTP, kind_of, kinds
from memcalc.blocks.layer import layers as layers_of
from memcalc.config import Config
from memcalc.errors import ConfigError
from memcalc.graph.graph import Graph


@dataclass(frozen=True, slots=True)
class Held:
    """What one rank of a stage holds when it holds most activations, in bytes.

    Attributes:
        stage: The stage, counted from 0.
        microbatches: Micro-batches in flight through each of its chunks.
        layers: Of the transformer layers.
        embedding: Of the embedding, on the first stage; of an encoder-decoder, with the encoder's
            end.
        head: Of the last norm, the logits and the loss, on the last stage.
        outputs: Of the stage's outputs, where they are not freed once they are sent.
    """

    stage: int
    microbatches: dict[int, int]
    layers: int
    embedding: int
    head: int
    outputs: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.layers + self.embedding + self.head + self.outputs


def stages(config: Config, accounting: str = "paper", frees_outputs: bool = True) -> list[Held]:
    """What a rank of each stage holds at its own peak; the arguments are those of ``stage``.

    >>> from memcalc.config import load
    >>> [held.microbatches[0] for held in stages(load("1t"))][:3]
    [64, 63, 62]
    """
    return [
        stage(config, number, accounting, frees_outputs) for number in range(config.parallel.pp)
    ]


def stage(
    config: Config, number: int, accounting: str = "paper", frees_outputs: bool = True
) -> Held:
    """What a rank of one stage holds at its peak.

    Args:
        config: The model, its parallelism and its run.
        number: The stage, counted from 0.
        accounting: ``paper`` or ``exact``.
        frees_outputs: Whether a stage frees its output once it is sent, which is the next stage's
            input (Korthikanti et al. 2022, appendix B).

    Raises:
        ConfigError: The layers do not divide over the stages, or the vocabulary is unknown.

    >>> from memcalc.config import load
    >>> stage(load("530b"), 0).layers / 2**20 / 840
    139.0
    """
    parallel = config.parallel
    first, last = number == 0, number == parallel.pp - 1
    layers = [chunk_bytes(config, names, accounting) for names in chunks(config, number)]
    embedding = _bytes(embedding_graph(config), accounting) if first else 0
    heads = 1 + config.model.mtp_layers
    head = heads * _bytes(head_graph(config), accounting) if last else 0
    output = 0 if frees_outputs else output_bytes(config)
    final = parallel.vpp - 1

    # the first chunk of the first stage has the embedding; the last of the last has the head, and
    # sends no output
    def ends(chunk: int) -> tuple[int, int, int]:
        of_head = head if chunk == final else 0
        sends = not (last and chunk == final)
        return (embedding if chunk == 0 else 0), of_head, (output if sends else 0)

    steps = order(number, parallel.pp, config.microbatches, parallel.vpp)
    held = peak(steps, lambda chunk: layers[chunk] + sum(ends(chunk)))
    parts = [sum(n * ends(chunk)[part] for chunk, n in held.items()) for part in range(3)]
    return Held(number, held, sum(n * layers[chunk] for chunk, n in held.items()), *parts)


def layers_per_chunk(config: Config) -> int:
    """The layers of each chunk of the pipeline.

    Raises:
        ConfigError: The chunks do not divide the layers.
    """
    chunks = config.parallel.pp * config.parallel.vpp
    layers, rest = divmod(layers_of(config.model), chunks)
    if rest:
        raise ConfigError(f"{chunks} chunks do not divide layers {config.model.layers}")
    return layers


def chunks(config: Config, stage: int) -> list[list[str]]:
    """The kinds of the layers of each of a stage's chunks, in order.

    Chunks are dealt out as Megatron-core does: the first to each stage in turn, then the second.
    The last has the layers that predict further tokens, each with a head of its own.

    >>> from memcalc.config import load
    >>> chunks(load("175b"), 0)[0]
    ['dense', 'dense', 'dense', 'dense']
    """
    parallel, n = config.parallel, layers_per_chunk(config)
    starts = ((chunk * parallel.pp + stage) * n for chunk in range(parallel.vpp))
    found = [[kind_of(config.model, i) for i in range(start, start + n)] for start in starts]
    if stage == parallel.pp - 1:
        found[-1] += [MTP] * config.model.mtp_layers
    return found


def chunk_bytes(config: Config, names: Sequence[str], accounting: str) -> int:
    """What the layers of a chunk keep of one micro-batch, of kinds in their order.

    Of full recomputation by blocks, the layers after the first N keep all; uniform, the first of
    every N layers keeps the input of all.
    """
    run, number = config.run, config.run.recompute_layers or 1
    everything = replace(config, run=run.recomputing("none"))
    if run.recompute_method == "block" and run.recompute_layers is not None:
        again, whole = names[:number], names[number:]
    else:  # number 1 is every layer alone
        again, whole = names[::number], ()
    return sum(layer_bytes(config, accounting, kind) for kind in again) + sum(
        layer_bytes(everything, accounting, kind) for kind in whole
    )


def recomputed_layers(config: Config) -> dict[str, int]:
    """How many layers of each kind are recomputed in backward, by the run's policy.

    >>> from memcalc.config import load
    >>> settings = {"recompute": "full", "recompute_method": "block", "recompute_layers": 1}
    >>> recomputed_layers(load("175b", **settings))
    {'dense': 24}
    """
    run, there = config.run, kinds(config.model)
    if run.recompute_method != "block" or run.recompute_layers is None:
        return there
    found = dict.fromkeys(there, 0)
    for number in range(config.parallel.pp):
        for names in chunks(config, number):
            for kind in names[: run.recompute_layers]:
                found[kind] += 1
    return found


def output_bytes(config: Config) -> int:
    """The bytes of a stage's output for one micro-batch, as a rank holds and sends it."""
    run, parallel = config.run, config.parallel
    hidden = run.activation_bytes * run.seq_length * run.micro_batch_size * config.model.hidden_size
    return hidden // (parallel.cp * (parallel.tp if parallel.sp else 1))


def _bytes(graph: Graph, accounting: str) -> int:
    kept = activations.kept(graph)
    size: int = activations.total(activations.counted(kept, accounting))
    return size
