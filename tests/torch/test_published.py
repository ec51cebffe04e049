"""The catalog against transformers: published sizes, and what a config leaves out."""

import functools

import pytest
import torch
import transformers
from shared import CONFIGS
from transformers import AutoConfig

from memcalc.analysis.parameters import parameters
from memcalc.config import Model, catalog, load
from memcalc.config.families import FAMILIES
from memcalc.config.readers import huggingface

PAPER = ("22b", "175b", "530b", "1t")

CARD, PAGE, REPORT = "model card", "size on the Hugging Face page", "technical report"

# Parameters as they were printed, and where.
PUBLISHED = {
    "22b": ("22B", "Korthikanti et al. 2022, table 3"),
    "175b": ("174.6B", "Narayanan et al. 2021 (arXiv 2104.04473), table 1"),
    "530b": ("529.6B", "Narayanan et al. 2021, table 1"),
    "1t": ("1008.0B", "Narayanan et al. 2021, table 1"),
    "bert-large": ("336M", CARD),
    "bloom-176b": ("176247271424", CARD),
    "command-r": ("35B", CARD),
    "deepseek-v2-lite": ("15.7B", "DeepSeek-V2 (arXiv 2405.04434), appendix B"),
    "deepseek-v3": ("671B", CARD),
    "falcon-40b": ("41.8B", PAGE),
    "falcon-7b": ("7.22B", PAGE),
    "gemma-2-27b": ("27.2B", PAGE),
    "gemma-2-9b": ("9.24B", PAGE),
    "gemma-3-27b": ("25600M", "Gemma 3 (arXiv 2503.19786), table 1, without embeddings"),
    "glm-4.5": ("358B", PAGE),
    "glm-4.5-air": ("110B", PAGE),
    "gpt-neox-20b": ("20554567680", CARD),
    "gpt-oss-120b": ("116.83B", "gpt-oss model card (arXiv 2508.10925), table 1"),
    "gpt-oss-20b": ("20.91B", "gpt-oss model card (arXiv 2508.10925), table 1"),
    "gpt2": ("124M", CARD),
    "gpt2-large": ("774M", CARD),
    "gpt2-medium": ("355M", CARD),
    "gpt2-xl": ("1558M", "openai/gpt-2, the folder of its weights"),
    "kimi-k2": ("1T", CARD),
    "llama-2-13b": ("13.0B", PAGE),
    "llama-2-70b": ("69.0B", PAGE),
    "llama-2-7b": ("6.74B", PAGE),
    "llama-3-70b": ("70.6B", PAGE),
    "llama-3-8b": ("8.03B", PAGE),
    "llama-3.1-405b": ("406B", PAGE),
    "llama-3.1-70b": ("70.6B", PAGE),
    "llama-3.1-8b": ("8.03B", PAGE),
    "llama-3.2-1b": ("1.24B", PAGE),
    "llama-3.2-3b": ("3.21B", CARD),
    "mistral-7b": ("7.25B", PAGE),
    "mixtral-8x22b": ("141B", CARD),
    "mixtral-8x7b": ("46.7B", CARD),
    "opt-175b": ("175B", "Zhang et al. 2022 (arXiv 2205.01068), table 1"),
    "opt-66b": ("66B", "Zhang et al. 2022 (arXiv 2205.01068), table 1"),
    "phi-2": ("2.78B", PAGE),
    "phi-3-mini": ("3.8B", CARD),
    "phi-4": ("14.7B", PAGE),
    "qwen2-57b-a14b": ("57.41B", "qwenlm.github.io/blog/qwen2, table of models"),
    "qwen2.5-0.5b": ("0.49B", CARD),
    "qwen2.5-1.5b": ("1.54B", CARD),
    "qwen2.5-14b": ("14.8B", PAGE),
    "qwen2.5-32b": ("32.8B", PAGE),
    "qwen2.5-3b": ("3.09B", CARD),
    "qwen2.5-72b": ("72.7B", CARD),
    "qwen2.5-7b": ("7.62B", PAGE),
    "qwen3-235b-a22b": ("235B", CARD),
    "qwen3-30b-a3b": ("30.5B", CARD),
    "qwen3-32b": ("32.8B", CARD),
    "qwen3-8b": ("8.2B", CARD),
    "starcoder2-7b": ("7.17B", PAGE),
    "t5-11b": ("11B", CARD),
    "vit-base": ("86567656", "torchvision, ViT_B_16_Weights"),
    "vit-large": ("304326632", "torchvision, ViT_L_16_Weights"),
}

# What a published number counts and transformers' model does not own, or the other way round.
COUNTED = {
    # the pooler and the head of the next sentence
    "bert-large": lambda m: (m.hidden_size + 1) * m.hidden_size + 2 * m.hidden_size + 2,
    # the file holds the head's weight beside the embedding's, which it equals
    "falcon-40b": lambda m: m.vocab_size * m.hidden_size,
    "falcon-7b": lambda m: m.vocab_size * m.hidden_size,
    "gemma-3-27b": lambda m: -m.vocab_size * m.hidden_size,
    # the layer of multi-token prediction, with copies of the embedding and the head
    "glm-4.5": lambda m: multi_token(m),
    "glm-4.5-air": lambda m: multi_token(m),
}

