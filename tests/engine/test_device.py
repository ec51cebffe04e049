"""A GPU's memory, phase by phase, and the buffers beside states and activations."""

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalc.analysis import buffers
from memcalc.analysis.device import Phase, StageMemory, device, stage_memory
from memcalc.analysis.headroom import Headroom, headroom
from memcalc.analysis.layers import layer_bytes
from memcalc.analysis.parts import CERTAINTIES, GROUPS, Part
from memcalc.analysis.rank import Rank
from memcalc.config import load
from memcalc.config.environment import Environment
from memcalc.errors import ConfigError
from memcalc.units import MIB


def llama(**settings):
    settings = {"seq_length": 4096, "implementation": "megatron", "sp": False, **settings}
    return load("llama-3-8b", **settings)


def named(found):
    return {part.name: part.bytes for part in found}


def phase(memory, name) -> Phase:
    return next(each for each in memory.phases if each.name == name)


class TestPhases:
    def test_the_peak_is_the_largest_phase_and_never_a_sum(self):
        for memory in device(llama(pp=4, global_batch_size=8)):
            assert memory.peak.bytes == max(each.bytes for each in memory.phases)
            assert memory.peak.bytes < sum(each.bytes for each in memory.phases)

    def test_the_ends_are_on_the_stages_where_they_are(self):
        first, middle, last = device(llama(pp=3, layout="10,11,11", global_batch_size=3))
        names = [{each.name for each in memory.phases} for memory in (first, middle, last)]
        everywhere = {"forward", "backward", "optimizer step", "between steps"}
        assert names[0] == everywhere | {"embedding backward"}
        assert names[1] == everywhere
        assert names[2] == everywhere | {"loss", "head backward"}

    @pytest.mark.parametrize("schedule", ["zb-v", "dualpipe"])
    def test_pipelines_that_turn_have_the_head_on_the_first_rank(self, schedule):
        memory = stage_memory(llama(pp=4, schedule=schedule, global_batch_size=16), 0)
        assert {"loss", "embedding backward"} <= {each.name for each in memory.phases}

    def test_activations_are_those_of_the_micro_batches_in_flight(self):
        config = llama(pp=4, global_batch_size=8)
        for memory in device(config):
            held = named(phase(memory, "forward").parts)["layers' activations"]
            assert held == (4 - memory.stage) * 8 * layer_bytes(config, "exact")

    def test_between_steps_there_are_no_activations(self):
        for memory in device(llama(pp=2, global_batch_size=4)):
            groups = {part.group for part in memory.steady.parts}
            assert not groups & {"activations", "logits"}
            assert memory.steady.bytes < memory.peak.bytes

    def test_of_blocks_of_recomputation_the_last_layer_runs_no_forward_again(self):
        some, all_ = (
            stage_memory(llama(recompute="full", recompute_method="block", recompute_layers=n), 0)
            for n in (4, 32)
        )
        at_work = [
            next(p for p in phase(m, "backward").parts if "temporary tensors" in p.name).bytes
            for m in (some, all_)
        ]
        assert at_work[0] < at_work[1]

    def test_layers_that_are_recomputed_together_are_whole_together(self):
        config = llama(recompute="full", recompute_method="uniform", recompute_layers=4)
        parts = named(phase(stage_memory(config, 0), "backward").parts)
        whole, input_ = layer_bytes(llama(), "exact"), 2 * 4096 * 4096
        assert parts["other layers of the same checkpoint"] == 3 * whole - input_

    @pytest.mark.parametrize("layers", [1, 4, 32])
    def test_uniform_is_the_default_method(self, layers):
        given = {"recompute": "full", "recompute_layers": layers}
        assert stage_memory(llama(**given), 0) == stage_memory(
            llama(**given, recompute_method="uniform"), 0
        )

    def test_the_largest_group_is_the_peak_wherever_it_stands(self):
        """Of 32 layers in groups of 31 the last group is one layer alone."""
        settings = {"recompute": "full", "recompute_method": "uniform"}
        parts = named(
            phase(stage_memory(llama(**settings, recompute_layers=31), 0), "backward").parts
        )
        whole, input_ = layer_bytes(llama(), "exact"), 2 * 4096 * 4096
        assert parts["other layers of the same checkpoint"] == 30 * whole - input_
        assert parts["layers' activations"] == input_  # the last layer's is gone

    def test_the_layer_that_needs_most_is_the_peak_wherever_it_stands(self):
        settings = {"seq_length": 4096, "recompute": "full", "global_batch_size": 1}
        of_experts = {}
        for last in (0, 1):
            config = load("mixtral-8x7b", **settings)
            pattern = (1 - last, last) * 16
            model = replace(config.model, moe_layers=pattern)
            found = phase(stage_memory(replace(config, model=model), 0), "backward")
            (of_experts[last],) = [p for p in found.parts if "temporary tensors" in p.name]
        assert of_experts[0] == of_experts[1]

    @pytest.mark.parametrize(
        ("settings", "bytes_"),
        [
            ({}, 0),  # Megatron-LM's products add to its buffers
            ({"environment": Environment(fused_gradients=False)}, 2),
            ({"sharder": "deepspeed", "zero": 1, "dp": 2}, 2),
            ({"sharder": "fsdp2", "dp": 2}, 0),  # among the gradients of a whole layer
        ],
    )
    def test_a_weight_has_a_gradient_of_its_own_where_no_buffer_has_it(self, settings, bytes_):
        backward = phase(stage_memory(llama(**settings), 0), "backward")
        fc2 = 4096 * 14336
        assert named(backward.parts).get("layer: weight gradient", 0) == bytes_ * fc2

    def test_every_part_has_a_group_a_certainty_and_a_source(self):
        config = llama(pp=2, tp=2, sp=True, dp=2, zero=1, gpu="h100", global_batch_size=4)
        for memory in device(config):
            for each in memory.phases:
                for part in each.parts:
                    assert part.group in GROUPS
                    assert part.certainty in CERTAINTIES
                    assert part.source


