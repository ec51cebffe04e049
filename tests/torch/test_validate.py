"""Real PyTorch layers against the ledger: difference 0, and a wrong ledger is caught."""

import json
import operator
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path

import pytest
import torch
from alike import one_of_each
from shared import python
from torch.utils.flop_counter import FlopCounterMode
from vectors import GATHERED, GPT_LAYER, GROUPED, GROUPED_BYTES, HUGGING_FACE

import memcalc as library
from memcalc import symbols
from memcalc.analysis import flops
from memcalc.analysis.activations import kept
from memcalc.analysis.allocator import rounded
from memcalc.blocks.layer import layer_graph
from memcalc.cli import validate as cli_module
from memcalc.config import IMPLEMENTATIONS, Config, Experts, Model, Parallel, Run, catalog, load
from memcalc.config.allocator import expandable
from memcalc.config.recompute import POLICIES
from memcalc.errors import UsageError
from memcalc.units import format_bytes
from memcalc.validation import findings, gradients, ranks, witness
from memcalc.validation import validate as module
from memcalc.validation.gradients import TOLERANCE
from memcalc.validation.layers import megatron
from memcalc.validation.layers.hugging_face import HuggingFaceLayer
from memcalc.validation.layers.modules import TYPES, Layer, Place, hidden_state, lacking
from memcalc.validation.match import tie
from memcalc.validation.measuring import allocator, cuda, kernels, room
from memcalc.validation.measuring.kernels import CudaKernels
from memcalc.validation.measuring.measure import Stored, measure
from memcalc.validation.reduced import fewer_ranks, reduced
from memcalc.validation.validate import validate
from memcalc.validation.witness import observe

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

torch.set_num_threads(1)  # small tensors: threads would only wait for one another

FAULTS = """
import os

import torch


def fails_on_rank_1(rank, how):
    if rank == 1 and how == "die":
        os._exit(7)
    if rank == 1:
        raise ValueError("the cause")
    torch.distributed.barrier()
"""


# The catalog's models whose layer is written here, by hand or for DTensor.
WRITTEN = [name for name in catalog.names() if not lacking(load(name))]
PLAIN = one_of_each(WRITTEN, ranks=(2, 8))
FEW = ("22b", "gpt2", "llama-2-7b", "llama-3-70b", "qwen2.5-0.5b", "phi-4", "starcoder2-7b")


def split(name, tp):
    """Whether so many ranks share a model's heads."""
    model = load(name, tp=1).model
    return model.heads % tp == 0 and 0 in (model.kv_heads % tp, tp % model.kv_heads)


def sums(report):
    rows = [row for row in report.records() if row["status"] != "ignored"]
    return sum(r["ledger_bytes"] for r in rows), sum(r["measured_bytes"] for r in rows)


class TestMeta:
    def test_transformer_engines_unfused_attention_keeps_the_mask_of_a_bidirectional_layer(self):
        config = load("gpt2", seq_length=64, attention="unfused", implementation="megatron")
        causal = validate(config, "meta")
        report = validate(replace(config, model=replace(config.model, causal=False)), "meta")
        assert causal.failures == report.failures == ()
        assert sums(report)[0] - sums(causal)[0] == 64 * 64

    @pytest.mark.parametrize(
        ("name", "policy"),
        [
            *product(["22b"], ["full", "save_linear", "attention", "mlp", "norm"]),
            *product(["22b", "175b", "530b", "1t"], ["none", "selective"]),
        ],
    )
    @pytest.mark.parametrize(("tp", "sp"), [(1, False), (8, False), (8, True)])
    def test_the_papers_layer(self, name, tp, sp, policy):
        config = load(name, tp=tp, sp=sp, recompute=policy)
        report = validate(config, "meta")
        assert report.failures == ()
        ledger, measured = sums(report)
        assert ledger == measured == library.layer_bytes(config, "exact")
        if (name, tp, sp, policy) in GPT_LAYER:
            assert measured == GPT_LAYER[name, tp, sp, policy]

    @pytest.mark.parametrize(
        ("name", "implementation"),
        [*product(PLAIN, ["megatron"]), *product(FEW, ["megatron-local", "torch"])],
    )
    def test_every_kind_of_model_of_the_catalogue(self, name, implementation):
        settings = {"seq_length": 2048, "implementation": implementation}
        for tp, policy in ((1, "none"), (1, "selective"), (2, "none"), (8, "save_linear")):
            if split(name, tp):
                config = load(name, tp=tp, sp=tp > 1, recompute=policy, **settings)
                assert validate(config, "meta").failures == ()


class TestHuggingFace:
    """transformers' own layers: measured vectors."""

    @pytest.mark.parametrize(("name", "settings", "implementation", "measured"), HUGGING_FACE)
    def test_vectors(self, name, settings, implementation, measured):
        config = load(name, implementation=implementation, **settings)
        report = validate(config, "meta")
        assert report.failures == ()
        assert sums(report) == (measured, measured)

    def test_another_implementation_is_refused_and_an_assumed_one_is_replaced(self):
        with pytest.raises(UsageError, match="needs --implementation transformers-eager or"):
            validate(load("llama-3-8b", implementation="torch"), "meta", against="transformers")
        report = validate(load("llama-3-8b"), "meta", against="transformers")
        assert any("assumed" in n and "transformers-sdpa" in n for n in report.notes)
        assert not any("implementation megatron" in note for note in report.notes)

    def test_it_is_for_one_rank_on_meta(self):
        config = load("llama-3-8b", tp=2, implementation="transformers-sdpa")
        with pytest.raises(UsageError, match="needs --device meta, --tp 1, --cp 1 and"):
            validate(config, "meta")


