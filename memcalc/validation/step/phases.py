"""The phases of a step that a user wrote: they begin where the program itself begins them."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from memcalc.validation.step.tracker import FORWARD, Tracker

BACKWARD = "backward"
STEP = "optimizer step"
BETWEEN = "between passes"  # clipping, zeroing gradients, and what else the loop does


@contextmanager
def phases(tracker: Tracker) -> Iterator[None]:
    """Let a tracker follow the phases of all steps, and watch the models and optimizers in them.

    A forward phase begins with the forward pass of a module that is not within another one. Enter
    the tracker first.
    """
    backward = torch.autograd.backward
    running = False  # a backward pass, which may run modules (recomputation) and further passes

    def before_forward(module: nn.Module, inputs: Any) -> None:
        if not running and tracker.depth == 1:
            tracker.phase(FORWARD)
            tracker.watch(module)

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        nonlocal running
        if running:
            return backward(*args, **kwargs)
        running = True
        tracker.phase(BACKWARD)
        try:
            return backward(*args, **kwargs)
        finally:
            running = False
            tracker.phase(BETWEEN)

    def before_step(optimizer: Any, *args: Any) -> None:
        tracker.watch(optimizer)
        tracker.phase(STEP)

    with ExitStack() as stack:
        stack.callback(register_module_forward_pre_hook(before_forward).remove)
        stack.callback(register_optimizer_step_pre_hook(before_step).remove)
        after = register_optimizer_step_post_hook(lambda *args: tracker.phase(BETWEEN))
        stack.callback(after.remove)
        stack.enter_context(mock.patch.object(torch.autograd, "backward", run_backward))
        yield
