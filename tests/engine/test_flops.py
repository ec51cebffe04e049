"""FLOPs: appendix A of Korthikanti et al. 2022, and the products of the modern layer."""

import pytest

import memcalc
from memcalc import paper, symbols
from memcalc.analysis import flops
from memcalc.blocks.layer import layer_graph
from memcalc.config import catalog, load
from memcalc.errors import UsageError


def one(config):
    (row,) = memcalc.flops(config, scope="layer").records()
    return row


@pytest.mark.parametrize("model", ["22b", "175b", "530b", "1t"])
def test_a_layers_forward_flops_are_appendix_as(model):
    """Page 15: 24bsh^2 + 4bs^2h for a layer; backward twice that."""
    config = load(model)
    s, b, h = config.run.seq_length, config.run.micro_batch_size, config.model.hidden_size
    row = one(config)
    assert row["forward_flops"] == 24 * b * s * h**2 + 4 * b * s**2 * h
    assert row["backward_flops"] == 2 * row["forward_flops"]
    assert row["model_flops"] == 3 * row["forward_flops"] == row["hardware_flops"]


@pytest.mark.parametrize("name", catalog.names())
def test_selective_recomputation_repeats_the_two_products_of_the_core(name):
    config = load(name, recompute="selective", seq_length=1024)
    model, s, b = config.model, 1024, config.run.micro_batch_size
    sizes = model.head_size + (model.latent.v_head_size if model.latent else model.head_size)
    assert one(config)["recompute_flops"] == 2 * b * s**2 * model.heads * sizes


@pytest.mark.parametrize("name", catalog.names())
def test_full_recomputation_adds_one_forward_pass(name):
    row = one(load(name, recompute="full", seq_length=1024))
    assert row["recompute_flops"] == row["forward_flops"]


@pytest.mark.parametrize("name", catalog.names())
def test_flops_do_not_depend_on_how_ranks_share_them(name):
    serial = load(name, tp=1, seq_length=1024)
    for tp in (2, 4, 8):
        model = serial.model
        if model.heads % tp == 0 and 0 in (model.kv_heads % tp, tp % model.kv_heads):
            split = load(name, tp=tp, sp=True, seq_length=1024)
            assert flops.forward(layer_graph(split)) == flops.forward(layer_graph(serial))


def test_grouped_queries_and_a_gated_mlp():
    """Llama-2-70B: q, k, v, out; gate, up, down; QK^T and PV; two FLOPs a multiply-add."""
    s, h, a, k, d, f = 4096, 8192, 64, 8, 128, 28672
    linear = h * (a + 2 * k) * d + a * d * h + 3 * h * f
    core = 2 * s * a * d
    assert one(load("llama-2-70b"))["forward_flops"] == 2 * s * (linear + core)


def test_a_utilization_needs_as_many_ranks_as_the_experts():
    settings = {"seq_length": 4096, "tp": 4, "sp": True, "ep": 8, "etp": 1, "gpu": "h100"}
    with pytest.raises(UsageError, match="must divide the 4 ranks of a stage"):
        memcalc.flops(load("mixtral-8x7b", **settings), iteration_time=1.0)
    for more, gpus in (({"dp": 2}, None), ({"global_batch_size": 8}, 8)):
        config = load("mixtral-8x7b", **settings, **more)
        assert memcalc.flops(config, iteration_time=1.0, gpus=gpus).rows[0][5] > 0


def test_the_corrected_overhead_of_selective_recomputation():
    """Megatron-LM issue 523 corrects equation 9: 1 + s/(18h) where the MLP and heads are the
    paper's; exactly, for one layer, (24h + 4s) * 3 grows by 4s."""
    s, h = 2048, 12288
    row = one(load("175b", recompute="selective"))
    assert row["hardware_flops"] * 3 * (24 * h + 4 * s) == row["model_flops"] * (
        3 * (24 * h + 4 * s) + 4 * s
    )