ATTENTION = {
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
EXPERTS = {
    "mixtral": {
        **ATTENTION,
        "intermediate_size": 512,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen3_moe": {
        **ATTENTION,
        "moe_intermediate_size": 128,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
}


class TestHuggingFaceTotals:
    """transformers' layers: what is kept of them in all, as measured before."""

    def kept(self, kind, described, s, b):
        """Bytes of a layer alone, without the tables of positions, which all layers share."""
        run_ = Run(seq_length=s, micro_batch_size=b, implementation="transformers-sdpa")
        shape = (b, s, described["hidden_size"])
        x = torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)
        measured = measure(HuggingFaceLayer(kind, described, run_), x)
        assert measured.agrees
        return sum(each.bytes for each in measured.stored if each.made_by not in ("cos", "sin"))

    def test_products_that_are_batched_keep_a_weight_for_every_token(self):
        """203337216 bytes were measured before, by other hands, on the CPU; flash has 24 more."""
        kernels_ = replace(IMPLEMENTATIONS["transformers-sdpa"], expert_products="batched")
        run_ = Run(seq_length=64, micro_batch_size=2, implementation=kernels_)
        x = torch.empty(2, 64, 256, dtype=torch.bfloat16, device="meta", requires_grad=True)
        measured = measure(HuggingFaceLayer("mixtral", EXPERTS["mixtral"], run_), x)
        assert measured.agrees
        total = sum(e.bytes for e in measured.stored if e.made_by not in ("cos", "sin"))
        assert total == 203337216 + 24
        mixtral = load("mixtral-8x7b").model
        model = replace(
            mixtral,
            hidden_size=256,
            heads=8,
            kv_heads=2,
            head_size=32,
            ffn_size=512,
            experts=replace(mixtral.experts, number=4, ffn_size=512),
        )
        report = validate(Config(model, Parallel(), run_), "meta")
        assert report.failures == ()
        assert sums(report) == (total, total)

    @pytest.mark.parametrize(("kind", "bytes_"), [("mixtral", 2016808), ("qwen3_moe", 1481272)])
    def test_small_mixtures_of_experts(self, kind, bytes_):
        """Measured before, by other hands, as what a further layer of the model keeps."""
        assert self.kept(kind, EXPERTS[kind], 64, 2) == bytes_

    def test_mixtral_8x7b(self):
        """Measured before, by other hands; sizes: its config.json."""
        described = {
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        }
        assert self.kept("mixtral", described, 4096, 1) == 1427095608

    def test_qwen3_30b_a3b(self):
        """Measured before, by other hands, with the chosen experts' weights as softmax has them.

        Where norm_topk_prob makes them sum to 1, they and their sums are kept besides, in fp32.
        """
        described = {
            "hidden_size": 2048,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
        }
        assert self.kept("qwen3_moe", described, 4096, 1) == 797082136
        summing = {**described, "norm_topk_prob": True}
        assert self.kept("qwen3_moe", summing, 4096, 1) == 797082136 + 4 * 4096 * (8 + 1)

    def test_qwen3_is_llama_with_norms_of_query_and_key(self):
        """Each norm keeps its input in fp32, the normalized input, and a reciprocal in fp32."""
        described = {**ATTENTION, "intermediate_size": 704}
        norms = 64 * 2 * (8 + 2) * (4 * 32 + 2 * 32 + 4)
        # Llama's was measured before, by other hands
        assert self.kept("llama", described, 64, 2) == 1414168
        assert self.kept("qwen3", described, 64, 2) == 1414168 + norms

    @pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
    def test_a_layer_alone_keeps_what_a_further_layer_of_the_model_keeps(self, kind, monkeypatch):
        """The routers' logits are dropped in both, as the model is not asked to give them back."""
        from transformers import AutoConfig, AutoModel, masking_utils

        # it asks for a value, which meta has not; no sequences are packed here
        monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda positions: None)

        class Whole(torch.nn.Module):
            def __init__(self, layers):
                super().__init__()
                sizes = {**EXPERTS[kind], "num_hidden_layers": layers, "vocab_size": 64}
                config = AutoConfig.for_model(kind, **sizes)
                config._attn_implementation = "sdpa"
                config._experts_implementation = "grouped_mm"
                with torch.device("meta"):
                    self.model = AutoModel.from_config(config, dtype=torch.bfloat16).train()

            def forward(self, x):
                with CudaKernels(24):
                    return self.model(inputs_embeds=x, use_cache=False).last_hidden_state

        x = torch.empty(2, 64, 256, dtype=torch.bfloat16, device="meta", requires_grad=True)
        one, two = (measure(Whole(layers), x).bytes for layers in (1, 2))
        assert two - one == self.kept(kind, EXPERTS[kind], 64, 2)


class TestMegatron:
    """Megatron-core's own layer: the measured vectors, a GQA and SwiGLU layer's, and real ranks."""

    @pytest.mark.parametrize("policy", ["none", "selective"])
    @pytest.mark.parametrize(("tp", "sp"), [(1, False), (8, False), (8, True)])
    @pytest.mark.parametrize("name", ["22b", "175b", "530b", "1t"])
    def test_the_papers_layer(self, name, tp, sp, policy):
        report = validate(load(name, tp=tp, sp=sp, recompute=policy), "meta", against="megatron")
        assert report.failures == ()
        ledger, measured = sums(report)
        assert ledger == measured
        if (name, tp, sp, policy) in GPT_LAYER:
            assert measured == GPT_LAYER[name, tp, sp, policy]

    def test_grouped_queries_and_a_fused_gate(self):
        run_ = Run(seq_length=64, micro_batch_size=2, implementation="megatron-local")
        report = validate(Config(GROUPED, Parallel(), run_), "meta", against="megatron")
        assert report.failures == ()
        assert sums(report) == (GROUPED_BYTES, GROUPED_BYTES)

    @pytest.mark.parametrize("shared_ffn_size", [None, 160])
    def test_a_layer_of_experts_keeps_the_ledgers_tensors_and_small_ones_of_its_own(
        self, shared_ffn_size
    ):
        """By sums, for an expert's tensors are as long as the tokens that it happens to get."""
        model = Model(
            name="toy",
            layers=1,
            hidden_size=128,
            heads=4,
            norm="rmsnorm",
            activation="swiglu",
            position="none",
            qkv_bias=False,
            proj_bias=False,
            mlp_bias=False,
            experts=Experts(number=4, top_k=2, ffn_size=96, shared_ffn_size=shared_ffn_size),
        )
        run_ = Run(seq_length=64, micro_batch_size=2, implementation="megatron-local")
        config, place = Config(model, Parallel(), run_), Place("cpu", TYPES["bf16"])
        torch.manual_seed(0)
        with megatron.groups(place):
            layer = megatron.MegatronLayer(config, place)
            for parameter in layer.parameters():
                torch.nn.init.normal_(parameter, std=0.02)
            measured = measure(layer, hidden_state(config, place))
        assert measured.agrees
        # small is what has less than 16 bytes for each routed token: their places, weights, scores
        most = 16 * 2 * 64 * 2
        kept_ = [each.bytes for each in measured.stored if each.made_by != "later"]
        counted = [entry.tensor.bytes for entry in kept(layer_graph(config))]
        large, ours = (sum(x for x in sizes if x > most) for sizes in (kept_, counted))
        assert large == ours
        assert sum(kept_) - large < 4 * most

    @pytest.mark.usefixtures("forked_ranks")
    @pytest.mark.parametrize("sp", [False, True])
    def test_two_real_ranks(self, sp):
        report = validate(load("22b", tp=2, sp=sp), "cpu", against="megatron")
        assert report.failures == ()

    def test_what_it_is_not_built_of_is_refused(self):
        config = load("22b")
        bidirectional = replace(config, model=replace(config.model, causal=False))
        for config, message in [
            (load("22b", attention="flash"), "needs --implementation paper or megatron-local"),
            (
                load("llama-3-8b", implementation="megatron-local"),
                "a model without rotary positions",
            ),
            (bidirectional, "needs a causal model"),
            (load("22b", recompute="full"), "needs --recompute none or selective"),
        ]:
            with pytest.raises(UsageError, match=message):
                validate(config, "meta", against="megatron")

    def test_cuda_is_put_back(self):
        before = torch.cuda.current_device
        validate(load("22b"), "meta", against="megatron")
        assert torch.cuda.current_device is before


