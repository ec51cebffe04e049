"""Bytes that PyTorch 2.13 was seen to keep, against the exact ledger.

The vectors were measured with torch.autograd.graph.saved_tensors_hooks on meta tensors, counting
live storages once and leaving parameters out, with CUDA's kernels for dropout, norms and flash
attention. Hugging Face: transformers 5.24, one decoder layer, as the difference of two depths.
"""

from dataclasses import replace

import pytest

from memcalc.analysis.activations import kept, total
from memcalc.analysis.layers import layer_bytes
from memcalc.blocks.embedding import embedding_graph
from memcalc.blocks.head import head_graph
from memcalc.config import Config, Model, Parallel, Run, load
from memcalc.config.implementation import IMPLEMENTATIONS

PAPER = IMPLEMENTATIONS["paper"]

# A pre-LN GPT layer in plain torch; ranks are a fake process group. Bytes a layer and rank, for
# t = 1, t = 8, t = 8 with sequence parallelism, and the last with the gathered inputs kept.
GPT_LAYER = {
    "22b": (7080116224, 1325531136, 885014528, 1061175296),
    "175b": (2868936704, 578846720, 358617088, 446697472),
    "530b": (4110450688, 880836608, 513806336, 660606976),
    "1t": (5138055168, 1101037568, 642256896, 825757696),
}


@pytest.mark.parametrize("model", GPT_LAYER)
def test_the_papers_layer(model):
    serial, tensor, sequence, gathered = GPT_LAYER[model]
    assert layer_bytes(load(model, tp=1), "exact") == serial
    assert layer_bytes(load(model), "exact") == tensor
    assert layer_bytes(load(model, sp=True), "exact") == sequence
    keeps = replace(PAPER, keeps_gathered=True)
    assert layer_bytes(load(model, sp=True, implementation=keeps), "exact") == gathered


# Megatron-core 0.16.1's own layer, t = 8, recomputing the core: it holds 4 bytes more, an int32.
MEGATRON_SELECTIVE = {
    "22b": (654442500, 213925892),
    "175b": (327188484, 106958852),
    "530b": (545292292, 178262020),
    "1t": (681607172, 222826500),
}


@pytest.mark.parametrize("model", MEGATRON_SELECTIVE)
def test_megatrons_layer_with_selective_recomputation(model):
    tensor, sequence = (size - 4 for size in MEGATRON_SELECTIVE[model])
    assert layer_bytes(load(model, recompute="selective"), "exact") == tensor
    assert layer_bytes(load(model, sp=True, recompute="selective"), "exact") == sequence


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


@pytest.mark.parametrize(
    ("model", "implementation", "measured"),
    [
        ("llama-3-8b", "transformers-eager", 14629797888),
        ("llama-3-8b", "transformers-sdpa", 1645281304),
        ("llama-3-70b", "transformers-sdpa", 3256942616),
        ("llama-3.1-405b", "transformers-sdpa", 6211829784),
    ],
)
def test_hugging_faces_llama_3_at_8192_tokens(model, implementation, measured):
    config = load(model, seq_length=8192, implementation=implementation)
    assert layer_bytes(config, "exact") == measured


def test_hugging_faces_gpt2_layer():
    """Its gelu_new runs operation by operation and keeps 32sbh where a fused kernel keeps 8."""
    sizes = {"seq_length": 64, "micro_batch_size": 2}
    eager = load("gpt2", implementation="transformers-eager", **sizes)
    sdpa = load("gpt2", implementation="transformers-sdpa", **sizes)
    assert layer_bytes(eager, "exact") == 6195200
    assert layer_bytes(sdpa, "exact") == 5709848


def test_megatron_cores_layer_of_today():
    """megatron-core 0.16.1, local layer: RMSNorm, 2 of 4 heads for K and V, fused SwiGLU, p = 0."""
    model = Model(
        name="toy",
        layers=1,
        hidden_size=128,
        heads=4,
        kv_heads=2,
        ffn_size=352,
        norm="rmsnorm",
        activation="swiglu",
    )
    run = Run(seq_length=64, micro_batch_size=2, implementation=IMPLEMENTATIONS["megatron-local"])
    assert layer_bytes(Config(model, Parallel(), run), "exact") == 599040


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
