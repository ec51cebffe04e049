"""Recurrent cells: what they keep over time, against PyTorch's own, and in closed form."""

from dataclasses import replace
from fractions import Fraction

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from memcalc import rnn_formulas
from memcalc.analysis import recurrent
from memcalc.analysis.activations import kept, outermost, total
from memcalc.analysis.onchip import recurrent_weights
from memcalc.analysis.recurrent import CHECKPOINTED, Costs, costs
from memcalc.blocks.rnn import rnn_graph
from memcalc.config.recurrent import CELLS, KERNELS, Recurrent
from memcalc.errors import ConfigError
from memcalc.validation.deriving.derivation import derive
from memcalc.validation.layers.rnn import Network
from memcalc.validation.measuring.kernels import FusedLstm
from memcalc.validation.measuring.measure import measure, peak_bytes

B, WIDE, H = 2, 5, 7  # batch size, input size, hidden size
TORCH_CELLS = {"vanilla": nn.RNNCell, "gru": nn.GRUCell, "lstm": nn.LSTMCell}
TORCH_SEQUENCES = {"vanilla": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}

each_cell = pytest.mark.parametrize("cell", CELLS)
each_kernel = pytest.mark.parametrize("kernels", KERNELS)
each_device = pytest.mark.parametrize("device", ["cpu", "meta"])


def network(cell, kernels="torch-cpu", layers=1, **fields):
    sizes = {"hidden_size": H, "input_size": WIDE, "batch_size": B}
    return Recurrent(cell=cell, kernels=kernels, layers=layers, **sizes, **fields)


def inputs(steps, device="cpu", dtype=torch.float32):
    return torch.randn(steps, B, WIDE, device=device, dtype=dtype)


class Loop(nn.Module):
    """A torch.nn cell, a step after the other."""

    def __init__(self, cell, device, dtype=torch.float32):
        super().__init__()
        self.cell = TORCH_CELLS[cell](WIDE, H, device=device, dtype=dtype)
        self.lstm = cell == "lstm"

    def forward(self, x):
        zeros = [x.new_zeros(B, H) for _ in range(2)]
        state = tuple(zeros) if self.lstm else zeros[0]
        for step in x:
            state = self.cell(step, state)
        return state[0] if self.lstm else state


class TestWhatIsKept:
    @pytest.mark.parametrize("steps", [1, 2, 5])
    @each_device
    @each_cell
    def test_torchs_cells_keep_what_the_ledger_says(self, cell, device, steps):
        measured = measure(Loop(cell, device), inputs(steps, device))
        assert measured.agrees
        assert measured.bytes == total(kept(rnn_graph(network(cell), steps)))

    @each_cell
    def test_in_16_bits_too(self, cell):
        measured = measure(Loop(cell, "cpu", torch.bfloat16), inputs(3, dtype=torch.bfloat16))
        assert measured.bytes == costs(network(cell, precision="bf16")).whole(3)
        fused = network(cell, "torch-cuda", precision="bf16")
        measured = measure(Network(fused), inputs(3, dtype=torch.bfloat16))
        assert measured.bytes == costs(fused).whole(3)

    @pytest.mark.parametrize("layers", [1, 2, 3])
    @each_cell
    def test_torchs_networks_keep_the_same_and_copies_between_layers(self, cell, layers):
        """nn.RNN and its like stack a layer's outputs for the next layer: a copy of all of them.

        A state that the next layer reads is then saved only where a cell's own gradient needs it:
        the last one of vanilla cells is, the others' is not. oneDNN's LSTM keeps a workspace that
        is its own, and is not asked.
        """
        steps = 4
        module = TORCH_SEQUENCES[cell](WIDE, H, layers)
        with torch.backends.mkldnn.flags(enabled=False, allow_tf32=None):
            measured = measure(module, inputs(steps))
        state = 4 * B * H
        copies = (layers - 1) * (steps * state - (0 if cell == "vanilla" else state))
        assert measured.bytes == costs(network(cell, layers=layers)).whole(steps) + copies

    @pytest.mark.parametrize("layers", [1, 2])
    @each_device
    @each_kernel
    @each_cell
    def test_own_networks_keep_what_the_ledger_says(self, cell, kernels, device, layers):
        config = network(cell, kernels, layers)
        for steps in (1, 4):
            measured = measure(Network(config, device=device), inputs(steps, device))
            assert measured.agrees
            assert measured.bytes == total(kept(rnn_graph(config, steps)))

    def test_the_stand_in_keeps_what_torchs_fused_kernel_does(self):
        """PyTorch has its fused LSTM on meta too: its own saved tensors, and those of ours."""

        class Step(nn.Module):
            def __init__(self, run):
                super().__init__()
                self.run = run
                self.bias = nn.Parameter(torch.zeros(4 * H, device="meta"))

            def forward(self, x):
                products = x @ x.new_zeros(WIDE, 4 * H), x @ x.new_zeros(WIDE, 4 * H)
                return self.run(*products, x.new_zeros(B, H), self.bias, self.bias)[:2]

        x = inputs(1, "meta")[0].requires_grad_()
        theirs = measure(Step(torch.ops.aten._thnn_fused_lstm_cell), x)
        ours = measure(Step(FusedLstm.apply), x)
        assert theirs.bytes == ours.bytes
        assert sorted(theirs.sizes) == sorted(ours.sizes)

    @each_kernel
    @each_cell
    def test_own_networks_compute_what_torchs_do(self, cell, kernels):
        torch.manual_seed(0)
        own, theirs = Network(network(cell, kernels, 2)), TORCH_SEQUENCES[cell](WIDE, H, 2)
        for number, each in enumerate(own.cells):
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
                with torch.no_grad():
                    getattr(theirs, f"{name}_l{number}").copy_(getattr(each, name))
        x, y = inputs(6).requires_grad_(), None
        gradients = []
        for module in (own, theirs):
            y = module(x)
            last = y if module is own else y[0][-1]
            last.square().sum().backward()
            gradients.append((last.detach(), x.grad, *(p.grad for p in module.parameters())))
            x.grad = None
        for mine, others in zip(*gradients, strict=True):
            torch.testing.assert_close(mine, others, rtol=1e-4, atol=1e-5)