class TestTorch:
    """Plain modules under DTensor: the measured vectors, the catalog, and real ranks."""

    @pytest.mark.parametrize("policy", ["none", "selective", "full", "attention", "mlp", "norm"])
    @pytest.mark.parametrize(("tp", "sp"), [(1, False), (8, False), (8, True)])
    @pytest.mark.parametrize("name", ["22b", "175b", "530b", "1t"])
    def test_the_papers_layer(self, name, tp, sp, policy):
        settings = {"implementation": "torch", "attention": "unfused", "recompute": policy}
        config = load(name, tp=tp, sp=sp, **settings)
        report = validate(config, "meta", against="torch")
        assert report.failures == ()
        ledger, measured = sums(report)
        assert ledger == measured == library.layer_bytes(config, "exact")
        if sp and policy == "none":
            assert measured == GATHERED[name]
        if not sp and (name, tp, sp, policy) in GPT_LAYER:
            assert measured == GPT_LAYER[name, tp, sp, policy]

    def test_sequence_parallelism_keeps_the_inputs_that_it_gathers(self):
        """4sbh(1 - 1/t) bytes: those of two linears, which the paper gathers again in backward."""
        for name, naive in GATHERED.items():
            sizes = load(name)
            sbh = sizes.run.seq_length * sizes.run.micro_batch_size * sizes.model.hidden_size
            assert naive - GPT_LAYER[name, 8, True, "none"] == 4 * sbh * 7 // 8

    @pytest.mark.parametrize("name", FEW)
    def test_models_of_the_catalogue_agree_with_the_own_layer(self, name):
        for tp, sp, policy in (
            (1, False, "none"),
            (1, False, "selective"),
            (2, True, "full"),
            (8, False, "none"),
            (8, True, "none"),
        ):
            if load(name, tp=1).model.kv_heads % tp == 0:
                settings = {"tp": tp, "sp": sp, "seq_length": 2048, "implementation": "torch"}
                config = load(name, recompute=policy, **settings)
                report = validate(config, "meta", against="torch")
                assert report.failures == ()
                assert sums(report) == sums(validate(config, "meta"))

    @pytest.mark.usefixtures("forked_ranks")
    @pytest.mark.parametrize(
        ("name", "sp", "policy"),
        [
            ("22b", False, "none"),
            ("22b", True, "selective"),
            ("llama-3-70b", False, "full"),
            ("llama-3-70b", True, "attention,mlp,norm"),
            ("22b", True, "save_linear"),  # products with a bias
        ],
    )
    def test_two_real_ranks_keep_their_parts_and_their_gradients_are_the_unsplit_layers(
        self, name, sp, policy
    ):
        report = validate(load(name, tp=2, sp=sp, recompute=policy), "cpu", against="torch")
        assert report.failures == ()
        assert any("agree with the unsharded layer's" in note for note in report.notes)

    @pytest.mark.usefixtures("forked_ranks")
    @pytest.mark.parametrize(
        ("sizes", "tp", "sp", "measured"),
        [
            ((64, 2, 128, 4), 1, False, 721920),
            ((64, 2, 128, 4), 2, False, 443392),
            ((64, 2, 128, 4), 2, True, 393728),
            ((96, 3, 192, 6), 2, True, 1466496),
        ],
    )
    def test_vectors_of_real_ranks(self, sizes, tp, sp, measured):
        """Measured before, by other hands, over gloo."""
        s, b, h, a = sizes
        probabilities = {"attention_dropout": 0.1, "hidden_dropout": 0.1}
        model = Model(name="toy", layers=1, hidden_size=h, heads=a, **probabilities)
        kernels = replace(IMPLEMENTATIONS["torch"], attention="unfused")
        run_ = Run(seq_length=s, micro_batch_size=b, implementation=kernels)
        config = Config(model, Parallel(tp=tp, sp=sp), run_)
        for result in ranks.on_each(tp, observe, config, "cpu", "torch"):
            assert {each.status for each in result.ties} <= {"matched", "ignored"}
            assert result.measured.agrees
            assert sum(t.measured_bytes for t in result.ties if t.status == "matched") == measured

    def test_the_papers_and_an_assumed_implementation_are_replaced(self):
        for name, kind in (("22b", "unfused"), ("llama-3-8b", "flash")):
            notes = validate(load(name, tp=1), "meta", against="torch").notes
            assert any(f"implementation: torch ({kind} attention" in note for note in notes)
            assert any("assumed" in note and "implementation torch" in note for note in notes)
            assert not any("implementation megatron" in note for note in notes)

    def test_whose_layer_ran_is_said(self):
        notes = validate(load("llama-3-8b", tp=8), "meta", against="torch").notes
        assert (
            "layer: plain PyTorch modules sharded by DTensor over 8 tensor-parallel ranks; a "
            "stand-in replaces CUDA's dropout"
        ) in notes
        assert any(
            note.endswith("kernels: flash attention, RMSNorm, rotary positions") for note in notes
        )

    def test_what_it_is_not_built_of_is_refused(self):
        for config, message in [
            (load("llama-3-8b", tp=16), "needs --tp of at most 8"),
            (load("llama-3-8b", implementation="megatron"), "--implementation torch, not megatron"),
            (load("gpt2", implementation="transformers-sdpa"), "not transformers-sdpa"),
            (load("llama-3-8b", attention="unfused"), "--attention flash for a model with GQA"),
        ]:
            with pytest.raises(UsageError, match=message):
                validate(config, "meta", against="torch")

    def test_a_ledger_that_gathers_again_is_caught(self):
        again = replace(IMPLEMENTATIONS["torch"], keeps_gathered=False)
        config = load("llama-3-8b", tp=8, sp=True, seq_length=2048, implementation=again)
        failures = validate(config, "meta", against="torch").failures
        assert sum("is unexplained" in line for line in failures) == 2
        assert sum("is missing" in line for line in failures) == 2


