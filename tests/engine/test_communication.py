"""Collectives: section 4.2.2 of Korthikanti et al. 2022, and what a rank sends in an iteration."""

from dataclasses import replace

import pytest
import sympy

import memcalc
from memcalc import symbols
from memcalc.analysis.activations import kept
from memcalc.analysis.communication import of_graph, of_iteration
from memcalc.blocks.layer import kinds, layer_graph
from memcalc.config import load
from memcalc.errors import ConfigError


def traffic(**settings):
    config = load("175b", **settings)
    return of_graph(layer_graph(config, symbols.symbolic(config)), config.run.policy)


def count(rows, collective, overlapped_with=None):
    return sum(
        row.times
        for row in rows
        if row.collective == collective and overlapped_with in (None, row.overlapped_with)
    )


def test_tensor_parallelism_has_four_all_reduces_a_layer():
    """Page 7."""
    assert [(row.collective, row.phase, row.times) for row in traffic()] == [
        ("all_reduce", "backward", 2),
        ("all_reduce", "forward", 2),
    ]


def test_sequence_parallelism_has_four_gathers_and_four_scatters_and_two_gathers_again():
    """Page 7: the gathers again are overlapped with the gradient of Y, the data gradient."""
    rows = traffic(sp=True)
    assert count(rows, "reduce_scatter") == 4
    assert count(rows, "all_gather") - count(rows, "all_gather", "data gradient") == 4
    assert count(rows, "all_gather", "data gradient") == 2


def test_sequence_parallelism_adds_no_ring_traffic():
    """Page 7: a ring all-reduce is a scatter and a gather. The gathers again are 25 % more."""
    tensor = sum(row.bytes for row in traffic())
    rows = traffic(sp=True)
    again = sum(row.bytes for row in rows if row.overlapped_with == "data gradient")
    sequence = sum(row.bytes for row in rows) - again
    assert sympy.simplify(tensor - sequence) == 0
    assert sympy.simplify(again / sequence) == sympy.Rational(1, 4)
    s, b, h, t = (symbols.symbol(letter) for letter in "sbht")
    assert sympy.simplify(tensor - 4 * 2 * (t - 1) / t * 2 * s * b * h) == 0


def test_full_recomputation_runs_the_forward_collectives_again():
    rows = traffic(recompute="full")
    assert [(row.phase, row.times) for row in rows] == [
        ("backward", 2),
        ("forward", 2),
        ("recompute", 2),
    ]
    assert not [row for row in traffic(recompute="selective") if row.phase == "recompute"]


def sends(**settings):
    rows = of_iteration(load("175b", **settings))
    return [(row.phase, row.times, row.bytes) for row in rows if row.collective == "send"]


