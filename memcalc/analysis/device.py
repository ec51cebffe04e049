"""A GPU at every pipeline stage: what it holds in each phase of a step, and where the peak is.

A phase is a moment of an iteration; what it holds is a list of named parts, each with its source.
The peak is the largest phase, never a sum of peaks.
"""

from collections.abc import Sequence
from typing import NamedTuple

from memcalc.config import Config

GROUPS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers")

CERTAINTIES = {
    "exact": "follows from shapes and types",
    "framework-dependent": "what this framework allocates, read from its source",
    "estimated": "what is not known to the byte",
}


class Part(NamedTuple):
    """Bytes that a GPU holds, with where that was seen.

    Attributes:
        name: What it is.
        bytes: Its bytes on one rank.
        group: A word of ``GROUPS``.
        certainty: A word of ``CERTAINTIES``.
        source: The framework's source file, or the vendor's document.
    """

    name: str
    bytes: int
    group: str
    certainty: str
    source: str


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
    """What a rank of each stage holds, phase by phase."""
    raise NotImplementedError
