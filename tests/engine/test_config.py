"""Configs: what is valid, what is derived, what is assumed, what is refused and how."""

import inspect
import json
from dataclasses import replace

import numpy as np
import pytest
from words import assumed

import memcalc
from memcalc.answers.warnings import warnings
from memcalc.config import IMPLEMENTATIONS, Config, Model, Parallel, Run, catalog, load
from memcalc.config.recompute import policy
from memcalc.config.source import SETTINGS
from memcalc.errors import ConfigError, MemcalcError

TOY = {"name": "toy", "layers": 2, "hidden_size": 64, "heads": 8}


def test_sizes_that_are_not_said_follow():
    model = Model(**TOY)
    assert (model.kv_heads, model.head_size, model.ffn_size) == (8, 8, 256)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": -64}, "hidden_size must be a whole number from 1 to 16777216, not -64"),
        ({"hidden_size": 10**30}, "not a number of more than 20 digits"),
        ({"heads": 8.0}, "heads must be a whole number"),
        ({"heads": True}, "heads must be a whole number from 1 to 1048576, not True"),
        ({"layers": "2"}, "layers must be a whole number from 1 to 4096, not '2'"),
        ({"heads": 7}, "heads 7 must divide hidden_size 64"),
        ({"kv_heads": 3}, "kv_heads 3 must divide heads 8"),
        ({"kv_heads": 16}, "kv_heads 16 must divide heads 8"),
        ({"norm": "rmsnrom"}, "norm 'rmsnrom' is unknown; did you mean 'rmsnorm'"),
        ({"activation": "swigl"}, "did you mean 'swiglu'"),
        ({"position": None}, "position None is unknown"),
        ({"qkv_bias": 1}, "qkv_bias must be true or false, not 1"),
        ({"attention_dropout": 1.0}, "attention_dropout must be a number from 0 to less than 1"),
        ({"hidden_dropout": float("nan")}, "hidden_dropout must be a number"),
        ({"name": "two\nlines"}, "name must be one line of text"),
        ({"source": 3}, "source must be one line of text"),
        ({"vocab_size": 0}, "vocab_size must be a whole number"),
        ({"max_seq_length": -1}, "max_seq_length must be a whole number"),
        ({"head_size": 7, "position": "rotary"}, "rotary positions need an even head_size, not 7"),
    ],
)
def test_a_model_that_cannot_be_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        Model(**TOY | change)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"router": "sigmoid"}, "router needs experts"),
        ({"capacity_factor": 1.5}, "capacity_factor needs experts"),
        ({"moe_layers": [0, 1]}, "moe_layers needs experts"),
        ({"experts": 0}, "experts must be a whole number from 1"),
        ({"experts": 4, "experts_per_token": 5}, "experts_per_token 5 must be at most experts 4"),
        ({"experts": 4, "expert_ffn_size": 0}, "expert_ffn_size must be a whole number"),
        ({"experts": 4, "router": "sigmod"}, "router 'sigmod' is unknown; did you mean 'sigmoid'"),
        ({"q_lora_rank": 8}, "q_lora_rank needs kv_lora_rank"),
        ({"kv_lora_rank": 8}, "kv_lora_rank needs rope_head_size"),
        ({"image_channels": 1}, "image_channels needs image_size"),
        ({"expert": 4}, "a model has no 'expert'; did you mean 'experts'"),
    ],
)
def test_flat_facts_that_contradict_each_other_are_refused(facts, message):
    with pytest.raises(ConfigError, match=message):
        Model.of(**TOY | facts)


def test_a_flat_fact_is_refused_where_a_record_is_meant():
    with pytest.raises(ConfigError, match="experts must be a record Experts, not 8"):
        Model(**TOY, experts=8)


@pytest.mark.parametrize("name", catalog.names())
def test_the_flat_facts_of_a_model_give_it_back(name):
    model = load(name).model
    assert Model.of(**model.facts()) == model


def test_facts_of_no_record_may_be_defaults():
    dense = Model.of(**TOY, moe_layers=[0, 0], router="softmax", image_channels=3, q_lora_rank=None)
    assert dense.experts is dense.vision is dense.latent is None


