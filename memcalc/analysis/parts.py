"""Named parts of what a GPU holds: each with its bytes, how sure they are, and their source."""

from collections.abc import Iterable
from typing import NamedTuple

GROUPS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers")

CERTAINTIES = {
    "exact": "follows from shapes and dtypes",
    "framework-dependent": "read from the framework's source",
    "estimated": "an approximation, not known to the byte",
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


def total(parts: Iterable[Part]) -> int:
    """The bytes of all parts."""
    return sum(part.bytes for part in parts)