class TestWorkspaces:
    """PyTorch's default is 8.125 MiB a handle, 32 MiB on Hopper; so Blackwell from 2.12 on."""

    @pytest.mark.parametrize(
        ("gpu", "pytorch", "mib"),
        [
            ("a100", None, 2 * 8.125),
            ("h100", (2, 6), 2 * 32),
            ("b200", (2, 10), 2 * 8.125),
            ("b200", (2, 12), 2 * 32),
            ("gb200", None, 2 * 32),
        ],
    )
    def test_cublas_has_a_workspace_a_thread(self, gpu, pytorch, mib):
        config = llama(gpu=gpu, environment=Environment(pytorch=pytorch))
        assert named(buffers.lasting(Rank(config, 0)))["cuBLAS workspaces"] == mib * MIB

    def test_the_environment_decides_whatever_the_gpu_is(self):
        for value, mib in ((":4096:8", 32), (":4096:2:16:8", 8.125)):
            config = llama(gpu="a100", environment=Environment(cublas_workspace=value))
            assert named(buffers.lasting(Rank(config, 0)))["cuBLAS workspaces"] == 2 * mib * MIB

    @pytest.mark.parametrize(("gpu", "mib"), [("a100", 4), ("h100", 32), ("b200", 32)])
    def test_transformer_engine_has_its_own(self, gpu, mib):
        found = named(buffers.lasting(Rank(llama(gpu=gpu), 0)))
        assert found["Transformer Engine workspace"] == mib * MIB

    def test_grouped_products_have_one_a_stream(self):
        settings = {"gpu": "h100", "implementation": "megatron", "seq_length": 512}
        name = "Transformer Engine workspaces of grouped GEMMs"
        for kind, number in (("grouped", 4), ("sequential", 0)):
            config = load("mixtral-8x7b", expert_products=kind, **settings)
            assert named(buffers.lasting(Rank(config, 0))).get(name, 0) == number * 32 * MIB

    @pytest.mark.parametrize("value", ["4096:8", ":4096", ":a:8", "", ":4096:8 "])
    def test_what_is_no_workspace_is_refused(self, value):
        with pytest.raises(ConfigError, match="cublas_workspace must be"):
            Environment(cublas_workspace=value)