@pytest.mark.parametrize(
    ("parallel", "run", "message"),
    [
        ({"tp": 3}, {}, "--tp 3 must divide heads 8"),
        ({"tp": 16}, {}, "--tp 16 must divide heads 8"),
        ({"tp": 4, "sp": True}, {"seq_length": 10}, "--tp \\(with --sp\\) = 4 must divide"),
        ({"tp": 0}, {}, "tp must be a whole number"),
        ({"vpp": 2}, {}, "needs --pp of at least 2"),
        ({"sp": "yes"}, {}, "sp must be true or false"),
        ({}, {"seq_length": 2**40}, "seq_length must be a whole number"),
        ({}, {"micro_batch_size": 0}, "micro_batch_size must be a whole number"),
        ({}, {"global_batch_size": -1}, "global_batch_size must be a whole number"),
        ({}, {"precision": "fp61"}, "did you mean 'fp16'"),
    ],
)
def test_a_run_that_cannot_be_is_refused(parallel, run, message):
    with pytest.raises(ConfigError, match=message):
        Config(Model(**TOY), Parallel(**parallel), Run(**{"seq_length": 128, **run}))


@pytest.mark.parametrize(
    ("model", "tp", "message"),
    [
        ({"ffn_size": 102}, 4, "--tp 4 must divide ffn_size 102"),
        ({"kv_heads": 6}, 4, "--tp 4 must divide kv_heads 6"),
        ({"kv_heads": 3}, 4, "kv_heads 3 must divide --tp 4"),
        ({"kv_heads": 1, "head_size": 1}, 4, "--tp 4 must divide .* x head_size = 14"),
    ],
)
def test_every_axis_that_is_split_is_named(model, tp, message):
    twelve = {"heads": 12, "hidden_size": 96}
    with pytest.raises(ConfigError, match=message):
        Config(Model(**TOY | twelve | model), Parallel(tp=tp), Run(seq_length=8))


def test_what_nobody_said_is_assumed_and_listed():
    config = load("llama-3-70b")
    assert config.run.seq_length == 8192
    assert tuple(assumed(config)) == (
        "sequence length 8192 (the model's context length)",
        "micro-batch size 1",
        "no tensor parallelism",
        "bf16 activations",
        "implementation megatron",
    )
    assert config.run.implementation.attention == "flash"
    notes = " ".join(memcalc.layer(config).notes)
    assert "assumed: sequence length 8192" in notes


def test_the_papers_models_carry_the_papers_run():
    config = load("530b")
    assert not config.assumed
    assert (config.parallel.tp, config.parallel.pp, config.parallel.vpp) == (8, 35, 3)
    assert (config.run.micro_batch_size, config.run.global_batch_size) == (1, 280)
    assert config.run.implementation.name == "paper"


def test_settings_replace_what_the_file_says():
    config = load("22b", seq_length=1024, attention="flash", dropout=0.0, precision="fp32", tp=None)
    assert (config.run.seq_length, config.run.precision, config.parallel.tp) == (1024, "fp32", 8)
    assert config.run.implementation.attention == "flash"
    assert config.model.attention_dropout == config.model.hidden_dropout == 0.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seq_lenght": 1}, "setting 'seq_lenght' is unknown; did you mean 'seq_length'"),
        ({"dropout": 1.5}, "dropout must be a number from 0 to less than 1"),
        ({"implementation": "megatrn"}, "did you mean 'megatron'"),
        ({"attention": "flahs"}, "attention 'flahs' is unknown; did you mean 'flash'"),
        ({"recompute": "none,full"}, "--recompute none cannot be combined"),
        ({"gpu": "a1000"}, "did you mean 'a100'"),
        ({"pp": 50}, r"50 model chunks \(--pp x chunks per rank\) need at least 50 layers"),
        ({"global_batch_size": 3}, "--micro-batch-size x --dp = 4 must divide"),
        ({"recompute": 3}, "--recompute must be a policy, or regions"),
        ({"recompute": [3]}, "--recompute must be a policy, or regions"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        load("22b", **settings)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("qwen2.5-7b", {"tp": 8}, "--tp 8 must divide heads 28: use 1, 2 or 4"),
        ("llama-3-8b", {"recompute_method": "block"}, "--recompute-method needs --recompute full"),
        ("llama-3-8b", {"recompute_layers": 2}, "--recompute-layers needs --recompute full"),
        ("llama-3-8b", {"ep": 4}, "--ep needs experts; llama-3-8b has none"),
        ("llama-3-8b", {"etp": 4}, "--etp needs experts; llama-3-8b has none"),
        ("llama-3-8b", {"recompute": "uniform"}, "use --recompute full --recompute-method uniform"),
    ],
)
def test_a_refusal_names_what_was_set_and_what_is_valid(name, settings, message):
    with pytest.raises(ConfigError) as refusal:
        load(name, **settings)
    assert str(refusal.value).endswith(message)


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("gemma-2-9b", "sdpa has no soft cap of the scores"),
        ("gpt-oss-20b", "sdpa has no attention sinks"),
        ("bloom-176b", "its class supports only eager attention"),
    ],
)
def test_a_layer_that_transformers_does_not_have_is_refused(name, cause):
    with pytest.raises(ConfigError, match=f"{cause}; choose --implementation transformers-eager"):
        load(name, implementation="transformers-sdpa")
    for other in IMPLEMENTATIONS.keys() - {"transformers-sdpa"}:
        assert load(name, implementation=other).run.implementation.name == other