def small(**changes):
    """A small layer, of one change or several."""
    model = {
        "heads": 4,
        "hidden_size": 64,
        "norm": "layernorm",
        "activation": "gelu",
        "position": "none",
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    run = {"precision": "fp32", "implementation": IMPLEMENTATIONS["paper"], "recompute": ("none",)}
    parallel = {}
    for name, value in changes.items():
        holder = run if name in run else parallel if name in ("tp", "sp") else model
        holder[name] = value
    return Config(
        Model(name="small", layers=1, **model),
        Parallel(**parallel),
        Run(seq_length=32, micro_batch_size=2, **run),
    )


SMALL = [
    dict(zip(("dropout", "precision", "wide", "kv_heads", "style"), values, strict=True))
    for values in product(
        (0.0, 0.1),
        ("bf16", "fp16", "fp32"),
        (False, True),
        (4, 2, 1),
        ("paper-gelu", "local-silu", "local-swiglu", "flash-swiglu", "flash-geglu", "torch-swiglu"),
    )
]


def small_config(dropout, precision, wide, kv_heads, style, **parallel):
    name, activation = style.split("-")
    kernels = IMPLEMENTATIONS[
        {"paper": "paper", "local": "megatron-local", "flash": "megatron", "torch": "torch"}[name]
    ]
    modern = name != "paper"
    return small(
        attention_dropout=dropout,
        hidden_dropout=dropout,
        precision=precision,
        softmax_fp32=wide,
        kv_heads=kv_heads if modern else 4,
        activation=activation,
        norm="rmsnorm" if modern else "layernorm",
        position="rotary" if modern else "none",
        implementation=replace(kernels, softmax_fp32=wide),
        **parallel,
    )


class TestCpu:
    @pytest.mark.parametrize("case", SMALL, ids=lambda case: "-".join(map(str, case.values())))
    def test_real_kernels_keep_what_the_ledger_says(self, case):
        result = observe(0, small_config(**case), "cpu")
        assert {each.status for each in result.ties} <= {"matched", "ignored"}
        assert result.measured.agrees

    @pytest.mark.parametrize("name", ["llama-3-8b", "gpt2"])
    def test_torchtitans_selective_checkpoint_of_operations(self, name):
        settings = {"implementation": "torch", "recompute": "selective_op", "dropout": 0.0}
        report = validate(load(name, seq_length=512, **settings), "cpu")
        assert report.failures == ()
        kept_ = set(report.column("tensor"))
        # products in their order: query, key, value, proj, gate, up, fc2; gpt2 has no gate
        second = {"gate", "fc2_output"} if name == "llama-3-8b" else {"fc1_output"}
        assert kept_ == {"layer_input", "query", "value", "context", "log_sum_exp"} | second

    def test_its_flops(self):
        """Unfused, where PyTorch's counter sees every product: key, proj and up are made again."""
        s, h, k, d, f = 1024, 4096, 8, 128, 14336
        settings = {"tp": 1, "implementation": "torch", "seq_length": s}
        graph = layer_graph(load("llama-3-8b", **settings))
        again = flops.recomputed(graph, POLICIES["selective_op"])
        assert again == 2 * s * h * (k * d + h + f)

    def test_there_are_two_hundred_of_them(self):
        assert len(SMALL) >= 200

    def test_a_reduced_model_has_the_shape_of_its_own(self):
        for name in PLAIN:
            for tp in (1, 2, 4):
                if split(name, tp):
                    model = load(name, tp=tp).model
                    little = reduced(load(name, tp=tp)).model
                    assert little.heads // little.kv_heads == model.heads // model.kv_heads
                    assert (little.activation, little.norm) == (model.activation, model.norm)

    def test_the_report_is_of_the_reduced_model(self):
        report = validate(load("llama-3-70b"), "cpu")
        assert report.failures == ()
        assert report.symbols["s"] == 64
        assert "backend cpu" in report.notes[0]


class TestStandIns:
    """What stands in for fused kernels has the gradients of PyTorch's own operations, in fp32."""

    def compare(self, ours, theirs, *inputs):
        given = [x.clone().requires_grad_() for x in inputs], [x.clone() for x in inputs]
        for x in given[1]:
            x.requires_grad_()
        y, expected = ours(*given[0]), theirs(*given[1])
        torch.testing.assert_close(y, expected)
        weights = torch.randn_like(y)
        (y * weights).sum().backward()
        (expected * weights).sum().backward()
        for mine, other in zip(*given, strict=True):
            torch.testing.assert_close(mine.grad, other.grad)

    def test_rms_norm(self):
        self.compare(
            kernels.rms_norm,
            lambda x, w: torch.nn.functional.rms_norm(x, (16,), w, 1e-5),
            *(torch.randn(3, 5, 16), torch.randn(16)),
        )

    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("kv_heads", [4, 2])
    def test_flash_attention(self, kv_heads, causal):
        self.compare(
            lambda q, k, v: kernels.FlashAttention.apply(q, k, v, 0, "sb", causal),
            lambda q, k, v: kernels.native_flash_attention(q, k, v, 0.0, causal),
            *(torch.randn(2, 4, 8, 16), *torch.randn(2, 2, kv_heads, 8, 16)),
        )

    def test_the_gate(self):
        self.compare(
            lambda packed: kernels.GatedActivation.apply(packed, "swiglu"),
            lambda packed: torch.nn.functional.silu(packed[..., :8]) * packed[..., 8:],
            torch.randn(3, 5, 16),
        )

    def test_rotary_positions(self):
        cos, sin = kernels.angles(5, 8, torch.float32, "cpu")
        self.compare(
            lambda x: kernels.Rotate.apply(x, cos, sin),
            lambda x: kernels._turn(x, cos, sin),
            torch.randn(5, 2, 3, 8),
        )


class TestRanks:
    @pytest.mark.usefixtures("forked_ranks")
    @pytest.mark.parametrize("tp", [2, 4])
    @pytest.mark.parametrize("sp", [False, True])
    def test_real_ranks_keep_their_parts_and_their_gradients_are_the_unsplit_layers(self, tp, sp):
        for config in (
            small_config(0.1, "bf16", False, 4, "paper-gelu", tp=tp, sp=sp),
            small_config(0.0, "fp32", False, 1, "flash-swiglu", tp=tp, sp=sp),
        ):
            for result in ranks.on_each(tp, observe, config, "cpu"):
                assert {each.status for each in result.ties} <= {"matched", "ignored"}
                assert result.measured.agrees
                assert result.gradient_error < TOLERANCE

    @pytest.mark.parametrize("error", [0.5, float("nan")])
    def test_wrong_gradients_are_a_failure(self, error):
        found = observe(0, small_config(0.0, "fp32", False, 4, "paper-gelu"), "cpu")
        (line,) = findings.failures_of(0, found._replace(gradient_error=error))
        assert line == f"rank 0: gradients differ from the unsharded layer's by {error:.1g}"

    def test_a_gradient_that_is_no_number_is_the_largest_error(self, monkeypatch):
        real = gradients._gradients

        def spoilt(*arguments):
            found = real(*arguments)
            found["fc2.weight"] = found["fc2.weight"] * float("nan")
            return found

        monkeypatch.setattr(gradients, "_gradients", spoilt)
        config = small_config(0.0, "fp32", False, 4, "paper-gelu")
        error = gradients.gradient_error(0, config)
        assert error != error

    def test_a_stray_environment_launches_nothing(self, monkeypatch):
        for name, value in {"RANK": "1", "WORLD_SIZE": "abc", "MASTER_ADDR": "x"}.items():
            monkeypatch.setenv(name, value)
        assert not ranks.launched()
        assert ranks.is_first()

    def test_ranks_that_are_launched_already_are_joined(self, tmp_path):
        command = ["-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", "2", "-m", "memcalc", "validate", "22b", "--device", "cpu"]
        done = python(*command, "--tp", "2", "--json", timeout=120, cwd=tmp_path)
        assert done.returncode == 0
        assert json.loads(done.stdout)["command"] == "validate"

    def test_a_launch_of_another_number_of_ranks_is_refused(self, memcalc, monkeypatch):
        launch = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
        for name, value in launch.items():
            monkeypatch.setenv(name, value)
        outcome = memcalc("validate 22b --device cpu --tp 4")
        assert outcome.status == 2
        assert "--tp 4 needs 4 ranks, but 2 were launched" in outcome.err

    @pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
    def test_ranks_end_with_the_process_that_started_them_and_leave_nothing(self, name, tmp_path):
        """They share its stdout and stderr, which end when the last of them does."""
        command = [sys.executable, "-m", "memcalc", "validate", "22b", "--device", "cpu", "--tp=2"]
        started = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(tmp_path)},
            start_new_session=True,
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # may be ignored here
        )
        while not list(tmp_path.glob("memcalc-ranks-*/*")) and started.poll() is None:
            time.sleep(0.05)  # until a rank has joined the group
        if name == "SIGINT":  # as a terminal does: to all of them
            os.killpg(started.pid, signal.SIGINT)
        else:
            started.send_signal(getattr(signal, name))
        out, err = started.communicate(timeout=20)
        interrupted = name == "SIGINT"
        assert started.returncode == (130 if interrupted else -getattr(signal, name))
        assert (out, err) == ("", "memcalc: interrupted\n" if interrupted else "")
        assert list(tmp_path.iterdir()) == []

    def test_one_rank_runs_here(self):
        assert ranks.on_each(1, max, 3) == [3]

    def test_a_rank_that_fails_says_why(self):
        with pytest.raises(ranks.RankError, match=r"rank \d failed: .*by zero"):
            ranks.on_each(2, operator.floordiv, 0)

    def test_a_rank_that_dies_is_noticed(self):
        with pytest.raises(ranks.RankError, match=r"rank (\d) died \(exit code \1\)"):
            ranks.on_each(2, os._exit)

    @pytest.mark.parametrize(
        ("how", "message"),
        [("raise", "rank 1 failed: the cause"), ("die", r"rank 1 died \(exit code 7\)")],
    )
    def test_the_rank_that_failed_is_named_and_not_one_that_waited_for_it(
        self, how, message, tmp_path, monkeypatch
    ):
        (tmp_path / "rank_faults.py").write_text(FAULTS)  # where the ranks' processes find it
        monkeypatch.syspath_prepend(tmp_path)
        function = import_module("rank_faults").fails_on_rank_1
        with pytest.raises(ranks.RankError, match=message):
            ranks.on_each(2, function, how)

    def test_a_rank_that_hangs_is_ended(self):
        """Starting takes longer than this."""
        with pytest.raises(ranks.RankError, match="no answer from rank 0, 1 within 0 s"):
            ranks.on_each(2, max, 0, timeout=0)


