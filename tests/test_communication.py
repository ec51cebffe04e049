"""Collectives: section 4.2.2 of Korthikanti et al. 2022, and what a rank sends in an iteration."""

import sympy

import memcalc
from memcalc import symbols
from memcalc.analysis.communication import of_graph, of_iteration
from memcalc.blocks.layer import layer_graph
from memcalc.config import load


def traffic(**settings):
    config = load("175b", **settings)
    return of_graph(layer_graph(config, symbols.symbolic(config)), config.run.regions)


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


def test_an_iteration_sends_outputs_between_stages_and_gradients_between_replicas():
    config = load("175b", sp=True, dp=2, global_batch_size=128)
    rows = of_iteration(config)
    s, h, t, m, micro = 2048, 12288, 8, 3, 64
    sends = [row for row in rows if row.collective == "send"]
    assert [(row.phase, row.times) for row in sends] == [
        ("forward", micro * m),
        ("backward", micro * m),
    ]
    assert sends[0].bytes == micro * m * 2 * s * h // t
    gradients = rows[-1]
    from memcalc.analysis.parameters import parameters

    # a ring all-reduce over two ranks sends the whole of a rank's fp32 gradients once
    assert gradients.bytes * t * 8 == 4 * parameters(config)
    layer = {(r.collective, r.phase, r.overlapped_with): r for r in of_graph(layer_graph(config))}
    for row in rows[: len(layer)]:
        one = layer[row.collective, row.phase, row.overlapped_with]
        assert row.times == one.times * 12 * micro
        assert row.bytes == one.bytes * 12 * micro


def test_one_rank_sends_nothing():
    assert memcalc.comm(load("llama-3-8b")).rows == ()