def test_the_first_assumption_leads_to_hugging_faces_layers_where_a_run_may_have_them(tmp_path):
    path = tmp_path / "config.json"
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 64}
    path.write_text(json.dumps({"model_type": "llama", **sizes}))
    words = "implementation megatron (for Hugging Face's layers: --implementation transformers-"
    for config in (
        load(path),
        load("llama-3-8b", sharder="fsdp2"),
        load("llama-3-8b", zero=3),
        load("llama-3-8b", sharder="deepspeed"),
    ):
        assert assumed(config)[0] == f"{words}sdpa)"
    assert assumed(load("gemma-2-9b", sharder="fsdp2"))[0] == f"{words}eager)"
    for config in (
        load("llama-3-8b"),
        load("llama-3-8b", zero=1),
        load("llama-3-8b", sharder="megatron-fsdp"),
        load("175b", sharder="fsdp2"),
        load(path, implementation="megatron"),
    ):
        assert not any("Hugging Face" in line for line in assumed(config))


@pytest.mark.parametrize("gpu", ["v100", "t4", "p100"])
def test_a_gpu_without_bf16_or_flash_kernels_is_warned_about(gpu):
    lines = warnings(load("bert-large", gpu=gpu))
    assert any("has no tensor cores for bf16, and PyTorch emulates it" in line for line in lines)
    assert any("flash attention kernels need CUDA compute capability" in line for line in lines)
    settings = {"precision": "fp16", "attention": "unfused"}
    assert not warnings(load("bert-large", gpu=gpu, **settings))
    assert not warnings(load("bert-large", gpu="a100"))


@pytest.mark.parametrize("gpu", ["a100", "v100", "rtx-3090"])
def test_a_gpu_without_fp8_refuses_it(gpu):
    with pytest.raises(ConfigError, match="has no fp8, which needs CUDA compute capability"):
        load("llama-3-8b", precision="fp8", gpu=gpu)
    with pytest.raises(ConfigError, match="has no fp8"):
        memcalc.memory(load("llama-3-8b", precision="fp8"), budget=gpu)
    for other in ("h100", "l40s", "rtx-4090", "b200", "mi300x"):
        assert load("llama-3-8b", precision="fp8", gpu=other).run.precision == "fp8"


@pytest.mark.parametrize("zero", [2, 3])
def test_deepspeed_has_no_pipeline_with_sharded_gradients_or_weights(zero):
    """PipelineEngine asserts this: deepspeed/runtime/pipe/engine.py."""
    message = f"--sharder deepspeed has no --zero {zero} with --pp: use --zero 1, or --sharder "
    with pytest.raises(ConfigError, match=message):
        load("llama-3-8b", dp=8, pp=4, zero=zero)
    for allowed in ({"zero": 1, "sharder": "deepspeed"}, {"zero": zero, "sharder": "fsdp2"}):
        assert load("llama-3-8b", dp=8, pp=4, **allowed).parallel.pp == 4


def test_an_unknown_recomputation_is_refused_with_the_nearest():
    with pytest.raises(MemcalcError, match="'selectiv' is neither a policy nor a region; did you"):
        memcalc.layer_bytes(load("22b", recompute="selectiv"))