class TestCheckpoints:
    @pytest.mark.parametrize("layers", [1, 2])
    @each_kernel
    @each_cell
    def test_torchs_checkpoints_keep_what_the_ledger_says(self, cell, kernels, layers):
        config = network(cell, kernels, layers)
        for steps, every in ((6, 3), (7, 3), (5, 1), (4, 9)):
            measured = measure(Network(config, every), inputs(steps))
            assert measured.agrees
            assert measured.bytes == total(kept(rnn_graph(config, steps, every), CHECKPOINTED))
            segments = -(-steps // every)
            assert measured.bytes == costs(config).checkpointed(steps, segments)

    @pytest.mark.parametrize("layers", [1, 2])
    @each_kernel
    @each_cell
    def test_the_measured_peak_grows_as_the_ledgers(self, cell, kernels, layers):
        """The input is there before; where the last segment is short, its states have gradients."""
        config = network(cell, kernels, layers)
        held = costs(config)

        def beyond(steps, every):
            measured = peak_bytes([Network(config, every)], inputs(steps))
            return measured + steps * held.input - held.peak(steps, every)

        assert beyond(12, 3) == beyond(24, 3) == beyond(24, 6) == beyond(12, 4)
        assert beyond(24, 7) == beyond(12, 3) + held.state

    @settings(deadline=None)
    @given(
        st.sampled_from(CELLS),
        st.sampled_from(sorted(KERNELS)),
        st.integers(1, 2),
        st.integers(1, 9),
        st.integers(1, 9),
    )
    def test_closed_forms_are_what_the_graph_keeps(self, cell, kernels, layers, steps, every):
        config = network(cell, kernels, layers)
        held = costs(config)
        assert held.whole(steps) == total(kept(rnn_graph(config, steps)))
        graph = rnn_graph(config, steps, every)
        segments = -(-steps // every)
        assert held.checkpointed(steps, segments) == total(kept(graph, CHECKPOINTED))
        assert held.peak(steps, every) == walked_peak(graph)

    @settings(deadline=None)
    @given(st.integers(1, 60), *[st.integers(1, 9)] * 3)
    def test_the_best_spacing_has_the_least_peak(self, steps, first, step, state):
        held = Costs(0, first + step, step, state)
        peaks = [held.peak(steps, every) for every in range(1, steps + 1)]
        assert held.peak(steps, held.best(steps)) == min(peaks)

    @each_kernel
    @each_cell
    def test_the_least_peak_is_where_its_derivative_vanishes(self, cell, kernels):
        """Checkpoints cost s/k states and a segment k steps: k^2 = s state / step."""
        config = network(cell, kernels)
        forms = dict(rnn_formulas.over_time(config))
        s, k = rnn_formulas.s, rnn_formulas.k
        held = costs(config)
        assert sympy.expand(forms["k with the lowest peak"] ** 2 - s * held.state / held.step) == 0
        best = forms["peak during backward with these checkpoints"].subs(
            k, forms["k with the lowest peak"]
        )
        assert sympy.simplify(best - forms["lowest peak"]) == 0

    @each_cell
    def test_formulas_are_the_numbers(self, cell):
        config = network(cell, layers=2)
        held = costs(config)
        at = dict(
            zip((getattr(rnn_formulas, x) for x in "sbhik"), (24, B, H, WIDE, 6), strict=True)
        )
        values = {name: form.subs(at) for name, form in rnn_formulas.over_time(config)}
        assert values["kept per later step"] == held.input + held.step
        assert values["kept over s steps"] == held.whole(24)
        assert values["kept with a checkpoint every k steps"] == held.checkpointed(24, 4)
        assert values["peak during backward with these checkpoints"] == held.peak(24, 6)
        assert values["parameters"] == recurrent.parameters(config)
        flops = values["forward FLOPs (twice that with checkpoints)"]
        assert flops == recurrent.forward_flops(config, 24)

    def test_an_lstm_keeps_seven_states_a_step_and_its_input(self):
        """Four gates, tanh of the memory, state and memory; fused, both products and a workspace.

        A fused cell has 4 + 4 + 4 gates, state and memory.
        """
        h = rnn_formulas.h
        assert form("lstm", "torch-cpu") == 4 * rnn_formulas.b * (7 * h + rnn_formulas.i)
        assert form("lstm", "torch-cuda") == 4 * rnn_formulas.b * (14 * h + rnn_formulas.i)
        assert form("gru", "torch-cuda") == 4 * rnn_formulas.b * (12 * h + rnn_formulas.i)


class TestFlopsAndParameters:
    @each_cell
    def test_flops_are_torchs_counters(self, cell):
        steps = 3
        forward = recurrent.forward_flops(network(cell), steps)
        gates = {"vanilla": 1, "gru": 3, "lstm": 4}[cell]
        assert forward == steps * 2 * B * (WIDE + H) * gates * H
        module, x = Loop(cell, "cpu"), inputs(steps)
        with FlopCounterMode(display=False) as counter:
            y = module(x.requires_grad_())
        assert counter.get_total_flops() == forward
        with FlopCounterMode(display=False) as counter:
            y.sum().backward()
        # the first states are given, and get no gradient
        assert counter.get_total_flops() == 2 * forward - 2 * B * H * gates * H

    @each_kernel
    @each_cell
    def test_checkpoints_add_a_forward_pass(self, cell, kernels):
        config = network(cell, kernels)
        counts = []
        for every in (None, 2):
            y = Network(config, every)(inputs(6))
            with FlopCounterMode(display=False) as counter:
                y.sum().backward()
            counts.append(counter.get_total_flops())
        assert counts[1] - counts[0] == recurrent.forward_flops(config, 6)

    @pytest.mark.parametrize("layers", [1, 3])
    @each_cell
    def test_parameters_are_torchs(self, cell, layers):
        theirs = TORCH_SEQUENCES[cell](WIDE, H, layers)
        expected = sum(p.numel() for p in theirs.parameters())
        assert recurrent.parameters(network(cell, layers=layers)) == expected

    @each_cell
    def test_recurrent_weights_are_torchs(self, cell):
        theirs = TORCH_SEQUENCES[cell](WIDE, H, 2)
        sizes = sum(p.numel() for name, p in theirs.named_parameters() if "weight_hh" in name)
        assert recurrent_weights(network(cell, layers=2)) == sizes


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cell": "lsmt"}, "did you mean 'lstm'"),
        ({"hidden_size": 0}, "hidden size must be a whole number from 1"),
        ({"hidden_size": 10**30}, "not a number of more than 20 digits"),
        ({"layers": True}, "layers must be a whole number"),
        ({"seq_length": 2**21}, "sequence length must be a whole number from 1 to 1048576"),
        ({"precision": "fp8"}, "precision 'fp8' is unknown"),
        ({"kernels": "cudnn"}, "kernels 'cudnn' is unknown"),
    ],
)
def test_what_cannot_be_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        Recurrent(**fields)