class TestPeaks:
    """The peak of forward and backward grows by the ledger's bytes a layer, exactly."""

    @pytest.mark.parametrize("device", ["meta", "cpu"])
    @pytest.mark.parametrize("policy", ["none", "selective", "full", "save_linear", "mlp"])
    @pytest.mark.parametrize("name", ["175b", "llama-3-8b"])
    def test_the_slope_is_the_ledgers(self, name, policy, device):
        report = validate(load(name, tp=1, seq_length=2048, recompute=policy), device)
        assert report.failures == ()
        assert any("the peak of forward plus backward grows by" in note for note in report.notes)

    def test_another_slope_is_a_failure(self, monkeypatch):
        monkeypatch.setattr(witness, "peak_bytes", lambda layers, x: 10 * len(layers))
        (line,) = validate(load("22b", tp=1), "meta").failures
        assert line == (
            "rank 0: the peak grows by 10 bytes per layer, the ledger has 7,080,116,224 bytes"
        )


class TestRecomputation:
    """FLOPs by torch's own counter, on meta; its checkpoint repeats all of a region."""

    @pytest.mark.parametrize("name", ["175b", "llama-3-8b"])
    @pytest.mark.parametrize("policy", ["none", "selective", "full", "save_linear", "mlp"])
    @pytest.mark.parametrize("early_stop", [False, True])
    @pytest.mark.parametrize("dropout", [0.0, 0.1])
    def test_flops_are_torchs(self, name, policy, early_stop, dropout):
        local = {} if name == "175b" else {"implementation": "megatron-local"}
        config = load(name, tp=1, seq_length=1024, recompute=policy, dropout=dropout, **local)
        place = Place("meta", TYPES[config.run.precision])
        layer, x = Layer(config, place), hidden_state(config, place)
        layer.early_stop = early_stop
        with FlopCounterMode(display=False) as forward:
            y = layer(x)
        graph = layer_graph(config)
        assert forward.get_total_flops() == flops.forward(graph)
        with FlopCounterMode(display=False) as backward:
            y.backward(torch.empty_like(y))
        again = flops.recomputed(graph, config.run.policy, early_stop=early_stop)
        assert backward.get_total_flops() == 2 * flops.forward(graph) + again

    def test_a_flash_kernels_own_backward_is_what_the_counter_has_beside(self):
        config = load("llama-3-8b", seq_length=1024)
        place = Place("meta", TYPES["bf16"])
        y = Layer(config, place)(hidden_state(config, place))
        with FlopCounterMode(display=False) as backward:
            y.backward(torch.empty_like(y))
        graph = layer_graph(config)
        again = flops.flash_backward(graph)
        assert again == 2 * 1024**2 * 4096
        assert backward.get_total_flops() == 2 * flops.forward(graph) + again

    def test_early_stop_leaves_out_the_cores_second_product_and_without_dropout_the_last(self):
        s, b, h = 2048, 1, 12288
        config = load("175b", tp=1)
        graph, selective, full = layer_graph(config), *(POLICIES[w] for w in ("selective", "full"))
        assert flops.recomputed(graph, selective, early_stop=True) == 2 * b * s**2 * h
        assert flops.recomputed(graph, full, early_stop=True) == flops.forward(graph)
        graph = layer_graph(load("175b", tp=1, dropout=0.0))
        last = 2 * b * s * 4 * h * h
        assert flops.recomputed(graph, full, early_stop=True) == flops.forward(graph) - last

    @pytest.mark.parametrize(("tp", "sp"), [(1, False), (8, False), (8, True)])
    @pytest.mark.parametrize("name", ["selective", "full", "save_linear"])
    def test_a_report_counts_them_on_a_rank(self, name, tp, sp):
        report = validate(load("175b", tp=tp, sp=sp, recompute=name), "meta")
        assert report.failures == ()
        assert any("per rank by PyTorch's counter" in note for note in report.notes)

    @pytest.mark.parametrize(
        "words", ["full,selective", "attention,core_attention", "save_linear,norm", "full,mlp,norm"]
    )
    def test_a_region_inside_another_is_made_again_once(self, words):
        assert validate(load("llama-3-8b", recompute=words), "meta").failures == ()

    def test_other_flops_are_a_failure(self, monkeypatch):
        monkeypatch.setattr(witness, "_backward_flops", lambda *arguments: 0)
        report = validate(load("175b", tp=1, recompute="selective"), "meta")
        (line,) = report.failures
        assert not any("the ledger has the same" in note for note in report.notes)
        assert line == (
            "rank 0: recomputation adds 0 FLOPs, or 0 with early stop; the ledger has "
            "206,158,430,208 and 103,079,215,104"
        )