class TestBuffers:
    def test_a_dummy_gradient_stands_for_each_shape_of_a_weight(self):
        h, f, kv, v = 4096, 14336, 1024, 128256
        shapes = [(h, h + 2 * kv), (h, h), (h, 2 * f), (f, h), (h, v)]
        found = named(buffers.lasting(Rank(llama(), 0)))
        assert found["dummy weight gradients"] == sum(2 * a * b for a, b in shapes)
        config = llama(environment=Environment(fused_gradients=False))
        assert "dummy weight gradients" not in named(buffers.lasting(Rank(config, 0)))

    @pytest.mark.parametrize("sharder", ["deepspeed", "fsdp2", "nanotron"])
    def test_what_is_megatrons_own_is_not_there_where_another_splits_states(self, sharder):
        """Layers of Megatron-core's work in its global buffer whoever runs the step."""
        settings = {"tp": 2, "sp": True, "pp": 2, "dp": 2, "global_batch_size": 8}
        other = {"zero": 1, "sharder": sharder} if sharder != "fsdp2" else {"sharder": sharder}
        theirs, ours = llama(**settings, zero=1), llama(**settings, **other)
        gone = {part.name for part in buffers.lasting(Rank(theirs, 1))}
        gone -= {part.name for part in buffers.lasting(Rank(ours, 1))}
        assert gone == {"dummy weight gradients"}
        assert buffers.between_steps(Rank(theirs, 1))
        assert buffers.in_a_pass(Rank(theirs, 1), "forward")
        assert (
            buffers.between_steps(Rank(ours, 1))
            == buffers.in_a_pass(Rank(ours, 1), "forward")
            == []
        )

    def test_the_head_gathers_into_a_buffer_of_its_own_stage(self):
        config = llama(tp=2, sp=True, pp=2)
        sizes = [
            named(buffers.lasting(Rank(config, stage))).get("Megatron's GlobalMemoryBuffer", 0)
            for stage in (0, 1)
        ]
        assert sizes == [0, 2 * 4096 * 4096]

    def test_local_attention_works_in_a_buffer_of_scores(self):
        config = load("gpt2", implementation="megatron-local", seq_length=1024, tp=4)
        assert (
            named(buffers.lasting(Rank(config, 0)))["Megatron's GlobalMemoryBuffer"]
            == 2 * 3 * 1024**2
        )

    def test_experts_that_are_given_all_tokens_gather_them_into_it(self):
        settings = {"seq_length": 4096, "tp": 2, "sp": True, "ep": 4, "dp": 4}
        for gathers, size in ((True, 2 * 4096 * 4096 * 4), (False, 2 * 4096 * 4096)):
            config = load(
                "mixtral-8x7b", implementation="megatron", gathers_tokens=gathers, **settings
            )
            assert named(buffers.lasting(Rank(config, 0)))["Megatron's GlobalMemoryBuffer"] == size

    def test_the_rotary_table_is_of_a_ranks_own_tokens(self):
        assert (
            named(buffers.lasting(Rank(llama(cp=4), 0)))["rotary embedding table"] == 4 * 1024 * 128
        )

    def test_a_pipeline_keeps_the_last_input_of_each_chunk_and_its_gradient(self):
        hidden = 2 * 4096 * 4096
        config = llama(pp=2, vpp=2, global_batch_size=4)
        kept = [
            sum(p.bytes for p in buffers.between_steps(Rank(config, stage))) for stage in (0, 1)
        ]
        assert kept == [2 * 1 * hidden, 2 * 2 * hidden]  # the embedding's chunk receives none
        assert buffers.between_steps(Rank(llama(), 0)) == []

    def test_a_loaders_mask_is_there_forward_and_on_the_ends_alone(self):
        mask = Environment(loader_mask=True)
        config = llama(pp=4, micro_batch_size=2, environment=mask, global_batch_size=8)
        name = "attention mask from the data loader"
        for stage, number in ((0, 1), (1, 0), (3, 1)):
            forward = named(buffers.in_a_pass(Rank(config, stage), "forward"))
            assert forward.get(name, 0) == number * 2 * 4096**2
            assert name not in named(buffers.in_a_pass(Rank(config, stage), "backward"))

    @pytest.mark.parametrize(("microbatches", "leaves"), [(8, 2), (4, 2), (3, 1), (2, 0)])
    def test_a_late_gradient_of_the_head_keeps_logits_gradients_hidden_states_and_leaves(
        self, microbatches, leaves
    ):
        late = Environment(deferred_gradients=2)
        config = llama(pp=2, global_batch_size=microbatches, environment=late)
        found = named(buffers.in_a_pass(Rank(config, 1), "backward"))
        (size,) = (size for name, size in found.items() if "deferred head gradient" in name)
        assert size == 2 * (2 * 4096 * 128256 + 2 * 4096 * 4096)
        inputs = sum(size for name, size in found.items() if name.startswith("stage inputs"))
        assert inputs == leaves * 2 * (2 * 4096 * 4096)

    def test_frameworks_other_than_megatron_have_none_of_these(self):
        config = load("llama-3-8b", seq_length=512, implementation="torch", pp=2)
        assert buffers.lasting(Rank(config, 1)) == buffers.between_steps(Rank(config, 1)) == []
        assert buffers.in_a_pass(Rank(config, 1), "forward") == []


