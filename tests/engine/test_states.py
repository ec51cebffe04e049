"""Weights, gradients and optimizer states: bytes a parameter, by recipe, optimizer and sharding."""

from math import ceil

import pytest
from words import assumed

from memcalc.analysis.optimizer_step import temporary
from memcalc.analysis.parameters import held, held_of_experts
from memcalc.analysis.parameters import parameters as whole
from memcalc.analysis.rank import Rank
from memcalc.analysis.states import buckets, recipe, states
from memcalc.answers.warnings import warnings
from memcalc.blocks.embedding import embedding_graph
from memcalc.blocks.head import head_graph
from memcalc.blocks.layer import layer_graph
from memcalc.config import Run, load
from memcalc.config.assumption import Assumption
from memcalc.config.merge import configure
from memcalc.config.optimizers import ALL, MOMENT, OPTIMIZERS, Moments, Optimizer, Step
from memcalc.config.readers.megatron.model_args import read_yaml
from memcalc.errors import ConfigError, InputError


def sizes(config, stage=0):
    return {part.name: part.bytes for part in states(Rank(config, stage))}


def by_group(config, stage=0):
    found = dict.fromkeys(("weights", "gradients", "optimizer"), 0)
    for part in states(Rank(config, stage)):
        found[part.group] += part.bytes
    return tuple(found.values())


class TestParameters:
    @pytest.mark.parametrize(
        "model", ["22b", "llama-3-8b", "deepseek-v2-lite", "gpt2", "bert-large"]
    )
    def test_one_rank_alone_holds_the_whole_model(self, model):
        config = load(model, tp=1, seq_length=512)
        assert Rank(config, 0).parameters.total() == whole(config)

    def test_the_stages_hold_the_model_together(self):
        config = load("llama-3-70b", pp=4)
        assert sum(Rank(config, stage).parameters.total() for stage in range(4)) == whole(config)

    def test_a_tied_table_stands_on_the_first_and_on_the_last_stage(self):
        one, four = load("175b", pp=1, vpp=1), load("175b", vpp=1, pp=4)
        table = 51200 * 12288 // 8
        rank = Rank(one, 0).parameters.total()
        assert sum(Rank(four, stage).parameters.total() for stage in range(4)) == rank + table
        head = held(head_graph(four)) + table
        assert Rank(four, 3).parameters.total() == 24 * held(layer_graph(four)) + head

    def test_further_tokens_embed_with_a_table_of_their_own_stage(self):
        """Megatron-core, gpt_model.py: an embedding where there is multi-token prediction."""
        config = load("deepseek-v3", pp=16, seq_length=4096)
        last = Rank(config, 15).parameters.total()
        layers = sum(held(layer_graph(config, kind=kind)) for kind in ("moe", "moe", "moe", "mtp"))
        assert last == layers + held(head_graph(config)) + 129280 * 7168
        alone = load("deepseek-v3", pp=1, seq_length=4096)
        assert Rank(alone, 0).parameters.total() == whole(alone) + held(
            layer_graph(alone, kind="mtp")
        )

    def test_experts_are_told_apart(self):
        config = load("mixtral-8x7b", ep=4, tp=2, etp=1)
        counted = Rank(config, 0).parameters
        experts = sum(n for kind, n in counted.items() if kind.expert)
        assert experts == 32 * held_of_experts(layer_graph(config))

    def test_dualpipe_holds_weights_twice(self):
        """Each rank has the layers of its own stage and of the one opposite, and both ends."""
        plain = load("llama-3-70b", pp=4)
        dual = load("llama-3-70b", pp=4, schedule="dualpipe")
        layer = held(layer_graph(plain))
        ends = held(embedding_graph(plain)) + held(head_graph(plain))
        assert Rank(plain, 1).parameters.total() == 20 * layer
        assert Rank(dual, 1).parameters.total() == 40 * layer
        for stage in (0, 3):
            assert Rank(dual, stage).parameters.total() == 40 * layer + ends