class TestAWrongLedgerIsCaught:
    """Each planted error fails, and names the tensor."""

    def measured(self, **settings):
        config = load("22b", tp=1, **settings)
        place = Place("meta", TYPES[config.run.precision])
        return measure(Layer(config, place), hidden_state(config, place))

    def tied(self, change=lambda entries: entries, stored=lambda stored: stored, **settings):
        config = load("22b", tp=1, **settings)
        # a graph of its own, for an error is planted in it, and those of a config are kept
        measured, graph = self.measured(**settings), layer_graph(config, symbols.values(config))
        ties = tie(graph, change(kept(graph, config.run.policy)), stored(measured.stored))
        return {
            (t.tensor, t.module, t.status) for t in ties if t.status not in ("matched", "ignored")
        }

    def test_nothing_is_wrong(self):
        assert self.tied() == set()

    def test_a_missing_tensor(self):
        wrong = self.tied(lambda entries: [e for e in entries if e.tensor.name != "gelu_output"])
        assert wrong == {("(8192 24576)", "gelu", "unexplained")}

    def test_a_wrong_width(self):
        def widen(entries):
            for entry in entries:
                if entry.tensor.name == "softmax_dropout_mask":
                    entry.tensor.bytes *= 2
            return entries

        assert self.tied(widen) == {
            ("softmax_dropout_mask", "softmax_dropout", "missing"),
            ("(256 2048 2048)", "softmax_dropout", "unexplained"),
        }

    def test_a_tensor_that_another_operation_saves(self):
        def elsewhere(stored):
            return [
                replace(each, saved_by=("proj",)) if each.made_by == "gelu" else each
                for each in stored
            ]

        config, measured = load("22b", tp=1), self.measured()
        graph = layer_graph(config)
        known = frozenset(op.name for op in graph.ops)
        ties = tie(graph, kept(graph), elsewhere(measured.stored), known=known)
        wrong = {(t.tensor, t.status) for t in ties if t.module == "gelu"}
        assert wrong == {("gelu_output", "missing"), ("(8192 24576)", "unexplained")}

    def test_a_doubled_tensor(self):
        wrong = self.tied(lambda entries: [*entries, entries[0]])
        assert wrong == {("layer_input", "", "missing")}

    def test_a_tensor_that_is_kept_besides(self):
        more = Stored(96, "proj", ("proj",), (4, 12))
        wrong = self.tied(stored=lambda stored: (*stored, more))
        assert wrong == {("(4 12)", "proj", "unexplained")}

    def test_a_naive_sequence_parallelism_that_keeps_what_it_gathered(self):
        config = load("22b", sp=True)
        naive = replace(config.run.implementation, keeps_gathered=True)
        place = Place("meta", TYPES[config.run.precision], 8, 0, True)
        with ranks.pretended(8):
            layer = Layer(replace(config, run=replace(config.run, implementation=naive)), place)
            measured = measure(layer, hidden_state(config, place))
        graph = layer_graph(config)
        wrong = {(t.tensor, t.status) for t in tie(graph, kept(graph), measured.stored)}
        assert ("input_norm_output", "missing") in wrong
        assert ("mlp_norm_output", "missing") in wrong

    def test_a_tensor_that_the_caller_keeps_alive(self):
        held = []

        class Keeps(torch.nn.Module):
            def forward(self, x):
                y = x * 2
                held.append(y)
                return (y + 1).relu()

        measured = measure(Keeps(), torch.ones(4, 4, requires_grad=True))
        assert measured.agrees
        alone = [each for each in measured.stored if not each.saved_by]
        assert [(each.bytes, each.made_by, each.shape) for each in alone] == [(64, ".", (4, 4))]
        # and no entry of a ledger is a tensor that is alive without being saved
        held = tuple(replace(each, saved_by=()) for each in self.measured().stored)
        statuses = [status for _, _, status in self.tied(stored=lambda stored: held)]
        assert statuses.count("missing") == len(held) - 1  # all but the mask, which is ignored

    def test_it_is_status_1_on_the_command_line(self, memcalc, monkeypatch):
        real = witness.kept
        monkeypatch.setattr(witness, "kept", lambda *arguments: real(*arguments)[1:])
        outcome = memcalc("validate 22b --device meta")
        assert outcome.status == 1
        assert "failed: rank 0: (2048 4 6144) of the input is unexplained" in outcome.err


