"""``trace``: a user's own step on fake CUDA tensors."""

import inspect
import json
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from shared import is_refused, is_valid
from torch import nn

import memcalc as library
from memcalc.validation.step import example
from memcalc.validation.trace import SHOWN
from memcalc.validation.traced import run

H, TOKENS = 256, 64
BLOCK = 512  # what the allocator rounds to

FACTORIES = """
    import torch
    from torch import nn

    def model():
        return nn.Sequential(nn.Linear(256, 256, bias=False), nn.ReLU(), nn.Linear(256, 256))

    def make():
        net = model()
        return net, torch.ones(64, 256), torch.optim.SGD(net.parameters())

    def function():
        net, x, optimizer = make()
        measure = nn.MSELoss()
        def step():
            for _ in range(2):
                measure(net(x), x).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return step

    class Trainer:
        def __init__(self):
            self.model, self.inputs, self.optimizer = make()

    class Stepper(Trainer):
        def step(self):
            self.model(self.inputs).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def mapping():
        class Net(nn.Linear):
            def forward(self, input_ids, labels):
                out = super().forward(input_ids)
                return {"loss": (out - labels).square().mean(), "logits": out}
        net, x = Net(256, 256), torch.ones(64, 256)
        return net, {"input_ids": x, "labels": x}, torch.optim.AdamW(net.parameters())

    def sharded():
        from torch.distributed import fsdp, init_process_group
        init_process_group("nccl")
        net = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))
        for each in (*net, net):
            fsdp.fully_shard(each)
        return net, torch.ones(16, 1024), torch.optim.AdamW(net.parameters())

    def compiled():
        net, x, optimizer = make()
        return torch.compile(net), x, optimizer

    def raises():
        raise ValueError("not\\ntoday")

    def number():
        return 3

    def two():
        return make()[:2]

    def frozen():
        net, x, optimizer = make()
        return net.requires_grad_(False), x, optimizer

    def elsewhere():
        net, x, optimizer = make()
        return net, x.to("cpu"), optimizer

    def lossless():
        class Net(nn.Linear):
            def forward(self, x):
                return "loss"
        net = Net(2, 2)
        return net, torch.ones(2, 2), torch.optim.SGD(net.parameters())

    def prints():
        print("hello")
        import warnings
        warnings.warn("beware")
        net, x, optimizer = make()
        print(x.sum().item())
        return net, x, optimizer
"""


@pytest.fixture(autouse=True)
def factories(tmp_path, monkeypatch):
    """A module ``mine`` of factories in the working directory."""
    (tmp_path / "mine.py").write_text(textwrap.dedent(FACTORIES))
    monkeypatch.chdir(tmp_path)
    yield
    monkeypatch.delitem(sys.modules, "mine", raising=False)


def asked(memcalc, line):
    """The JSON document of a question."""
    outcome = memcalc(f"trace {line} --format json")
    assert (outcome.status, outcome.err) == (0, "")
    document = json.loads(outcome.out)
    is_valid(document)
    return document


def allocated(rows):
    """The rows of storages."""
    return [x for x in rows if x["kind"] != "not allocated"]


def peak(rows):
    """The bytes of all storages."""
    return sum(x["bytes"] for x in allocated(rows))


def reserved(rows):
    """These, and what the allocator reserves beside them."""
    beside = {x["tensor"]: x["bytes"] for x in rows if x["kind"] == "not allocated"}
    return peak(rows) + beside["reserved by the allocator"]


