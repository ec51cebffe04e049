"""What real optimizers hold during a step, against their records: allocations on the CPU."""

import pytest
import torch
from transformers.optimization import Adafactor

from memcalc.analysis.optimizer_step import Tensor, held
from memcalc.config.optimizers import (
    BF16,
    FP32,
    MOMENT,
    OPTIMIZERS,
    WEIGHT,
    WIDE_MASTER,
    WIDE_MOMENT,
    WIDE_WEIGHT,
)

SHAPES = [(256, 512), (384, 512), (512, 128), (512,), (128, 128)]
SCALARS = 2048  # bytes: steps, norms and numbers that become tensors


def allocations(run):
    """The changes of what is allocated while something runs, in bytes, in their order."""
    activity = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity], profile_memory=True) as profiler:
        run()
    events = profiler.profiler.kineto_results.events()
    memory = [event for event in events if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(memory, key=lambda event: event.start_ns())]


def most(changes):
    total = most_ = 0
    for change in changes:
        total += change
        most_ = max(most_, total)
    return most_


def of_step(make, shapes, dtype):
    """The most that a later step holds, and what the first step leaves."""
    parameters = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = make(parameters)
    left = sum(allocations(optimizer.step))
    return most(allocations(optimizer.step)), left


def sgd(parameters, **given):
    return torch.optim.SGD(parameters, lr=1e-3, **given)


def transformers_adafactor(parameters, **_):
    return Adafactor(parameters)


CASES = {
    "adam": torch.optim.AdamW,
    "sgd": sgd,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "adafactor-torch": torch.optim.Adafactor,
    "adafactor": transformers_adafactor,
}
# A bf16 GEMM on the CPU has an fp32 buffer: there Muon, and PyTorch's Adafactor, hold more.
FORMS = [
    (name, form, dtype)
    for name in CASES
    for form in OPTIMIZERS[name].steps
    for dtype in (torch.float32, torch.bfloat16)
    if name != "adafactor-torch" or dtype is torch.float32
]


def recorded(name, form, size, decay):
    wide = 4 if size < 4 else 0
    moment = 4 if name == "adafactor" else size
    sizes = {MOMENT: moment, WEIGHT: size, FP32: 4, BF16: 2}
    sizes |= {WIDE_WEIGHT: wide, WIDE_MOMENT: 0, WIDE_MASTER: 0}
    return held(OPTIMIZERS[name].steps[form][0], [Tensor(shape) for shape in SHAPES], sizes, decay)


@pytest.mark.parametrize(("name", "form", "dtype"), FORMS, ids=str)
def test_a_step_holds_what_its_record_says(name, form, dtype):
    given = {"foreach": form == "foreach"}
    if form == "fused":
        given = {"fused": True}
    found, _ = of_step(lambda ps: CASES[name](ps, **given), SHAPES, dtype)
    expected = recorded(name, form, dtype.itemsize, decay=False)
    assert abs(found - expected) <= SCALARS


@pytest.mark.parametrize("form", ["foreach", "loop"])
@pytest.mark.parametrize("name", ["sgd", "adagrad", "rmsprop"])
def test_a_weight_decay_copies_gradients(name, form):
    given = {"foreach": form == "foreach", "weight_decay": 0.1}
    found, _ = of_step(lambda ps: CASES[name](ps, **given), SHAPES, torch.float32)
    assert abs(found - recorded(name, form, 4, decay=True)) <= SCALARS


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("adam", {}),
        ("sgd", {"momentum": 0.9}),
        ("rmsprop", {"momentum": 0.9}),
        ("adafactor-torch", {}),
        ("adafactor", {}),
    ],
)
def test_the_first_step_leaves_the_moments(name, given):
    _, left = of_step(lambda ps: CASES[name](ps, **given), SHAPES, torch.float32)
    expected = sum(m.number * m.layout(s, 4) for m in OPTIMIZERS[name].moments for s in SHAPES)
    assert abs(left - expected) <= SCALARS


def test_adagrads_sums_are_made_with_the_optimizer():
    _, left = of_step(torch.optim.Adagrad, SHAPES, torch.float32)
    assert OPTIMIZERS["adagrad"].lazy == ""
    assert left <= SCALARS


@pytest.mark.parametrize("foreach", [True, False])
def test_clipping_takes_norms_only(foreach):
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    clip = torch.nn.utils.clip_grad_norm_
    assert most(allocations(lambda: clip(parameters, 1.0, foreach=foreach))) <= SCALARS