def test_words_stand_for_records():
    run = Run(seq_length=8, recompute="attention,mlp", implementation="paper")
    assert run.policy.regions == {"attention", "mlp"}
    assert run.implementation.attention == "unfused"


def test_what_no_model_is_named_by_is_refused():
    with pytest.raises(ConfigError, match="MODEL must be a name or a path, not a int"):
        load(22)


def test_a_formula_takes_exact_values_only():
    formula = memcalc.layer_formula(load("175b"))
    letters = {"s": 2048, "b": 1, "h": 12288, "a": 96, "t": 8}
    with pytest.raises(TypeError, match=r"s must be an int or a Fraction, not 2048.0"):
        formula.value(letters | {"s": 2048.0})
    with pytest.raises(ZeroDivisionError):
        formula.value(letters | {"t": 0})


def test_a_kernel_keeps_no_negative_bytes():
    with pytest.raises(ConfigError, match="rng_bytes must be a whole number from 0, not -1"):
        replace(IMPLEMENTATIONS["torch"], rng_bytes=-1)


def test_an_unknown_accounting_is_refused():
    with pytest.raises(MemcalcError, match="accounting 'exakt' is unknown; did you mean 'exact'"):
        memcalc.layer(load("22b"), "exakt")


def test_policies_and_regions_may_be_combined():
    both = memcalc.layer_bytes(load("22b", recompute=["attention", "mlp"]))
    assert memcalc.layer_bytes(load("22b", recompute="attention, mlp")) == both
    # what is left: the layer's input, the norms' outputs, and the input of the second norm
    assert both == 4 * 2 * 2048 * 4 * 6144
    # recomputing all of the layer leaves nothing for smaller regions to decide
    assert memcalc.layer_bytes(load("22b", recompute="full,mlp")) == 2 * 2048 * 4 * 6144


def test_sequence_parallelism_over_one_rank_is_warned_about():
    config = load("llama-3-8b", sp=True)
    assert warnings(config) == ("--sp has no effect with --tp 1",)
    assert any(note.startswith("warning: --sp") for note in memcalc.ledger(config).notes)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"bucket": 100}, "--bucket 100 has no effect without DeepSpeed's ZeRO"),
        ({"bucket": 100, "sharder": "fsdp2"}, "--bucket 100 has no effect without DeepSpeed's"),
        ({"cp_kind": "all_to_all"}, "--cp-kind all_to_all has no effect with --cp 1"),
        ({"expert_products": "batched"}, "--expert-products batched has no effect on gpt2, which"),
        ({"imbalance": 3}, "--imbalance 3 has no effect on gpt2, which has no experts"),
        ({"embedding_as_layer": True}, "--embedding-as-layer has no effect with --pp 1"),
        ({"loss_as_layer": True}, "--loss-as-layer has no effect with --pp 1"),
    ],
)
def test_what_is_said_and_has_no_effect_is_warned_about(settings, line):
    (warning,) = warnings(load("gpt2", **settings))
    assert warning.startswith(line)


def test_a_copy_of_weights_that_are_fp32_is_warned_about():
    fp32 = {"precision": "fp32", "attention": "unfused"}
    (line,) = warnings(load("gpt2", main_params="none", **fp32))
    assert (
        line
        == "--main-params none has no effect with --precision fp32, which needs no master weights"
    )
    assert not warnings(load("gpt2", **fp32))


@pytest.mark.parametrize(
    ("name", "parts", "without"),
    [
        ("gpt2", "moe,mlp", ["moe: gpt2 has no such part"]),
        ("gpt2", "expert_act", ["expert_act: gpt2 has no such part"]),
        ("gpt2", "core_attention", ["core_attention: it has no parameters"]),
        ("mixtral-8x7b", "moe,expert_act", ["expert_act: it has no parameters"]),
        ("gpt-oss-20b", "core_attention,embedding,head", []),
    ],
)
def test_a_frozen_part_that_is_not_there_is_warned_about(name, parts, without):
    lines = [line for line in warnings(load(name, frozen=parts)) if "has no effect" in line]
    assert lines == [f"--frozen {part.replace(':', ' has no effect:')}" for part in without]


