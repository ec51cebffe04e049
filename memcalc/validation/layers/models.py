"""Whole models of Hugging Face: their config.json, config and class in transformers."""

from collections.abc import Mapping
from typing import Any

from memcalc.config import Config
from memcalc.config.run import Run
from memcalc.errors import InputError, nearest
from memcalc.validation.layers.families import as_config
from memcalc.validation.layers.hugging_face import family
from memcalc.validation.measuring.valueless import error_text

MOST_DEEP = 1000  # the most layers of a stack that are built
DEPTHS = ("num_hidden_layers", "num_layers", "num_decoder_layers")


def content_of_model(config: Config) -> dict[str, Any]:
    """A catalog model as a config.json of its family."""
    name, model = family(config), config.model
    sizes = {
        "num_hidden_layers": model.layers,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tied_embeddings,
        "embd_pdrop": model.embedding_dropout,  # of GPT-2 and Phi
        "embedding_dropout": model.embedding_dropout,  # of StarCoder2
    }
    return {
        "model_type": name,
        **{key: value for key, value in sizes.items() if value is not None},
        **as_config(name, model),
    }


def configured(content: Mapping[str, Any], run: Run, depth: int | None = None) -> Any:
    """The config of a model in transformers, of its config.json, at most ``depth`` layers deep.

    Raises:
        InputError: transformers does not know the family, or refuses the file.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    kernels = run.implementation
    words = {k: v for k, v in content.items() if k not in ("model_type", *_BESIDE)}
    family_ = str(content.get("model_type"))
    if family_ not in CONFIG_MAPPING:
        family_ = _SAID_OTHERWISE.get(family_, family_)
    if family_ not in CONFIG_MAPPING:
        raise InputError(
            f"transformers has no family {family_[:40]!r}; {nearest(family_, CONFIG_MAPPING)}"
        )
    try:
        config = AutoConfig.for_model(family_, **words)
        _bounded(config)
        if depth is not None:
            _cut(config, depth)
    except InputError:
        raise
    except Exception as error:  # whatever its validation raises
        raise InputError(
            f"transformers refuses this config of {family_}: {error_text(error)}"
        ) from error
    config._attn_implementation = "eager" if kernels.attention == "unfused" else "sdpa"
    if any("expert" in key for key in words):
        config._experts_implementation = f"{kernels.expert_products}_mm"
    return config


# Families that use another family's code.
_SAID_OTHERWISE = {"kimi_k2": "deepseek_v3"}

# Keys that are left out: they do not describe layers, or need code that is not run here.
_BESIDE = ("architectures", "quantization_config", "auto_map", "torch_dtype", "dtype", "use_cache")


def _bounded(config: Any) -> None:
    """Refuse more layers than any model has, as each of them would be built."""
    for key in DEPTHS:
        if isinstance(layers := getattr(config, key, None), int) and layers > MOST_DEEP:
            raise InputError(f"{key} is {layers}, and must be {MOST_DEEP} or less")


def _cut(config: Any, depth: int) -> None:
    """Cut each stack, and each list with one item per layer, to ``depth`` layers."""
    there = {key: getattr(config, key) for key in DEPTHS if getattr(config, key, None)}
    lists = {
        key: value
        for key, value in vars(config).items()
        if isinstance(value, list) and len(value) in there.values()
    }
    for key, value in there.items():
        setattr(config, key, min(value, depth))
    for key, value in lists.items():
        setattr(config, key, value[:depth])


def class_of(config: Any) -> Any:
    """The model class of a config."""
    import transformers as hub
    from transformers.models.auto import modeling_auto as auto

    kind = type(config)
    masked = kind in auto.MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False)
    if config.is_encoder_decoder:
        return hub.AutoModelForSeq2SeqLM
    if kind in auto.MODEL_FOR_CAUSAL_LM_MAPPING and not masked:
        return hub.AutoModelForCausalLM
    if masked:
        return hub.AutoModelForMaskedLM
    if kind in auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
        return hub.AutoModelForImageClassification
    return hub.AutoModel
