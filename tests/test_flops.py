"""FLOPs: appendix A of Korthikanti et al. 2022, and the products of the modern layer."""

import pytest

import memcalc
from memcalc.analysis import flops
from memcalc.blocks.layer import layer_graph
from memcalc.config import catalog, load


def one(config):
    (row,) = memcalc.flops(config).records()
    return row


@pytest.mark.parametrize("model", ["22b", "175b", "530b", "1t"])
def test_a_layers_forward_flops_are_appendix_as(model):
    """Page 15: 24bsh^2 + 4bs^2h for a layer; backward twice that."""
    config = load(model)
    s, b, h = config.run.seq_length, config.run.micro_batch_size, config.model.hidden_size
    row = one(config)
    assert row["forward_flops"] == 24 * b * s * h**2 + 4 * b * s**2 * h
    assert row["backward_flops"] == 2 * row["forward_flops"]
    assert row["model_flops"] == 3 * row["forward_flops"] == row["hardware_flops"]


@pytest.mark.parametrize("name", catalog.names())
def test_selective_recomputation_repeats_the_two_products_of_the_core(name):
    config = load(name, recompute="selective", seq_length=1024)
    model, s, b = config.model, 1024, config.run.micro_batch_size
    assert one(config)["recompute_flops"] == 4 * b * s**2 * model.heads * model.head_size


@pytest.mark.parametrize("name", catalog.names())
def test_full_recomputation_adds_one_forward_pass(name):
    row = one(load(name, recompute="full", seq_length=1024))
    assert row["recompute_flops"] == row["forward_flops"]


@pytest.mark.parametrize("name", catalog.names())
def test_flops_do_not_depend_on_how_ranks_share_them(name):
    serial = load(name, tp=1, seq_length=1024)
    for tp in (2, 4, 8):
        if serial.model.heads % tp == 0:
            split = load(name, tp=tp, sp=True, seq_length=1024)
            assert flops.forward(layer_graph(split)) == flops.forward(layer_graph(serial))


def test_grouped_queries_and_a_gated_mlp():
    """Llama-2-70B: q, k, v, out; gate, up, down; QK^T and PV; two FLOPs a multiply-add."""
    s, h, a, k, d, f = 4096, 8192, 64, 8, 128, 28672
    linear = h * (a + 2 * k) * d + a * d * h + 3 * h * f
    core = 2 * s * a * d
    assert one(load("llama-2-70b"))["forward_flops"] == 2 * s * (linear + core)


def test_the_corrected_overhead_of_selective_recomputation():
    """Megatron-LM issue 523 corrects equation 9: 1 + s/(18h) where the MLP and heads are the
    paper's; exactly, for one layer, (24h + 4s) * 3 grows by 4s."""
    s, h = 2048, 12288
    row = one(load("175b", recompute="selective"))
    assert row["hardware_flops"] * 3 * (24 * h + 4 * s) == row["model_flops"] * (
        3 * (24 * h + 4 * s) + 4 * s
    )