def test_what_has_an_effect_or_is_a_default_is_not_warned_about():
    spread = {"cp": 2, "cp_kind": "all_gather", "pp": 2, "embedding_as_layer": True}
    states = {"dp": 2, "zero": 1, "sharder": "deepspeed", "bucket": 100, "main_params": "none"}
    assert not warnings(load("gpt2", **spread, **states))
    assert not warnings(load("mixtral-8x7b", ep=8, dp=8, imbalance=3, expert_products="batched"))
    defaults = {"cp_kind": "ring", "imbalance": 1.0, "expert_products": "grouped"}
    assert not warnings(load("gpt2", **defaults, sharder="megatron", main_params="fp32"))


def test_no_model_of_the_catalogue_is_warned_about_what_it_does_not_say():
    for name in catalog.names():
        assert not any("has no effect" in line for line in warnings(load(name))), name


def test_a_sequence_beyond_the_context_is_warned_about():
    assert warnings(load("gpt2", seq_length=2048)) == (
        "sequence length 2048 exceeds the model's context length 1024",
    )
    assert not warnings(load("gpt2"))


def test_what_megatron_keeps_beside_a_packed_value_is_warned_about_with_its_bytes():
    """Measured on Megatron-core 0.16.1: 2 x 2sbh more, at s 256, b 1, h 512: 524288 bytes."""
    model = Model(name="toy", layers=1, hidden_size=512, heads=8, position="rotary")
    run = Run(seq_length=256, implementation="megatron-local")
    (line,) = warnings(Config(model, Parallel(), run))
    assert line.endswith("524288 more bytes per layer")
    assert not warnings(load("llama-3-8b", implementation="megatron-local"))


def test_hugging_faces_layers_over_ranks_are_warned_about():
    (line,) = warnings(load("llama-3-8b", tp=2, implementation="transformers-sdpa"))
    assert "were not measured" in line


def test_flash_kernels_are_counted_for_fp32_only_where_they_run():
    """Falcon's layers, and windowed ones, run a kernel that takes it."""
    run = {"seq_length": 2048, "precision": "fp32", "implementation": "transformers-sdpa"}
    told = {
        name: any("kernels do not support fp32" in line for line in warnings(load(name, **run)))
        for name in ("llama-3-8b", "gemma-3-27b", "phi-3-mini", "falcon-40b")
    }
    assert [*told.values()] == [True, True, False, False]


class TestKernels:
    """What an implementation changes, by the tensors that it adds."""

    def tensors(self, **settings):
        report = memcalc.ledger(load("llama-2-70b", tp=8, sp=True, **settings), "exact")
        return dict(zip(report.column("tensor"), report.column("bytes"), strict=True))

    def test_llama_2_70b_is_134_mib_a_layer(self):
        """33.5 sbh/t: norms 4, linears' inputs 4, q and output 4, k and v 0.5, MLP 6f/h = 21."""
        config = load("llama-2-70b", tp=8, sp=True)
        s, h, t = 4096, 8192, 8
        assert memcalc.layer_bytes(config) == 134 * 2**20 == 335 * s * h // (10 * t)

    def test_the_log_sum_exp_is_an_entry_of_its_own_in_exact_accounting(self):
        s, a, t = 4096, 64, 8
        assert self.tensors()["log_sum_exp"] == 4 * s * a // t
        report = memcalc.ledger(load("llama-2-70b", tp=8, sp=True))
        assert "log_sum_exp" not in report.column("tensor")

    def test_an_unfused_gate_keeps_the_activated_gate_too(self):
        fused, unfused = self.tensors(), self.tensors(implementation="torch")
        s, f, t = 4096, 28672, 8
        assert fused["gate_up"] == unfused["gate"] + unfused["up"] == 4 * s * f // t
        assert unfused["silu_output"] == 2 * s * f // t

    def test_torchs_sequence_parallelism_keeps_the_gathered_inputs(self):
        """+ 4sbh(1 - 1/t): the inputs of qkv and fc1, whole."""
        shard, whole = self.tensors(), self.tensors(implementation="torch")
        assert whole["input_norm_output_gathered"] == 8 * shard["input_norm_output"]
        assert whole["mlp_norm_output_gathered"] == 8 * shard["mlp_norm_output"]

    def test_unfused_attention_keeps_what_is_quadratic(self):
        tensors = self.tensors(attention="unfused", dropout=0.1)
        s, a, t = 4096, 64, 8
        assert tensors["softmax_output"] == 2 * a * s**2 // t
        assert tensors["softmax_dropout_mask"] == a * s**2 // t
        assert tensors["key_rotary_output_repeated"] == 2 * s * 8192 // t

    def test_each_dropout_has_its_own_probability(self):
        names = {"attention_dropout": {"softmax_dropout_mask"}}
        names["hidden_dropout"] = {"attention_dropout_mask", "mlp_dropout_mask"}
        every = {name for dropped in names.values() for name in dropped}
        for field, expected in names.items():
            config = load("22b", dropout=0.0)
            config = replace(config, model=replace(config.model, **{field: 0.1}))
            assert every & {*memcalc.ledger(config).column("tensor")} == expected

    def test_torchs_layer_keeps_one_kernels_norms_and_24_bytes_of_random_state(self):
        """Fused RMSNorm: its input and rstd; SDPA's flash kernel: seed, offset and a spare."""
        tensors = self.tensors(implementation="torch")
        assert tensors["rng_state"] == 24
        assert tensors["layer_input"] == 2 * 4096 * 8192 // 8
        assert tensors["input_norm_rstd"] == 4 * 4096 // 8

    def test_without_dropout_the_softmax_output_is_the_products_factor(self):
        report = memcalc.ledger(load("llama-2-70b", tp=8, attention="unfused"))
        ops = dict(zip(report.column("tensor"), report.column("op"), strict=True))
        assert ops["softmax_output"] == "softmax, context"

    def test_key_value_heads_are_copied_beyond_their_number(self):
        qwen = load("qwen2.5-3b", tp=8, seq_length=1024)  # 2 key-value heads
        rows = {row["tensor"]: row for row in memcalc.ledger(qwen).records()}
        assert rows["value"]["bytes"] == 2 * 1024 * 128
        assert rows["value"]["shape"] == "s b Max(1, k/t) d"
        assert rows["value"]["split"] == "tensor, replicated"


