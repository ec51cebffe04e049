"""What FSDP2 gathers and reduces at each moment, with the embedding and the head in its root."""

import pytest

from memcalc.analysis.device import stage_memory
from memcalc.config import load

H, F, KV, V, LAYERS = 4096, 14336, 1024, 128256, 32  # Llama-3-8B's
LAYER = H * (H + 2 * KV) + H * H + 3 * H * F + 2 * H
ROOT = 2 * V * H + H
HEAD = V * H + H
RANKS = 8


def parts(phase, **settings):
    given = {"implementation": "torch", "sharder": "fsdp2", "dp": RANKS, "seq_length": 512}
    memory = stage_memory(load("llama-3-8b", **given | settings), 0)
    (found,) = (each.parts for each in memory.phases if each.name == phase)
    return {part.name: part.bytes for part in found}


@pytest.mark.parametrize(
    ("phase", "name", "size"),
    [
        ("forward", "gathered weights that stay", 2 * ROOT),
        ("forward", "gathered weights of a layer, and their block", 2 * 2 * LAYER),
        ("loss", "gathered weights that stay", 2 * ROOT),
        ("head backward", "gathered weights of the last layer", 2 * LAYER),
        ("backward", "gathered weights of one layer and the next", 2 * 2 * LAYER),
        ("backward", "a layer's gradients in the reduce buffer", 4 * LAYER),
        ("backward", "the root's gradients, unsharded", 2 * HEAD),
        ("embedding backward", "the root's gradients, unsharded", 2 * HEAD),
        ("embedding backward", "embedding: weight gradient", 2 * V * H),
        ("root reduction", "the root's gradients, unsharded", 2 * ROOT),
        ("root reduction", "the root's gradients in the reduce buffer", 4 * ROOT),
        ("root reduction", "gradients of all layers and the head", 4 * LAYERS * LAYER // RANKS),
        ("optimizer step", "gradients", 4 * (LAYERS * LAYER + ROOT) // RANKS),
    ],
)
def test_each_moment_holds_what_its_code_gathers_and_reduces(phase, name, size):
    assert parts(phase)[name] == size


def test_layers_that_are_not_resharded_stay_gathered_with_the_root():
    found = parts("backward", zero=2)
    assert found["gathered weights that stay"] == 2 * (ROOT + LAYERS * LAYER)
    assert "gathered weights of one layer and the next" not in found


def test_megatrons_own_ends_are_units_like_layers():
    found = parts("loss", implementation="megatron")
    assert "gathered weights that stay" not in found


def test_shards_of_an_earlier_micro_batch_are_there_before():
    one, two = (parts("loss", global_batch_size=RANKS * n).get("gradients", 0) for n in (1, 2))
    assert (one, two) == (0, 4 * (LAYERS * LAYER + ROOT) // RANKS)