# What transformers' model owns and memcalc does not count, as the models' notes say.
BESIDE = {
    # two positions that are never used
    "opt-175b": lambda m: 2 * m.hidden_size,
    "opt-66b": lambda m: 2 * m.hidden_size,
}


# transformers' class of a model that does not predict the next token.
TASKS = {
    "bert": "AutoModelForMaskedLM",
    "t5": "AutoModelForSeq2SeqLM",
    "vit": "AutoModelForImageClassification",
}


@functools.cache
def transformers_parameters(name: str, fewer: int = 0) -> int:
    """Parameters of transformers' model of a public config, with so many layers fewer, on meta."""
    config = dict(CONFIGS[name].get("text_config", CONFIGS[name]))
    for key in ("architectures", "quantization_config"):
        config.pop(key, None)
    family = config.pop("model_type").replace("kimi_k2", "deepseek_v3")
    if fewer:
        config["num_hidden_layers"] -= fewer
    kind = getattr(transformers, TASKS.get(family, "AutoModelForCausalLM"))
    with torch.device("meta"):
        model = kind.from_config(transformers.AutoConfig.for_model(family, **config))
    return sum(parameter.numel() for parameter in model.parameters())


def multi_token(model: Model) -> int:
    """A layer, what joins its two inputs, three norms, and copies of the embedding and the head."""
    h, v = model.hidden_size, model.vocab_size
    layer = transformers_parameters(model.name) - transformers_parameters(model.name, fewer=1)
    return layer + 2 * h**2 + 3 * h + 2 * v * h


def digits(printed: str) -> tuple[float, float]:
    """A printed number, and half of its last digit.

    >>> digits("46.7B")
    (46700000000.0, 50000000.0)
    """
    unit = {"T": 1e12, "B": 1e9, "M": 1e6}.get(printed[-1])
    number = printed if unit is None else printed[:-1]
    places = len(number.partition(".")[2])
    return float(number) * (unit or 1), (unit or 1) * 10.0**-places / 2


def test_every_model_has_a_published_size():
    assert sorted(PUBLISHED) == catalog.names()


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_model_is_as_large_as_was_published(name):
    model = load(name).model
    count = parameters(load(name)) if name in PAPER else transformers_parameters(name)
    count += COUNTED.get(name, lambda m: 0)(model)
    published, half = digits(PUBLISHED[name][0])
    assert abs(count - published) <= half


@pytest.mark.parametrize("name", CONFIGS)
def test_the_graphs_weights_are_those_of_transformers_model(name):
    beside = BESIDE.get(name, lambda m: 0)(load(name).model)
    assert parameters(load(name)) + beside == transformers_parameters(name)


SIZES = {
    "num_hidden_layers": 24,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "intermediate_size": 512,
    "num_experts_per_tok": 2,
}


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"gemma3", "kimi_k2"}))
def test_what_a_config_leaves_out_is_what_transformers_takes(family):
    """Asked for: the sizes; everything else is left to the family's class."""
    theirs = AutoConfig.for_model(family, **SIZES)
    ours = huggingface.read({"model_type": family, **SIZES}, "x").model
    facts = ours.facts()
    same = {
        "num_key_value_heads": ours.kv_heads,
        "tie_word_embeddings": ours.tied_embeddings,
        "num_experts": facts["experts"] or 0,
        "n_routed_experts": facts["experts"],
        "moe_intermediate_size": facts["expert_ffn_size"],
        "kv_lora_rank": facts["kv_lora_rank"],
        "q_lora_rank": facts["q_lora_rank"],
        "v_head_dim": facts["v_head_size"],
        "num_mtp_layers": ours.mtp_layers,
        "attn_logit_softcapping": ours.attention_softcap,
        "final_logit_softcapping": ours.final_softcap,
        "attention_dropout": ours.attention_dropout,
        "attn_pdrop": ours.attention_dropout,
        "resid_pdrop": ours.hidden_dropout,
        "hidden_dropout": ours.hidden_dropout,
        "hidden_dropout_prob": ours.hidden_dropout,
        "attention_probs_dropout_prob": ours.attention_dropout,
    }
    if ours.latent:
        del same["num_key_value_heads"]  # all heads share what is compressed
        assert theirs.qk_head_dim == ours.head_size
    elif getattr(theirs, "head_dim", None) is not None:
        assert theirs.head_dim == ours.head_size
    for name, value in same.items():
        assert getattr(theirs, name, value) == value, name
    windows = getattr(theirs, "layer_types", None)
    window = getattr(theirs, "sliding_window", None) or None
    if windows is not None:
        found = tuple(int(kind == "sliding_attention") for kind in windows)
        assert found == (ours.window_layers or (0,) * 24)
        window = window if any(found) else None
    if family == "gpt_neo":  # other names of both
        window = theirs.window_size
        assert ours.window_layers == tuple(int(kind == "local") for kind in theirs.attention_layers)
    assert window == ours.sliding_window