class TestCatalogue:
    @pytest.mark.parametrize("name", catalog.names())
    def test_every_entry_can_be_loaded_and_names_its_source(self, name):
        config = load(name, tp=1)
        assert config.model.name == name
        assert config.model.source
        assert config.model.vocab_size or config.model.classes
        assert memcalc.layer_bytes(config) > 0

    def test_it_holds_what_is_promised(self):
        assert {"22b", "175b", "530b", "1t", "gpt2", "llama-2-70b", "llama-3-70b", "mistral-7b"} < {
            *catalog.names()
        }

    def test_names_are_found_whatever_their_case(self):
        assert load("LLAMA-3-8B").model.name == "llama-3-8b"

    def test_an_unknown_name_leads_to_the_nearest(self):
        with pytest.raises(ConfigError, match="did you mean 'llama-3-70b'"):
            load("llama3-70b")


def test_megatrons_modules_let_go_of_outputs_and_the_outermost_region_decides():
    assert policy(["layernorm", "moe_act"]).dropped == {"norm", "expert_act"}
    assert policy(["moe", "moe_act"]) == policy(["moe"])
    assert policy(["full", "layernorm"]) == policy(["full"])
    assert policy(["core_attn"]) == policy(["selective"])
    assert policy(["offload"]).offloaded


def test_a_word_that_recomputes_nothing_is_warned_about():
    """Megatron-core 0.16.1, gpt_layer_specs.py: its norms are inside the linears after them."""
    settings = {"seq_length": 4096, "recompute": "layernorm"}
    (line,) = warnings(load("llama-3-8b", **settings))
    assert line.startswith("--recompute layernorm recomputes nothing here")
    for other in ({"implementation": "torch"}, {"recompute": "mlp"}):
        assert not warnings(load("llama-3-8b", **{**settings, **other}))
    for name in ("mixtral-8x7b", "deepseek-v3"):
        assert not warnings(load(name, **settings))


