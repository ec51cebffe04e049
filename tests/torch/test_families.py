"""Every family of the catalog: transformers' own layers, built from their public configs."""

from dataclasses import replace
from importlib import import_module
from itertools import product
from pathlib import Path

import pytest
import torch
from alike import one_of_each
from shared import CONFIGS
from torch.utils.flop_counter import FlopCounterMode

from memcalc.analysis import flops
from memcalc.analysis.activations import total
from memcalc.analysis.layers import layer_entries
from memcalc.blocks.layer import kind_of, kinds, layer_graph, masked
from memcalc.config import Model, load
from memcalc.errors import NoLayerError, UsageError
from memcalc.validation.layers.families import FAMILIES
from memcalc.validation.layers.hugging_face import REMAINING, HuggingFaceLayer, family
from memcalc.validation.match import IGNORED_STORAGES
from memcalc.validation.measuring.measure import measure
from memcalc.validation.validate import validate

EAGER, SDPA = "transformers-eager", "transformers-sdpa"
# T5's layers have two inputs, and tests of their own: test_stacks
NAMES = [name for name in CONFIGS if name != "t5-11b"]
KINDS = one_of_each(NAMES)
S, B = 64, 2
SHARED = IGNORED_STORAGES.keys() - {""}  # tables that the whole model has once


def public(name):
    """The family of a public config, and what it says of its language model."""
    content = dict(CONFIGS[name].get("text_config", CONFIGS[name]))
    for key in ("architectures", "quantization_config"):
        content.pop(key, None)
    # Kimi-K2 says in its config that its code is DeepSeek-V3's
    return content.pop("model_type").replace("kimi_k2", "deepseek_v3"), content


def supports_sdpa(name):
    """Whether transformers' class of a family takes attn_implementation='sdpa'."""
    module = name.removesuffix("_text")
    modeling = import_module(f"transformers.models.{module}.modeling_{module}")
    classes = [each for each in vars(modeling).values() if isinstance(each, type)]
    return any(vars(each).get("_supports_sdpa") for each in classes)


def layers(name, implementation):
    """A layer of each kind of a catalog's model, with its config and its input."""
    config = load(name, seq_length=S, micro_batch_size=B, implementation=implementation)
    model, (of, content) = config.model, public(name)
    for kind in kinds(config).keys() - {"mtp"}:  # transformers does not build these
        number = [kind_of(config, each) for each in range(model.layers)].index(kind)
        layer = HuggingFaceLayer(of, content, config.run, number, masked(config, kind))
        shape = (B, S, model.hidden_size)
        x = torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)
        yield config, kind, layer, x


def has_layer(name, implementation):
    """Whether transformers has the layer, by ``REMAINING``."""
    remaining = REMAINING.get((public(name)[0], implementation))
    return remaining is None or remaining.bytes is not None


@pytest.mark.parametrize(
    ("name", "implementation"),
    [each for each in product(KINDS, [EAGER, SDPA]) if has_layer(*each)],
)
def test_a_layer_keeps_what_the_exact_ledger_has_and_what_is_said_to_remain(name, implementation):
    remaining = REMAINING.get((public(name)[0], implementation))
    for config, kind, layer, x in layers(name, implementation):
        measured = measure(layer, x)
        assert measured.agrees
        kept = sum(each.bytes for each in measured.stored if each.made_by not in SHARED)
        ledger = total(layer_entries(config, "exact", kind=kind))
        assert kept - ledger == (remaining.bytes if remaining else 0), kind


def test_what_is_said_not_to_be_there_is_what_transformers_does_not_support():
    without = {of for (of, _), remaining in REMAINING.items() if remaining.bytes is None}
    assert without == {of for of in FAMILIES if not supports_sdpa(of)}
    assert {implementation for _, implementation in REMAINING} <= {EAGER, SDPA}
    assert {of for of, _ in REMAINING} <= FAMILIES.keys()


def grouped_mm(x, weight, *args, out_shape=None, **kwargs):
    """PyTorch's counter has no formula for it: each token goes through one expert's weight."""
    return 2 * x[0] * x[1] * weight[-1]


