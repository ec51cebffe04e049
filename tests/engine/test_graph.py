"""Tensors, operations, regions: shapes, what is saved, FLOPs and weights."""

import sys
from dataclasses import MISSING, fields
from fractions import Fraction
from types import SimpleNamespace

import pytest
import sympy

from memcalc.analysis.activations import kept, total
from memcalc.analysis.layers import layer_bytes, layer_entries
from memcalc.blocks.embedding import embedding_graph
from memcalc.blocks.head import head_graph
from memcalc.blocks.layer import layer_graph
from memcalc.config import Config, Model, Parallel, Run, load
from memcalc.config.implementation import ATTENTIONS, AttentionKernel
from memcalc.config.recompute import REGIONS, Policy
from memcalc.errors import ConfigError
from memcalc.graph import ops
from memcalc.graph.graph import Graph, OpKind, Save, Tensor, plain
from memcalc.graph.mesh import Axis, Mesh

S, B, H, A, D, F = (Axis.whole(x, n) for x, n in zip("sbhadf", (16, 2, 64, 4, 16, 96), strict=True))
K = Axis.heads("k", 2)


def graph(t=1, sp=False):
    g = Graph(Mesh(t, sp))
    return g, g.input("x", (g.mesh.sequence(S), B, H))


def saved(g):
    """What the last operation saves: name -> shape, bytes."""
    return {save.tensor.name: (save.tensor.shape, save.tensor.bytes) for save in g.ops[-1].saves}


def weights(g):
    """The last operation's own weights: name -> sizes over all ranks, and on one."""
    return {
        w.name: ([axis.size for axis in w.axes], [axis.local for axis in w.axes])
        for w in g.ops[-1].weights
        if not w.shared
    }