@pytest.mark.parametrize(
    ("name", "words", "without"),
    [
        ("llama-3-8b", "moe,mlp", ["moe"]),
        ("llama-3-8b", "mla_up_proj,moe_act", ["moe_act", "mla_up_proj"]),
        ("mixtral-8x7b", "mlp,moe", ["mlp"]),
        ("mixtral-8x7b", "shared_experts", ["shared_experts"]),
        ("deepseek-v3", "mlp,moe_act,shared_experts,mla_up_proj", []),
        ("t5-11b", "cross_attention", []),
        ("bert-large", "cross_attention", ["cross_attention"]),
    ],
)
def test_a_region_that_no_layer_has_is_warned_about(name, words, without):
    found = warnings(load(name, seq_length=512, recompute=words))
    nothing = [line.split(" ")[1] for line in found if "recomputes nothing: " in line]
    assert nothing == without


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (
            lambda c: memcalc.ledger("22b"),
            r"config must be a Config \(memcalc.load gives one\), not",
        ),
        (lambda c: memcalc.layer_bytes([]), "config must be a Config"),
        (lambda c: memcalc.Config("22b", c.parallel, c.run), "model must be a Model, not '22b'"),
        (lambda c: memcalc.layer(c, 3), "accounting must be text, not 3"),
        (lambda c: memcalc.memory(c, budget=80), "budget must be text or None, not 80"),
        (lambda c: memcalc.memory(c, explain=1), "explain must be true or false, not 1"),
        (lambda c: memcalc.flops(c, iteration_time="x"), "iteration_time must be a number or None"),
        (lambda c: memcalc.flops(c, iteration_time=True), "iteration_time must be a number or No"),
        (
            lambda c: memcalc.flops(c, iteration_time=1, gpus=2.5),
            "gpus must be a whole number or N",
        ),
        (
            lambda c: memcalc.flops(c, iteration_time=1, gpus=0),
            "gpus must be a whole number from 1",
        ),
        (lambda c: memcalc.flops(c, iteration_time=1, gpus=-3), "from 1 to 16777216, not -3"),
        (lambda c: memcalc.backtest("runs.jsonl"), "path must be a Path, not 'runs.jsonl'"),
        (lambda c: memcalc.rnn(c), "config must be a Recurrent or None, not"),
        (lambda c: memcalc.load("22b", gpu=3), "gpu must be one line of text, not 3"),
        (lambda c: memcalc.layer(c).render(3), "format 3 is unknown"),
    ],
)
def test_what_is_of_a_wrong_type_is_refused_where_it_comes_in(ask, message):
    with pytest.raises(MemcalcError, match=message):
        ask(load("22b"))


def test_numbers_of_numpy_are_pythons_own_once_they_are_in():
    config = load("gpt2", seq_length=np.int64(512), tp=np.int32(2), dropout=np.float64(0.5))
    assert config == load("gpt2", seq_length=512, tp=2, dropout=0.5)
    numbers = config.run.seq_length, config.parallel.tp, config.model.hidden_dropout
    assert [type(number) for number in numbers] == [int, int, float]
    assert type(Parallel(tp=np.int64(2)).tp) is type(Run(seq_length=np.int16(8)).seq_length) is int
    assert type(Model(**TOY | {"heads": np.int64(8)}).kv_heads) is int
    timed = {"iteration_time": np.float32(37.5), "gpus": np.int64(280)}
    rows = memcalc.flops(load("530b"), iteration_time=37.5, gpus=280).rows
    assert memcalc.flops(load("530b"), **timed).rows == rows
    with pytest.raises(ConfigError, match="tp must be a whole number from 1"):
        load("gpt2", tp=np.float64(2))


def test_a_public_function_is_the_same_each_time_and_says_what_it_takes():
    assert memcalc.flops is memcalc.flops
    assert list(inspect.signature(memcalc.flops).parameters)[:2] == ["config", "scope"]


@pytest.mark.parametrize("imbalance", [-1, 0, 0.5, 2e9, float("nan"), "2"])
def test_an_imbalance_has_one_bound(imbalance):
    with pytest.raises(ConfigError, match=r"imbalance must be a number from 1 to 1e\+09, not"):
        load("mixtral-8x7b", imbalance=imbalance)


@pytest.mark.parametrize("value", [[], {}, [[1]], {"a": []}])
@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_a_list_or_an_object_for_a_setting_is_read_or_refused(name, value):
    """What it says is one line; anything but a ConfigError fails here."""
    refused = None
    try:
        load("22b", **{name: value})
    except ConfigError as error:
        refused = str(error)
    assert refused is None or "\n" not in refused