@pytest.mark.parametrize("name", KINDS)
def test_the_unfused_layers_flops_are_those_of_pytorchs_counter(name):
    """Of all s x s scores, causal or not, windowed or not, and of each token's own experts."""
    for config, kind, layer, x in layers(name, EAGER):
        known = {torch.ops.aten._grouped_mm: grouped_mm}
        with FlopCounterMode(display=False, custom_mapping=known) as counter:
            layer(x)
        assert counter.get_total_flops() == flops.forward(layer_graph(config, kind=kind)), kind


@pytest.mark.parametrize("implementation", [EAGER, SDPA])
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_model_is_validated_tensor_by_tensor(name, implementation):
    """From the facts of the catalog's model and its family alone."""
    if not has_layer(name, implementation):
        with pytest.raises(NoLayerError, match="choose --implementation transformers-eager"):
            load(name, implementation=implementation)
        return
    for batch, dropout in ((1, 0.0), (2, None)):
        config = load(
            name,
            seq_length=S,
            micro_batch_size=batch,
            dropout=dropout,
            implementation=implementation,
        )
        assert validate(config, "meta").failures == ()


@pytest.mark.parametrize("name", ["gemma-3-27b", "phi-3-mini", "starcoder2-7b"])
def test_a_layer_beyond_its_window_is_validated_with_the_mask_that_it_is_given(name):
    for batch, length in ((1, 8192), (2, 8193)):  # of which the second is padded to 8200
        sizes = {"seq_length": length, "micro_batch_size": batch}
        report = validate(load(name, implementation=SDPA, **sizes), "meta")
        assert report.failures == ()
        found = {row["tensor"]: row["measured_bytes"] for row in report.records()}
        assert found["mask_bias"] == 2 * batch * length * -(-length // 8) * 8


@pytest.mark.parametrize("name", ["llama-3-8b", "command-r", "gemma-2-9b", "phi-2", "qwen3-8b"])
def test_in_fp32_a_cast_copies_nothing(name):
    config = load(name, seq_length=S, precision="fp32", implementation=EAGER)
    assert validate(config, "meta").failures == ()


def test_experts_are_validated_in_bf16():
    config = load("mixtral-8x7b", seq_length=S, precision="fp16", implementation=SDPA)
    with pytest.raises(UsageError, match="MoE layers of Hugging Face need --precision bf16"):
        validate(config, "meta")


def test_a_models_family_is_that_of_its_public_config():
    found = {name: family(load(name, implementation=EAGER)) for name in NAMES}
    assert found == {name: public(name)[0] for name in found}
    assert {*found.values()} == FAMILIES.keys()


def test_the_family_of_a_model_made_by_hand_is_found_from_its_facts():
    for name in NAMES:
        config = load(name, implementation=EAGER)
        found = family(replace(config, model=replace(config.model, family=None)))
        # without a window, and with as many biases, Mistral's layer is Llama's
        assert found == ("llama" if name == "mistral-7b" else public(name)[0])


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("gpt2", {"position": "rotary"}, "position rotary"),
        ("gpt2", {"kv_heads": 4}, "kv_heads 4"),
        ("llama-3-8b", {"causal": False}, "causal False"),
        ("llama-3-8b", {"hidden_dropout": 0.1}, "hidden_dropout 0.1"),
        ("qwen3-30b-a3b", {"router": "sigmoid"}, "router sigmoid"),
        ("deepseek-v3", {"attention_sinks": True}, "attention_sinks True"),
        ("t5-11b", {}, "encoder_layers 24"),
    ],
)
def test_a_layer_of_no_family_is_refused_with_what_the_nearest_has(name, change, words):
    config = load(name, implementation=EAGER)
    changed = replace(config, model=Model.of(**config.model.facts() | change))
    with pytest.raises(UsageError, match=f"no known Hugging Face layer .*{words}.*the nearest"):
        validate(changed, "meta")


def test_the_page_lists_what_remains():
    page = (Path(__file__).parents[2] / "docs/pytorch.md").read_text()
    for (name, _), remaining in REMAINING.items():
        size = "no such layer" if remaining.bytes is None else f"{remaining.bytes} bytes"
        assert any(
            all(word in row for word in (f"| {name} |", size, remaining.cause))
            for row in page.splitlines()
        ), name
