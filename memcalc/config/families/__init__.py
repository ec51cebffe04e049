"""Families of Hugging Face models: a record of each, which reads and writes its config.json.

The records are loaded when a config.json is read, or for ``validate`` and ``derive``.
"""

from memcalc.config.families import (
    bert,
    bloom,
    cohere,
    deepseek,
    falcon,
    gemma,
    glm4_moe,
    gpt2,
    gpt_neo,
    gpt_neox,
    gpt_oss,
    llama,
    mistral,
    opt,
    phi,
    qwen,
    starcoder2,
    t5,
    vit,
)
from memcalc.config.families.record import Family
from memcalc.errors import NoLayerError

# By model_type. Of families that are equally near to a model, the first is taken.
FAMILIES: dict[str, Family] = {
    **gpt2.FAMILIES,
    **llama.FAMILIES,
    **mistral.FAMILIES,
    **qwen.FAMILIES,
    **phi.FAMILIES,
    **gemma.FAMILIES,
    **cohere.FAMILIES,
    **bert.FAMILIES,
    **vit.FAMILIES,
    **t5.FAMILIES,
    **bloom.FAMILIES,
    **falcon.FAMILIES,
    **gpt_neo.FAMILIES,
    **gpt_neox.FAMILIES,
    **opt.FAMILIES,
    **starcoder2.FAMILIES,
    **gpt_oss.FAMILIES,
    **glm4_moe.FAMILIES,
    **deepseek.FAMILIES,
}


def require_layer(name: str, implementation: str) -> None:
    """Refuse a layer that transformers does not have.

    Args:
        name: The family; of one that is not known nothing is refused.
        implementation: The implementation, by its name.

    Raises:
        NoLayerError: With the one to choose.

    >>> require_layer("gemma2", "transformers-sdpa")
    Traceback (most recent call last):
        ...
    memcalc.errors.NoLayerError: gemma2 has no transformers-sdpa layer: sdpa has no soft cap of \
the scores; choose --implementation transformers-eager
    """
    found = FAMILIES.get(name)
    if found and found.built_as:
        found = FAMILIES[found.built_as]
    remaining = found and found.remaining.get(implementation)
    if remaining and remaining.bytes is None:
        raise NoLayerError(
            f"{name} has no {implementation} layer: {remaining.cause}; choose --implementation "
            "transformers-eager"
        )