class TestKernels:
    """Transformer Engine's choice: FlashAttention before Hopper, cuDNN's kernel after."""

    @pytest.mark.parametrize(
        ("gpu", "deterministic", "first"),
        [
            ("a100", False, True),
            ("a100", True, True),
            ("h100", True, False),
            ("b200", False, False),
            ("b200", True, True),
        ],
    )
    def test_the_gpu_decides_the_flash_kernel(self, gpu, deterministic, first):
        environment = Environment(deterministic=deterministic)
        config = llama(gpu=gpu, environment=environment)
        assert config.run.implementation.batch_first is first

    def test_without_a_gpu_nothing_is_copied(self):
        assert not llama().run.implementation.batch_first


def test_headroom_is_estimated_and_apart_from_what_is_allocated():
    config = llama(tp=2, pp=4, dp=8, gpu="h100", global_batch_size=32)
    memory = stage_memory(config, 0)
    peak, beyond = memory.peak.bytes, headroom(config)
    found = beyond.parts(peak)
    assert {part.certainty for part in found} == {"estimated"}
    assert named(found)["NCCL communicators"] == (544 + 688 + 688) * 10**6
    assert peak < beyond.allocator(peak) < beyond.needed(peak)
    assert beyond.needed(peak) == peak + sum(part.bytes for part in found)


@given(st.integers(0, 2**40), st.integers(0, 10_000), st.integers(0, 2**33))
def test_the_most_that_may_be_allocated_is_the_inverse_of_what_is_needed(capacity, share, fixed):
    part = Part("fixed", fixed, "buffers", "estimated", "")
    beyond = Headroom(Fraction(share, 1000), (part,), "", "")
    most = beyond.allocatable(capacity)
    assert most < 0 or beyond.needed(most) <= capacity
    assert most < -1 or beyond.needed(most + 1) > capacity


def test_a_stage_without_phases_of_its_own_is_never_asked_for():
    """The last phase is what stays between steps."""
    memory = StageMemory(0, 1, {0: 1}, [Phase("a", []), Phase("between steps", [])])
    assert memory.steady.name == "between steps"


class TestEnvironment:
    def test_it_is_read_from_a_file(self):
        settings = {"pytorch": "2.10", "cublas_workspace": ":4096:8", "loader_mask": True}
        config = llama(environment=settings)
        assert config.run.environment == Environment(
            pytorch=(2, 10), cublas_workspace=":4096:8", loader_mask=True
        )

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            (3, "must be an object of settings"),
            ([], "must be an object of settings"),
            ({"pytorsh": "2.12"}, "did you mean 'pytorch'?"),
            ({"pytorch": "new"}, "must be a version, such as 2.12"),
            ({"pytorch": [2]}, "must be a version, such as 2.12"),
            ({"pytorch": [2, "x"]}, "must be a version, such as 2.12"),
            ({"loader_mask": 1}, "loader_mask must be true or false"),
            ({"deferred_gradients": -1}, "deferred_gradients must be a whole number"),
            ({"cublas_workspace": 4096}, "cublas_workspace must be one line of text"),
        ],
    )
    def test_what_is_none_is_refused(self, value, message):
        with pytest.raises(ConfigError, match=message):
            llama(environment=value, gpu="a100")

    def test_kernels_are_words_and_truths(self):
        with pytest.raises(ConfigError, match="cross_entropy 'fused' is unknown"):
            llama(cross_entropy="fused")
        with pytest.raises(ConfigError, match="batch_first must be true or false"):
            llama(batch_first=1)


@pytest.mark.parametrize("ep", [1, 2, 8])
def test_an_expert_rank_receives_no_more_than_all_tokens(ep):
    def size(imbalance):
        settings = {"ep": ep, "dp": 8, "seq_length": 4096, "imbalance": imbalance}
        return layer_bytes(load("mixtral-8x7b", **settings), "exact")

    if ep == 1:  # a run's setting, which has no effect
        assert size(100) == size(1)
        return
    assert size(ep) > size(1)
    with pytest.raises(ConfigError, match=f"--imbalance must be from 1 to --ep {ep}, not 100"):
        size(100)