class TestRecipes:
    """Bytes of weight, gradient and optimizer for each parameter, split over nothing."""

    @pytest.mark.parametrize(
        ("settings", "expected"),
        [
            ({"precision": "bf16"}, (2, 4, 12)),
            ({"precision": "fp16"}, (2, 4, 12)),
            ({"precision": "fp32"}, (4, 4, 8)),
            ({"main_grads": "bf16", "main_params": "none", "moments": "bf16"}, (2, 2, 4)),
            ({"precision": "fp16", "main_grads": "fp16"}, (2, 2, 12)),  # Rajbhandari et al.: 16
            ({"optimizer": "sgd"}, (2, 4, 8)),
            ({"optimizer": "sgd", "precision": "fp32"}, (4, 4, 4)),
            ({"main_params": "remainder"}, (2, 4, 10)),
            ({"moments": "fp8"}, (2, 4, 6)),
        ],
    )
    def test_bytes_a_parameter(self, settings, expected):
        config = load("llama-3-8b", **settings)
        n = whole(config)
        assert by_group(config) == tuple(n * each for each in expected)
        assert recipe(config.run).total == sum(expected)

    def test_muon_keeps_one_momentum_of_matrices(self):
        config = load("llama-3-8b", optimizer="muon")
        h, f, v, layers, kv = 4096, 14336, 128256, 32, 1024
        matrices = layers * (2 * h * h + 2 * kv * h + 3 * h * f)
        others = layers * 2 * h + h + 2 * v * h
        found = sizes(config)
        assert found["Muon's momentum"] == 4 * matrices
        assert found["Adam's moments"] == 8 * others
        assert found["master weights"] == 4 * (matrices + others)

    def test_one_record_adds_an_optimizer(self, monkeypatch):
        """Here a momentum in bf16, with a step that copies it."""
        moments = Moments("Signum's momentum", ALL, 1, "signum.py: buffer")
        step = Step("signum.py: step", all=(MOMENT,))
        signum = Optimizer("one momentum", (moments,), ("signsgd",), {"fused": (step,)})
        monkeypatch.setitem(OPTIMIZERS, "signum", signum)
        config = load("gpt2", optimizer="signum", moments="bf16")
        n = Rank(config, 0).parameters.total()
        found = {part.name: part.bytes for part in states(Rank(config, 0))}
        assert found["Signum's momentum"] == 2 * n
        (step,) = temporary(Rank(config, 0))
        assert step.bytes == 2 * n
        assert recipe(config.run).optimizer == 4 + 2

    def test_fp8_keeps_copies_of_linears_weights(self):
        """Transformer Engine: rows and columns, a byte each, beside bf16 or fp8 weights."""
        n = whole(load("llama-3-8b"))
        linears = 32 * (2 * 4096**2 + 2 * 1024 * 4096 + 3 * 4096 * 14336)
        bf16 = by_group(load("llama-3-8b", precision="fp8"))
        assert bf16 == (2 * n + 2 * linears, 4 * n, 12 * n)
        fp8 = by_group(load("llama-3-8b", precision="fp8", fp8_params=True))
        assert fp8 == (2 * (n - linears) + 2 * linears, 4 * n, 12 * n)

    def test_what_is_frozen_has_weights_alone(self):
        config = load("llama-3-8b", frozen="layer,embedding")
        n, head = whole(config), held(head_graph(config))
        assert by_group(config) == (2 * n, 4 * head, 12 * head)
        assert any("frozen" in warning for warning in warnings(config))


