"""Options without effect: each option of a question changes its answer, or that is said."""

import json

import click
import pytest

from memcalc.cli.main import COMMANDS
from memcalc.lazy import resolve

SIZES = {"layers": 4, "hidden_size": 256, "heads": 8, "kv_heads": 4, "vocab_size": 1000}
OWN = "an option of one question, which its own tests try"
DENSE = {**SIZES, "max_seq_length": 512, "norm": "rmsnorm", "activation": "swiglu"}
EXPERTS = {**DENSE, "experts": 8, "experts_per_token": 2, "expert_ffn_size": 128}

# A value of each option that is not its default; flags need none.
VALUES = {
    "seq_length": 256,
    "micro_batch_size": 2,
    "global_batch_size": 16,
    "vocab_size": 2000,
    "tp": 2,
    "pp": 2,
    "vpp": 2,
    "schedule": "gpipe",
    "microbatch_group_size": 3,
    "first_stage_layers": 1,
    "last_stage_layers": 1,
    "layout": "1,3",
    "dp": 2,
    "cp": 2,
    "cp_kind": "all_gather",
    "ep": 2,
    "etp": 1,
    "imbalance": 1.5,
    "zero": 1,
    "sharder": "deepspeed",
    "shard_copies": 2,
    "main_grads": "bf16",
    "main_params": "fp16",
    "moments": "bf16",
    "optimizer": "sgd",
    "optimizer_step": "loop",
    "momentum": 0.5,
    "weight_decay": 0.1,
    "frozen": "embedding",
    "bucket": 1_000_000,
    "recompute": "full",
    "recompute_method": "block",
    "recompute_layers": 5,
    "attention": "unfused",
    "dropout": 0.1,
    "precision": "fp16",
    "implementation": "torch",
    "gpu": "h100",
    "cross_entropy": "te",
    "expert_products": "sequential",
    "versions": "torch=2.9",
    "framework": "torch",
}
FLAGS = {"sp", "distributed_optimizer", "embedding_as_layer", "loss_as_layer", "fp8_params"}
FLAGS |= {"keep_gradients", "ema", "holds_logits"}
BASES = {
    "plain": {},
    "sharded": {"tp": 2, "sp": None, "pp": 2, "dp": 4, "cp": 2, "zero": 1, "gpu": "h100"},
    "recomputed": {
        "recompute": "full",
        "precision": "fp8",
        "zero": 1,
        "sharder": "deepspeed",
        "dp": 4,
        "pp": 2,
        "vpp": 2,
    },
}
# Options that are not tried, and why.
UNTRIED = {
    **dict.fromkeys(("format_", "output", "force", "wide"), "changes the form of an answer only"),
    **dict.fromkeys(("budget", "margin", "allocated_only", "fill", "gpus", "iteration_time"), OWN),
    **dict.fromkeys(("explain", "causal", "scope", "accounting"), OWN),
    "run": "needs a file, and stands for the settings in it",
}
# Setup and option -> what its refusal says.
DENSE_ONLY = {
    (base, option): f"--{option} needs experts" for base in BASES for option in ("ep", "etp")
}
REFUSED = {
    ("plain", "vpp"): "--vpp 2 needs --pp of at least 2",
    ("plain", "microbatch_group_size"): "needs --vpp of at least 2",
    ("sharded", "microbatch_group_size"): "needs --vpp of at least 2",
    ("plain", "first_stage_layers"): "needs --pp of at least 2",
    ("plain", "last_stage_layers"): "needs --pp of at least 2",
    ("plain", "fp8_params"): "--fp8-params needs --precision fp8",
    ("sharded", "fp8_params"): "--fp8-params needs --precision fp8",
    ("plain", "layout"): "--layout has 4 layers in 2 chunks",
    ("plain", "shard_copies"): "--shard-copies needs --zero 1, 2 or 3",
    ("plain", "recompute_method"): "needs --recompute full",
    ("plain", "recompute_layers"): "needs --recompute full",
    ("sharded", "recompute_method"): "needs --recompute full",
    ("sharded", "recompute_layers"): "needs --recompute full",
    ("recomputed", "first_stage_layers"): "--vpp 2 must divide",
    ("recomputed", "last_stage_layers"): "--vpp 2 must divide",
    ("recomputed", "layout"): "--layout has 4 layers in 2 chunks",
    ("recomputed", "schedule"): "--vpp 2 needs --schedule interleaved",
    ("recomputed", "distributed_optimizer"): "means --zero 1 --sharder megatron",
}
MEMORY_ONLY = {("plain", "ep"): "needs a multiple of 2 ranks per stage"}
# What states a default of these setups: nothing changes, and nothing is to be said.
STATED = {
    ("sharded", "distributed_optimizer"),  # zero 1 of sharder megatron
    ("plain", "etp"),  # as tp
    ("recomputed", "etp"),
    ("recomputed", "main_grads"),  # the weights' dtype, of DeepSpeed
}


