"""Run steps of a training loop of one's own on fake CUDA tensors."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memcalc.config.gpus import Gpu
from memcalc.errors import UsageError
from memcalc.progress import doing
from memcalc.units import counted
from memcalc.validation.deriving.arguments import arguments
from memcalc.validation.factory import factory, types, users_code
from memcalc.validation.measuring.valueless import operation
from memcalc.validation.step.fake_cuda import FakeCuda
from memcalc.validation.step.phases import phases
from memcalc.validation.step.ranks import fake_ranks
from memcalc.validation.step.tracker import Tracker

RETURNS = (
    "must return (model, inputs, optimizer), a function that runs one step, or an object with "
    "a function step or with model, inputs and optimizer"
)


class Step(NamedTuple):
    """A step to run.

    Attributes:
        run: Runs it once.
        watched: Its models and optimizers, as far as they are known.
        about: How it runs.
    """

    run: Callable[[], object]
    watched: tuple[nn.Module | Optimizer, ...]
    about: str


class Traced(NamedTuple):
    """A run of some steps.

    Attributes:
        tracker: Its storages.
        ends: The number of events in the log after each step.
        gpu: The GPU that kernels were chosen for.
        notes: What to know about it.
    """

    tracker: Tracker
    ends: tuple[int, ...]
    gpu: Gpu
    notes: tuple[str, ...]


def run(
    target: str | Callable[[], Any], gpu_name: str, steps: int, workspaces: bool, ranks: int = 1
) -> Traced:
    """Run steps of a factory's model on fake CUDA tensors.

    Raises:
        ConfigError, UsageError: As in ``trace``.
    """
    cuda = FakeCuda(gpu_name)
    tracker = Tracker(cublas=cuda.cublas if workspaces else 0, workspaces=workspaces)
    called = called_as(target)
    if isinstance(target, str):
        doing(f"importing {target.partition(':')[0]}")
        with users_code(called):
            make = factory(target)
    else:
        make = target
    ends: list[int] = []

    def where() -> str:
        if not ends:
            return ""
        module, op = tracker.last
        after = f", at or after {operation(str(op))}" if op else ""
        return f" in step {len(ends)}, {tracker.current}, module {module or '.'}{after}"

    group = fake_ranks(ranks) if ranks > 1 else nullcontext()
    with group, cuda, tracker, phases(tracker), users_code(called, where) as told:
        doing(f"calling {called}")
        made = make()
        cuda.adapt()
        step = _step(called, made)
        tracker.watch(*step.watched)
        tracker.reset_peaks(empty_cache=True)
        for number in range(steps):
            doing(f"running step {number + 1} of {steps}")
            ends.append(0)
            with torch.device("cpu"):  # a usual loop has no default device
                step.run()
            ends[-1] = len(tracker.log)
    read = sum(cuda.read.values())
    notes = [step.about, *told]
    if cuda.compiled:
        notes.append(
            "warning: torch.compile has no effect here: the step runs eagerly, and a compiled one "
            "allocates other tensors"
        )
    if ranks > 1:
        notes.append(
            f"rank 0 of {ranks}: collectives take memory in their own streams, and send nothing"
        )
    if read:
        notes.append(
            f"{counted(read, 'value')} read from tensors were taken as 1 or True, as there are none"
        )
    return Traced(tracker, tuple(ends), cuda.gpu, tuple(notes))


def called_as(target: str | Callable[[], Any]) -> str:
    """A factory's name."""
    return target if isinstance(target, str) else getattr(target, "__name__", "the factory")


def _step(target: str, made: Any) -> Step:
    """The step that a factory returned.

    Raises:
        UsageError: It is none.
    """
    model = inputs = optimizer = None
    if isinstance(made, tuple) and len(made) == 3:
        model, inputs, optimizer = made
    elif not isinstance(made, (nn.Module, tuple, type)):
        model, inputs, optimizer = (
            getattr(made, name, None) for name in ("model", "inputs", "optimizer")
        )
        function = getattr(made, "step", None) or (made if callable(made) else None)
        if callable(function) and not isinstance(made, Optimizer):
            found = [x for x in (model, optimizer) if isinstance(x, (nn.Module, Optimizer))]
            return Step(function, tuple(found), "loop: the step function of the factory")
    if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer) or inputs is None:
        raise UsageError(f"{target} {RETURNS}; it returned {types(made)}")
    if not any(each.requires_grad for each in model.parameters()):
        raise UsageError(f"{target}: the model has no parameters that need a gradient")
    args, kwargs = arguments(inputs)

    def run_once() -> None:
        _loss(model(*args, **kwargs)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Step(
        run_once,
        (model, optimizer),
        "loop: forward, backward of the loss, optimizer.step(), optimizer.zero_grad(); the output "
        "is dropped before backward, as Hugging Face's Trainer does",
    )


def _loss(out: Any) -> Tensor:
    """The loss in an output: its ``loss``, or its first tensor, summed if it is not a scalar."""
    loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", out)
    if isinstance(loss, Sequence) and loss:
        loss = loss[0]
    if not isinstance(loss, Tensor):
        raise UsageError(
            f"no loss was found in the model's output of type {type(out).__name__}: it must be a "
            "tensor, begin with one, or have one named loss; or return a step function"
        )
    return loss if loss.dim() == 0 else loss.sum()