class TestSharding:
    @pytest.mark.parametrize(("dp", "cp"), [(1, 1), (8, 1), (4, 2), (7, 1)])
    def test_megatrons_distributed_optimizer(self, dp, cp):
        """6 + 12/(d c) bytes a parameter: Megatron-LM's docs/source/api-guide/dist_optimizer."""
        config = load("llama-3-8b", dp=dp, cp=cp, distributed_optimizer=True)
        n = whole(config)
        share = ceil(n / (dp * cp))
        assert by_group(config) == (2 * n, 4 * n, 12 * share)

    @pytest.mark.parametrize(
        ("recipe_", "other"),
        [
            ({"precision": "fp32"}, (4, 4, 8)),
            ({"precision": "fp16", "main_grads": "fp16"}, (2, 2, 12)),
        ],
    )
    def test_its_kin(self, recipe_, other):
        """The same table: fp32 8 + 8/d, fp16 with fp16 gradients 4 + 16/d, of which 4 in a step."""
        config = load("llama-3-8b", dp=8, distributed_optimizer=True, **recipe_)
        n = whole(config)
        assert by_group(config) == (other[0] * n, other[1] * n, other[2] * n // 8)
        step = sum(part.bytes for part in buckets(Rank(config, 0), "step"))
        assert step == (4 * n // 8 if other[1] == 2 else 0)

    @pytest.mark.parametrize("zero", [0, 1, 2, 3])
    def test_zero(self, zero):
        """Rajbhandari et al. 2020 (arXiv 1910.02054), figure 1: 2, 2 and 12 bytes a parameter."""
        settings = {} if zero == 0 else {"zero": zero, "sharder": "deepspeed"}
        config = load("llama-3-8b", dp=8, main_grads="bf16", **settings)
        n = whole(config)
        expected = [2, 2, 12]
        for level, part in ((3, 0), (2, 1), (1, 2)):
            if zero >= level:
                expected[part] /= 8
        assert by_group(config) == tuple(each * n for each in expected)

    def test_nanotron_leaves_context_parallel_ranks_out(self):
        config = load("llama-3-8b", dp=4, cp=2, zero=1, sharder="nanotron")
        assert by_group(config)[2] == 12 * whole(config) // 4

    def test_only_what_is_trained_has_gradients_to_be_reduced(self):
        settings = {"dp": 8, "sharder": "fsdp2", "seq_length": 4096}
        sizes = []
        for frozen in ((), ("embedding", "head")):
            config = load("llama-3-8b", frozen=frozen, **settings)
            (part,) = [
                p for p in buckets(Rank(config, 0), "backward") if p.name.startswith("gradients")
            ]
            sizes.append(part.bytes)
        layer = 2 * 4096**2 + 2 * 1024 * 4096 + 3 * 4096 * 14336 + 2 * 4096
        head = 128256 * 4096 + 4096  # with the last norm
        assert sizes == [6 * head, 6 * layer]

    def test_fsdp2_keeps_fp32_shards(self):
        config = load("llama-3-8b", dp=8, sharder="fsdp2")
        n = whole(config)
        assert by_group(config) == (4 * n // 8, 4 * n // 8, 8 * n // 8)
        layer, table = held(layer_graph(config)), 128256 * 4096
        (gathered,) = buckets(Rank(config, 0), "forward")
        assert gathered.bytes == 2 * (table + 4096 + layer)  # the head's unit has the last norm
        reduced = buckets(Rank(config, 0), "backward")[1]
        assert reduced.bytes == (2 + 4) * (table + 4096)

    def test_fsdp2_that_does_not_reshard_holds_all_weights_in_the_passes(self):
        config = load("llama-3-8b", dp=8, sharder="fsdp2", zero=2)
        assert buckets(Rank(config, 0), "forward")[0].bytes == 2 * whole(config)

    def test_hybrid_sharding_holds_copies(self):
        """HSDP, or Megatron-LM's --num-distributed-optimizer-instances 2."""
        config = load("llama-3-8b", dp=8, sharder="fsdp2", shard_copies=2)
        assert by_group(config)[2] == 8 * whole(config) // 4

    def test_experts_are_split_over_their_own_ranks(self):
        """d 8, t 2, e 4, experts' t 1: 16 ranks of a stage hold each expert 4 times."""
        config = load("mixtral-8x7b", tp=2, ep=4, etp=1, dp=8, distributed_optimizer=True)
        counted = Rank(config, 0).parameters
        experts = sum(n for kind, n in counted.items() if kind.expert)
        dense = counted.total() - experts
        found = sizes(config)
        assert found["master weights"] == 4 * ceil(dense / 8)
        assert found["master weights of experts"] == 4 * experts // 4
        assert found["weights of experts"] == 2 * experts

    def test_deepspeeds_stage_3_steps_a_group_of_parameters_at_a_time(self):
        """DeepSpeed 0.18.2, stage3.py: step and _create_fp16_sub_groups; stage 2 steps all."""
        for zero, dp, expected in ((3, 2, 10**9), (3, 16, None), (2, 2, None)):
            config = load("llama-3-8b", dp=dp, zero=zero)
            (part,) = buckets(Rank(config, 0), "step")
            assert part.bytes == 4 * (expected or whole(config) // dp)

    def test_deepspeeds_buckets(self):
        one = load("llama-3-8b", dp=8, zero=2, sharder="deepspeed")
        assert [part.bytes for part in buckets(Rank(one, 0), "backward")] == [2 * 500_000_000]
        small = load("llama-3-8b", dp=8, zero=2, sharder="deepspeed", bucket=1000)
        assert [part.bytes for part in buckets(Rank(small, 0), "backward")] == [2000]
        assert buckets(Rank(small, 0), "forward") == []
        assert (
            buckets(Rank(load("llama-3-8b", dp=8, distributed_optimizer=True), 0), "backward") == []
        )

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"zero": 4}, "zero must be 0, 1, 2 or 3"),
            ({"zero": 2, "sharder": "nanotron"}, "for --zero 2 use --sharder deepspeed"),
            ({"zero": 3, "sharder": "megatron"}, "--sharder megatron shards optimizer states only"),
            ({"zero": 1, "sharder": "fsdp2"}, "needs --zero 3"),
            ({"sharder": "fsdp"}, "did you mean 'fsdp2'"),
            ({"zero": 2, "distributed_optimizer": True}, "--zero 1 --sharder megatron"),
            ({"zero": 1, "dp": 4, "shard_copies": 3}, "3 must divide --dp x --cp = 4"),
            ({"dp": 4, "shard_copies": 2}, "nothing is sharded"),
            ({"optimizer": "adamm"}, "did you mean 'adam'"),
            ({"main_params": "remainder", "precision": "fp16"}, "needs bf16 weights"),
            ({"fp8_params": True}, "precision fp8"),
            ({"frozen": "heads"}, "did you mean 'head'"),
            ({"bucket": 0}, "bucket must be"),
        ],
    )
    def test_contradictions_are_refused(self, settings, message):
        with pytest.raises(ConfigError, match=message):
            load("llama-3-8b", **settings)

    def test_experts_that_copies_do_not_divide_are_refused(self):
        config = load("mixtral-8x7b", ep=8, dp=8, zero=1, shard_copies=2)
        with pytest.raises(ConfigError, match="ranks with the same experts = 1"):
            states(Rank(config, 0))


