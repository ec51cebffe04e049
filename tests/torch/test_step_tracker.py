"""Whole steps on fake CUDA tensors: their storages, against real tensors and PyTorch's trackers."""

import gc
import sys

import pytest
import step_parts
import steps
import torch
from shared import python
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from memcalc.config.allocator import AllocatorConf
from memcalc.errors import UsageError
from memcalc.validation.step import link
from memcalc.validation.step.fake_cuda import FakeCuda
from memcalc.validation.step.ranks import fake_ranks
from memcalc.validation.step.storages import KINDS
from memcalc.validation.step.tracker import Tracker

VOCABULARY, HIDDEN, TOKENS = 512, 64, 96


class Block(nn.Module):
    """A layer with attention, a gated MLP and residual sums."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp_norm = nn.RMSNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 8 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x):
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).transpose(1, 3)
        q, k, v = heads.unbind(2)
        scores = (q @ k.mT).softmax(-1)
        x = x + self.out((scores @ v).transpose(1, 2).flatten(2))
        gate, up = self.up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)


class Small(nn.Module):
    """A small language model, with or without tied embeddings and checkpoints."""

    def __init__(self, tied=False, recomputes=False):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.recomputes = recomputes

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


MODELS = {
    "untied": {},
    "tied": {"tied": True},
    "checkpoints": {"recomputes": True},
    "tied, checkpoints": {"tied": True, "recomputes": True},
}


def made(**how):
    """A model, its optimizer and its input."""
    model = Small(**how)
    return model, torch.optim.AdamW(model.parameters()), torch.zeros(2, TOKENS, dtype=torch.long)


def two_steps(model, optimizer, ids, phase=lambda name: None, number=2):
    """Forward, backward and an optimizer step, as often as ``number``."""
    for _ in range(number):
        phase("forward")
        loss = model(ids)
        phase("backward")
        loss.backward()
        del loss
        phase("step")
        optimizer.step()
        phase("zero")
        optimizer.zero_grad()
    phase("end")


class Curve(Tracker):
    """A tracker that notes the bytes that are alive after each operation."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if str(func).startswith("aten.") and func is not torch.ops.aten.detach.default:
            self.curve.append((str(func), self.allocated))
        return out


