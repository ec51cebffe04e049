"""Mistral: Llama with a window; and Mixtral: Mistral with experts."""

from memcalc.config.families import experts, llama, names, words
from memcalc.config.families.content import Content
from memcalc.config.families.layers import windows
from memcalc.config.families.record import Facts, Family


def _mistral(said: Content) -> Facts:
    return {**llama.read(said), **windows(said)}


def _mixtral(said: Content) -> Facts:
    return {**_mistral(said), **experts.read(said, said.fact("ffn_size")), "router_norm": True}


FAMILIES = {
    "mistral": Family(
        _mistral,
        architectures=("MistralForCausalLM",),
        defaults={"kv_heads": 8, "sliding_window": 4096},
        layer="MistralDecoderLayer",
        words={**words.GROUPED, **words.WINDOW},
        names=names.PARTS,
    ),
    "mixtral": Family(
        _mixtral,
        architectures=("MixtralForCausalLM",),
        defaults={"kv_heads": 8, "experts": 8, "experts_per_token": 2},
        layer="MixtralDecoderLayer",
        words={**words.GROUPED, **words.WINDOW, **experts.LOCAL},
        names={**names.BLOCK, **names.EXPERTS},
    ),
}
