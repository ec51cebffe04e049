"""Bytes that PyTorch was measured to save (``helpers/vectors.py``), against the exact ledger."""

from dataclasses import replace

import pytest
from vectors import GATHERED, GPT_LAYER, GROUPED, GROUPED_BYTES, HUGGING_FACE

from memcalc.analysis.activations import kept, total
from memcalc.analysis.layers import layer_bytes
from memcalc.blocks.embedding import embedding_graph
from memcalc.blocks.head import head_graph
from memcalc.config import Config, Model, Parallel, Run, load
from memcalc.config.implementation import IMPLEMENTATIONS

PAPER = IMPLEMENTATIONS["paper"]


@pytest.mark.parametrize("case", GPT_LAYER, ids=str)
def test_the_papers_layer(case):
    model, tp, sp, recompute = case
    config = load(model, tp=tp, sp=sp, recompute=recompute)
    assert layer_bytes(config, "exact") == GPT_LAYER[case]


@pytest.mark.parametrize("model", GATHERED)
def test_the_papers_layer_with_gathered_inputs(model):
    keeps = replace(PAPER, keeps_gathered=True)
    assert layer_bytes(load(model, sp=True, implementation=keeps), "exact") == GATHERED[model]


def toy(dropout=0.1, softmax_fp32=False, **run):
    """s 64, b 2, h 128, a 4."""
    model = Model(
        name="toy",
        layers=1,
        hidden_size=128,
        heads=4,
        attention_dropout=dropout,
        hidden_dropout=dropout,
        softmax_fp32=softmax_fp32,
    )
    run = {"implementation": PAPER, **run}
    return Config(model, Parallel(), Run(seq_length=64, micro_batch_size=2, **run))


def test_the_toy_layers():
    assert layer_bytes(toy(), "exact") == 722944
    assert layer_bytes(toy(recompute=("selective",)), "exact") == 559104
    assert layer_bytes(toy(recompute=("full",)), "exact") == 32768
    # measured on the CPU, whose norm keeps its statistics in the activations' 2 bytes: 8sb less
    statistics = 8 * 64 * 2
    assert layer_bytes(toy(dropout=0.0), "exact") == 590848 + statistics
    wide = replace(PAPER, softmax_fp32=True)
    fp32_softmax = layer_bytes(toy(softmax_fp32=True, implementation=wide), "exact")
    assert fp32_softmax == 787456 + statistics
    # an fp32 model keeps 4-byte statistics on the CPU too
    assert layer_bytes(toy(precision="fp32"), "exact") == 1378304


def llama(s, b, h, a, k, f, implementation):
    model = Model(
        name="llama",
        layers=1,
        hidden_size=h,
        heads=a,
        kv_heads=k,
        ffn_size=f,
        norm="rmsnorm",
        activation="swiglu",
        position="rotary",
        softmax_fp32=True,
    )
    kernels = IMPLEMENTATIONS[implementation]
    return Config(model, Parallel(), Run(seq_length=s, micro_batch_size=b, implementation=kernels))


@pytest.mark.parametrize(
    ("sizes", "eager", "sdpa_without_rng"),
    [
        ((64, 2, 256, 8, 2, 704), 1901568, 1414144),
        ((128, 1, 512, 16, 4, 1376), 4555776, 2794496),
        ((96, 3, 192, 6, 6, 512), 3504384, 2515968),
    ],
)
def test_hugging_faces_llama_layer(sizes, eager, sdpa_without_rng):
    assert layer_bytes(llama(*sizes, "transformers-eager"), "exact") == eager
    # on CUDA the flash kernel keeps 24 bytes of random-number state that the CPU's has not
    sdpa = layer_bytes(llama(*sizes, "transformers-sdpa"), "exact")
    assert sdpa == sdpa_without_rng + 24


@pytest.mark.parametrize(("name", "settings", "implementation", "measured"), HUGGING_FACE)
def test_hugging_faces_layers(name, settings, implementation, measured):
    """GPT-2's gelu_new runs operation by operation: it saves 32sbh where a fused kernel saves 8."""
    config = load(name, implementation=implementation, **settings)
    assert layer_bytes(config, "exact") == measured


def test_megatron_cores_layer_of_today():
    run = Run(seq_length=64, micro_batch_size=2, implementation=IMPLEMENTATIONS["megatron-local"])
    assert layer_bytes(Config(GROUPED, Parallel(), run), "exact") == GROUPED_BYTES


def test_the_ends_of_megatron_cores_model():
    """megatron-core 0.16.1, GPTModel without its layers: s 64, b 2, h 128, v 512, dropout 0.1.

    Measured on the CPU, whose norm keeps 2-byte statistics, and without the model's own inputs.
    """
    s, b = 64, 2
    for tp, sp, measured in ((1, False, 345728), (2, False, 215808), (2, True, 174592)):
        model = replace(toy().model, vocab_size=512, embedding_dropout=0.1)
        config = replace(toy(), model=model, parallel=Parallel(tp=tp, sp=sp))
        ends = total(kept(embedding_graph(config))) + total(kept(head_graph(config)))
        statistics = 4 * s * b // (tp if sp else 1)
        inputs = 8 * s * b if tp == 1 else 0
        assert ends == measured + statistics + inputs
