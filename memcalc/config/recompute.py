"""Recomputation, in words. A policy says what backward makes again of a layer."""

from collections.abc import Iterable
from typing import NamedTuple

from memcalc.errors import ConfigError, nearest

# The regions that the blocks name, outermost first.
REGIONS = (
    *("layer", "norm", "attention", "cross_attention", "mla_up", "core_attention"),
    *("mlp", "moe", "expert_act", "shared_experts"),
)


class Policy(NamedTuple):
    """What backward makes again.

    Attributes:
        regions: Checkpointed regions: what enters one is kept, all else in it is made again.
        cached: Kinds of operations in them whose outputs are kept and not made again (torch's
            selective checkpointing, ``create_selective_checkpoint_contexts``).
        dropped: Of the regions, those whose outputs too are let go and made again (Megatron-core's
            ``CheckpointWithoutOutput``).
    """

    regions: frozenset[str] = frozenset()
    cached: frozenset[str] = frozenset()
    dropped: frozenset[str] = frozenset()

    def __or__(self, other: "Policy") -> "Policy":
        return Policy(*(mine | theirs for mine, theirs in zip(self, other, strict=True)))


# The policies with names of their own.
POLICIES = {
    "none": Policy(),
    "selective": Policy(frozenset({"core_attention"})),
    "full": Policy(frozenset({"layer"})),
    "save_linear": Policy(frozenset({"layer"}), frozenset({"linear"})),
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

    >>> sorted(policy(["selective", "mlp"]).regions)
    ['core_attention', 'mlp']

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
            hint = nearest(word[:40], [*POLICIES, *MEGATRON_MODULES, *REGIONS])
            raise ConfigError(f"recompute {word[:40]!r} is neither a policy nor a region; {hint}")
    return found