class TestLinear:
    def test_saves_its_input_and_counts_two_flops_a_multiply_add(self):
        g, x = graph()
        (y,) = ops.linear(g, "fc1", x, {"y": (F,)}, ops.COLUMN, bias=True)
        assert y.shape == "s b f"
        assert saved(g) == {"x": ("s b h", 2 * 16 * 2 * 64)}
        assert g.ops[-1].flops == 2 * (16 * 2) * 64 * 96
        assert weights(g) == {
            "fc1.weight": ([96, 64], [96, 64]),
            "fc1.bias": ([96], [96]),
        }

    def test_column_split_divides_the_output_and_not_the_input(self):
        g, x = graph(t=4)
        (y,) = ops.linear(g, "fc1", x, {"y": (F,)}, ops.COLUMN, bias=True)
        assert (y.shape, y.bytes) == ("s b f/t", 2 * 16 * 2 * 24)
        assert weights(g) == {"fc1.weight": ([96, 64], [24, 64]), "fc1.bias": ([96], [24])}
        assert saved(g)["x"] == ("s b h", 2 * 16 * 2 * 64)
        assert g.ops[-1].flops == 2 * (16 * 2) * 64 * 96

    def test_row_split_divides_the_input_and_leaves_the_bias_whole(self):
        g, x = graph(t=4)
        (y,) = ops.linear(g, "fc1", x, {"y": (F,)}, ops.COLUMN)
        (z,) = ops.linear(g, "fc2", y, {"z": (H,)}, ops.ROW, bias=True)
        assert z.shape == "s b h"
        assert saved(g) == {"y": ("s b f/t", 2 * 16 * 2 * 24)}
        assert weights(g) == {"fc2.weight": ([64, 96], [64, 24]), "fc2.bias": ([64], [64])}

    def test_replicated_divides_nothing(self):
        g, x = graph(t=4)
        (y,) = ops.linear(g, "router", x, {"y": (F,)}, ops.REPLICATED, bias=True)
        assert y.shape == "s b f"
        assert weights(g) == {"router.weight": ([96, 64], [96, 64]), "router.bias": ([96], [96])}

    def test_packed_outputs_share_one_product(self):
        g, x = graph(t=2)
        q, k, _ = ops.linear(
            g, "qkv", x, {"q": (A, D), "k": (K, D), "v": (K, D)}, ops.COLUMN, bias=True
        )
        assert (q.shape, k.shape) == ("s b a/t d", "s b k/t d")
        assert g.ops[-1].flops == 2 * (16 * 2) * 64 * (4 + 2 + 2) * 16
        assert weights(g)["qkv.weight"] == ([(4 + 2 + 2) * 16, 64], [(2 + 1 + 1) * 16, 64])

    def test_fewer_key_heads_than_ranks_are_copied_but_their_weight_is_not(self):
        g, x = graph(t=4)
        q, k, _ = ops.linear(g, "qkv", x, {"q": (A, D), "k": (K, D), "v": (K, D)}, ops.COLUMN)
        assert (q.shape, q.bytes) == ("s b a/t d", 2 * 16 * 2 * 1 * 16)
        assert (k.shape, k.bytes) == ("s b Max(1, k/t) d", 2 * 16 * 2 * 1 * 16)
        assert weights(g)["qkv.weight"] == ([(4 + 2 + 2) * 16, 64], [(4 + 2 + 2) * 16 // 4, 64])


class TestAttention:
    def qkv(self, t=1):
        g, x = graph(t)
        return g, ops.linear(g, "qkv", x, {"q": (A, D), "k": (A, D), "v": (A, D)}, ops.COLUMN)

    def test_matmul_saves_both_factors(self):
        g, (q, k, _) = self.qkv()
        scores = ops.matmul(g, "scores", "scores", q, k, (B, A, S, S), over=D)
        assert scores.bytes == 2 * (2 * 4 * 16 * 16)
        assert list(saved(g)) == ["q", "k"]
        assert g.ops[-1].flops == 2 * 2 * 4 * 16 * 16 * 16

    def test_scale_mask_rotary_cast_and_repeats_save_nothing(self):
        g, (q, _, _) = self.qkv()
        for apply in (
            lambda: ops.scale(g, "scale", q),
            lambda: ops.mask(g, "mask", q),
            lambda: ops.rotary(g, "rotary", q),
            lambda: ops.cast(g, "cast", q, 4),
            lambda: ops.repeat_heads(g, "repeat", q, A),
        ):
            made = apply()
            assert g.ops[-1].outputs == (made,)
            assert not g.ops[-1].saves
        assert ops.cast(g, "cast", q, 2) is q

    def test_softmax_saves_its_output_in_its_own_width(self):
        g, (q, k, _) = self.qkv()
        scores = ops.matmul(g, "scores", "scores", q, k, (B, A, S, S), over=D)
        ops.softmax(g, "softmax", scores, 4)
        assert saved(g) == {"softmax_output": ("b a s s", 4 * 2 * 4 * 16 * 16)}

    def test_padding_saves_a_mask_of_a_byte_a_pair_of_tokens_for_all_heads(self):
        g, (q, k, _) = self.qkv(t=2)
        scores = ops.matmul(g, "scores", "scores", q, k, (B, A, S, S), over=D)
        filled = ops.fill_padding(g, "padding", scores)
        assert filled.axes == scores.axes
        assert g.ops[-1].saves[0].tensor.shape == "b s s"
        assert saved(g)["padding_mask"] == ("b s s", 2 * 16 * 16)

    def test_flash_saves_four_tensors_and_a_log_sum_exp_but_nothing_quadratic(self):
        g, (q, k, v) = self.qkv(t=2)
        out = ops.flash_attention(g, "flash", q, k, v, rng_bytes=16, causal=True)
        assert out.shape == "s b a/t d"
        assert saved(g) == {
            **dict.fromkeys(("q", "k", "v", "context"), ("s b a/t d", 2 * 16 * 2 * 2 * 16)),
            "log_sum_exp": ("b a/t s", 4 * 2 * 2 * 16),
            "rng_state": ("16", 16),
        }
        assert g.ops[-1].flops == 4 * 2 * 16**2 * 4 * 16

    def test_the_memory_efficient_kernel_saves_its_mask_too_and_rows_in_tiles_of_32(self):
        g, (q, k, v) = self.qkv(t=2)
        mask = ops.mask_bias(g, "mask", (B, S, S.tiles(ops.BIAS_TILE)))
        ops.efficient_attention(g, "efficient", q, k, v, causal=True, bias=mask)
        assert saved(g) == {
            **dict.fromkeys(("q", "k", "v", "context"), ("s b a/t d", 2 * 16 * 2 * 2 * 16)),
            "log_sum_exp": ("b a/t 32*ceil(s/32)", 4 * 2 * 2 * 32),
            "rng_state": ("16", 16),
            "mask": ("b s s", 2 * 2 * 16 * 16),
        }
        assert g.ops[-1].flops == 4 * 2 * 16**2 * 4 * 16


class TestElementwise:
    def test_dropout_saves_a_byte_an_element_and_vanishes_without_probability(self):
        g, x = graph()
        assert ops.dropout(g, "dropout", x, 0.0) is x
        assert not g.ops
        ops.dropout(g, "dropout", x, 0.1)
        assert saved(g) == {"dropout_mask": ("s b h", 16 * 2 * 64)}

    def test_gelu_and_silu_save_their_input(self):
        for activation in (ops.gelu, ops.silu):
            g, x = graph()
            activation(g, "act", x)
            assert saved(g) == {"x": ("s b h", 2 * 16 * 2 * 64)}

    def test_a_sum_saves_nothing_and_a_product_both_factors(self):
        g, x = graph()
        y = g.input("y", x.axes)
        ops.add(g, "add", x, y)
        assert not saved(g)
        ops.multiply(g, "multiply", x, y)
        assert list(saved(g)) == ["x", "y"]

    def test_a_fused_gate_saves_its_packed_input_and_an_unfused_one_three_tensors(self):
        g, x = graph()
        (packed,) = ops.linear(g, "fc1", x, {"gate_up": (F.times(2),)}, ops.COLUMN)
        ops.gated_activation(g, "swiglu", packed, F)
        assert saved(g) == {"gate_up": ("s b 2f", 2 * 16 * 2 * 2 * 96)}

        g, x = graph()
        gate, up = ops.linear(g, "fc1", x, {"gate": (F,), "up": (F,)}, ops.COLUMN)
        ops.multiply(g, "swiglu", ops.silu(g, "silu", gate), up)
        names = [entry.tensor.name for entry in kept(g)]
        assert names == ["x", "gate", "silu_output", "up"]

    def test_gelu_operation_by_operation_keeps_four_tensors(self):
        """PyTorch keeps 4 x 8sbh for Hugging Face's gelu_new, where a kernel keeps 8sbh."""
        g, x = graph()
        ops.gelu_chain(g, "gelu", x)
        assert [save.tensor.bytes for save in g.ops[-1].saves] == [x.bytes] * 4

    def test_gelu_fast_operation_by_operation_keeps_seven_tensors(self):
        """0.5x * (1 + tanh(cx * (1 + c'x * x))): three products' factors and the tanh."""
        g, x = graph()
        ops.gelu_fast_chain(g, "gelu", x)
        assert total(kept(g)) == 7 * x.bytes

    def test_a_clamped_gate_keeps_six_tensors(self):
        """Gate and up, and the factors of gate * sigmoid(gate) and of its product with up + 1."""
        g, x = graph()
        gate, up = ops.linear(g, "fc1", x, {"gate": (F,), "up": (F,)}, ops.COLUMN)
        ops.clamped_swiglu(g, "clamped_swiglu", gate, up)
        assert total(kept(g)) == x.bytes + 6 * gate.bytes


class TestNorms:
    def test_layer_norm_saves_input_mean_and_deviation(self):
        g, x = graph()
        ops.layer_norm(g, "norm", x)
        assert saved(g) == {
            "x": ("s b h", 2 * 16 * 2 * 64),
            "norm_mean": ("s b", 4 * 16 * 2),
            "norm_rstd": ("s b", 4 * 16 * 2),
        }
        assert weights(g) == {"norm.weight": ([64], [64]), "norm.bias": ([64], [64])}

    def test_rms_norm_saves_input_and_one_statistic(self):
        g, x = graph(t=4, sp=True)
        ops.rms_norm(g, "norm", x)
        assert saved(g) == {
            "x": ("s/t b h", 2 * 4 * 2 * 64),
            "norm_rstd": ("s/t b", 4 * 4 * 2),
        }

    def test_rms_norm_operation_by_operation_keeps_more(self):
        """PyTorch keeps 6sbh + 4sb for Hugging Face's LlamaRMSNorm in bf16."""
        g, x = graph()
        ops.rms_norm_chain(g, "norm", x)
        assert total(kept(g)) == 6 * 16 * 2 * 64 + 4 * 16 * 2

    def test_rms_norm_that_scales_in_fp32_keeps_8sbh(self):
        """PyTorch keeps the input and the normalized input in fp32, and Gemma's 1 + weight."""
        for scaled, scale in (("fp32", 0), ("one_plus", 4 * 64)):
            g, x = graph()
            ops.rms_norm_chain(g, "norm", x, scaled)
            assert total(kept(g)) == 8 * 16 * 2 * 64 + 4 * 16 * 2 + scale

    def test_layer_norm_operation_by_operation_keeps_12sbh(self):
        """PyTorch keeps 12sbh + 4sb and the weight, 4h, for Hugging Face's CohereLayerNorm."""
        g, x = graph()
        ops.layer_norm_chain(g, "norm", x, bias=False)
        assert total(kept(g)) == 12 * 16 * 2 * 64 + 4 * 16 * 2 + 4 * 64


class TestCollectives:
    def test_with_one_rank_they_vanish(self):
        g, x = graph()
        assert (
            ops.leave_tensor_parallel(g, "leave", ops.enter_tensor_parallel(g, "enter", x, False))
            is x
        )
        assert not g.ops

    def test_f_and_f_bar_all_reduce_once_each(self):
        g, x = graph(t=4)
        y = ops.leave_tensor_parallel(g, "leave", ops.enter_tensor_parallel(g, "enter", x, False))
        assert y.shape == "s b h"
        assert [(op.kind.name, [m[:3] for m in op.moves]) for op in g.ops] == [
            ("copy", [("all_reduce", "backward", x.bytes)]),
            ("all_reduce", [("all_reduce", "forward", x.bytes)]),
        ]

    def test_g_gathers_and_g_bar_scatters_with_their_conjugates_in_backward(self):
        g, x = graph(t=4, sp=True)
        gathered = ops.enter_tensor_parallel(g, "enter", x, False)
        y = ops.leave_tensor_parallel(g, "leave", gathered)
        assert (x.shape, gathered.shape, y.shape) == ("s/t b h", "s b h", "s/t b h")
        whole = gathered.bytes
        assert whole == 4 * x.bytes
        assert [(op.kind.name, [tuple(m) for m in op.moves]) for op in g.ops] == [
            (
                "all_gather",
                [
                    ("all_gather", "forward", whole, 4, ""),
                    ("reduce_scatter", "backward", whole, 4, "weight gradient"),
                    ("all_gather", "backward", whole, 4, "data gradient"),
                ],
            ),
            (
                "reduce_scatter",
                [
                    ("reduce_scatter", "forward", whole, 4, ""),
                    ("all_gather", "backward", whole, 4, ""),
                ],
            ),
        ]

    def test_a_linear_behind_g_keeps_the_shard_or_the_whole(self):
        for keeps_gathered, kept_bytes in ((False, 2 * 4 * 2 * 64), (True, 2 * 16 * 2 * 64)):
            g, x = graph(t=4, sp=True)
            y = ops.enter_tensor_parallel(g, "enter", x, keeps_gathered)
            ops.linear(g, "fc1", y, {"y": (F,)}, ops.COLUMN)
            assert total(kept(g)) == kept_bytes


class TestEnds:
    V = Axis.whole("v", 32)

    def test_an_embedding_saves_indices_and_owns_its_table(self):
        g, x = graph()
        tokens = Tensor("tokens", (S, B), 8)
        assert ops.embedding(g, "word", tokens, self.V, H).shape == "s b h"
        assert saved(g) == {"tokens": ("s b", 8 * 16 * 2)}
        assert weights(g) == {"word.weight": ([32, 64], [32, 64])}
        ops.position_embedding(g, "position", x, S)
        assert not saved(g)
        assert weights(g) == {"position.weight": ([16, 64], [16, 64])}

    def test_a_split_table_saves_a_ranks_own_indices_and_a_byte_a_token(self):
        g, _ = graph(t=4)
        ops.embedding(g, "word", Tensor("tokens", (S, B), 8), self.V, H)
        assert saved(g) == {"word_rows": ("s b", 256), "word_foreign": ("s b", 32)}
        assert weights(g) == {"word.weight": ([32, 64], [8, 64])}

    def test_cross_entropy_saves_an_fp32_softmax_over_a_ranks_vocabulary(self):
        g, x = graph(t=4)
        (logits,) = ops.linear(g, "output", x, {"logits": (self.V,)}, ops.COLUMN, shared=True)
        assert weights(g) == {}
        ops.megatron_cross_entropy(g, "loss", logits)
        assert saved(g) == {
            "loss_softmax": ("s b v/t", 4 * 16 * 2 * 8),
            "loss_target": ("s b", 256),
            "loss_foreign": ("s b", 32),
        }


class TestGraph:
    def test_every_operation_records_the_name_of_its_function(self):
        for config in (load("22b", sp=True), load("22b"), load("gpt2", implementation="torch")):
            for g in (layer_graph(config), embedding_graph(config), head_graph(config)):
                assert all(callable(getattr(ops, op.kind.name)) for op in g.ops)

    def test_the_blocks_name_the_regions_that_may_be_recomputed(self):
        latent = Model.of(
            name="toy",
            layers=1,
            hidden_size=64,
            heads=4,
            head_size=24,
            kv_lora_rank=16,
            rope_head_size=8,
            v_head_size=16,
            experts=4,
            experts_per_token=2,
            shared_ffn_size=64,
        )
        experts = Config(latent, Parallel(), Run(seq_length=64))
        decoder = layer_graph(load("t5-11b"), kind="decoder")
        graphs = layer_graph(load("22b")), layer_graph(experts), decoder
        named = {region.name for g in graphs for op in g.ops for region in op.regions}
        assert named == {*REGIONS}

    def test_a_tensor_that_two_operations_save_counts_once(self):
        g, x = graph()
        ops.gelu(g, "first", x)
        ops.silu(g, "second", x)
        (entry,) = kept(g)
        assert entry.ops == ("first", "second")

    def test_two_equal_tensors_are_two(self):
        g, x = graph()
        ops.multiply(g, "multiply", x, g.input("x", x.axes))
        assert total(kept(g)) == 2 * x.bytes

    def chain(self):
        """x -> a -> b -> c, with a and b in one region and b in a region inside it."""
        g, x = graph()
        with g.region("outer"):
            y = ops.gelu(g, "a", x)
            with g.region("inner"):
                y = ops.gelu(g, "b", y)
        ops.gelu(g, "c", y)
        return g

    @pytest.mark.parametrize(
        ("recomputed", "names"),
        [
            (set(), ["x", "a_output", "b_output"]),
            ({"inner"}, ["x", "a_output", "b_output"]),  # a_output enters the region
            ({"outer"}, ["x", "b_output"]),
            ({"outer", "inner"}, ["x", "b_output"]),  # the outermost decides
        ],
    )
    def test_a_recomputed_region_keeps_what_enters_it(self, recomputed, names):
        entries = kept(self.chain(), Policy(frozenset(recomputed)))
        assert [entry.tensor.name for entry in entries] == names

    def test_a_cached_output_is_kept_and_not_made_again(self):
        """All of its kind, or every second one."""
        policy = Policy(frozenset({"outer"}), cached=frozenset({"mine"}))
        for every, names in (1, ["x", "y0", "y1", "y2"]), (2, ["x", "y0", "y2"]):
            g, x = graph()
            with g.region("outer"):
                for number in range(3):
                    y = Tensor(f"y{number}", x.axes, 2)
                    g.record("op", plain("op", cached={"mine": every}), (x,), (y,))
            assert [entry.tensor.name for entry in kept(g, policy)] == names

    def test_two_regions_of_one_name_are_two_checkpoints(self):
        g, x = graph()
        for _ in range(2):
            with g.region("part"):
                x = ops.gelu(g, "one", x)
                x = ops.gelu(g, "two", x)
        names = [entry.tensor.name for entry in kept(g, Policy(frozenset({"part"})))]
        assert names == ["x", "two_output"]

    def test_a_region_ends_when_its_block_fails(self):
        g, x = graph()
        with pytest.raises(ZeroDivisionError), g.region("broken"):
            _ = 1 / 0
        ops.gelu(g, "after", x)
        assert g.ops[-1].regions == ()

    def test_what_does_not_divide_is_refused_with_both_numbers(self):
        with pytest.raises(ConfigError, match="s: 10 is not divisible by 4"):
            Mesh(4, True).sequence(Axis.whole("s", 10))
        with pytest.raises(ConfigError, match="4 is not divisible by 3"):
            Mesh(4).tensor(Axis.heads("k", 3))

    @pytest.mark.parametrize(
        "make", [int, Fraction, lambda size: size * sympy.Symbol("z", positive=True)]
    )
    def test_sizes_may_be_of_any_kind(self, make):
        g = Graph(Mesh(make(4), True))
        axes = (Axis.whole("s", make(16)), Axis.whole("b", make(2)), Axis.whole("h", make(64)))
        x = g.input("x", (g.mesh.sequence(axes[0]), *axes[1:]))
        g.record("op", plain("op"), (x,), (), saves=[Save(x, "", "")])
        size = total(kept(g))
        if isinstance(size, sympy.Expr):
            assert size == 1024 * sympy.Symbol("z", positive=True) ** 2
        else:
            assert size == 1024

    def test_symbolic_key_heads_are_at_least_one(self):
        k, t = sympy.symbols("k t", positive=True)
        axis = Mesh(t).tensor(Axis.heads("k", k))
        assert axis.local == sympy.Max(1, k / t)
        assert Mesh(Fraction(8)).tensor(Axis.heads("k", Fraction(2))).local == 1


def test_linears_in_fp8_keep_their_inputs_in_8_bits():
    """Llama-3-8B: of its four linears' inputs, one is a flash kernel's output, which stays too."""
    s, h, f = 8192, 4096, 14336
    less = layer_bytes(load("llama-3-8b")) - layer_bytes(load("llama-3-8b", precision="fp8"))
    assert less == s * (h + h + f - h)  # into qkv, fc1 and fc2; beside the context, a copy


def test_of_a_view_that_enters_a_recomputed_region_the_whole_is_kept():
    """Phi-3's value is a view of the packed query, key and value, checkpointed or not."""
    for words, by in (("none", "flash_attention"), ("selective", "core_attention")):
        settings = {"implementation": "transformers-sdpa", "recompute": words}
        config = load("phi-3-mini", seq_length=512, **settings)
        entries = kept(layer_graph(config), config.run.policy)
        ops_of = {entry.tensor.name: entry.ops for entry in entries}
        assert ops_of["query+key+value"] == (by,)
        assert "value" not in ops_of


def test_a_layers_copy_of_a_mask_is_made_again_with_the_core():
    """Its heads are repeated there too; a selective checkpoint saves the kernel's outputs alone."""
    for words, kept_there in (
        ("none", {"mask_bias", "key_rotary_output_repeated", "value_repeated", "log_sum_exp"}),
        ("selective", {"key_rotary_output", "value"}),
        ("selective_op", {"log_sum_exp", "rng_state", "context"}),
    ):
        settings = {"implementation": "transformers-sdpa", "recompute": words}
        config = load("starcoder2-7b", seq_length=4096, **settings)
        names = {entry.tensor.name for entry in kept(layer_graph(config), config.run.policy)}
        assert kept_there <= names
        assert ("mask_bias" in names) == (words == "none")


def test_pytorchs_math_form_keeps_its_factors_in_fp32():
    """Falcon-7B's: 71 heads of queries, and one key and value, viewed in one sequence."""
    s, heads, d = 2048, 71, 64
    for batch, of_key in ((1, 1), (2, heads)):
        config = load("falcon-7b", micro_batch_size=batch, implementation="transformers-sdpa")
        sizes = {x.tensor.name: x.tensor.bytes for x in kept(layer_graph(config))}
        repeated = "" if batch == 1 else "_repeated"
        assert sizes["query_rotary_output_fp32"] == 4 * s * batch * heads * d
        assert sizes[f"key_rotary_output_fp32{repeated}"] == 4 * s * batch * of_key * d
        assert sizes[f"value_fp32{repeated}"] == 4 * s * batch * of_key * d
        assert sizes["softmax_output"] == 4 * batch * heads * s**2


@pytest.mark.parametrize(
    ("name", "kind", "words", "gone"),
    [
        ("llama-3-8b", "dense", "layernorm", set()),
        ("llama-3-8b", "dense", "mlp", {"mlp_norm_output", "gate_up", "swiglu_output"}),
        ("mixtral-8x7b", "moe", "layernorm", {"mlp_norm_output"}),
        ("deepseek-v3", "dense", "layernorm", {"input_norm_output"}),
        ("deepseek-v3", "moe", "layernorm", {"input_norm_output", "mlp_norm_output"}),
        (
            "deepseek-v3",
            "moe",
            "mla_up_proj",
            {"q_norm_output", "kv_norm_output", "query_rotary_output", "key", "value"},
        ),
    ],
)
def test_a_norm_inside_a_linear_is_recomputed_with_it_or_not_at_all(name, kind, words, gone):
    """Megatron-core 0.16.1 with Transformer Engine, gpt_layer_specs.py: LayerNormLinear."""
    names = [
        {e.tensor.name for e in layer_entries(load(name, seq_length=4096, recompute=w), kind=kind)}
        for w in ("none", words)
    ]
    assert names[0] - names[1] == gone


def test_a_further_token_keeps_its_gathered_projection_whole():
    """Megatron-core 0.16.1, mappings.py: a rank's tokens are a slice, and so a view, of all."""
    for words in ("none", "layernorm"):
        settings = {"seq_length": 4096, "tp": 8, "sp": True, "recompute": words}
        config = load("deepseek-v3", **settings)
        sizes = {
            entry.tensor.name: entry.tensor.bytes
            for entry in kept(layer_graph(config, kind="mtp"), config.run.policy)
        }
        assert sizes["join_gather_output"] == 2 * 4096 * 7168


def scaled_attention(g, name, q, k, v, *others):
    """A fused kernel that also keeps an fp32 scale of each query: what a new kernel has to say."""
    out = ops.flash_attention(g, name, q, k, v, *others)
    scale = Tensor("scale", q.axes[:-1], 4)
    reason, source = "scale of each query's numbers", "a test"
    g.ops[-1] = g.ops[-1]._replace(saves=[*g.ops[-1].saves, Save(scale, reason, source)])
    return out


def test_one_record_and_one_operation_add_an_attention_kernel(monkeypatch):
    module = SimpleNamespace(scaled_attention=scaled_attention)
    monkeypatch.setitem(sys.modules, "kernels_of_a_test", module)
    record = AttentionKernel("keeps a scale", "kernels_of_a_test:scaled_attention")
    monkeypatch.setitem(ATTENTIONS, "scaled", record)
    config = load("llama-3-8b", seq_length=4096)
    more = layer_bytes(load("llama-3-8b", seq_length=4096, attention="scaled"), "exact")
    assert more - layer_bytes(config, "exact") == 4 * 4096 * 32  # s b a


def test_no_fact_of_a_kind_of_operation_has_a_default():
    assert all(field.default is MISSING for field in fields(OpKind))
