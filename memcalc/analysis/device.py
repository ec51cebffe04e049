"""A GPU at every pipeline stage: what it holds in each phase of a step, and where the peak is.

A phase is a moment of an iteration; what it holds is a list of named parts, each with its source.
The peak is the largest phase, never a sum of peaks.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from memcalc.analysis import activations, buffers, stages, walk
from memcalc.analysis.parts import Part
from memcalc.analysis.stages import chunks
from memcalc.analysis.states import buckets, states
from memcalc.analysis.walk import Moment
from memcalc.blocks.head import head_graph
from memcalc.blocks.layer import layer_graph
from memcalc.config import Config
from memcalc.config.recompute import Policy
from memcalc.graph.graph import Graph

LEDGER = "the ledger: `memcalc ledger`"


class Phase(NamedTuple):
    """A moment of a step, with what a GPU holds then.

    Attributes:
        name: The moment.
        parts: What is held.
    """

    name: str
    parts: Sequence[Part]

    @property
    def bytes(self) -> int:
        """All of it."""
        return sum(part.bytes for part in self.parts)


class StageMemory(NamedTuple):
    """What one rank of a pipeline stage holds.

    Attributes:
        stage: The stage, counted from 0.
        layers: Its transformer layers.
        in_flight: Micro-batches of each of its chunks when it holds most activations.
        phases: The moments of a step, in their order; the last is between steps.
    """

    stage: int
    layers: int
    in_flight: dict[int, int]
    phases: Sequence[Phase]

    @property
    def peak(self) -> Phase:
        """The phase that holds most."""
        return max(self.phases, key=lambda phase: phase.bytes)

    @property
    def steady(self) -> Phase:
        """What stays between steps."""
        return self.phases[-1]


def device(config: Config) -> list[StageMemory]:
    """What a rank of each stage holds, phase by phase.

    Raises:
        ConfigError: The vocabulary is unknown, or the schedule cannot run the micro-batches.

    >>> from memcalc.config import load
    >>> first, *_, last = device(load("22b", tp=8, pp=4, global_batch_size=16))
    >>> first.in_flight, last.in_flight
    ({0: 4}, {0: 1})
    """
    return [stage_memory(config, stage) for stage in range(config.parallel.pp)]


def stage_memory(config: Config, stage: int) -> StageMemory:
    """What a rank of one stage holds, phase by phase; the stage is counted from 0."""
    names = [name for chunk in chunks(config, stage) for name in chunk]
    held = stages.stage(config, stage, "exact")
    there = [*states(config, stage), *buffers.lasting(config, stage)]
    in_flight = [
        Part("layers' activations", held.layers, "activations", "exact", LEDGER),
        Part("embedding's activations", held.embedding, "activations", "exact", LEDGER),
    ]
    phases = [
        Phase(name, [part for part in (*there, *in_flight, *parts) if part.bytes])
        for name, parts in _moments(config, stage)
    ]
    step = [*there, *buckets(config, stage, "step")]
    over = [*step, *buffers.between_steps(config, stage)]
    phases += [Phase("optimizer step", step), Phase("between steps", over)]
    return StageMemory(stage, len(names), held.microbatches, phases)


def _moments(config: Config, stage: int) -> Iterator[tuple[str, list[Part]]]:
    """What comes to what is in flight at each moment of the micro-batch that passes."""
    forward = [*buckets(config, stage, "forward"), *buffers.in_a_pass(config, stage, "forward")]
    backward = [*buckets(config, stage, "backward"), *buffers.in_a_pass(config, stage, "backward")]
    fused = config.run.environment.fused_gradients
    kind = chunks(config, stage)[-1][-1:]
    if kind:
        graph, policy = layer_graph(config, kind=kind[0]), config.run.policy
        yield "forward", [*forward, *_working(graph, policy, walk.forward(graph, policy))]
    if stage == config.parallel.pp - 1:
        head, further = head_graph(config), config.model.mtp_layers
        kept = further * activations.total(activations.kept(head))
        before = [Part("heads of further tokens", kept, "logits", "exact", LEDGER)]
        yield "loss", [*forward, *before, *_logits(walk.forward(head))]
        moment = walk.backward(head, fused=fused, gathers=not buffers.is_megatron(config))
        yield "head backward", [*backward, *before, *_logits(moment)]
    if kind:
        own = buffers.has_te(config) or not buffers.is_megatron(config)
        moment = walk.backward(graph, policy, fused, gathers=own)
        yield "backward", [*backward, *_working(graph, policy, moment)]


def _logits(moment: Moment) -> list[Part]:
    return [
        Part("head: kept", moment.kept, "logits", "exact", LEDGER),
        Part(f"head: {moment.op} at work", moment.working, "logits", "exact", LEDGER),
        Part("head: gradient of its weight", moment.weight, "gradients", "exact", LEDGER),
    ]


def _working(graph: Graph, policy: Policy, moment: Moment) -> list[Part]:
    """What a layer holds at a moment beside what it keeps, which is in flight already."""
    more = moment.kept + moment.working - activations.total(activations.kept(graph, policy))
    name = f"layer: {moment.op} at work"
    return [
        Part(name, more, "activations", "framework-dependent", LEDGER),
        Part("layer: gradient of a weight", moment.weight, "gradients", "exact", LEDGER),
    ]