SECONDS = {"22b": 1.10, "175b": 13.75, "530b": 37.83, "1t": 71.49}
PRINTED = {"22b": (41.5, 43.7), "175b": (51.4, 52.8), "530b": (56.0, 57.0), "1t": (56.3, 57.0)}


class TestIteration:
    """Equation 7, and table 5 (page 12), whose peak is 312 TFLOP/s (footnote 5)."""

    @pytest.mark.parametrize("model", SECONDS)
    def test_model_flops_are_equation_7s(self, model):
        config = load(model)
        letters = symbols.values(config) | {"B": config.run.global_batch_size}
        (row,) = memcalc.flops(config).records()
        assert row["model_flops"] == paper.EQUATIONS[7](paper.exact(letters))

    @pytest.mark.parametrize("model", SECONDS)
    def test_hardware_flops_are_the_corrected_equation_8s(self, model):
        config = load(model, recompute="selective")
        letters = symbols.values(config) | {"B": config.run.global_batch_size}
        (row,) = memcalc.flops(config).records()
        assert row["hardware_flops"] == paper.CORRECTED[8](paper.exact(letters))

    @pytest.mark.parametrize("model", SECONDS)
    def test_utilization_is_table_5s(self, model):
        """To half of the last digit of both the percentages and the seconds."""
        config = load(model, recompute="selective", sp=True)
        (row,) = memcalc.flops(config, iteration_time=SECONDS[model]).records()
        for ours, printed in zip(
            ("mfu_percent", "hfu_printed_percent"), PRINTED[model], strict=True
        ):
            assert abs(row[ours] - printed) < 0.05 + printed * 0.005 / SECONDS[model]

    @pytest.mark.parametrize("model", SECONDS)
    def test_the_corrected_utilization_is_that_of_the_corrected_equation_8(self, model):
        config = load(model, recompute="selective", sp=True)
        (row,) = memcalc.flops(config, iteration_time=SECONDS[model]).records()
        letters = paper.exact(symbols.values(config) | {"B": config.run.global_batch_size})
        corrected = float(paper.CORRECTED[8](letters) / paper.EQUATIONS[8](letters))
        assert row["hfu_percent"] == pytest.approx(row["hfu_printed_percent"] * corrected)

    def test_the_530b_model_on_2240_gpus(self):
        """Page 13: 39.15 s, 54.2 %."""
        config = load("530b", recompute="selective", dp=8, global_batch_size=8 * 280)
        (row,) = memcalc.flops(config, iteration_time=39.15, gpus=2240).records()
        assert round(row["mfu_percent"], 1) == 54.2

    def test_a_vocabulary_that_ranks_do_not_divide_is_padded_and_that_is_said(self):
        split, padded = load("gpt2", tp=4), load("gpt2", tp=4).padded
        assert padded.model.vocab_size == 50688  # a multiple of 128 x 4
        for answer in (memcalc.flops, memcalc.comm):
            assert answer(split).rows == answer(padded).rows
            assert "vocabulary 50688 (50257 padded to a multiple of 512" in answer(split).notes[1]
        assert not any("vocabulary" in line for line in memcalc.flops(split, "layer").notes)

    @pytest.mark.parametrize("name", ["bert-large", "vit-base"])
    def test_a_causal_count_of_no_causal_mask_is_refused(self, name):
        for scope in ("iteration", "layer"):
            with pytest.raises(UsageError, match=f"causal attention, which {name}"):
                memcalc.flops(load(name), scope, causal=True)

    def test_a_causal_count_of_an_encoder_decoder_is_the_decoders(self):
        """Of a layer each, s = 512 tokens: the decoder's own s x s, not the encoder's or across."""
        config = load("t5-11b", seq_length=512)
        (whole,), (half,) = (memcalc.flops(config, causal=c).records() for c in (False, True))
        layers, s, width = config.model.layers, 512, config.model.heads * config.model.head_size
        assert whole["forward_flops"] - half["forward_flops"] == layers * 2 * s**2 * width

    def test_a_causal_count_halves_the_attentions_products_alone(self):
        s, b, h, v, layers = 2048, 4, 6144, 51200, 48
        (row,) = memcalc.flops(load("22b"), causal=True).records()
        linear = layers * 24 * b * s * h**2 + 2 * b * s * h * v
        assert row["forward_flops"] == linear + layers * 4 * b * s**2 * h // 2
        (flash,) = memcalc.flops(load("22b", attention="flash"), causal=True).records()
        assert flash["forward_flops"] == row["forward_flops"]

    def test_recomputed_products_are_halved_too(self):
        s, b, h, layers = 2048, 4, 6144, 48
        (row,) = memcalc.flops(load("22b", recompute="selective"), causal=True).records()
        assert row["recompute_flops"] == layers * 4 * b * s**2 * h // 2

    def test_the_number_of_gpus_counts(self):
        config = load("22b")
        eight, sixteen = (memcalc.flops(config, iteration_time=1.1, gpus=gpus) for gpus in (8, 16))
        assert eight.column("mfu_percent")[0] == 2 * sixteen.column("mfu_percent")[0]
        line = "--gpus 16, but the FLOPs are those of a global batch of 4 over 8 ranks"
        assert any(line in note for note in sixteen.notes)
        fast = memcalc.flops(config, iteration_time=0.1)
        assert any("utilization above 100 %" in note for note in fast.notes)

    def test_other_gpus_than_ranks_need_the_global_batch(self):
        settings = {"gpu": "h100", "tp": 2}
        refusal = "those of 2 ranks: pass --dp 4 and --global-batch-size of the whole run"
        with pytest.raises(UsageError, match=f"--gpus 8, but the FLOPs are {refusal}"):
            memcalc.flops(load("llama-3-8b", **settings), iteration_time=1, gpus=8)
        with pytest.raises(UsageError, match="those of 2 ranks: pass --global-batch-size"):
            memcalc.flops(load("llama-3-8b", **settings), iteration_time=1, gpus=7)
        whole = load("llama-3-8b", **settings, global_batch_size=64)
        assert memcalc.flops(whole, iteration_time=10, gpus=8).answer.endswith("%")

    def test_without_a_time_the_utilization_is_unknown(self):
        (row,) = memcalc.flops(load("22b")).records()
        assert row["mfu_percent"] is row["hfu_percent"] is row["hfu_printed_percent"] is None

    def test_equation_8_is_for_the_papers_layer_and_policy_alone(self):
        for config in (load("22b"), load("llama-3-8b", recompute="selective", gpu="a100")):
            (row,) = memcalc.flops(config, iteration_time=1.0).records()
            assert row["hfu_printed_percent"] is None
            assert row["hfu_percent"] is not None


