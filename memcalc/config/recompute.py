"""Recomputation, in words. A policy says what backward makes again of a layer."""

from collections.abc import Iterable
from typing import NamedTuple

from memcalc.errors import ConfigError, nearest

# The regions that the blocks name, each with those that it stands in.
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


# Beside kinds of operations, what a policy may cache: of linears, the first product, the third...
EVERY_SECOND = "every second linear"


class Policy(NamedTuple):
    """What backward makes again.

    Attributes:
        regions: Checkpointed regions: what enters one is kept, all else in it is made again.
        cached: Kinds of operations in them whose outputs are kept and not made again (torch's
            selective checkpointing, ``create_selective_checkpoint_contexts``).
        offloaded: Whether what would be kept goes to the host's memory instead.
        dropped: Of the regions, those whose outputs too are let go and made again (Megatron-core's
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


# The policies with names of their own.
POLICIES = {
    "none": Policy(),
    "selective": Policy(frozenset({"core_attention"})),
    "full": Policy(frozenset({"layer"})),
    "save_linear": Policy(frozenset({"layer"}), frozenset({"linear"})),
    "selective_op": Policy(
        frozenset({"layer"}),
        frozenset({EVERY_SECOND, "flash_attention", "efficient_attention", "reduce_scatter"}),
    ),
    "offload": Policy(offloaded=True),
}

# Of full recomputation with a number N, what N counts (Megatron-LM, --recompute-method).
METHODS = {
    "uniform": "layers that are recomputed together, from the input of their first",
    "block": "layers of each pipeline chunk that are recomputed; the others are not",
}

# The words of Megatron-core's --recompute-modules that are not names of regions, or mean more.
MEGATRON_MODULES = {
    "core_attn": Policy(frozenset({"core_attention"})),
    "layernorm": Policy(frozenset({"norm"}), dropped=frozenset({"norm"})),
    "mla_up_proj": Policy(frozenset({"mla_up"}), dropped=frozenset({"mla_up"})),
    "moe_act": Policy(frozenset({"expert_act"}), dropped=frozenset({"expert_act"})),
}


def policy(words: Iterable[str]) -> Policy:
    """What words for recomputation mean: policies, regions, or several of them.

    A region that stands only in others that are made again is made again with them, and once: it
    is left out.

    >>> sorted(policy(["selective", "mlp"]).regions)
    ['core_attention', 'mlp']
    >>> sorted(policy(["moe", "expert_act", "mlp"]).regions)
    ['mlp', 'moe']

    Raises:
        ConfigError: A word is neither a policy nor a region.
    """
    words = tuple(words)
    if "none" in words and len(words) > 1:
        raise ConfigError(
            f"recompute none contradicts {', '.join(set(words) - {'none'}) or 'none'}"
        )
    found = Policy()
    for word in words:
        if word in POLICIES:
            found |= POLICIES[word]
        elif word in MEGATRON_MODULES:
            found |= MEGATRON_MODULES[word]
        elif word in REGIONS:
            found |= Policy(frozenset({word}))
        else:
            known = {*POLICIES, *MEGATRON_MODULES, *REGIONS}
            hint = nearest(word[:40], known, "`memcalc ledger --help`")
            raise ConfigError(f"recompute {word[:40]!r} is neither a policy nor a region; {hint}")
    outermost = frozenset(name for name in found.regions if not _inside(name, found.regions))
    return found._replace(regions=outermost, dropped=found.dropped & outermost)


def _inside(name: str, regions: frozenset[str]) -> bool:
    """Whether all that a region stands in is among regions, or inside them."""
    around = AROUND[name]
    return bool(around) and all(each in regions or _inside(each, regions) for each in around)
