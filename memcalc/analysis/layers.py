"""What one layer of a config saves, under the run's recomputation."""

from collections.abc import Mapping
from functools import lru_cache

from memcalc.analysis.activations import Entry, counted, kept, total, waiting
from memcalc.blocks.layer import layer_graph
from memcalc.config import Config
from memcalc.graph.mesh import Size


def layer_entries(
    config: Config,
    accounting: str = "paper",
    sizes: Mapping[str, Size] | None = None,
    kind: str | None = None,
) -> list[Entry]:
    """The tensors that one layer saves for backward on one rank.

    Args:
        config: The model, its parallelism and its run.
        accounting: ``paper`` or ``exact``.
        sizes: Sizes by letter, instead of the config's own: ints, Fractions or symbols.
        kind: The kind of layer, as ``memcalc.blocks.layer.kinds`` names them; by default the
            most frequent one.

    Raises:
        UsageError: There is no such accounting.
        ConfigError: The model has no layer of that kind.

    >>> from memcalc.config import load
    >>> [entry.tensor.name for entry in layer_entries(load("22b", recompute="full"))]
    ['layer_input']
    """
    return counted(kept(layer_graph(config, sizes, kind), config.run.policy), accounting)


@lru_cache(1024)
def layer_bytes(config: Config, accounting: str = "paper", kind: str | None = None) -> int:
    """The bytes that one layer saves for backward on one rank. For the arguments, see above.

    >>> from memcalc.config import load
    >>> layer_bytes(load("22b")) // 2**20
    1264
    """
    size: int = total(layer_entries(config, accounting, kind=kind))
    return size


@lru_cache(1024)
def layer_waiting(config: Config, kind: str) -> int:
    """The bytes that one layer of a kind keeps on a rank until its weights have gradients."""
    size: int = waiting(layer_graph(config, kind=kind))
    return size