def arguments(settings, command):
    """The options of a command line, of those that the command has."""
    words = []
    for name, value in settings.items():
        if name == "format" or name in {parameter.name for parameter in command.params}:
            words.append(f"--{name.replace('_', '-')}")
            words += [] if value is None else [str(value)]
    return words


@pytest.mark.parametrize("question", ["memory", "ledger", "recompute", "flops", "comm", "layer"])
@pytest.mark.parametrize("sizes", [DENSE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("base", BASES)
def test_each_option_changes_the_answer_or_that_is_said(memcalc, tmp_path, question, sizes, base):
    model = tmp_path / "toy.json"
    model.write_text(json.dumps({"memcalc": 1, "model": sizes}))
    command = resolve(COMMANDS[question][0])
    settings = BASES[base]
    if question == "layer":  # whose rows are all techniques
        settings = {k: v for k, v in settings.items() if k not in ("sp", "recompute")}

    def asked(settings):
        return memcalc(" ".join([question, str(model), *arguments(settings, command)]))

    before = json.loads(memcalc_json(asked, settings).out)
    options = [each for each in command.params if isinstance(each, click.Option)]
    tried = 0
    for option in options:
        name = option.name
        if name in settings or name in UNTRIED:
            continue
        assert name in VALUES or name in FLAGS, name
        outcome = memcalc_json(asked, {**settings, name: VALUES.get(name)})
        refused = REFUSED | (MEMORY_ONLY if question == "memory" else {})
        refusal = (refused if sizes is EXPERTS else refused | DENSE_ONLY).get((base, name))
        assert (outcome.status == 2) == (refusal is not None), name
        if refusal:
            assert refusal in outcome.err
            continue
        after = json.loads(outcome.out)
        said = [note for note in after["notes"] if "no effect" in note or "recomputes" in note]
        same = after["rows"] == before["rows"]
        if question == "memory":  # its first note is its answer
            same = same and after["notes"][0] == before["notes"][0]
        if name in ("dp", "global_batch_size"):  # which a title may state
            same = same and after["title"] == before["title"]
        assert not same or said or (base, name) in STATED, name
        tried += 1
    assert tried > 5


def memcalc_json(asked, settings):
    return asked({**settings, "format": "json"})


class TestNamed:
    def test_more_recomputed_layers_than_there_are(self, memcalc):
        line = "memory 22b --recompute full --recompute-method block --recompute-layers"
        said = "--recompute-layers 49 recomputes all layers: a model chunk has 48 layers"
        assert f"warning: {said}" in " ".join(memcalc(f"{line} 49").out.split())
        assert "warning" not in memcalc(f"{line} 47").out

    def test_a_gpu_without_a_time(self, memcalc):
        said = "warning: --gpu has no effect on this answer"
        assert said in memcalc("flops 530b --gpu h100").out
        assert said not in memcalc("flops 530b --gpu h100 --iteration-time 40").out

    def test_a_default_that_is_stated_is_not_named(self, memcalc):
        line = "memory llama-3-8b -s 4096 -b 1 --tp 1 --dp 1 --precision bf16 --optimizer adam"
        assert "effect" not in memcalc(line).out

    def test_what_a_warning_names_is_not_named_twice(self, memcalc):
        out = memcalc("memory llama-3-8b -s 4096 --sp").out
        assert out.count("no effect") == 1

    def test_a_long_pipeline_is_asked_once(self, memcalc, tmp_path):
        model = tmp_path / "toy.json"
        for layers, said in ((200, True), (300, False)):
            sizes = {**DENSE, "layers": layers}
            model.write_text(json.dumps({"memcalc": 1, "model": sizes}))
            outcome = memcalc(f"flops {model} --pp {layers} --global-batch-size 512 --gpu a100")
            assert ("--gpu has no effect" in outcome.out) is said
