"""Recomputation by words. A policy says what backward recomputes of a layer."""

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from memcalc.errors import ConfigError, nearest

# The regions of the blocks, each with the regions around it.
AROUND: dict[str, tuple[str, ...]] = {
    "layer": (),
    "norm": ("layer",),
    "attention": ("layer",),
    "cross_attention": ("layer",),
    "mla_up": ("attention",),
    "core_attention": ("attention", "cross_attention"),
    "mlp": ("layer",),
    "moe": ("layer",),
    "expert_act": ("moe",),
    "shared_experts": ("moe",),
}
REGIONS = tuple(AROUND)


class Policy(NamedTuple):
    """What backward recomputes.

    Attributes:
        regions: Checkpointed regions: their inputs are saved, all else in them is recomputed.
        cached: Policies that save outputs of operations in them (PyTorch's selective
            checkpointing, ``create_selective_checkpoint_contexts``). Of which operations, these
            say: ``memcalc.graph.graph.OpKind.cached``.
        offloaded: Whether saved tensors move to the host's memory.
        dropped: The regions whose outputs are freed and recomputed too (Megatron-core's
            ``CheckpointWithoutOutput``).
    """

    regions: frozenset[str] = frozenset()
    cached: frozenset[str] = frozenset()
    dropped: frozenset[str] = frozenset()
    offloaded: bool = False

    def __or__(self, other: "Policy") -> "Policy":
        return Policy(
            self.regions | other.regions,
            self.cached | other.cached,
            self.dropped | other.dropped,
            self.offloaded or other.offloaded,
        )


# The policies that have names.
POLICIES = {
    "none": Policy(),
    "selective": Policy(frozenset({"core_attention"})),
    "full": Policy(frozenset({"layer"})),
    "save_linear": Policy(frozenset({"layer"}), frozenset({"save_linear"})),
    "selective_op": Policy(frozenset({"layer"}), frozenset({"selective_op"})),
    "offload": Policy(offloaded=True),
}

# What is recomputed under each --recompute-method, with --recompute-layers, as in Megatron-LM.
METHODS = {
    "uniform": "one checkpoint per {}",
    "block": "the first {} of each model chunk recomputed, the others not",
}

# Words of Megatron-core's --recompute-modules that are not names of regions, or mean more.
MEGATRON_MODULES = {
    "core_attn": Policy(frozenset({"core_attention"})),
    "layernorm": Policy(frozenset({"norm"}), dropped=frozenset({"norm"})),
    "mla_up_proj": Policy(frozenset({"mla_up"}), dropped=frozenset({"mla_up"})),
    "moe_act": Policy(frozenset({"expert_act"}), dropped=frozenset({"expert_act"})),
}


WORDS = frozenset({*POLICIES, *MEGATRON_MODULES, *REGIONS})


def policy(words: Iterable[str]) -> Policy:
    """The policy that words for recomputation mean: policies, regions, or several of them.

    A region inside other recomputed regions is recomputed with them, once: it is left out.

    >>> sorted(policy(["selective", "mlp"]).regions)
    ['core_attention', 'mlp']
    >>> sorted(policy(["moe", "expert_act", "mlp"]).regions)
    ['mlp', 'moe']

    Raises:
        ConfigError: A word is neither a policy nor a region.
    """
    return _policy(tuple(words))


@lru_cache(256)
def _policy(words: tuple[str, ...]) -> Policy:
    if "none" in words and len(words) > 1:
        raise ConfigError("--recompute none cannot be combined with other policies or regions")
    found = Policy()
    for word in words:
        if word in POLICIES:
            found |= POLICIES[word]
        elif word in MEGATRON_MODULES:
            found |= MEGATRON_MODULES[word]
        elif word in REGIONS:
            found |= Policy(frozenset({word}))
        else:
            hint = nearest(word[:40], WORDS, "`memcalc memory --help`")
            if word in METHODS:
                hint = f"use --recompute full --recompute-method {word}"
            raise ConfigError(f"--recompute {word[:40]!r} is neither a policy nor a region; {hint}")
    outermost = frozenset(name for name in found.regions if not _inside(name, found.regions))
    return found._replace(regions=outermost, dropped=found.dropped & outermost)


def _inside(name: str, regions: frozenset[str]) -> bool:
    """Whether all regions around a region are among the regions, or inside them."""
    around = AROUND[name]
    return bool(around) and all(each in regions or _inside(each, regions) for each in around)
