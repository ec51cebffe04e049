"""The activations of every pipeline stage: chunks weighed by what they hold, orders walked."""

from dataclasses import dataclass

from memcalc.analysis import activations
from memcalc.analysis.layers import layer_bytes
from memcalc.analysis.schedule import order, peak
from memcalc.blocks.embedding import embedding_graph
from memcalc.blocks.head import head_graph
from memcalc.config import Config
from memcalc.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Held:
    """What one rank of a stage holds when it holds most activations, in bytes.

    Attributes:
        stage: The stage, counted from 0.
        microbatches: Micro-batches in flight through each of its chunks.
        layers: Of the transformer layers.
        embedding: Of the embedding, on the first stage.
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
    """What a rank of each stage holds at its own peak.

    Args:
        config: The model, its parallelism and its run.
        accounting: ``paper`` or ``exact``.
        frees_outputs: Whether a stage frees its output once it is sent, which is the next stage's
            input (Korthikanti et al. 2022, appendix B).

    Raises:
        ConfigError: The layers do not divide over the stages, or the vocabulary is unknown.

    >>> from memcalc.config import load
    >>> first = stages(load("530b"))[0]
    >>> first.layers / 2**20 / 840
    139.0
    """
    parallel, run = config.parallel, config.run
    chunks = parallel.vpp
    per_chunk, rest = divmod(config.model.layers, parallel.pp * chunks)
    if rest:
        raise ConfigError(
            f"{parallel.pp * chunks} chunks do not divide layers {config.model.layers}"
        )
    layer = layer_bytes(config, accounting)
    embedding = _bytes(activations.kept(embedding_graph(config)), accounting)
    head = _bytes(activations.kept(head_graph(config)), accounting)
    hidden = run.activation_bytes * run.seq_length * run.micro_batch_size * config.model.hidden_size
    output = 0 if frees_outputs else hidden // (parallel.tp if parallel.sp else 1)
    last = parallel.pp - 1

    def hold(stage: int) -> Held:
        # the first chunk of the first stage has the embedding, the last of the last the head
        of_embedding = {0: embedding} if stage == 0 else {}
        of_head = {chunks - 1: head} if stage == last else {}
        of_output = {c: output for c in range(chunks) if (stage, c) != (last, chunks - 1)}

        def weight(chunk: int) -> int:
            ends = of_embedding.get(chunk, 0) + of_head.get(chunk, 0)
            return per_chunk * layer + ends + of_output.get(chunk, 0)

        held = peak(order(stage, parallel.pp, config.microbatches, chunks), weight)

        def times(bytes_: dict[int, int]) -> int:
            return sum(count * bytes_.get(chunk, 0) for chunk, count in held.items())

        return Held(
            stage,
            held,
            per_chunk * layer * sum(held.values()),
            times(of_embedding),
            times(of_head),
            times(of_output),
        )

    return [hold(stage) for stage in range(parallel.pp)]


def _bytes(entries: list[activations.Entry], accounting: str) -> int:
    size: int = activations.total(activations.counted(entries, accounting))
    return size