class TestMegatron:
    def read(self, **arguments):
        base = {"--num-layers": 2, "--hidden-size": 64, "--num-attention-heads": 4}
        base |= {"--micro-batch-size": 1, "--seq-length": 64}
        given = {"--" + name.replace("_", "-"): value for name, value in arguments.items()}
        return read_yaml({"MODEL_ARGS": base | given}, "x")

    def test_the_distributed_optimizer(self):
        source = self.read(bf16=True, use_distributed_optimizer=True)
        assert source.settings["distributed_optimizer"] is True
        assert "main_grads" not in source.settings

    def test_gradients_under_fp16_are_fp16_unless_asked(self):
        """megatron/training/arguments.py: only bf16 makes accumulation fp32 by itself."""
        assert self.read(fp16=True).settings["main_grads"] == "fp16"
        asked = self.read(fp16=True, accumulate_allreduce_grads_in_fp32=True)
        assert "main_grads" not in asked.settings
        assert self.read(bf16=True, grad_reduce_in_bf16=True).settings["main_grads"] == "bf16"

    def test_a_precision_aware_optimizer(self):
        given = {"main_grads_dtype": "bf16", "exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp16"}
        plain = self.read(bf16=True, **given).settings
        assert "moments" not in plain
        source = self.read(bf16=True, use_precision_aware_optimizer=True, **given)
        found = {name: source.settings[name] for name in ("main_grads", "main_params", "moments")}
        assert found == {"main_grads": "bf16", "main_params": "remainder", "moments": "fp16"}
        assert any("moments of two dtypes" in line for line in source.unmodelled)

    def test_other_optimizers_and_instances(self):
        source = self.read(
            bf16=True,
            optimizer="dist_muon",
            use_distributed_optimizer=True,
            num_distributed_optimizer_instances=2,
        )
        assert source.settings["optimizer"] == "muon"
        assert source.settings["shard_copies"] == 2

    @pytest.mark.parametrize("name", ["use_megatron_fsdp", "use_custom_fsdp"])
    def test_megatron_fsdp(self, name):
        source = self.read(
            bf16=True,
            use_distributed_optimizer=True,
            data_parallel_sharding_strategy="optim_grads_params",
            **{name: True},
        )
        assert (source.settings["zero"], source.settings["sharder"]) == (3, "megatron-fsdp")

    @pytest.mark.parametrize(
        ("said", "zero"),
        [
            ({}, 3),
            ({"torch_fsdp2_no_reshard_after_forward": True}, 2),
            ({"torch_fsdp2_reshard_after_forward": "auto"}, 3),
            ({"torch_fsdp2_reshard_after_forward": "false"}, 2),
            ({"torch_fsdp2_reshard_after_forward": "4"}, 3),
        ],
    )
    def test_pytorchs_fsdp2(self, said, zero):
        """Megatron-core, distributed/torch_fully_sharded_data_parallel.py, splits bf16 weights.

        2 bytes, 2 of their gradients, 4 of the optimizer's fp32 copies and 8 of moments: as many
        as fsdp2's fp32 shards, gradients and moments, whatever gradients are reduced in.
        """
        given = {"bf16": True, "grad_reduce_in_bf16": True, "padded_vocab_size": 1024}
        source = self.read(use_torch_fsdp2=True, **given, **said)
        config = configure(source, {"dp": 8})
        assert (config.parallel.zero, config.parallel.sharder) == (zero, "fsdp2")
        assert sum(by_group(config)) == 16 * whole(config) // 8
        assert not list(temporary(Rank(config, 0)))  # Megatron-core's FusedAdam runs
        lines = [line for line in source.unmodelled if "after-forward 4" in line]
        assert len(lines) == (said.get("torch_fsdp2_reshard_after_forward") == "4")

    def test_a_batch_of_the_run_is_a_recipe(self):
        assert recipe(Run(seq_length=1, optimizer="sgd")).total == 14


