"""What an optimizer keeps, and what its step holds while it runs."""

import pytest

from memcalc.analysis.device import stage_memory
from memcalc.analysis.optimizer_step import NAME, Tensor, form, held, temporary
from memcalc.analysis.rank import Rank
from memcalc.analysis.states import moments, states
from memcalc.config import Run, load
from memcalc.config.optimizers import (
    BF16,
    FORMS,
    FP32,
    MATRICES,
    MOMENT,
    NAMES,
    OPTIMIZERS,
    WEIGHT,
    WIDE_MASTER,
    WIDE_MOMENT,
    WIDE_WEIGHT,
)
from memcalc.config.readers.keys import optimizer
from memcalc.config.readers.megatron.model_args import read_yaml
from memcalc.errors import ConfigError, InputError

# Eight matrices and eight vectors, whose steps ran on PyTorch 2.13.0, transformers 5.24.0 and
# bitsandbytes 0.50.2 with a tracker of storages: bytes per parameter of the whole model, to four
# digits, beyond what was there before step().
WIDE, NARROW = 4096, 1024
MATRIX, VECTOR = WIDE * NARROW, WIDE
WHOLE = 8 * MATRIX + 8 * VECTOR
SHAPES = [(NARROW, WIDE), (WIDE, NARROW)] * 4
VECTORS = [(WIDE,)] * 8
# optimizer, form, bytes of a weight and of a moment -> states, most in a later step
MEASURED = {
    "AdamW foreach bf16": (("adam", "foreach", 2, 2), 4.0, 2.0),
    "AdamW foreach fp32": (("adam", "foreach", 4, 4), 8.0, 4.0),
    "AdamW default bf16": (("adam", "foreach", 2, 2), 4.0, 2.0),
    "AdamW loop bf16": (("adam", "loop", 2, 2), 4.0, 0.7493),
    "AdamW fused bf16": (("adam", "fused", 2, 2), 4.0, 0.0),
    "AdamW fused fp32": (("adam", "fused", 4, 4), 8.0, 0.0),
    "AdamW foreach capturable fp32": (("adam", "foreach", 4, 4), 8.0, 4.0),
    "Adam foreach weight decay fp32": (("adam", "foreach", 4, 4), 8.0, 4.0),
    "SGD foreach momentum fp32": (("sgd", "foreach", 4, 4), 4.0, 0.0),
    "torch Adafactor foreach fp32": (("adafactor-torch", "foreach", 4, 4), 0.0088, 4.0),
    "torch Adafactor loop fp32": (("adafactor-torch", "loop", 4, 4), 0.0088, 0.9996),
    "HF Adafactor bf16": (("adafactor", "loop", 2, 4), 0.0088, 2.4976),
    "RMSprop foreach fp32": (("rmsprop", "foreach", 4, 4), 4.0, 4.0),
}


def sizes(weight, moment):
    widened = {WIDE_WEIGHT: 4 if weight < 4 else 0, WIDE_MOMENT: 0, WIDE_MASTER: 0}
    return {MOMENT: moment, WEIGHT: weight, FP32: 4, BF16: 2, **widened}


def tensors(*shapes):
    return [Tensor(shape) for shape in shapes]


def most(name, form_, weight, moment, decay=False, shapes=(*SHAPES, *VECTORS)):
    """The bytes of the first part of a step."""
    step = OPTIMIZERS[name].steps[form_][0]
    return held(step, tensors(*shapes), sizes(weight, moment), decay)


def kept(name, moment, shapes=(*SHAPES, *VECTORS), momentum=False):
    """The bytes of an optimizer's moments."""
    records = [m for m in OPTIMIZERS[name].moments if momentum or not m.of_momentum]
    return sum(m.number * m.layout(shape, moment) for m in records for shape in shapes)


