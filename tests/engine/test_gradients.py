"""Gradients that are made in backward and freed after the step."""

import pytest

from memcalc.analysis import gradients
from memcalc.analysis.device import stage_memory
from memcalc.analysis.rank import Rank
from memcalc.analysis.walk import WEIGHT, backward_events
from memcalc.blocks.layer import layer_graph
from memcalc.config import load

BF16 = {"main_grads": "bf16", "main_params": "none", "moments": "bf16"}


def llama(name="llama-3-8b", **settings):
    settings = {"seq_length": 512, "implementation": "transformers-sdpa", **BF16, **settings}
    return load(name, **settings)


def held(config, phase, group="gradients"):
    memory = stage_memory(config, 0)
    (found,) = [each for each in memory.phases if each.name == phase]
    return sum(part.bytes for part in found.parts if part.group == group)


def weights(config):
    return Rank(config, 0).parameters.total()


@pytest.mark.parametrize(
    ("phase", "share"),
    [("forward", 0), ("loss", 0), ("optimizer step", 1), ("between steps", 0)],
)
def test_gradients_exist_from_backward_to_the_step(phase, share):
    config = llama()
    assert held(config, phase) == share * 2 * weights(config)


@pytest.mark.parametrize(
    "settings", [{"keep_gradients": True}, {"global_batch_size": 2}], ids=["kept", "accumulated"]
)
def test_gradients_that_are_added_to_exist_in_forward_too(settings):
    config = llama(**settings)
    for phase in ("forward", "loss", "optimizer step"):
        assert held(config, phase) == 2 * weights(config)
    kept = 1 if "keep_gradients" in settings else 0
    assert held(config, "between steps") == kept * 2 * weights(config)


def test_all_gradients_are_there_when_the_embeddings_is_made():
    config = llama()
    assert not config.model.tied_embeddings
    assert held(config, "embedding backward") == 2 * weights(config)


def test_a_tied_table_has_three_tensors_at_the_end_of_backward():
    """The head's gradient, which has waited, the embedding's, and their sum."""
    config = llama("llama-3.2-1b")
    table = 2 * 128256 * 2048
    found = next(p for p in stage_memory(config, 0).phases if p.name == "embedding backward")
    assert held(config, "embedding backward") == 2 * weights(config) + table
    assert next(p.bytes for p in found.parts if "sum of a tied" in p.name) == table
    later = llama("llama-3.2-1b", global_batch_size=2)
    assert held(later, "embedding backward") == 2 * weights(later) + 2 * table


def test_backward_peaks_at_the_layer_where_saved_tensors_and_gradients_are_most():
    """With many weights and few tokens that is the first layer, whose backward comes last."""
    parts = {
        part.name: part.bytes
        for phase in stage_memory(llama(seq_length=16), 0).phases
        if phase.name == "backward"
        for part in phase.parts
    }
    of_layer = 2 * (4096 * (4096 + 1024) * 2 + 3 * 4096 * 14336 + 2 * 4096)
    assert parts["gradients of later layers"] == 31 * of_layer
    assert parts["gradients of the head and of later chunks"] == 2 * (128256 * 4096 + 4096)


def test_a_weights_gradient_stays_only_where_it_is_the_first():
    config = llama()
    graph = layer_graph(config)
    of_layer = 2 * (4096 * (4096 + 1024) * 2 + 3 * 4096 * 14336 + 2 * 4096)
    for keeps, left in ((True, of_layer), (False, 0)):
        events = backward_events(graph, own=2, keeps=keeps)
        assert sum(event.bytes for event in events if event.kind == WEIGHT) == left


@pytest.mark.parametrize("settings", [{"implementation": "megatron"}, {"main_grads": "fp32"}])
def test_a_buffer_of_gradients_is_there_all_the_time(settings):
    config = llama(**settings)
    size = 4 if settings.get("main_grads") else 2
    assert not gradients.in_backward(config)
    for phase in ("forward", "backward", "between steps"):
        assert held(config, phase) >= size * weights(config)


def test_shards_of_fsdp2_are_made_in_backward():
    config = llama(sharder="fsdp2", dp=8, main_params="fp32", main_grads="fp32")
    assert held(config, "loss") == 0
    assert held(config, "optimizer step") == 4 * weights(config) // 8


def test_frozen_weights_have_no_gradient_in_backward():
    """All gradients are those of what is trained, at the end of backward and in the step."""
    config = llama(frozen=("attention", "mlp"))
    trained = Rank(config, 0).trained
    assert held(config, "embedding backward") == held(config, "optimizer step") == 2 * trained
    assert held(config, "backward") <= 2 * trained
