"""Losses: the moments of each, in bytes per logit beside the hidden states, derived by hand."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

import memcalc as library
from memcalc.analysis import activations, flops, walk
from memcalc.analysis.device import device
from memcalc.analysis.parameters import parameters
from memcalc.blocks.head import head_graph
from memcalc.config import IMPLEMENTATIONS, Config, Model, Parallel, Run, load
from memcalc.config.families import FAMILIES
from memcalc.config.implementation import CROSS_ENTROPIES
from memcalc.errors import ConfigError
from memcalc.graph import ops
from memcalc.graph.graph import Graph, Tensor
from memcalc.graph.mesh import Axis, Mesh
from memcalc.lazy import resolve

N, V, H = 4096, 128256, 2048
LOGITS, HIDDEN, WEIGHT = N * V, 2 * N * H, 2 * V * H  # a number; bytes
TARGETS = 8 * N + 4  # int64, and the weight of all targets
LOSS = 4  # a scalar, or its gradient


def toy(**more):
    """A model whose head is only the linear and the loss."""
    sizes = {"name": "toy", "layers": 1, "hidden_size": H, "heads": 16, "vocab_size": V}
    ends = {"final_norm": False, "tied_embeddings": False}
    return Model.of(**{**sizes, **ends, **more})


def graph(word, holds=False, model=None, **parallel):
    kernels = replace(IMPLEMENTATIONS["torch"], cross_entropy=word, holds_logits=holds)
    run = Run(seq_length=N, implementation=kernels)
    return head_graph(Config(model or toy(), Parallel(**parallel), run))


def bytes_of(word, holds=False, **more):
    """What the forward pass holds at most, what is kept, and what backward holds at most."""
    found = graph(word, holds, **more)
    forward, backward = walk.forward(found), walk.backward(found, own=2)
    return forward.bytes, activations.total(activations.kept(found)), backward.bytes


# the loss is that of one chunk; that of 8 has as many scalars
EIGHTH, LITGPT = LOGITS // 8, LOGITS // 32  # logits of a chunk of 8, and of 128 tokens
LIGER = 2 * 128 * V  # Liger's chunk: 4096 / ceil(128256 / 2048), rounded up to a power of 2
IN_LIGER = 4 * N + N  # each token's loss, and whether it counts
EXPECTED = {
    # an fp32 copy of the logits and its log-softmax; then the gradients of both
    ("torch", False): (
        HIDDEN + (2 + 4 + 4) * LOGITS + TARGETS + LOSS,
        HIDDEN + 4 * LOGITS + TARGETS,
        HIDDEN + (4 + 4 + 4) * LOGITS,
    ),
    ("torch", True): (
        HIDDEN + (2 + 4 + 4) * LOGITS + TARGETS + LOSS,
        HIDDEN + (2 + 4) * LOGITS + TARGETS,
        HIDDEN + (2 + 4 + 4 + 4) * LOGITS,
    ),
    # a log-softmax in 16 bits
    ("torch-16bit", False): (
        HIDDEN + (2 + 2) * LOGITS + TARGETS + LOSS,
        HIDDEN + 2 * LOGITS + TARGETS,
        HIDDEN + (2 + 2 + 2) * LOGITS,
    ),
    ("torch-16bit", True): (
        HIDDEN + (2 + 2) * LOGITS + TARGETS + LOSS,
        HIDDEN + (2 + 2) * LOGITS + TARGETS,
        HIDDEN + (2 + 2 + 2 + 2) * LOGITS,
    ),
    # the model's own logits are gone once they are cast
    ("torch-fp32", True): (
        HIDDEN + (4 + 4) * LOGITS + TARGETS + LOSS,
        HIDDEN + (4 + 4) * LOGITS + TARGETS,
        HIDDEN + (4 + 4 + 4 + 4) * LOGITS,
    ),
    # the logits, two fp32 numbers of each token, and then the gradient in 16 bits
    ("compiled", False): (
        HIDDEN + 2 * LOGITS + (8 + 8) * N + LOSS,
        HIDDEN + 2 * LOGITS + (8 + 8) * N,
        HIDDEN + (2 + 2) * LOGITS + (8 + 8) * N + LOSS,
    ),
    # on one rank, as torch
    ("loss-parallel", False): (
        HIDDEN + (2 + 4 + 4) * LOGITS + TARGETS + LOSS,
        HIDDEN + 4 * LOGITS + TARGETS,
        HIDDEN + (4 + 4 + 4) * LOGITS,
    ),
    # all logits and all log-softmaxes, the last with its fp32 copy; backward begins with the last
    ("torchtune-chunked", False): (
        HIDDEN + (2 + 4) * LOGITS + 4 * EIGHTH + 8 * N + 8 * 4 + LOSS,
        HIDDEN + 4 * LOGITS + 8 * N + 8 * 4,
        HIDDEN + 4 * LOGITS + (4 + 4) * EIGHTH + 7 * (N + 4) + 7 * LOSS,
    ),
    # the gradients of all logits are there when the second weight gradient is added to the first
    ("litgpt", True): (
        HIDDEN + (2 + 2) * LOGITS + 8 * N + 32 * 4 + LOSS,
        HIDDEN + (2 + 2) * LOGITS + 8 * N + 32 * 4,
        HIDDEN + (2 + 2) * LOGITS - 2 * 2 * LITGPT + 3 * WEIGHT + 2 * HIDDEN // 32,
    ),
    # a chunk: its logits end with the cast
    ("chunked-recomputed", True): (
        HIDDEN + (4 + 4) * EIGHTH + LOSS,
        HIDDEN,
        HIDDEN + 3 * WEIGHT + 2 * HIDDEN // 8 + 6 * LOSS,
    ),
    # over the logits; then the head's GEMMs, with the gradients of the weight and of x
    ("liger", False): (
        HIDDEN + 2 * LOGITS + 2 * N + N + LOSS,
        HIDDEN + 2 * LOGITS,
        HIDDEN + 2 * LOGITS + WEIGHT + HIDDEN,
    ),
    ("liger", True): (
        HIDDEN + 2 * LOGITS + 2 * N + N + LOSS,
        HIDDEN + 2 * LOGITS,
        HIDDEN + 2 * LOGITS + WEIGHT + HIDDEN,
    ),
    # both gradients, and one chunk of logits
    ("liger-linear", True): (
        HIDDEN + HIDDEN + WEIGHT + LIGER + IN_LIGER + LOSS,
        HIDDEN + WEIGHT,
        HIDDEN + WEIGHT + LOSS,
    ),
    # a log-sum-exp and a loss of each token, an average of each logit; then both gradients, and
    # the order of the vocabulary
    ("cut", True): (
        HIDDEN + (4 + 8) * N + 4 * V + 4 * N + LOSS,
        HIDDEN + (4 + 8) * N + 4 * V,
        HIDDEN + (4 + 8) * N + 4 * V + WEIGHT + HIDDEN + 4 * V + LOSS,
    ),
}


@pytest.mark.parametrize(("word", "holds"), EXPECTED, ids=lambda each: str(each))
def test_a_loss_holds_what_its_operations_make(word, holds):
    assert bytes_of(word, holds) == EXPECTED[word, holds]


def test_every_loss_is_tried_here_or_is_megatrons():
    assert {word for word, _ in EXPECTED} == {*CROSS_ENTROPIES} - {
        *("unfused", "native", "te"),  # in test_walk
        "chunked",
    }
    assert bytes_of("chunked") == bytes_of("liger-linear")


class TestTensorParallel:
    T = 4
    PART = LOGITS // T

    def test_logits_of_a_sharded_vocabulary_are_gathered(self):
        """Each rank then has the whole loss; of its own logits nothing is left."""
        forward, kept, backward = bytes_of("torch", tp=self.T)
        assert forward == HIDDEN + (2 + 4 + 4) * LOGITS + TARGETS + LOSS
        assert kept == HIDDEN + 4 * LOGITS + TARGETS
        assert backward == HIDDEN + (4 + 4 + 4) * LOGITS

    def test_a_parallel_loss_stays_sharded_and_has_two_more_temporaries(self):
        """Forward: the shifted logits. Backward: zeros, and their sum with the probabilities."""
        forward, kept, backward = bytes_of("loss-parallel", tp=self.T)
        assert kept == HIDDEN + 4 * self.PART + TARGETS
        assert forward == HIDDEN + (2 + 4 + 4 + 4) * self.PART
        assert backward == HIDDEN + (4 + 4 + 4 + 4) * self.PART + TARGETS + LOSS

    @pytest.mark.parametrize(("implementation", "word"), [("torch", "loss-parallel")])
    def test_tensor_parallel_modules_have_a_parallel_loss(self, implementation, word):
        config = load("llama-3-8b", implementation=implementation, tp=self.T)
        assert config.run.implementation.cross_entropy == word

    def test_transformers_gathers(self):
        config = load("llama-3-8b", implementation="transformers-sdpa", tp=self.T)
        assert config.run.implementation.cross_entropy == "torch"


class TestDefaults:
    @pytest.mark.parametrize(
        ("name", "word"),
        [
            ("llama-3-8b", "torch"),
            ("gpt2", "torch"),
            ("bert-large", "torch-16bit"),
            ("t5-11b", "torch-16bit"),
            ("vit-base", "torch-16bit"),
        ],
    )
    def test_a_class_of_transformers_has_its_own_loss(self, name, word):
        for implementation in ("transformers-eager", "transformers-sdpa"):
            config = load(name, implementation=implementation)
            assert config.run.implementation.cross_entropy == word
        said = load(name, implementation="transformers-eager", cross_entropy="liger")
        assert said.run.implementation.cross_entropy == "liger"

    @pytest.mark.parametrize("implementation", ["paper", "megatron", "megatron-local"])
    def test_megatrons_are_as_they_were(self, implementation):
        kernels = load("llama-3-8b", implementation=implementation).run.implementation
        assert (kernels.cross_entropy, kernels.holds_logits) == ("unfused", False)

    def test_every_familys_loss_is_known(self):
        assert {family.cross_entropy for family in FAMILIES.values()} <= {*CROSS_ENTROPIES}

    def test_every_loss_is_an_operation(self):
        for record in CROSS_ENTROPIES.values():
            assert callable(resolve(record.operation))
            assert record.summary
            assert record.source


class TestHeldLogits:
    RUN: ClassVar = {"implementation": "transformers-sdpa", "seq_length": 1024}
    NOTE = "logits held until backward is over"

    def test_they_are_held_unless_something_says_otherwise(self):
        held = load("llama-3.2-1b", **self.RUN)
        assert held.run.implementation.holds_logits
        assert any(self.NOTE in each.words for each in held.assumed)
        for said in (True, False):
            config = load("llama-3.2-1b", **self.RUN, holds_logits=said)
            assert config.run.implementation.holds_logits is said
            assert not any(self.NOTE in each.words for each in config.assumed)

    @pytest.mark.parametrize(
        "word", ["torchtune-chunked", "liger-linear", "cut", "chunked-recomputed"]
    )
    def test_they_are_not_where_the_loop_drops_them_or_there_are_none(self, word):
        config = load("llama-3.2-1b", **self.RUN, cross_entropy=word)
        assert not config.run.implementation.holds_logits
        assert not any(self.NOTE in each.words for each in config.assumed)

    def test_they_stay_through_the_whole_backward_pass(self):
        sizes = []
        for holds in (True, False):
            (stage,) = device(load("llama-3.2-1b", **self.RUN, holds_logits=holds))
            sizes.append({phase.name: phase.bytes for phase in stage.phases})
        more = {name: sizes[0][name] - sizes[1][name] for name in sizes[0]}
        of_all = 2 * 1024 * 128256
        backward = {name for name, size in more.items() if size}
        assert backward == {"head backward", "backward", "embedding backward"}
        assert {more[name] for name in backward} == {of_all}

    def test_the_option(self, memcalc):
        line = "memory gpt2 --implementation transformers-sdpa -s 1024 --cross-entropy cut"
        said = "--holds-logits has no effect with --cross-entropy cut"
        assert said in memcalc(f"{line} --holds-logits").out
        assert said not in memcalc(f"{line} --no-holds-logits").out

    def test_answers_with_a_loss_say_how_it_is_computed_and_what_is_assumed(self, memcalc):
        line = "llama-3.2-1b --implementation torch -s 1024 --format json"
        summary = CROSS_ENTROPIES["torch"].summary
        for command in ("memory", "recompute", "layer"):
            notes = " ".join(memcalc(f"{command} {line}").document["notes"])
            assert (f"loss: torch ({summary}); assumed: {self.NOTE}" in notes) == (
                command != "layer"
            )
            assert (self.NOTE in notes) == (command != "layer")

    def test_a_file_says_so_too(self, tmp_path):
        content = {"memcalc": 1, "run": {**self.RUN, "holds_logits": False}}
        (tmp_path / "run.json").write_text(json.dumps(content))
        config = load("llama-3.2-1b", run=tmp_path / "run.json")
        assert not config.run.implementation.holds_logits

    def test_a_flag_is_true_or_false(self):
        with pytest.raises(ConfigError, match="holds_logits must be true or false"):
            load("llama-3.2-1b", **self.RUN, holds_logits="yes")


class TestWholeHead:
    @pytest.mark.parametrize("word", CROSS_ENTROPIES)
    def test_weights_and_flops_do_not_depend_on_the_loss(self, word):
        model = toy(head_bias=True)
        found = graph(word, model=model)
        assert flops.forward(found) == 2 * N * H * V
        weights = [w for op in found.ops for w in op.weights if not w.shared]
        assert sum(w.axes[0].size * (H if len(w.axes) > 1 else 1) for w in weights) == V * (H + 1)

    @pytest.mark.parametrize("word", CROSS_ENTROPIES)
    def test_a_formula_of_the_parameters_needs_no_number(self, word):
        config = load("llama-3.2-1b", implementation="torch", cross_entropy=word)
        assert parameters(config) == parameters(load("llama-3.2-1b"))

    def test_a_checkpointed_chunk_computes_its_gemm_again(self):
        once, again = (
            flops.iteration(load("llama-3.2-1b", seq_length=N, cross_entropy=word))
            for word in ("torch", "chunked-recomputed")
        )
        assert again.model == once.model
        assert again.hardware - once.hardware == 2 * N * 2048 * 128256

    def test_tokens_that_chunks_do_not_divide_are_all_there(self):
        for number in (1, 7, 4097):
            run = Run(
                seq_length=number,
                implementation=replace(IMPLEMENTATIONS["torch"], cross_entropy="litgpt"),
            )
            found = head_graph(Config(toy(), Parallel(), run))
            chunks = [op.outputs[0].axes[0].local for op in found.ops if op.name == "output"]
            assert sum(chunks) == number
            assert max(chunks) <= 128

    def test_a_long_sequence_has_no_more_chunks_than_are_recorded(self):
        config = load("llama-3.2-1b", seq_length=2**24, cross_entropy="litgpt")
        assert len(head_graph(config).ops) < 2000

    def test_a_capped_head_caps_each_chunk(self):
        for word in ("litgpt", "torchtune-chunked", "chunked-recomputed"):
            capped = graph(word, model=toy(final_softcap=30.0))
            caps = [op for op in capped.ops if op.kind.name == "tanh"]
            assert len(caps) == len([op for op in capped.ops if op.name == "output"])

    def test_a_step_frees_all_that_it_holds(self):
        """The replayed allocator refuses to free what is not there."""
        recipe = {"main_grads": "bf16", "main_params": "none", "moments": "bf16"}
        run = {"implementation": "transformers-sdpa", "seq_length": 256, **recipe}
        for word in CROSS_ENTROPIES:
            for holds in (True, False):
                config = load("gpt2", **run, cross_entropy=word, holds_logits=holds)
                assert library.memory(config).rows


def test_the_page_says_how_many_bytes_a_logit_takes():
    page = (Path(__file__).parents[2] / "docs/gpu.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \|.*\| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.M)
    assert [row[0] for row in rows] == [*CROSS_ENTROPIES]
    for word, *said in rows:
        ranks = 4 if word == "loss-parallel" else 1
        found = bytes_of(word, tp=ranks)
        assert said == [f"{(size - HIDDEN) * ranks / LOGITS:.1f}" for size in found]


# Liger's benchmark on A100s: forward and backward, repeated, so that gradients of the run before
# are there. One workspace of cuBLAS per thread, before Hopper.
WORKSPACES = 2 * 8_519_680
VARIABLE = "MEMCALC_PUBLIC_RUNS"


def of_logits(provider, vocabulary):
    """cross_entropy: fp32 logits of 16,384 tokens are the input, which has a gradient."""
    tokens = 8 * 2048
    g = Graph(Mesh())
    axes = Axis.whole("s", tokens), Axis.whole("b", 1), Axis.whole("v", vocabulary)
    logits = Tensor("logits", axes, 4)
    there = logits.bytes + 8 * tokens
    if provider == "liger":  # the gradient lies over the input
        return there + 4 * tokens + tokens
    ops.cross_entropy(g, "loss", logits)
    return there + logits.bytes + walk.backward(g).bytes


def of_hidden_states(provider, tokens):
    """fused_linear_cross_entropy: both providers' heads are there, and one has gradients."""
    hidden, vocabulary = 4096, 128256
    model = toy(hidden_size=hidden, heads=32)
    word = "liger-linear" if provider == "liger" else "torch-16bit"
    kernels = replace(IMPLEMENTATIONS["torch"], cross_entropy=word, holds_logits=False)
    run = Run(seq_length=tokens, implementation=kernels)
    head = head_graph(Config(model, Parallel(), run))
    most = max(walk.forward(head).bytes, walk.backward(head, own=2).bytes)
    if provider == "liger":
        # 0.4.2 casts a chunk of logits to fp32, beside the gradient of the chunk before
        most += (4 + 2) * vocabulary * tokens // 32
    weight, x = 2 * vocabulary * hidden, 2 * tokens * hidden
    return 2 * weight + weight + x + 8 * tokens + most + WORKSPACES


MEASURED = {"cross_entropy": of_logits, "fused_linear_cross_entropy": of_hidden_states}


@pytest.mark.measured
def test_ligers_benchmark_of_losses():
    folder = os.environ.get(VARIABLE)
    if folder is None:
        pytest.skip(f"{VARIABLE} names no folder of public measurements")
    lines = (Path(folder) / "liger.jsonl").read_text().splitlines()
    errors = []
    for row in map(json.loads, lines):
        operation, provider = row["model"].removeprefix("operation "), row["params"]["provider"]
        if operation in MEASURED:
            predicted = MEASURED[operation](provider, int(row["params"]["x_value"]))
            errors.append(predicted / row["measured_bytes"] - 1)
    assert len(errors) == 20
    assert sum(abs(error) <= 0.001 for error in errors) >= 18
    assert max(map(abs, errors)) <= 0.005