def test_stages_send_their_outputs_and_the_gradients_of_them():
    """2sbh a micro-batch and chunk, or a shard of it under sequence parallelism."""
    s, h, t, m, micro = 2048, 12288, 8, 3, 64
    whole = micro * m * 2 * s * h
    assert sends() == [("forward", micro * m, whole), ("backward", micro * m, whole)]
    assert sends(sp=True) == [
        ("forward", micro * m, whole // t),
        ("backward", micro * m, whole // t),
    ]


def test_replicas_reduce_the_fp32_gradients_of_a_stages_own_parameters():
    """A ring all-reduce over two ranks sends the whole of them once."""
    h, t, layers = 12288, 8, 96 // 8
    rows = of_iteration(load("175b", dp=2, global_batch_size=128))
    split = 12 * h**2 + 3 * h + 4 * h  # the linears' weights, and biases of qkv and fc1
    whole = 4 * h + 2 * h  # norms, and biases of proj and fc2
    assert rows[-1].bytes == 4 * layers * (split // t + whole)


def test_a_single_stage_has_the_ends_collectives_too():
    """22B: an all-reduce of the embedding's output forward, one of the head's input backward."""
    s, b, h, t, layers = 2048, 4, 6144, 8, 48
    rows = of_iteration(load("22b"))
    assert {(row.phase, row.times) for row in rows} == {
        ("forward", 2 * layers),
        ("backward", 2 * layers),
        ("forward", 1),
        ("backward", 1),
    }
    total = sum(row.bytes for row in rows)
    assert total == (4 * layers + 2) * 2 * (t - 1) * 2 * s * b * h // t


def test_an_iteration_is_a_stages_layers_for_every_micro_batch():
    rows = of_iteration(load("175b", sp=True))
    s, h, t, layers, micro = 2048, 12288, 8, 12, 64
    again = next(row for row in rows if row.overlapped_with == "data gradient")
    assert again.times == 2 * layers * micro
    assert again.bytes == 2 * layers * micro * (t - 1) * 2 * s * h // t


def test_layers_that_do_not_divide_are_spread_evenly_and_that_is_said():
    report = memcalc.comm(load("22b", pp=5))
    assert "assumed: 48 layers on 5 stages: one more on each of the first 3 than on the others" in (
        report.notes
    )


def test_one_rank_sends_nothing():
    assert memcalc.comm(load("llama-3-8b")).rows == ()


def test_what_latent_attention_expands_again_it_gathers_again_from_its_shards():
    """Megatron-core 0.16.1, multi_latent_attention.py: the checkpoint of mla_up_proj is around the
    column-split linears, which gather their own inputs; the rotated key is gathered before it."""
    config = load("deepseek-v3", seq_length=4096, tp=8, sp=True, recompute="mla_up_proj")
    graph = layer_graph(config, kind="dense")
    shards = [e.tensor for e in kept(graph, config.run.policy) if "mla_up" in e.ops]
    assert [(tensor.name, tensor.shape) for tensor in shards] == [
        ("query_compressed", "s/t b q"),  # the linears have the norms inside
        ("kv_compressed", "s/t b l"),
        ("key_rope_gathered", "s b o"),
    ]
    again = [row for row in of_graph(graph, config.run.policy) if row.phase == "recompute"]
    assert [(row.collective, row.times) for row in again] == [("all_gather", 2)]
    assert again[0].bytes == 2 * 4096 * (1536 + 512) * 7 // 8


def reduced(name, **settings):
    rows = of_iteration(load(name, seq_length=4096, **settings))
    return [row.bytes for row in rows if row.collective == "all_reduce"]


def test_experts_gradients_are_reduced_over_ranks_that_hold_the_same_experts():
    """Megatron-core, parallel_state.py: of a stage's ranks, those beside ep x etp are replicas."""
    h, g, k, v, layers = 4096, 14336, 8 * 128, 32000, 32
    dense = layers * (2 * h * h + 2 * h * k + 8 * h + 2 * h) + 2 * v * h + h
    expert = layers * 3 * h * g
    assert reduced("mixtral-8x7b", dp=8, ep=8) == [2 * 7 * 4 * dense // 8]
    assert reduced("mixtral-8x7b", dp=8, ep=4) == [
        2 * 7 * 4 * dense // 8,
        4 * 2 * expert,  # two experts on a rank, two replicas: a ring sends the whole once
    ]
    assert reduced("mixtral-8x7b", dp=1, cp=2, ep=8) == [4 * dense]
    with pytest.raises(ConfigError, match="--dp = 6: pass --dp 8"):
        reduced("mixtral-8x7b", dp=6, ep=4)


def once(part, name, **settings):
    rows = of_iteration(load(name, seq_length=4096, **settings))
    return [row.bytes for row in rows if row.part == part and row.collective == "all_reduce"]


def test_partial_gradients_of_whole_parameters_are_summed_over_tensor_parallel_ranks():
    """Megatron-core, finalize_model_grads.py: those it marks, and norms of q and k.

    Norms, biases after a scatter, routers and the compressions of latent attention.
    """
    h, layers, t = 12288, 96 // 8, 8
    fp32 = 2 * (t - 1) * 4  # a ring's all-reduce
    assert once("partial", "175b", sp=True) == [fp32 * layers * 6 * h // t]
    assert once("partial", "175b") == []
    d, layers = 128, 36
    assert once("partial", "qwen3-8b", tp=8) == [fp32 * layers * 2 * d // t]
    h, experts, q, kv, rope, layers = 7168, 256, 1536, 512, 64, (3, 58)
    attention = 2 * h + q * h + (kv + rope) * h + q + kv
    ends = h  # the last norm
    further = attention + 3 * h + experts * h  # two norms of its inputs, one of its output
    expected = sum(layers) * attention + layers[1] * experts * h + ends + further
    settings = {"tp": 8, "sp": True, "ep": 8, "etp": 1}
    assert once("partial", "deepseek-v3", **settings) == [fp32 * expected // t]


def of_weights(part="weights", **settings):
    settings = {"seq_length": 4096, "global_batch_size": 32, **settings}
    return [
        (row.collective, row.phase, row.times, row.bytes)
        for row in of_iteration(load("llama-3-8b", **settings))
        if row.part == part
    ]


N = 8_030_261_248


def test_what_is_split_is_scattered_and_gathered():
    """n-1 of n parts of a tensor, by the ring; bf16 weights, fp32 gradients (DeepSpeed's: bf16)."""
    assert of_weights(dp=8) == [("all_reduce", "backward", 1, 2 * 4 * N * 7 // 8)]
    assert of_weights(dp=8, zero=1) == [
        ("reduce_scatter", "backward", 1, 4 * N * 7 // 8),
        ("all_gather", "step", 1, 2 * N * 7 // 8),
    ]
    micro, shard = 4, 2 * N * 7 // 8
    deepspeed = {"dp": 8, "sharder": "deepspeed"}
    assert of_weights(**deepspeed, zero=2) == [
        ("reduce_scatter", "backward", micro, micro * shard),
        ("all_gather", "step", 1, shard),
    ]
    assert of_weights(**deepspeed, zero=3) == [
        ("reduce_scatter", "backward", micro, micro * shard),
        ("all_gather", "forward", micro, micro * shard),
        ("all_gather", "backward", micro, micro * shard),
    ]


def test_hybrid_shards_are_summed_over_their_copies():
    scattered, summed, *_ = of_weights(dp=8, zero=3, sharder="fsdp2", shard_copies=2)
    assert scattered[-1] == 4 * 4 * N * 3 // 4
    assert summed == ("all_reduce", "backward", 4, 4 * 4 * N // 4)


def test_what_is_frozen_has_no_gradient():
    attention = 32 * (2 * 4096**2 + 2 * 4096 * 1024)
    (row,) = of_weights(dp=2, frozen="attention")
    assert row[-1] == 4 * (N - attention)


def test_only_layers_that_are_recomputed_send_again():
    """Of every stage's chunk the first, whose two gathers run again with every micro-batch."""
    settings = {"recompute": "full", "recompute_method": "block", "recompute_layers": 1}
    rows = of_weights("layers", tp=2, sp=True, pp=2, global_batch_size=8, **settings)
    again = [row for row in rows if row[1] == "recompute"]
    assert [(kind, times) for kind, _, times, _ in again] == [
        ("all_gather", 2 * 8),
        ("reduce_scatter", 2 * 8),
    ]


@pytest.mark.parametrize(
    ("settings", "forward", "backward"),
    [
        ({"pp": 2}, 1, 0),  # the first of two stages
        ({"pp": 4}, 1, 1),
        ({"pp": 2, "vpp": 2}, 2, 1),
        ({"pp": 2, "schedule": "zb-v"}, 1, 1),  # it has the first and the last of four chunks
        ({"pp": 4, "schedule": "zb-v"}, 2, 2),
        ({"pp": 4, "schedule": "dualpipe"}, 1, 1),  # each way half of the micro-batches
    ],
)
def test_chunks_send_to_those_of_other_ranks(settings, forward, backward):
    found = {way: times for _, way, times, _ in of_weights("stages", **settings)}
    assert found.get("forward", 0) == 32 * forward
    assert found.get("backward", 0) == 32 * backward


def test_gradients_of_copies_of_the_table_are_summed():
    """Megatron-core, finalize_model_grads.py: the first stage's and the last's."""
    v, h, t = 51200, 6144, 8
    table = [row for row in of_iteration(load("22b", pp=2)) if row.part == "table"]
    assert table[-1].bytes == 4 * v * h // t  # a ring of two sends the whole once
    assert not once("table", "22b", tp=1, pp=1)
    assert not once("table", "llama-3-8b", pp=2)  # its head has a weight of its own


@pytest.mark.parametrize("name", ["gpt2", "vit-large"])
def test_of_two_copies_of_all_weights_the_table_is_one(name):
    config = load(name, pp=2, schedule="dualpipe", global_batch_size=8)
    assert "table" not in {row.part for row in of_iteration(config) if row.times == 1}


def test_every_token_that_is_predicted_has_a_head_and_its_collectives():
    h, s, t = 7168, 4096, 8
    (without, with_one) = (
        sum(row.bytes for row in of_iteration(config) if row.phase == "forward")
        - sum(
            n * row.bytes
            for kind, n in kinds(config).items()
            for row in of_graph(layer_graph(config, kind=kind))
            if row.phase == "forward"
        )
        for config in (
            replace(config, model=replace(config.model, mtp_layers=number))
            for config in [load("deepseek-v3", seq_length=s, tp=t, sp=True)]
            for number in (0, 1)
        )
    )
    assert with_one - without == 2 * s * h * (t - 1) // t


@pytest.mark.parametrize(("sp", "gathers"), [(False, (1, 0)), (True, (1, 1))])
def test_a_further_tokens_projection_is_gathered_and_its_gradient_under_sequence_parallelism(
    sp, gathers
):
    """Megatron-core 0.16.1, multi_token_prediction.py: features are gathered, tokens scattered."""
    graph = layer_graph(load("deepseek-v3", seq_length=4096, tp=8, sp=sp), kind="mtp")
    moves = next(op.moves for op in graph.ops if op.name == "join_gather")
    phases = [move.phase for move in moves if move.bytes == 2 * 4096 * 7168]
    assert (phases.count("forward"), phases.count("backward")) == gathers
