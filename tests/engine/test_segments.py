"""Blocks that PyTorch's allocator does not split, by its rules and by the layers' order."""

from dataclasses import replace

import pytest

from memcalc.analysis import segments, states
from memcalc.analysis.device import stage_memory
from memcalc.analysis.rank import Rank
from memcalc.analysis.segments import Segments, unsplit_passes
from memcalc.analysis.states import unsplit_states
from memcalc.blocks.layer import layer_graph
from memcalc.config import load
from memcalc.config.environment import Environment
from memcalc.units import MIB

NAME = "unsplit remainders of allocator blocks: activations"


def gpt(**settings):
    """Twelve layers whose queries, keys and values have 1 MiB each on a rank, hidden states 4."""
    sizes = {"seq_length": 1024, "micro_batch_size": 4, "tp": 4, "implementation": "megatron"}
    config = load("gpt2", **{**sizes, **settings})
    sizes = {"hidden_size": 512, "heads": 8, "kv_heads": 8, "head_size": 64, "ffn_size": 2048}
    sizes |= {"vocab_size": 50688, "hidden_dropout": 0.1, "attention_dropout": 0.1}
    return replace(config, model=replace(config.model, **sizes))


def beside(config, stage=0, phase="loss"):
    """Bytes of a phase that are not split off, in MiB."""
    phases = {each.name: each for each in stage_memory(config, stage).phases}
    return sum(part.bytes for part in phases[phase].parts if part.name == NAME) / MIB


class TestSegments:
    @pytest.mark.parametrize(
        ("whole", "asked", "more"), [(4, 3, 1), (5, 3, 0), (4, 4, 0), (4, 3.5, 0.5)]
    )
    def test_a_rest_of_at_most_a_mebibyte_is_not_split(self, whole, asked, more):
        found = Segments()
        block, _ = found.take(whole * MIB), found.take(4 * MIB)
        found.give(block)
        found.take(int(asked * MIB))
        assert found.unsplit == more * MIB

    def test_the_smallest_free_block_is_taken(self):
        found = Segments()
        large, _, small, _ = (found.take(size * MIB) for size in (5, 2, 4, 2))
        found.give(large)
        found.give(small)
        assert found.take(3 * MIB) is small

    def test_free_neighbors_are_one(self):
        found = Segments()
        blocks = [found.take(4 * MIB) for _ in range(5)]
        for index in (1, 3, 2):
            found.give(blocks[index])
        assert found.take(9 * MIB) is blocks[1]
        assert found.take(2 * MIB).address == blocks[1].address + 9 * MIB

    @pytest.mark.parametrize(
        ("asked", "more"), [(21, 1), (22, 0), (21.5, 0.5), (10, 0), (19.5, 0.5)]
    )
    def test_requests_from_10_mib_on_have_segments_of_whole_2_mib(self, asked, more):
        found = Segments()
        found.take(int(asked * MIB))
        assert found.unsplit == more * MIB

    def test_requests_of_the_small_pool_are_always_split(self):
        found = Segments()
        assert found.take(MIB) is None
        found.give(None)
        assert found.unsplit == 0


class TestLayers:
    """3 MiB of queries, keys and values, between tensors of 4 MiB."""

    @pytest.mark.parametrize("kernels", ["megatron", "megatron-local"])
    def test_views_of_a_product_keep_a_block_of_4_mib_in_each_layer(self, kernels):
        config = gpt(implementation=kernels, attention="unfused")
        assert beside(config) == 12

    def test_what_flash_attention_copied_leaves_holes_of_3_mib(self):
        config = gpt(batch_first=True)
        # two blocks in each layer but one
        assert beside(config) == 2 * 11

    def test_keys_and_values_that_go_round_are_one_block(self):
        ring = {"tp": 2, "sp": True, "cp": 2, "dropout": 0.0}
        views = gpt(**ring, cp_kind="all_gather")
        assert beside(views) == 0
        assert beside(gpt(**ring)) == 3

    def test_whole_powers_of_two_leave_nothing(self):
        assert beside(gpt(tp=1)) == beside(gpt(tp=2)) == 0

    def test_segments_that_expand_leave_nothing(self):
        assert beside(gpt(environment=Environment(expandable_segments=True))) == 0

    def test_it_is_there_while_activations_are_and_not_between_steps(self):
        config = gpt(attention="unfused")
        assert {beside(config, phase=name) for name in ("forward", "loss", "backward")} == {12}
        assert beside(config, phase="between steps") == 0

    def test_it_is_known_of_megatron_alone(self):
        assert beside(gpt(implementation="torch")) == 0

    def test_more_passes_than_are_walked_go_on_as_these_did(self, monkeypatch):
        config = gpt(attention="unfused")
        layer = layer_graph(config), config.run.policy, 2000
        assert unsplit_passes([layer], copies=False) == (2000 * MIB, False)
        monkeypatch.setattr(segments, "MOST", 10)
        assert unsplit_passes([layer], copies=False) == (2000 * MIB, False)

    def test_layers_go_forward_micro_batch_by_micro_batch(self):
        """A dense layer and one of experts leave other blocks than one kind after the other."""
        config = load("deepseek-v2-lite", seq_length=3000, implementation="megatron")
        dense, moe = (
            (layer_graph(config, kind=kind), config.run.policy) for kind in ("dense", "moe")
        )
        in_turns, _ = unsplit_passes([(*dense, 4), (*moe, 4)], copies=True)
        first, _ = unsplit_passes([(*dense, 1), (*moe, 1)] * 4, copies=True)
        assert in_turns == first


class TestStates:
    """Weights, their buffers, and master copies, before anything else is there."""

    def test_a_buffer_of_weights_is_a_segment_of_whole_2_mib(self):
        config = gpt(dp=2, zero=1, global_batch_size=8)
        size = 2 * sum(Rank(config, 0).parameters.values())
        rest = -size % (2 * MIB)
        assert 0 < rest < MIB
        assert sum(part.bytes for part in unsplit_states(Rank(config, 0))) == rest // 512 * 512

    def test_what_is_not_trained_has_no_buffer_and_no_master_copy(self):
        config = gpt(dp=2, zero=1, global_batch_size=8, frozen=("embedding", "layer", "head"))
        assert not any(kind.trained for kind, *_ in Rank(config, 0).weights())
        assert sum(part.bytes for part in unsplit_states(Rank(config, 0))) < MIB

    @pytest.mark.parametrize(
        "settings",
        [{"sharder": "fsdp2"}, {"environment": Environment(expandable_segments=True)}],
    )
    def test_they_are_known_of_megatrons_alone_and_of_segments_that_do_not_expand(self, settings):
        assert not [*unsplit_states(Rank(gpt(dp=2, zero=2, global_batch_size=8, **settings), 0))]

    def test_each_expert_has_weights_of_its_own(self):
        config = load("mixtral-8x7b", implementation="megatron", seq_length=4096)
        sizes = [(size, number) for kind, size, number in Rank(config, 0).weights() if kind.expert]
        assert sizes.count((4096 * 14336, 8)) == 32
        assert sizes.count((4096 * 2 * 14336, 8)) == 32

    def test_a_shard_is_the_end_of_what_lies_backwards(self):
        assert states._last_shard([10, 4, 6], 2) == [10, 0, 0]
        assert states._last_shard([4, 8, 8], 2) == [4, 6, 0]
        assert states._last_shard([4, 8, 8], 1) == [4, 8, 8]