class TestAnswer:
    """The verdict is the first line, and the notes say what the table's statuses are."""

    def test_what_matches(self):
        report = validate(load("22b", tp=1), "meta")
        matched = [row for row in report.records() if row["status"] == "matched"]
        size = format_bytes(sum(row["measured_bytes"] for row in matched))
        number = f"{len(matched)} of {len(matched)} tensors"
        assert report.answer == f"matches: {number}, {size}, measured on meta"
        assert report.good is True
        told = {note.partition(":")[0] for note in report.notes}
        assert told >= {"matched", "ignored"} == set(report.column("status"))
        (note,) = (note for note in report.notes if note.startswith("ignored:"))
        assert note.endswith("(4 MiB: the causal mask, one per model)")  # 2048 x 2048 bytes

    def test_what_does_not(self, monkeypatch):
        """Without the layer's input in the ledger it is unexplained, and the peak grows by more."""
        real = witness.kept
        monkeypatch.setattr(witness, "kept", lambda *arguments: real(*arguments)[1:])
        report = validate(load("22b", tp=1), "meta")
        wrong = "1 unexplained, 1 other check failed"
        assert report.answer == f"does not match: {wrong}, measured on meta"
        assert report.good is False
        assert "unexplained: saved by PyTorch, but not in the ledger" in report.notes

    def test_of_two_devices_each_has_its_own(self):
        answer = validate(load("22b", tp=1)).answer
        assert re.fullmatch(r"matches: .*, measured on cpu; matches: .*, measured on meta", answer)


class TestBeyondThePaper:
    @pytest.mark.parametrize("device", ["meta", "cpu"])
    @pytest.mark.parametrize("name", ["22b", "llama-3-8b"])
    def test_the_terms_add_up_to_what_is_kept(self, name, device):
        config = load(name, tp=1)
        config = config if device == "meta" else reduced(config)
        theirs, differences = module._paper_differences(witness.as_on(config, device))
        ours = sum(validate(load(name, tp=1), device).column("ledger_bytes"))
        assert theirs + sum(differences.values()) == ours

    def test_cuda_keeps_its_own_state_of_random_numbers(self):
        config = witness.as_on(load("llama-3-8b"), "cuda")
        (note,) = module._beyond_the_paper(config)
        assert "rng_state +24 B" in note