def form(cell, kernels):
    return dict(rnn_formulas.over_time(network(cell, kernels)))["kept per later step"]


def walked_peak(graph):
    """The most of what is kept in backward, by making every segment again, the last one first.

    While a segment is made again there is what entered it and those before it, and what it saves.
    """
    segments = list(dict.fromkeys(outermost(op, CHECKPOINTED) for op in graph.ops))
    peaks = []
    for number, segment in enumerate(segments):
        made, alive = set(), set()
        for op in graph.ops:
            own = outermost(op, CHECKPOINTED)
            if own in segments[: number + 1]:
                entering = {x for x in op.inputs if x not in made or made_in(graph, x) is not own}
                alive |= {x.kept_as or x for x in entering}
                made.update(op.outputs)
            if own is segment:
                alive |= {save.tensor.kept_as or save.tensor for save in op.saves}
        peaks.append(sum(tensor.bytes for tensor in alive))
    return max(peaks)


def made_in(graph, tensor):
    return next(outermost(op, CHECKPOINTED) for op in graph.ops if tensor in op.outputs)


def test_the_peak_is_an_exact_int():
    assert type(costs(Recurrent(seq_length=5)).peak(5, 2)) is int
    assert costs(Recurrent()).even_peak(Fraction(12), Fraction(3)) == costs(Recurrent()).peak(12, 3)


@each_cell
@each_kernel
def test_what_is_kept_over_time_is_what_pytorch_gives_on_symbols(cell, kernels):
    """In steps the loop is interpolated; both forms are the same at sizes that neither has seen."""
    config = network(cell, kernels)
    derived = derive(Network(config), torch.randn(6, 3, WIDE), {"s": 6, "b": 3}, "cpu")
    assert derived.method == "interpolated (degree 1 in s, 1 in b; confirmed at 4 further sizes)"
    for steps, batch in ((4, 2), (11, 5), (100, 64)):
        ledger = costs(replace(config, batch_size=batch)).whole(steps)
        assert derived.value(s=steps, b=batch) == ledger
