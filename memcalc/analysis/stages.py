"""The activations of every pipeline stage: chunks weighed by what they hold, orders walked."""

from dataclasses import dataclass

from memcalc.analysis import activations
from memcalc.analysis.layers import layer_bytes
from memcalc.analysis.schedule import order, peak
from memcalc.blocks.embedding import embedding_graph
from memcalc.blocks.head import head_graph
from memcalc.blocks.layer import kind_of
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
    layers = [
        sum(n * layer_bytes(config, accounting, kind) for kind, n in held.items())
        for held in chunks(config, number)
    ]
    embedding = _bytes(embedding_graph(config), accounting) if first else 0
    head = _bytes(head_graph(config), accounting) if last else 0
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


def chunks(config: Config, stage: int) -> list[dict[str, int]]:
    """The layers of each of a stage's chunks, by kind.

    Chunks are dealt out as Megatron-core does: the first to each stage in turn, then the second.

    >>> from memcalc.config import load
    >>> chunks(load("175b"), 0)
    [{'dense': 4}, {'dense': 4}, {'dense': 4}]
    """
    parallel, n = config.parallel, layers_per_chunk(config)
    starts = ((chunk * parallel.pp + stage) * n for chunk in range(parallel.vpp))
    names = ([kind_of(config.model, i) for i in range(start, start + n)] for start in starts)
    return [{kind: held.count(kind) for kind in dict.fromkeys(held)} for held in names]


def output_bytes(config: Config) -> int:
    """The bytes of a stage's output for one micro-batch, as a rank holds and sends it."""
    run, parallel = config.run, config.parallel
    hidden = run.activation_bytes * run.seq_length * run.micro_batch_size * config.model.hidden_size
    return hidden // (parallel.cp * (parallel.tp if parallel.sp else 1))


def _bytes(graph: Graph, accounting: str) -> int:
    kept = activations.kept(graph)
    size: int = activations.total(activations.counted(kept, accounting))
    return size
