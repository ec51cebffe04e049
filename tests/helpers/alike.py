"""One model of the catalog for each set that tests of PyTorch's layers need not tell apart."""

import os
from collections.abc import Iterable, Sequence

from shared import CONFIGS

from memcalc.config import load

# Keys of a config.json that say nothing about layers.
BESIDE = ("architectures", "quantization_config", "torch_dtype", "transformers_version")


def one_of_each(names: Iterable[str], ranks: Sequence[int] = ()) -> list[str]:
    """The first model of every set whose models have the same facts.

    These are the facts:

    - every attribute that is text, and whether every other attribute is set and not 0;
    - how key-value heads and the heads' sizes relate to query heads and to the hidden size;
    - whether a token goes to one expert;
    - for each number of ranks, whether it divides the heads, whether it divides the key-value
      heads, and whether there are fewer of these than ranks;
    - the public config.json: which keys are set (not null, false or 0), and the texts.

    Other sizes are left out, also where code depends on them: whether they are multiples of
    something, and which layers are of which kind. With ``MEMCALC_EVERY_MODEL`` in the environment
    every model is returned.

    Args:
        names: Models of the catalog.
        ranks: Numbers of tensor-parallel ranks that the tests run.
    """
    if "MEMCALC_EVERY_MODEL" in os.environ:
        return list(names)
    first: dict[tuple[object, ...], str] = {}
    for name in names:
        first.setdefault(_facts(name, ranks), name)
    return list(first.values())


def _facts(name: str, ranks: Sequence[int]) -> tuple[object, ...]:
    model = load(name).model
    values = [value for name, value in model.facts().items() if name not in ("name", "source")]
    return (
        model.kv_heads < model.heads,
        model.kv_heads == 1,
        model.heads * model.head_size == model.hidden_size,
        model.latent is None or model.latent.v_head_size == model.head_size,
        model.experts is not None and model.experts.top_k == 1,
        *(value if isinstance(value, str) else _is_set(value) for value in values),
        *((model.heads % t == 0, model.kv_heads % t == 0, model.kv_heads < t) for t in ranks),
        *_said(CONFIGS.get(name, {})),
    )


def _is_set(value: object) -> bool:
    return any(value) if isinstance(value, tuple) else bool(value)


def _said(content: dict[str, object]) -> list[object]:
    """The keys of a config.json and its text config that are set, with texts as their values."""
    text = content.get("text_config")
    content = {**content, **(text if isinstance(text, dict) else {})}
    return [
        (key, value if isinstance(value, str) else None)
        for key, value in sorted(content.items())
        if value and key not in BESIDE and not key.endswith("token_id")
    ]