@pytest.mark.parametrize("size", ["-1", "0", "2e12", "1e999", "true", '"2e8"', "[]"])
def test_a_deepspeed_bucket_that_is_no_size_is_refused(tmp_path, size):
    file = tmp_path / "ds.json"
    file.write_text(f'{{"zero_optimization": {{"stage": 2, "reduce_bucket_size": {size}}}}}')
    with pytest.raises(InputError, match="reduce_bucket_size must be a number from 1 to"):
        load("llama-3-8b", run=file, dp=4)


def test_deepspeed_files_say_what_is_split(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(
        '{"zero_optimization": {"stage": 2, "reduce_bucket_size": 2e8, '
        '"offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": true}, '
        '"optimizer": {"type": "Lamb"}}'
    )
    config = load("llama-3-8b", run=file, dp=4)
    assert (config.parallel.zero, config.parallel.sharder) == (2, "deepspeed")
    assert (config.run.main_grads, config.run.bucket) == ("bf16", 200_000_000)
    lines = " ".join(config.unmodelled)
    assert "offload_optimizer is not modeled" in lines
    assert "optimizer Lamb is not modeled" in lines


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_deepspeed_sums_gradients_in_the_weights_type(tmp_path, stage, precision):
    """DeepSpeed 0.18.2, runtime/engine.py: get_data_types, however the run is described."""
    named, auto = tmp_path / "named.json", tmp_path / "auto.json"
    zero = f'{{"zero_optimization": {{"stage": {stage}}}, '
    said = "" if precision == "fp32" else f'"{precision}": {{"enabled": true}}, '
    named.write_text(zero + said + '"train_batch_size": "auto"}')
    auto.write_text(zero + '"bf16": {"enabled": "auto"}}')
    settings = {} if precision != "fp32" else {"precision": precision}
    runs = [
        load("gpt2", run=named, dp=8, **settings),
        load("gpt2", run=auto, dp=8, precision=precision),
        load("gpt2", dp=8, zero=stage, sharder="deepspeed", precision=precision),
    ]
    for config in runs:
        assert (config.parallel.zero, config.parallel.sharder) == (stage, "deepspeed")
        assert config.run.main_grads == precision
        older = "bf16 gradients (as in DeepSpeed 0.18 and later)"
        assert (older in assumed(config)) == (precision == "bf16" and stage == 0)


def test_a_type_of_gradients_that_is_said_is_heard(tmp_path):
    """With stage 1 DeepSpeed 0.18.2's bf16_optimizer.py sums bf16 gradients into fp32 ones."""
    file = tmp_path / "ds.json"
    file.write_text(
        '{"zero_optimization": {"stage": 1}, "bf16": {"enabled": true}, '
        '"data_types": {"grad_accum_dtype": "fp32"}}'
    )
    config = load("gpt2", run=file, dp=8)
    assert config.run.main_grads == "fp32"
    assert any("bf16 gradients beside fp32 ones" in line for line in config.unmodelled)
    assert load("gpt2", run=file, dp=8, main_grads="bf16").run.main_grads == "bf16"


def test_zero_2_and_3_alone_are_deepspeeds(tmp_path):
    for zero in (2, 3):
        config = load("llama-3-8b", dp=8, zero=zero)
        assert config.parallel.sharder == "deepspeed"
        said = Assumption("sharder", "deepspeed", f"the default for ZeRO stage {zero}")
        assert said in config.assumed
        assert said.words == f"DeepSpeed's sharding (the default for ZeRO stage {zero})"
    assert load("llama-3-8b", dp=8, zero=1).parallel.sharder == "megatron"
    assert load("llama-3-8b", dp=8, sharder="megatron-fsdp").parallel.zero == 3
    file = tmp_path / "z0.json"
    file.write_text('{"zero_optimization": {"stage": 0}}')
    config = load("llama-3-8b", run=file, dp=8, zero=3)
    assert (config.parallel.zero, config.parallel.sharder) == (3, "deepspeed")
    assert not any(each.setting == "sharder" for each in config.assumed)


class TestOverrides:
    """A new word for sharding, over a file's."""

    def load(self, tmp_path, content, **settings):
        file = tmp_path / "run.json"
        file.write_text(content)
        parallel = load("llama-3-8b", run=file, dp=8, **settings).parallel
        return parallel.zero, parallel.sharder, parallel.shard_copies

    def test_over_deepspeeds(self, tmp_path):
        content = '{"zero_optimization": {"stage": 2}}'
        assert self.load(tmp_path, content) == (2, "deepspeed", 1)
        assert self.load(tmp_path, content, zero=3) == (3, "deepspeed", 1)
        assert self.load(tmp_path, content, sharder="fsdp2") == (3, "fsdp2", 1)
        assert self.load(tmp_path, content, distributed_optimizer=True) == (1, "megatron", 1)

    def test_over_megatrons(self, tmp_path):
        content = (
            '{"memcalc": 1, "parallel": {"distributed_optimizer": true, "shard_copies": 2}}'
        ).replace('"parallel"', '"run": {}, "parallel"')
        content = content.replace('"distributed_optimizer": true', '"zero": 1')
        assert self.load(tmp_path, content) == (1, "megatron", 2)
        assert self.load(tmp_path, content, zero=0) == (0, "megatron", 1)
        assert self.load(tmp_path, content, sharder="fsdp2") == (3, "fsdp2", 1)

    def test_frozen_parts_of_a_file(self, tmp_path):
        file = tmp_path / "run.json"
        file.write_text('{"memcalc": 1, "run": {"frozen": ["embedding", "head"]}}')
        config = load("llama-3-8b", run=file)
        assert by_group(config)[0] == 2 * whole(config)
        with pytest.raises(ConfigError, match="frozen must name parts"):
            load("llama-3-8b", frozen=3)

    def test_instances_of_an_optimizer_without_ranks_to_split_it(self):
        """A launch file may say how many there are, and not on how many GPUs."""
        config = load("llama-3-8b", distributed_optimizer=True, shard_copies=2)
        assert by_group(config)[2] == 12 * whole(config)
