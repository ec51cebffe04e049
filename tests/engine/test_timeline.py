"""A step as one program of births and deaths."""

import pytest

from memcalc.analysis.device import ROUNDED, device
from memcalc.analysis.headroom import headroom
from memcalc.analysis.rank import Rank
from memcalc.analysis.timeline import LAST_ITERATION, covers, events, replay
from memcalc.blocks.embedding import embedding_graph
from memcalc.blocks.head import head_graph
from memcalc.blocks.layer import layer_graph
from memcalc.config import load

BF16 = {"main_grads": "bf16", "main_params": "none", "moments": "bf16"}
FP32 = {"precision": "fp32"}
RUNS = {
    "plain": {},
    "eager": {"implementation": "transformers-eager"},
    "full": {"recompute": "full"},
    "block": {"recompute": "full", "recompute_method": "block", "recompute_layers": 5},
    "region": {"recompute": "mlp"},
    "cached": {"recompute": "selective_op"},
    "accumulated": {"global_batch_size": 4},
    "kept": {"keep_gradients": True},
    "short": {"seq_length": 16},
    "fp32": {**FP32, "main_grads": "fp32", "moments": "fp32"},
    "torch": {"implementation": "torch"},
    "sgd": {"optimizer": "sgd", "momentum": 0.9},
    "fused": {"optimizer_step": "fused"},
    "loop": {"optimizer_step": "loop"},
}
MODELS = ("llama-3.2-1b", "qwen2.5-1.5b", "gpt2", "mixtral-8x7b", "gemma-2-9b")


def run(name, **settings):
    settings = {"seq_length": 512, "implementation": "transformers-sdpa", **BF16, **settings}
    if name.startswith("gemma-2") and settings["implementation"] == "transformers-sdpa":
        settings["implementation"] = "transformers-eager"
    return load(name, **settings).padded


def peaks(config):
    """The largest sum in the last iteration, and what is left after it."""
    alive, total, most = {}, 0, 0
    for event in events(Rank(config, 0)):
        if event.storage is None:
            most = total if event.op == LAST_ITERATION else most
            continue
        if event.bytes > 0:
            assert event.storage not in alive
            alive[event.storage] = event.bytes
        else:
            assert alive.pop(event.storage) == -event.bytes
        total += event.bytes
        most = max(most, total)
    assert total == sum(alive.values())
    return most, total


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("settings", RUNS.values(), ids=RUNS)
def test_the_sum_of_births_and_deaths_is_the_peak_of_memory(name, settings):
    """Each storage dies once, and what is left is what memory counts between steps."""
    config = run(name, **settings)
    (memory,) = device(config)
    most, left = peaks(config)
    rests = sum(part.bytes for part in memory.peak.parts if part.name == ROUNDED)
    assert most == memory.peak.bytes - rests
    assert left == memory.steady.bytes
    found = replay(config)
    assert found.requested == most
    assert found.allocated == memory.peak.bytes
    assert found.reserved >= found.allocated


@pytest.mark.parametrize(
    "settings",
    [
        {"implementation": "megatron"},
        {"main_grads": "fp32"},
        {"dp": 2, "zero": 3},
        {"pp": 2},
        {"frozen": ("attention",)},
        {"precision": "fp8"},
        {"recompute": "full", "recompute_layers": 4},
    ],
)
def test_where_the_order_is_not_known_nothing_is_replayed(settings):
    config = run("llama-3.2-1b", **settings)
    assert not covers(config)
    assert replay(config) is None


def test_reserved_memory_is_what_the_allocator_holds_in_the_replay():
    config = run("llama-3.2-1b")
    peak = device(config)[0].peak.bytes
    assert headroom(config).allocator(peak) == replay(config).reserved


def test_expandable_segments_reserve_less():
    config = run("qwen2.5-1.5b", seq_length=2048)
    grown = run("qwen2.5-1.5b", seq_length=2048, environment={"expandable_segments": True})
    assert replay(grown).reserved < replay(config).reserved
    assert replay(grown).allocated < replay(config).allocated


def test_ddp_keeps_buckets_beside_gradients():
    alone, both = (device(run("llama-3.2-1b", dp=dp))[0] for dp in (1, 2))
    size = 2 * Rank(run("llama-3.2-1b"), 0).parameters.total()
    assert both.steady.bytes - alone.steady.bytes == size


def test_a_step_is_counted_alike_after_many_others():
    """Its passes refer to the tensors of one graph, though graphs are built again."""
    first, *others = (run("gpt2", seq_length=s) for s in range(32, 132))
    found = peaks(first)
    for number, other in enumerate(others):
        layer_graph(other), head_graph(other), embedding_graph(other)
        if number > 70:
            peaks(other)
    assert peaks(first) == found
