"""What a pass holds at its worst moment, derived from sizes."""

from dataclasses import replace

import pytest

from memcalc.analysis import activations, walk
from memcalc.blocks.embedding import embedding_graph
from memcalc.blocks.head import head_graph
from memcalc.blocks.layer import layer_graph
from memcalc.config import load
from memcalc.config.recompute import POLICIES
from memcalc.graph.ops.experts import COMBINE, DISPATCH

S, B, H, A, F, V = 4096, 1, 4096, 32, 14336, 128256  # Llama-3-8B's
HIDDEN = 2 * S * B * H


def llama(**settings):
    settings = {"seq_length": S, "implementation": "megatron", "sp": False, **settings}
    return load("llama-3-8b", **settings)


# Bytes of a logit while the loss is made: itself, its fp32 copy (the softmax in place), and where
# that is compiled the exponential too; in place of the logits, nothing more.
FORWARD = {"unfused": 2 + 4, "native": 2 + 4 + 4, "te": 2}
CAST = (
    4 + 2
)  # on the way back: the softmax, over which the gradient is written, and that in 16 bits


class TestHead:
    """Of the loss, bytes of a logit beside what the norm and the product keep."""

    @staticmethod
    def of_logits(moment, graph):
        """The bytes of a logit, without what is a few bytes a token and the states around."""
        around = 2 * HIDDEN  # inputs of the last norm and of the product
        small = sum(e.tensor.bytes for e in activations.kept(graph) if e.small)
        return (moment.bytes - around - small - 4 * S * B) / (S * B * V)

    @pytest.mark.parametrize("kind", FORWARD)
    def test_the_loss_holds_what_its_implementation_makes(self, kind):
        graph = head_graph(llama(cross_entropy=kind))
        moment = walk.forward(graph)
        assert moment.op == "loss"
        assert self.of_logits(moment, graph) == FORWARD[kind]

    @pytest.mark.parametrize("kind", ["unfused", "native"])
    def test_the_cast_gradient_stands_beside_the_softmax(self, kind):
        graph = head_graph(llama(cross_entropy=kind))
        moment = walk.backward(graph)
        assert moment.op == "loss"
        assert self.of_logits(moment, graph) == CAST

    def test_in_place_of_the_logits_the_product_backwards_is_the_most(self):
        """Their gradient, both kept inputs, and the gradient of the hidden states."""
        graph = head_graph(llama(cross_entropy="te"))
        moment = walk.backward(graph)
        small = 4 * S * B  # reciprocal norms, fp32
        assert moment.op == "output"
        assert moment.bytes == 2 * S * B * V + 3 * HIDDEN + small

    def test_without_fusion_the_weights_gradient_is_a_tensor_of_its_own(self):
        graph = head_graph(llama(cross_entropy="te"))
        added, own = walk.backward(graph), walk.backward(graph, own=2)
        assert (added.weight, own.weight) == (0, 2 * H * V)
        assert own.bytes - added.bytes == own.weight

    def test_a_tied_weight_has_a_gradient_all_the_same(self):
        config = load("gpt2", implementation="megatron", cross_entropy="te")
        assert config.model.tied_embeddings
        assert walk.backward(head_graph(config), own=2).weight == 2 * 768 * 50257

    def test_under_sequence_parallelism_the_whole_is_gathered_and_its_gradient_scattered(self):
        t = 8
        graph = head_graph(llama(tp=t, sp=True, cross_entropy="te"))
        moment, buffered = walk.backward(graph), walk.backward(graph, gathers=False)
        logits, small = 2 * S * B * V // t, 4 * S * B // t
        kept, gradients = 2 * HIDDEN // t, HIDDEN + HIDDEN // t
        assert buffered.bytes == logits + kept + gradients + small
        assert moment.bytes == buffered.bytes + HIDDEN

    def test_a_chunked_loss_never_has_all_logits(self):
        """Liger: as many tokens at once as (v / h, rounded up) divides all into, a power of 2."""
        graph = head_graph(llama(cross_entropy="chunked"))
        tokens = 1 << (-(-S * B // -(-V // H)) - 1).bit_length()
        moment = walk.forward(graph)
        kept = HIDDEN + HIDDEN + 2 * H * V  # the norm's input, and both gradients
        inputs = HIDDEN  # the product's input, which nothing keeps
        small = 4 * S * B + 4 * S * B + S * B + 4  # reciprocal norms; losses, targets, their sum
        assert moment.bytes == kept + inputs + small + 2 * tokens * V


class TestLayer:
    def test_the_widest_moment_of_an_mlp_is_its_activations_backward(self):
        """Residual's gradient, the activation's, and of the gate and what it gates."""
        moment = walk.backward(layer_graph(llama()))
        assert moment.op == "swiglu"
        assert moment.working == 2 * S * B * (H + F + 2 * F)

    def test_a_recomputed_layer_holds_all_it_saves_once_more(self):
        config = llama()
        graph = layer_graph(config)
        whole = walk.backward(graph)
        again = walk.backward(graph, POLICIES["full"])
        assert activations.total(activations.kept(graph, POLICIES["full"])) == HIDDEN
        # the input is there in either; the gradient of the output waits while the layer runs again
        assert again.bytes == whole.bytes
        assert walk.forward(graph, POLICIES["full"]).kept == HIDDEN

    @pytest.mark.parametrize(
        ("recompute", "more"), [("full", HIDDEN), ("mlp", HIDDEN), ("moe_act", 0), ("none", 0)]
    )
    def test_a_reentrant_checkpoint_holds_its_outputs_until_it_is_done(self, recompute, more):
        """The output made again; its gradient is the residual's, which is there anyway."""
        config = llama(recompute=recompute)
        graph, chosen = layer_graph(config), config.run.policy
        plain = walk.backward(graph, chosen)
        held = walk.backward(graph, chosen, reentrant=True)
        assert (held.op, held.bytes - plain.bytes) == (plain.op, more)

    def test_what_two_operations_save_stays_until_the_first_is_done(self):
        """Flash attention and the projection keep the same output: it is let go by the former."""
        graph = layer_graph(llama())
        names = [op.name for op in graph.ops]
        context = next(op.outputs[0] for op in graph.ops if op.name == "flash_attention")
        keepers = [op.name for op in graph.ops if context in [save.tensor for save in op.saves]]
        assert keepers == ["flash_attention", "proj"]
        assert names.index("flash_attention") < names.index("proj")

    def test_a_batch_first_kernel_keeps_a_second_copy_of_its_output(self):
        for b, more in ((1, 0), (4, 2 * S * 4 * H)):
            layers = [
                layer_graph(llama(micro_batch_size=b, batch_first=first)) for first in (False, True)
            ]
            plain, copied = (activations.total(activations.kept(g)) for g in layers)
            assert copied - plain == more

    def test_exchanged_heads_are_kept_before_and_after(self):
        c = 4
        sizes = [
            activations.total(activations.kept(layer_graph(llama(cp=c, cp_kind=kind))))
            for kind in ("ring", "all_to_all")
        ]
        assert sizes[1] - sizes[0] == HIDDEN // c


def test_an_embeddings_table_has_a_gradient_as_large_as_itself():
    moment = walk.backward(embedding_graph(llama()), own=2)
    assert moment.weight == 2 * V * H


def test_routed_tokens_are_copied_at_every_step_of_their_way():
    """Sent, received, gathered over the experts' tensor ranks, and put in order."""
    config = load("mixtral-8x7b", ep=4, etp=2, tp=2, sp=True, implementation="megatron")
    names = [op.outputs[0].name for op in layer_graph(config).ops if op.kind is DISPATCH]
    assert names == [
        "dispatch_sent",
        "dispatch_received",
        "dispatch_gathered",
        "dispatch_output",
    ]
    back = [op.outputs[0].name for op in layer_graph(config).ops if op.kind is COMBINE]
    assert back == ["combine_gathered", "combine_received", "combine_sent", "combine_output"]


def test_tokens_that_variables_refer_to_stay_until_the_block_returns():
    """As they were sent and received, beside those put in order and those on their way back."""
    config = load("mixtral-8x7b", ep=4, dp=4, seq_length=4096, implementation="megatron")
    routed = 2 * 2 * 4096 * 4096  # bytes of two experts a token
    held = walk.forward(layer_graph(config))
    gone = walk.forward(layer_graph(without(config, holds_routed=False)))
    assert held.op == gone.op == "combine_received"
    assert held.working - gone.working == 2 * routed
    weights = 4 * 2 * 4096  # fp32, of each token's experts
    assert gone.working == 2 * routed + weights


def test_shared_experts_run_first_where_megatron_runs_them():
    config = load("deepseek-v2-lite", seq_length=4096, implementation="megatron")
    orders = [
        [op.name for op in layer_graph(each).ops if op.name in ("router", "shared_fc1")]
        for each in (config, without(config, shared_first=False))
    ]
    assert orders == [["shared_fc1", "router"], ["router", "shared_fc1"]]


def without(config, **kernels):
    """The same with other kernels."""
    implementation = replace(config.run.implementation, **kernels)
    return replace(config, run=replace(config.run, implementation=implementation))
