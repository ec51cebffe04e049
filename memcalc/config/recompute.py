"""Recomputation, in words. A policy is a set of regions: backward runs them again."""

from collections.abc import Iterable

from memcalc.errors import ConfigError, nearest

# The regions that the blocks name, outermost first.
REGIONS = ("layer", "attention", "core_attention", "mlp", "norm")

# The policies with names of their own, and the regions that they recompute.
POLICIES: dict[str, frozenset[str]] = {
    "none": frozenset(),
    "selective": frozenset({"core_attention"}),
    "full": frozenset({"layer"}),
}


def regions(words: Iterable[str]) -> frozenset[str]:
    """The regions that words for recomputation name: policies, regions, or several of them.

    >>> sorted(regions(["selective", "mlp"]))
    ['core_attention', 'mlp']

    Raises:
        ConfigError: A word is neither a policy nor a region.
    """
    words = tuple(words)
    if "none" in words and len(words) > 1:
        raise ConfigError(
            f"recompute none contradicts {', '.join(set(words) - {'none'}) or 'none'}"
        )
    found: set[str] = set()
    for word in words:
        if word in POLICIES:
            found |= POLICIES[word]
        elif word in REGIONS:
            found.add(word)
        else:
            hint = nearest(word[:40], [*POLICIES, *REGIONS])
            raise ConfigError(f"recompute {word[:40]!r} is neither a policy nor a region; {hint}")
    return frozenset(found)