class TestMeasured:
    @pytest.mark.parametrize("name", MEASURED)
    def test_states_and_the_most_in_a_later_step(self, name):
        (optimizer, form_, weight, moment), states_, later = MEASURED[name]
        momentum = optimizer == "sgd"
        assert round(kept(optimizer, moment, momentum=momentum) / WHOLE, 4) == states_
        assert round(most(optimizer, form_, weight, moment) / WHOLE, 4) == later

    @pytest.mark.parametrize("name", MEASURED)
    def test_a_first_step_makes_the_states_too(self, name):
        """Measured: 2.5024 with transformers' Adafactor, which has made eight of them by then."""
        (optimizer, form_, weight, moment), states_, later = MEASURED[name]
        lazy = OPTIMIZERS[optimizer].lazy
        assert lazy == ("one by one" if optimizer == "adafactor" else "at once")
        if lazy == "one by one":
            first = most(optimizer, form_, weight, moment) + kept(optimizer, moment, SHAPES)
            assert round(first / WHOLE, 4) == 2.5024
        else:
            first = kept(optimizer, moment, momentum=optimizer == "sgd")
            first += most(optimizer, form_, weight, moment)
            assert first / WHOLE == pytest.approx(states_ + later, abs=1e-4)

    def test_amsgrad_keeps_a_third_moment_and_its_step_holds_no_more(self):
        """Measured: 12 bytes of states, 4 more in a step. There is no option for it."""
        assert kept("adam", 4) * 3 // 2 == 12 * WHOLE
        assert most("adam", "foreach", 4, 4) == 4 * WHOLE

    def test_sgd_with_weight_decay_copies_the_gradients(self):
        """Measured: 4 with momentum, Nesterov's and decay; 0 of plain SGD, which keeps nothing."""
        assert most("sgd", "foreach", 4, 4, decay=True) == 4 * WHOLE
        assert most("sgd", "foreach", 4, 4) == kept("sgd", 4) == 0

    def test_adagrads_sums_are_there_before_its_first_step(self):
        """Measured: 8 in each step, and nothing new after the first."""
        assert most("adagrad", "foreach", 4, 4) == 8 * WHOLE
        assert OPTIMIZERS["adagrad"].lazy == ""

    def test_muon_of_pytorch_takes_matrices_only(self):
        """Measured: states of 1.998 and 0.8741 in a step: 3 matrices and two Gram matrices."""
        found = most("muon", "loop", 2, 2, shapes=SHAPES)
        assert found == 2 * (3 * MATRIX + 2 * NARROW**2)
        assert round(found / WHOLE, 4) == 0.8741
        (momentum,) = (m for m in OPTIMIZERS["muon"].moments if m.weights == MATRICES)
        assert round(sum(momentum.layout(s, 2) for s in SHAPES) / WHOLE, 4) == 1.998

    def test_8_bit_adam(self):
        """Measured: states of 2.0313, with two tables of 256 fp32 values, and 0 in a step."""
        found = kept("adam-8bit", 4)
        assert found == 2 * (WHOLE + 4 * WHOLE // 256)
        assert round((found + 2 * 4 * 256) / WHOLE, 4) == 2.0313
        assert most("adam-8bit", "fused", 2, 4) == 0


class TestLoops:
    """A loop holds the largest tensors that meet: the one it updates and the one before it."""

    def test_adam(self):
        adam = OPTIMIZERS["adam"].steps["loop"][0]
        big, small = (100, 10), (10, 10)
        assert held(adam, tensors(big, small), {MOMENT: 4}) == 4 * 2 * 1000
        assert held(adam, tensors(small, big), {MOMENT: 4}) == 4 * (2 * 1000 + 100)
        assert held(adam, tensors(big, big), {MOMENT: 4}) == 4 * 3 * 1000
        assert held(adam, [Tensor(big, alike=2)], {MOMENT: 4}) == 4 * 3 * 1000
        assert held(adam, [Tensor(big, alike=2, shards=8)], {MOMENT: 4}) == 4 * 3 * 125

    def test_adafactor_of_fp32_weights_copies_neither_them_nor_gradients(self):
        assert most("adafactor", "loop", 4, 4) == 4 * 3 * MATRIX

    @pytest.mark.parametrize("name", ["adagrad", "rmsprop"])
    def test_a_weight_decay_copies_one_gradient(self, name):
        assert most(name, "loop", 4, 4) == 4 * 2 * MATRIX
        assert most(name, "loop", 4, 4, decay=True) == 4 * 3 * MATRIX


def pure(**settings):
    """Llama 3.2 1B in bf16 throughout, as PyTorch trains it."""
    dtypes = {"main_grads": "bf16", "main_params": "none", "moments": "bf16"}
    return load(
        "llama-3.2-1b",
        **{"implementation": "transformers-sdpa", "seq_length": 2048, **dtypes, **settings},
    )


def step_bytes(config):
    return sum(part.bytes for part in temporary(Rank(config, 0)))


# Parts of whole steps at their peak, in the step, with PyTorch's foreach AdamW: weights, gradients,
# moments and temporary tensors, each storage as it was requested.
WHOLE_STEPS = {
    ("llama-3.2-1b", "bf16"): (2471628800, 2471628800, 4943257600, 2471628800),
    ("llama-3.2-1b", "fp32"): (4943257600, 4943257600, 9886515200, 4943257600),
    ("llama-3.2-3b", "bf16"): (6425499648, 6425499648, 12850999296, 6425499648),
}


@pytest.mark.parametrize("case", WHOLE_STEPS, ids=str)
def test_whole_steps(case):
    model, precision = case
    settings = {"implementation": "transformers-sdpa", "recompute": "full", "main_params": "none"}
    if precision == "bf16":
        settings |= {"main_grads": "bf16", "moments": "bf16"}
    memory = stage_memory(load(model, seq_length=2048, precision=precision, **settings), 0)
    (step,) = (phase for phase in memory.phases if phase.name == "optimizer step")
    found = {part.name: part.bytes for part in step.parts}
    names = ("weights", "gradients", "Adam's moments", NAME)
    assert tuple(found[name] for name in names) == WHOLE_STEPS[case]


class TestMemory:
    def test_pytorchs_step_holds_a_copy_of_all_weights(self):
        config = pure()
        n = Rank(config, 0).parameters.total()
        assert form(config) == "foreach"
        assert step_bytes(config) == 2 * n
        phases = {phase.name: phase for phase in stage_memory(config, 0).phases}
        (part,) = (part for part in phases["optimizer step"].parts if part.name == NAME)
        assert part.bytes == 2 * n
        assert NAME not in {part.name for part in phases["between steps"].parts}

    def test_fused_and_loop(self):
        table = 128256 * 2048  # the largest weight is the first
        assert step_bytes(pure(optimizer_step="fused")) == 0
        assert step_bytes(pure(optimizer_step="loop")) == 2 * 2 * table

    def test_fsdp2_shards_it(self):
        config = load("llama-3-8b", implementation="torch", sharder="fsdp2", dp=8)
        n = Rank(config, 0).parameters.total()
        assert step_bytes(config) == 4 * n // 8

    @pytest.mark.parametrize(
        "settings",
        [
            {},
            {"zero": 1, "dp": 2},
            {"zero": 3, "dp": 2, "sharder": "deepspeed"},
            {"zero": 1, "dp": 2, "sharder": "nanotron"},
            {"optimizer": "muon"},
            {"optimizer": "sgd"},
        ],
        ids=str,
    )
    def test_the_other_frameworks_have_fused_steps(self, settings):
        config = load("llama-3-8b", **settings)
        assert form(config) == "fused"
        assert step_bytes(config) == 0

    def test_transformer_engine_copies_narrow_states_to_fp32(self):
        """Its optimizers/fused_adam.py: get_unscaled_state, of all weights before the kernel."""
        n = Rank(load("llama-3-8b"), 0).parameters.total()
        assert step_bytes(load("llama-3-8b", moments="bf16")) == 8 * n
        assert step_bytes(load("llama-3-8b", moments="fp8", main_params="fp16")) == 12 * n
        assert step_bytes(load("llama-3-8b", main_params="remainder")) == 0

    def test_muon_and_adam_run_one_after_the_other(self):
        config = pure(optimizer="muon")
        tables = 128256 * 2048 + (2 * 16 + 1) * 2048  # and the norms
        mlp = 2 * 8192 * 2048  # gate and up
        assert step_bytes(config) == max(2 * tables, 2 * (3 * mlp + 2 * 2048**2))

    def test_every_optimizer_has_a_step_on_every_framework(self):
        for name, record in OPTIMIZERS.items():
            assert set(record.steps) <= set(FORMS)
            assert all(parts for parts in record.steps.values())
            for implementation in ("megatron", "torch"):
                config = load("gpt2", optimizer=name, implementation=implementation)
                assert form(config) in record.steps


class TestStates:
    def test_factors_have_an_element_per_row_and_column(self):
        config = load("gpt2", optimizer="adafactor")
        (part,) = (p for p in states(Rank(config, 0)) if p.name == "Adafactor's moment")
        h, layers = 768, 12
        vocabulary = config.model.vocab_size
        matrices = (h + 3 * h) + (h + h) + (h + 4 * h) + (4 * h + h)
        vectors = 4 * h + 3 * h + h + 4 * h + h
        ends = (vocabulary + h) + (1024 + h) + 2 * h
        assert part.bytes == 4 * (layers * (matrices + vectors) + ends)

    def test_a_flat_shard_has_no_factors(self):
        """DeepSpeed's optimizers update one vector per rank."""
        config = load("gpt2", optimizer="adafactor", dp=2, zero=1, sharder="deepspeed")
        (part,) = (p for p in states(Rank(config, 0)) if p.name == "Adafactor's moment")
        assert part.bytes == 4 * Rank(config, 0).parameters.total() // 2
        assert part.certainty == "estimated"

    @pytest.mark.parametrize(
        ("settings", "number"),
        [
            ({}, 1),  # Megatron-LM's --sgd-momentum 0.9
            ({"momentum": 0}, 0),
            ({"implementation": "torch"}, 0),
            ({"implementation": "torch", "momentum": 0.9}, 1),
            ({"sharder": "deepspeed", "zero": 2}, 0),
        ],
        ids=str,
    )
    def test_sgd_keeps_a_momentum_where_there_is_one(self, settings, number):
        assert len(moments(load("gpt2", optimizer="sgd", **settings))) == number

    def test_a_moving_average_is_one_more_copy_of_the_weights(self):
        def of(**settings):
            found = {part.name: part.bytes for part in states(Rank(load("gpt2", **settings), 0))}
            return found["moving average of the weights"], found["weights"]

        assert len(set(of(ema=True))) == 1
        sharded = {"implementation": "torch", "sharder": "fsdp2", "dp": 4}
        assert len(set(of(ema=True, **sharded))) == 1


class TestRefused:
    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"optimizer_step": "slow"}, "optimizer_step 'slow' is unknown"),
            (
                {"optimizer": "adafactor", "optimizer_step": "fused"},
                "--optimizer-step fused does not exist for --optimizer adafactor, which has loop",
            ),
            ({"momentum": 1.5}, "momentum must be a number from 0 to less than 1, not 1.5"),
            ({"weight_decay": -1}, "weight_decay must be a number from 0 to"),
            ({"ema": 1}, "ema must be true or false"),
        ],
        ids=str,
    )
    def test_in_one_line(self, settings, message):
        with pytest.raises(ConfigError, match=message):
            Run(seq_length=1, **settings)