def most_allocated(work):
    """The most bytes that PyTorch's profiler sees allocated at once on the CPU, above the start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = [x for x in profiler.profiler.kineto_results.events() if x.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda x: x.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


class TestRealTensors:
    @pytest.mark.parametrize("how", MODELS)
    def test_the_peak_is_the_profilers_without_a_mode(self, how):
        """The profiler also sees scalars that kernels make for themselves, and RNG states."""
        model, optimizer, ids = made(**MODELS[how])
        two_steps(model, optimizer, ids)  # with states, as in every later step
        with Tracker("cpu") as tracker:
            tracker.reset_peaks()
            two_steps(model, optimizer, ids, tracker.phase)
        seen = most_allocated(lambda: two_steps(model, optimizer, ids))
        rng_state = torch.get_rng_state().nbytes if "recomputes" in MODELS[how] else 0
        assert 0 <= seen - tracker.peak(rounded=False).bytes - rng_state <= 32

    @pytest.mark.parametrize("how", MODELS)
    def test_as_many_bytes_are_alive_after_every_operation_without_values(self, how):
        curves = []
        for mode in (torch.enable_grad(), FakeTensorMode(allow_non_fake_inputs=True)):
            with mode, Curve("cpu") as tracker:
                tracker.curve = []
                two_steps(*made(**MODELS[how]))
            curves.append(tracker.curve)
        real, fake = curves
        assert real == fake
        assert len(real) > 500


class TestPyTorchsOwnTracker:
    @pytest.mark.parametrize("how", MODELS)
    def test_it_finds_the_same_peak_in_the_same_mode(self, how):
        """In one step: it refuses a second one."""
        with FakeCuda():
            model, optimizer, ids = made(**MODELS[how])
            theirs = MemTracker()
            theirs.track_external(model, optimizer, ids)
            with theirs:
                two_steps(model, optimizer, ids, number=1)
            with Tracker() as tracker:
                two_steps(*made(**MODELS[how]), tracker.phase, number=1)
        snapshot = theirs.get_tracker_snapshot("peak")
        (found,) = (each for device, each in snapshot.items() if device.type == "cuda")
        assert found["Total"] == tracker.peak().bytes


# Peak, allocated with unsplit blocks, reserved, phase and operation of the second step of the toy
# Llama (tests/helpers/steps.py) in transformers 5 on an A100, b 2, s 256 if no other is given.
# Another tracker found them, on fake CUDA tensors with torch 2.13.0; its whole steps were within
# 0.04 % of measured ones.
LOSS, MLP = "aten._log_softmax_backward_data.default", "aten.mul.Tensor"
SQRT = "aten._foreach_sqrt.default"
TOY = [
    ({}, 46818816, 71303168, "backward", LOSS),
    ({"holds_logits": False}, 45770240, 69206016, "backward", LOSS),
    ({"set_to_none": False}, 50163712, 73400320, "backward", LOSS),
    ({"accumulate": 2}, 50163712, 73400320, "backward", LOSS),
    ({"attn": "eager"}, 60153344, 92274688, "backward", LOSS),
    ({"checkpoint": "non-reentrant"}, 38082560, 67108864, "backward", MLP),
    ({"checkpoint": "reentrant"}, 38344704, 67108864, "backward", MLP),
    ({"amp": True, "dtype": "fp32"}, 63112192, 85983232, "backward", LOSS),
    ({"optimizer": "adamw fused"}, 46829056, 71303168, "backward", LOSS),
    ({"optimizer": "adamw loop", "clip": True}, 46818816, 71303168, "backward", LOSS),
    ({"optimizer": "sgd"}, 43473920, 67108864, "backward", LOSS),
    ({"s": 16}, 33765376, 39845888, "step", SQRT),
    ({"s": 16, "optimizer": "adamw fused"}, 31545856, 37748736, "backward", "aten.add.Tensor"),
]


class TestHuggingFace:
    @pytest.mark.parametrize(("how", "peak", "reserved", "phase", "op"), TOY, ids=str)
    def test_a_step_has_the_known_peak_and_reserves_the_known_bytes(
        self, how, peak, reserved, phase, op
    ):
        tracker = steps.step(**{"b": 2, "s": 256, **how})
        found = tracker.peak()
        assert (found.bytes, found.phase, found.op) == (peak, phase, op)
        replayed = tracker.replay()
        assert (replayed.most_allocated, replayed.most_reserved) == (peak, reserved)
        assert sum(found.parts.values()) == peak
        assert found.parts.keys() <= KINDS.keys()


# A loss's peak in bytes beyond x (4096, 2048), the weight (128256, 2048), both in bf16, and labels;
# its phase and operation. Found by another tracker on fake CUDA tensors with torch 2.13.0.
LOSSES = {
    "hf_ForCausalLMLoss": (7354712072, "backward", LOSS),
    "hf_num_items_in_batch": (7354712072, "backward", LOSS),
    "F_cross_entropy_16bit": (4202692612, "backward", LOSS),
    "torchtitan_float": (6304038920, "backward", LOSS),
    "float_held": (8405385224, "backward", LOSS),
    "checkpointed_chunks_8": (1580204044, "backward", "aten.add.Tensor"),
}

# Bytes per parameter beyond what was there before an optimizer's first and second step, at which
# operation, and afterwards; found likewise, for 8 matrices of 4096 x 1024 and 8 vectors of 4096.
OPTIMIZERS = {
    "AdamW default bf16": (
        (6.0, "_foreach_sqrt.default", 4.0),
        (2.0, "_foreach_sqrt.default", 0.0),
    ),
    "AdamW foreach fp32": (
        (12.0, "_foreach_sqrt.default", 8.0),
        (4.0, "_foreach_sqrt.default", 0.0),
    ),
    "AdamW foreach amsgrad fp32": (
        (16.0, "_foreach_sqrt.default", 12.0),
        (4.0, "_foreach_sqrt.default", 0.0),
    ),
    "AdamW loop bf16": ((4.7493, "div.Tensor", 4.0), (0.7493, "div.Tensor", 0.0)),
    "AdamW fused bf16": ((4.0, "zeros_like.default", 4.0), (0.0, "reset", 0.0)),
    "Adam foreach weight_decay fp32": (
        (12.0, "_foreach_add.List", 8.0),
        (4.0, "_foreach_add.List", 0.0),
    ),
    "SGD foreach momentum fp32": ((4.0, "clone.default", 4.0), (0.0, "reset", 0.0)),
    "SGD foreach momentum nesterov wd": (
        (8.0, "clone.default", 4.0),
        (4.0, "_foreach_add.List", 0.0),
    ),
    "torch Adafactor foreach fp32": (
        (4.0088, "_foreach_mul.List", 0.0088),
        (4.0, "_foreach_mul.List", 0.0),
    ),
    "torch Adafactor loop fp32": ((1.0084, "mean.dim", 0.0088), (0.9996, "mean.dim", 0.0)),
    "HF Adafactor bf16": ((2.5024, "add.Tensor", 0.0088), (2.4976, "add.Tensor", 0.0)),
    "Muon torch bf16": ((2.8722, "addmm.default", 1.998), (0.8741, "addmm.default", 0.0)),
    "RMSprop foreach": ((8.0, "_foreach_sqrt.default", 4.0), (4.0, "_foreach_sqrt.default", 0.0)),
    "Adagrad foreach": (
        (8.0, "_foreach_mul.ScalarList", 0.0),
        (8.0, "_foreach_mul.ScalarList", 0.0),
    ),
}


class TestParts:
    @pytest.mark.parametrize("name", LOSSES)
    def test_a_loss_has_the_known_peak(self, name):
        assert step_parts.loss_peak(name) == LOSSES[name]

    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_an_optimizer_has_the_known_peak(self, name):
        found = step_parts.optimizer_peaks(name)
        assert (tuple(found["first"]), tuple(found["later"])) == OPTIMIZERS[name]


class TestRanks:
    def test_fsdp_shards_states_and_gathers_weights_in_its_own_stream(self):
        width, layers, ranks = 512, 4, 8
        with fake_ranks(ranks), FakeCuda(), Tracker() as tracker:
            model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
            for each in (*model, model):
                fully_shard(each)
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            tracker.watch(model, optimizer)
            x = torch.ones(1, width)
            tracker.phase("forward")
            loss = model(x).sum()
            tracker.phase("backward")
            loss.backward()
            tracker.phase("step")
            optimizer.step()
            tracker.phase("end")
        matrix = 4 * width**2
        parts = tracker.peak().parts
        assert parts["weights"] == layers * matrix // ranks
        gathered = [
            each.storage
            for each in tracker.log
            if each.what == "birth" and each.storage.bytes == matrix and each.storage.stream
        ]
        assert len(gathered) >= layers
        assert not torch.distributed.is_initialized()

    @pytest.mark.parametrize("as_view", [False, True])
    def test_ddp_keeps_buckets_beside_gradients_unless_these_are_views(self, as_view):
        width, layers = 512, 4
        with fake_ranks(8), FakeCuda(), Tracker() as tracker:
            model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
            sharded = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=as_view)
            before = tracker.allocated
            sharded(torch.ones(1, width)).sum().backward()
            gradients = 4 * layers * width**2
            assert before == 2 * gradients  # weights and buckets
            assert tracker.allocated == before + (0 if as_view else gradients)


class TestTheLog:
    def test_storages_are_named_by_their_parameters_and_modules(self):
        with FakeCuda() as cuda, Tracker(cublas=cuda.cublas) as tracker:
            model, optimizer, ids = made(recomputes=True)
            tracker.watch(model, optimizer)
            two_steps(model, optimizer, ids, tracker.phase)
        there = {(each.kind, each.name) for each in tracker.peak().storages}
        assert ("weights", "blocks.0.qkv.weight") in there
        assert ("optimizer", "head.weight exp_avg") in there
        born = {(each.storage.phase, each.storage.module) for each in tracker.log if each.storage}
        recomputed = {name for phase, name in born if phase == "backward"}
        assert {"head", "embed", "blocks.1.down", "blocks.0.qkv"} <= recomputed

    def test_what_dies_is_gone_from_the_allocator(self):
        with FakeCuda(), Tracker() as tracker:
            model, optimizer, ids = made()
            two_steps(model, optimizer, ids)
            del model, optimizer, ids
            gc.collect()
        assert tracker.allocated == tracker.replay().allocated == 0

    def test_torch_cuda_knows_its_memory(self):
        with FakeCuda(), Tracker() as tracker:
            x = torch.ones(2**20)
            torch.cuda.reset_peak_memory_stats()
            assert torch.cuda.memory_allocated() == tracker.allocated == 4 * x.numel()
            assert torch.cuda.max_memory_allocated() == 2**22
            assert torch.cuda.max_memory_reserved() == 20 * 2**20
            assert torch.cuda.memory_stats()["allocated_bytes.all.current"] == 2**22

    def test_expandable_segments_grow(self):
        with FakeCuda(), Tracker() as tracker:
            for size in (12, 13):
                torch.empty(size * 2**20, dtype=torch.uint8)
        assert tracker.replay().most_reserved == (12 + 14) * 2**20
        expandable = AllocatorConf.parse("expandable_segments:True")
        assert tracker.replay(expandable).most_reserved == 20 * 2**20

    def test_streams_have_pools_of_their_own(self):
        with FakeCuda(), Tracker() as tracker:
            for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
                with torch.cuda.stream(stream):
                    torch.empty(2**20)
        assert tracker.peak().bytes == 2**22
        assert tracker.replay().most_reserved == 2 * 20 * 2**20


class TestFakeCuda:
    def test_values_that_a_program_reads_are_1_or_true(self):
        with FakeCuda() as cuda:
            x = torch.randn(4, 2)
            assert (x.sum().item(), bool((x > 0).all()), x.nonzero().shape) == (1.0, True, (8, 2))
            assert torch.tensor([3, 5]).tolist() == [1, 1] or cuda.read
        assert cuda.read["aten._local_scalar_dense.default"] >= 2

    @pytest.mark.parametrize(
        ("gpu", "capability", "bf16"), [("t4", (7, 5), False), ("h100", (9, 0), True)]
    )
    def test_torch_cuda_answers_for_the_gpu(self, gpu, capability, bf16):
        with FakeCuda(gpu):
            assert torch.cuda.is_available()
            assert torch.cuda.get_device_capability() == capability
            assert torch.cuda.is_bf16_supported(including_emulation=False) == bf16
            assert torch.nn.Linear(2, 2).cuda().weight.is_cuda
        assert not torch.cuda.is_available()

    def test_attention_is_cudas(self):
        """Flash in bf16, memory-efficient in fp32 or on a T4, unfused for GQA with a mask."""

        def nodes(gpu, dtype, kv_heads=4, mask=None):
            with FakeCuda(gpu):
                q, k = (torch.empty(1, n, 8, 16, dtype=dtype) for n in (4, kv_heads))
                out = functional.scaled_dot_product_attention(
                    q.requires_grad_(), k, k, mask and torch.ones(8, 8, dtype=torch.bool),
                    enable_gqa=kv_heads != 4,
                )  # fmt: skip
                return type(out.grad_fn).__name__

        assert "Flash" in nodes("a100", torch.bfloat16)
        assert "Flash" in nodes("a100", torch.bfloat16, kv_heads=2)
        assert "Efficient" in nodes("a100", torch.float32)
        assert "Efficient" in nodes("t4", torch.float16)
        assert "Efficient" in nodes("a100", torch.bfloat16, mask=True)
        assert "Attention" not in nodes("a100", torch.bfloat16, kv_heads=2, mask=True)

    def test_a_grad_scaler_steps(self):
        with FakeCuda(), Tracker() as tracker:
            model, optimizer, ids = made()
            tracker.watch(model, optimizer)
            scaler = torch.amp.GradScaler()
            with torch.autocast("cuda", torch.float16):
                loss = model(ids)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            assert len(optimizer.state) == len(list(model.parameters()))

    def test_pytorch_is_as_before_afterwards(self):
        """A process of its own: its hooks must be back before it ends."""
        script = (
            "import torch\n"
            "from memcalc.validation.step.fake_cuda import FakeCuda\n"
            "with FakeCuda():\n"
            "    torch.nn.functional.silu(torch.ones(2, requires_grad=True)).sum().backward()\n"
            "assert not torch.cuda.is_available()\n"
            "x = torch.ones(2, requires_grad=True)\n"
            "torch.nn.functional.silu(x).sum().backward()\n"
            "print(x.grad)\n"
        )
        outcome = python("-c", script)
        assert (outcome.returncode, outcome.stderr) == (0, "")
        assert outcome.stdout == "tensor([0.9277, 0.9277])\n"

    def test_a_backward_before_the_import_is_refused(self):
        script = (
            "import torch\n"
            "torch.ones(2, requires_grad=True).sum().backward()\n"
            "from memcalc.validation.step.fake_cuda import FakeCuda\n"
            "with FakeCuda(): pass\n"
        )
        assert "import it first" in python("-c", script).stderr.splitlines()[-1]

    def test_a_version_that_was_not_tried_is_refused(self, monkeypatch):
        monkeypatch.setattr(torch, "__version__", "2.12.1+cpu")
        with (
            pytest.raises(UsageError, match=r"need PyTorch 2\.13\.0; this is 2\.12\.1"),
            FakeCuda(),
        ):
            pass
        monkeypatch.undo()
        monkeypatch.setattr(sys, "platform", "darwin")
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
        assert "Linux" in link.refusal()

    def test_an_amd_gpu_is_refused(self):
        with pytest.raises(UsageError, match="NVIDIA"):
            FakeCuda("mi300x")