class TestTheAnswer:
    def test_the_bytes_at_the_peak_are_counted_by_hand(self, memcalc):
        """At the last GEMM of backward: all gradients exist, and that of ReLU's input."""
        rows = asked(memcalc, "mine:make --no-workspaces --all")["rows"]
        matrix, activation, bias, scalar = 4 * H * H, 4 * TOKENS * H, 4 * H, BLOCK
        assert {(x["kind"], x["module"], x["tensor"]): x["bytes"] for x in allocated(rows)} == {
            ("weights", "*", "weight"): 2 * matrix,
            ("weights", "*", "bias"): bias,
            ("gradients", "*", "weight"): 2 * matrix,
            ("gradients", "*", "bias"): bias,
            ("inputs", ".", "fp32 64 x 256"): activation,
            ("temporary", "*", "fp32 64 x 256"): activation,
            ("saved", ".", "fp32"): scalar,  # the loss
            ("temporary", ".", "fp32"): scalar,  # its gradient
        }

    def test_kernels_own_memory_can_be_left_out(self, memcalc):
        counted = asked(memcalc, "mine:make")["rows"]
        left_out = asked(memcalc, "mine:make --no-workspaces")["rows"]
        assert (
            peak(counted) - peak(left_out) == 2 * 8519680
        )  # cuBLAS workspaces of two threads on Ampere

    @pytest.mark.parametrize("factory", ["make", "Trainer", "Stepper"])
    def test_all_forms_of_a_step_have_the_same_peak(self, factory):
        peaks = {
            name: run(f"mine:{name}", "a100", 2, True).tracker.peak() for name in ("make", factory)
        }
        assert peaks[factory].bytes == peaks["make"].bytes
        assert peaks[factory].parts == peaks["make"].parts

    def test_a_step_function_has_phases_and_names(self):
        tracker = run("mine:function", "a100", 2, True).tracker
        phases = {each.storage.phase for each in tracker.log if each.storage}
        assert phases == {"setup", "forward", "backward", "between passes"}
        kinds = {tracker.kind(each) for each in tracker.peak().storages}
        assert {"weights", "gradients", "inputs", "saved"} <= kinds

    def test_keyword_arguments_and_a_loss_by_name(self, memcalc):
        rows = asked(memcalc, "mine:mapping")["rows"]
        assert {"weight exp_avg", "weight exp_avg_sq"} <= {x["tensor"] for x in rows}

    def test_a_function_is_a_target_in_python(self):
        def make():
            net = nn.Linear(H, H, bias=False)
            return net, torch.ones(TOKENS, H), torch.optim.AdamW(net.parameters())

        report = library.trace(make, workspaces=False)
        assert report.title == "At the peak of make (2 steps on a fake a100-80gb)"
        # weight, gradient, two moments, and the square roots of one
        assert peak(report.records()) == 5 * 4 * H * H + 4 * TOKENS * H

    def test_the_first_line_is_the_peak_and_its_moment(self, memcalc):
        out = memcalc("trace mine:make").out
        assert out.startswith("peak of 17.")
        assert "allocated (step 1, backward, " in out.replace("\n", " ")
        assert "the smallest NVIDIA GPU that fits is t4" in out.replace("\n", " ")
        assert "  assumed: kernels of a100-80gb (--gpu)\n" in out

    def test_a_gpu_has_a_verdict(self, memcalc):
        document = asked(memcalc, "mine:make --gpu h100")
        assert document["notes"][0].startswith("fits h100-sxm (")
        assert {(x["verdict"], x["fits"]) for x in document["rows"]} == {("fits", True)}

    @pytest.mark.parametrize(
        ("budget", "verdict", "words"),
        [
            ("440MiB", "allocated_only", "MiB allocated alone would fit"),
            ("10MiB", "does_not_fit", "largest part: workspace"),
        ],
    )
    def test_a_budget_that_does_not_hold_the_steps_is_status_1(
        self, memcalc, budget, verdict, words
    ):
        outcome = memcalc(f"trace mine:make --budget {budget} --format json")
        assert outcome.status == 1
        assert outcome.err.startswith(f"memcalc: failed: does not fit {budget}")
        assert words in outcome.err
        assert {x["verdict"] for x in json.loads(outcome.out)["rows"]} == {verdict}

    def test_the_allocators_settings_change_what_is_reserved(self, memcalc):
        default, rounded = (
            reserved(asked(memcalc, f"mine:make{settings}")["rows"])
            for settings in ("", " --alloc-conf roundup_power2_divisions:2")
        )
        # workspaces of 8.125 MiB become 12 MiB, which have segments of their own
        assert rounded - default == (2 * 12 - 20) * 2**20

    def test_the_rest_is_one_row_unless_all_are_asked_for(self, memcalc):
        target = "memcalc.validation.step.example:make"
        few, every = (asked(memcalc, f"{target}{x}")["rows"] for x in ("", " --all"))
        few, every = allocated(few), allocated(every)
        assert len(few) == SHOWN + 1
        assert few[-1]["tensor"] == f"{len(every) - SHOWN} more rows"
        assert sum(x["bytes"] for x in few) == sum(x["bytes"] for x in every)
        assert sum(x["storages"] for x in few) == sum(x["storages"] for x in every)

    def test_a_compiled_model_runs_eagerly_with_a_warning(self, memcalc):
        outcome = memcalc("trace mine:compiled --format json")
        assert outcome.err.startswith("memcalc: warning: torch.compile has no effect here")
        rows = json.loads(outcome.out)["rows"]
        assert peak(rows) == peak(asked(memcalc, "mine:make")["rows"])

    def test_ranks_shard_states(self, memcalc):
        rows = asked(memcalc, "mine:sharded --ranks 8 --all")["rows"]
        states = [x for x in rows if x["kind"] in ("weights", "optimizer")]
        assert sum(x["bytes"] for x in states) == 3 * 4 * 4 * 1024**2 // 8
        assert not torch.distributed.is_initialized()

    def test_what_a_factory_prints_goes_to_stderr_and_its_warnings_to_the_notes(self, memcalc):
        outcome = memcalc("trace mine:prints")
        assert (outcome.status, outcome.err) == (0, "hello\n1.0\n")
        assert "warned: beware" in outcome.out
        assert "1 value read from tensors were taken as 1" in outcome.out.replace("\n  ", " ")


class TestRefusals:
    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("nowhere:make", "nowhere:make failed: ModuleNotFoundError: No module named 'nowhere'"),
            (
                "mine:nope",
                "mine:nope failed: AttributeError: module 'mine' has no attribute 'nope'",
            ),
            ("mine:raises", "mine:raises failed: ValueError: not today"),
            (
                "mine:number",
                "must return (model, inputs, optimizer), a function that runs one step",
            ),
            ("mine:two", "it returned Sequential, "),
            ("mine:frozen", "the model has no parameters that need a gradient"),
            ("mine:elsewhere", "mine:elsewhere failed in step 1, forward, module 0, at or after"),
            ("mine:lossless", "no loss was found in the model's output of type str"),
            ("175b", "TARGET must be package.module:factory"),
            ("mine:make --gpu tpu", "GPU 'tpu' is unknown"),
            ("mine:make --gpu mi300x", "needs an NVIDIA GPU"),
            ("mine:make --budget much", "must be a size with its unit"),
            ("mine:make --steps 0", "--steps must be a whole number"),
            ("mine:make --alloc-conf nonsense", "nonsense"),
        ],
    )
    def test_a_mistake_is_one_line(self, memcalc, line, message):
        is_refused(memcalc(f"trace {line}"), message)

    def test_another_version_of_pytorch_is_one_line(self, memcalc, monkeypatch):
        monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
        is_refused(memcalc("trace mine:make"), "need PyTorch 2.13.0; this is 2.9.1")


def test_the_page_shows_the_code_of_its_example():
    page = (Path(__file__).parents[2] / "docs" / "pytorch.md").read_text()
    assert f"```python\n{inspect.getsource(example.make)}```" in page