def test_frozen_weights_need_no_gradient():
    """Backward multiplies with them once, for the gradient of their input."""
    whole, frozen = (
        flops.iteration(load("llama-3-8b", seq_length=4096, frozen=words))
        for words in ((), ("mlp",))
    )
    assert whole.backward - frozen.backward == 32 * 3 * 2 * 4096 * 4096 * 14336
    assert whole.forward == frozen.forward


def test_scores_beyond_a_window_are_named(memcalc):
    """Of s^2 scores a window of w leaves 2sw - w^2, where a causal mask saves none."""
    config = load("gemma-3-27b", seq_length=32768)
    s, w, heads, d = 32768, 1024, 32, 128
    assert flops.beyond_windows(config) == 52 * 4 * heads * d * (s - w) ** 2
    assert flops.beyond_windows(load("gemma-3-27b", seq_length=w)) == 0
    share = float(100 * flops.beyond_windows(config) / flops.iteration(config).forward)
    notes = memcalc("flops gemma-3-27b -s 32768 --format json").document["notes"]
    assert any(f"outside a sliding window run {share:.1f} % fewer" in note for note in notes)


def test_an_early_stop_is_said_of_what_torch_recomputes(memcalc):
    line = "flops llama-3-8b -s 4096 --recompute full --implementation {} --format json"
    for name, said in (("transformers-sdpa", True), ("megatron", False)):
        notes = memcalc(line.format(name)).document["notes"]
        assert any("stops early by default" in note for note in notes) == said