@pytest.mark.parametrize("given", ["--optimizer adam-8bit", "--optim adamw_bnb_8bit"])
def test_names_of_other_tools_are_options_too(memcalc, given):
    rows = memcalc(f"memory gpt2 {given} --explain --format json").document["rows"]
    assert "Adam's 8-bit moments" in {row["part"] for row in rows}


def test_the_note_says_what_is_not_counted(memcalc):
    line = "memory llama-3-8b --optimizer muon --format json"
    said = "not counted: temporary buffers of Muon's Newton-Schulz steps"
    assert any(said in note for note in memcalc(line).document["notes"])
    torch = memcalc(f"{line} --implementation torch").document["notes"]
    assert not any(said in note for note in torch)
    assert any("optimizer step: foreach, each operation is on all weights" in n for n in torch)


class TestFiles:
    def test_the_momentum_of_a_file(self, tmp_path):
        deepspeed = tmp_path / "ds.json"
        for params, number in (('{"momentum": 0.9}', 1), ("{}", 0)):
            deepspeed.write_text(
                '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}, '
                f'"optimizer": {{"type": "SGD", "params": {params}}}}}'
            )
            assert len(moments(load("gpt2", run=deepspeed))) == number
        deepspeed.write_text(deepspeed.read_text().replace("{}", '{"momentum": "x"}'))
        with pytest.raises(InputError, match="momentum must be a number, not 'x'"):
            load("gpt2", run=deepspeed)

    def test_another_optimizer_forgets_the_step_and_the_momentum_of_a_file(self, tmp_path):
        file = tmp_path / "run.json"
        run = '{"optimizer": "sgd", "optimizer_step": "fused", "momentum": 0.9}'
        file.write_text(f'{{"memcalc": 1, "run": {run}}}')
        config = load("gpt2", run=file, optimizer="adafactor")
        assert (config.run.optimizer_step, config.run.momentum) == (None, None)
        assert load("gpt2", run=file).run.momentum == 0.9

    def test_megatrons_arguments(self):
        sizes_ = {"--num-layers": 2, "--hidden-size": 64, "--num-attention-heads": 4}
        said = sizes_ | {"--optimizer": "sgd", "--sgd-momentum": 0.0, "--seq-length": 64}
        source = read_yaml({"MODEL_ARGS": said}, "x")
        assert source.settings["momentum"] == 0
        assert not source.unmodelled

    @pytest.mark.parametrize(
        ("section", "step"),
        [
            ({"type": "Adam", "params": {"torch_adam": True}}, "foreach"),
            ({"type": "Adam", "params": {"lr": 1e-4}}, None),
        ],
    )
    def test_deepspeeds_torch_adam(self, section, step):
        assert optimizer(section, []).get("optimizer_step") == step

    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("adamw_torch_fused", "adam"),
            ("adamw_bnb_8bit", "adam-8bit"),
            ("lion_32bit", "lion"),
            ("Adagrad", "adagrad"),
        ],
    )
    def test_names_of_other_tools(self, name, expected):
        assert NAMES[name.lower()] == expected