class TestCuda:
    """What there is of it without a GPU: the allocator's rules, and what is refused."""

    def test_a_block_is_a_multiple_of_512_bytes(self):
        assert [rounded(n) for n in (0, 1, 512, 513)] == [0, 512, 512, 1024]

    def test_segments_that_expand_leave_nothing_to_chance(self):
        sizes = [24, 2**20, 3 * 2**20 + 1]
        assert allocator.allocated(sizes, True) == (512 + 2**20 + 3 * 2**20 + 512,) * 2

    def test_a_large_block_may_be_left_whole(self):
        sizes = [2**20, 2**20 + 1]  # the first comes from the small pool, whose blocks are split
        least, most = allocator.allocated(sizes, False)
        assert most - least == 2**20

    @pytest.mark.parametrize(
        ("environment", "expand"),
        [
            ({}, None),
            ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}, None),
            ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128,expandable_segments:False"}, False),
            ({"PYTORCH_ALLOC_CONF": "expandable_segments: True"}, True),
        ],
    )
    def test_the_environment_says_whether_segments_expand(self, environment, expand):
        assert expandable(environment) is expand

    @pytest.mark.parametrize(
        ("settings", "gpus", "message"),
        [
            ({}, 0, "PyTorch finds no GPU here"),
            ({"tp": 8}, 2, "--tp 8 needs 8 GPUs, and this machine has 2"),
            ({"attention": "flash", "precision": "fp32"}, 8, "needs --precision bf16 or fp16"),
        ],
    )
    def test_what_cannot_run_is_refused(self, settings, gpus, message, monkeypatch):
        monkeypatch.setattr(cuda, "available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        with pytest.raises(UsageError, match=message):
            validate(load("22b", **settings), "cuda")

    def test_a_kernel_that_is_not_there_is_said(self):
        q = torch.zeros(1, 2, 4, 8)
        with pytest.raises(UsageError, match=r"no flash kernel .* choose --attention unfused"):
            kernels.native_flash_attention(q, q, q, 0.1)  # the CPU's has no dropout

    def test_by_default_it_is_for_the_own_layer_alone(self, monkeypatch):
        monkeypatch.setattr(cuda, "available", lambda: True)
        report = validate(load("22b", tp=1), against="torch")
        assert {row["backend"] for row in report.records()} == {"cpu", "meta"}

    def test_other_layers_are_not_for_it(self):
        with pytest.raises(UsageError, match="--device cuda runs memcalc's own layer only"):
            validate(load("22b"), "cuda", against="megatron")

    @pytest.mark.parametrize("allocated", [0, 10**6])
    def test_what_the_allocator_counts_is_held_against_its_rules(self, allocated, monkeypatch):
        """The measuring itself, with a count that is exact and one that is not."""
        config = load("llama-3-8b", seq_length=128)
        place = Place("meta", TYPES["bf16"])
        layer, x = Layer(config, place), hidden_state(config, place)
        sizes = measure(layer, x).sizes
        counts = iter([0, sum(rounded(size) for size in sizes) + allocated])
        found = witness.observe(0, config, "meta")
        measured = measure(layer, x, allocated=lambda: next(counts))
        failures = findings.failures_of(0, found._replace(measured=measured))
        assert len(failures) == (allocated > 0)
        assert all("the allocator counts" in line for line in failures)


class TestDevices:
    @pytest.mark.usefixtures("forked_ranks")
    def test_without_a_gpu_a_small_layer_runs_on_the_cpu_and_the_whole_on_meta(self):
        report = validate(load("175b", sp=True))
        assert report.failures == ()
        assert {*report.column("backend")} == {"cpu", "meta"}
        notes = " ".join(report.notes)
        assert "cpu: 2 processes, real kernels; 175b, reduced" in notes
        assert "meta: full size; no memory is allocated and no kernel runs" in notes
        assert "Saved for backward by one layer of 175b (s 2048, b 1, tp 8" in report.title

    def test_a_failure_names_its_device(self, monkeypatch):
        real = witness.kept
        monkeypatch.setattr(witness, "kept", lambda *arguments: real(*arguments)[1:])
        report = validate(load("llama-3-8b"))
        assert {line.partition(":")[0] for line in report.failures} == {"cpu", "meta"}

    def test_the_smallest_number_of_ranks_that_split_it(self):
        for t, fewer in ((1, 1), (8, 2)):
            assert fewer_ranks(load("22b", tp=t)).parallel.tp == fewer

    def test_the_difference_from_the_papers_count_is_named_term_by_term(self):
        report = validate(load("22b", tp=1), "meta")
        (line,) = [note for note in report.notes if note.startswith("--implementation paper")]
        terms = [f"{n}_norm_{part} +32 KiB" for n in ("input", "mlp") for part in ("mean", "rstd")]
        said = "--implementation paper --accounting paper: 6,752 MiB; this layer differs by: "
        assert line == said + ", ".join(terms)


class TestGpuCheck:
    """The one command for a GPU, tried on the CPU."""

    def run(self, *arguments, cwd):
        script = Path(__file__).parents[1] / "gpu_check.py"
        return python("-W", "ignore", str(script), *arguments, timeout=300, cwd=cwd)

    def test_it_writes_every_report(self, tmp_path):
        done = self.run("--device", "cpu", "-o", "found.json", cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        document = json.loads((tmp_path / "found.json").read_text())
        assert len(document["reports"]) == 10
        assert document["failures"] == []
        assert {"source", "device", "versions", "date"} <= document.keys()

    def test_without_a_gpu_it_says_so(self, tmp_path, monkeypatch):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # wherever the tests run, it sees none
        done = self.run(cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr == "gpu_check: PyTorch finds no GPU here\n"


class TestTime:
    def test_every_policy_has_its_times(self, memcalc):
        outcome = memcalc("validate 22b --tp 1 --device cpu --time --format json")
        assert outcome.status == 0
        rows = outcome.document["rows"]
        assert [row["policy"] for row in rows] == ["none", "selective", "full", "save_linear"]
        for row in rows:
            assert row["combined_seconds"] == row["forward_seconds"] + row["backward_seconds"] > 0
        assert [row["paper_overhead_percent"] for row in rows] == [None, 7.0, 39.0, None]
        assert any(note.startswith("measured on the CPU, ") for note in outcome.document["notes"])

    def test_meta_has_no_time(self):
        with pytest.raises(UsageError, match="--time needs --device cpu or cuda"):
            validate(load("22b"), "meta", time=True)


class TestRoom:
    def test_what_does_not_fit_is_refused_before_it_is_allocated(self, memcalc, monkeypatch):
        monkeypatch.setitem(room.FREE, "cpu", lambda: 2**30)
        outcome = memcalc("validate 1t --device cpu --full-size --tp 1")
        assert outcome.status == 2
        assert "the layer needs about" in outcome.err
        assert "only 1 GiB are free" in outcome.err

    def test_free_memory_is_known_here(self):
        assert room.free_on_cpu() > 0

    def test_need_is_no_less_than_what_is_kept(self):
        config = load("22b", tp=1)
        for need in room.NEEDS.values():
            assert need(config) > library.layer_bytes(config, "exact")


@pytest.mark.parametrize(
    ("name", "lacks"),
    [
        ("mixtral-8x7b", "experts"),
        ("bert-large", "post_norm blocks"),
        ("qwen3-8b", "query and key norms"),
        ("bloom-176b", "alibi positions"),
        ("opt-66b", "activation relu"),
    ],
)
@pytest.mark.parametrize("against", ["own", "torch"])
def test_a_layer_that_is_not_written_here_is_refused(name, lacks, against):
    with pytest.raises(UsageError, match=f"PyTorch layer does not support {lacks};"):
        validate(load(name), "meta", against=against)


def test_every_kind_of_dense_decoder_of_the_first_families_is_written_here():
    assert {"22b", "llama-3-8b", "qwen2.5-7b", "gpt2", "mistral-7b"} <= set(WRITTEN)


def test_what_no_module_is_written_for_is_refused():
    with pytest.raises(UsageError, match="choose --implementation megatron-local"):
        validate(load("llama-3-8b", implementation="paper"), "meta")
    with pytest.raises(UsageError, match="device 'gpu' is unknown; did you mean 'cpu'"):
        validate(load("22b"), "gpu")


def test_the_command_knows_the_devices():
    assert cli_module.DEVICES == module.DEVICES
    assert tuple(module.AGAINST) == cli_module.AGAINST


def test_without_torch_the_extra_is_named(memcalc, monkeypatch):
    import builtins
    import sys

    for name in [n for n in sys.modules if n.startswith("memcalc.validation")]:
        monkeypatch.delitem(sys.modules, name)
    real = builtins.__import__

    def without(name, *arguments, **keywords):
        if name == "torch" or name.startswith("torch."):
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without)
    outcome = memcalc("validate 22b")
    assert outcome.status == 2
    assert "pip install '.[torch]'" in outcome.err
