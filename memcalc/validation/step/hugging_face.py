"""The training step of a Hugging Face model on fake CUDA tensors, as a run says."""

from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from memcalc.analysis.optimizer_step import form
from memcalc.config import Config
from memcalc.config.families import FAMILIES
from memcalc.errors import UsageError
from memcalc.validation.layers import hugging_face
from memcalc.validation.layers.models import class_of, configured, content_of_model
from memcalc.validation.layers.modules import TYPES
from memcalc.validation.measuring.valueless import quiet
from memcalc.validation.step.fake_cuda import FakeCuda
from memcalc.validation.step.tracker import Tracker

GPU = "a100"  # whose attention kernels are chosen where the run names none
ITERATIONS = 2  # the first makes the optimizer's states; peaks are those of the second


def run(config: Config) -> Tracker:
    """The tracker after two iterations of a run's training loop.

    The loop is that of a script of one's own: forward with labels, backward, the optimizer's step,
    ``zero_grad``.

    Raises:
        UsageError: The step has something that the loop cannot do.
    """
    require(config)
    tracker = Tracker()
    with ExitStack() as stack:
        stack.enter_context(quiet())
        stack.enter_context(_quiet())
        stack.enter_context(FakeCuda(config.run.gpu or GPU))
        stack.enter_context(tracker)
        model = _model(config)
        parameters = [each for each in model.parameters() if each.requires_grad]
        optimizer = _optimizer(config, parameters)
        tracker.watch(model, optimizer)
        batch = _batch(config)
        for number in range(ITERATIONS):
            if number == ITERATIONS - 1:
                tracker.reset_peaks()
            _iteration(config, tracker, model, optimizer, batch)
        tracker.phase("end")
    return tracker


def require(config: Config) -> None:
    """Refuse a run whose step the loop cannot do.

    Raises:
        UsageError: With what it cannot do, and the way out.
    """
    run_, parallel = config.run, config.parallel
    if not run_.implementation.maker.whole_models:
        raise UsageError(
            "--step runs models of Hugging Face: pass --implementation transformers-sdpa or "
            "transformers-eager"
        )
    sizes = parallel.tp, parallel.pp, parallel.cp, parallel.ep, parallel.dp
    if any(size > 1 for size in sizes):
        raise UsageError("--step runs one GPU: leave out --tp, --pp, --cp, --ep and --dp")
    words = set(run_.recompute)
    if not words <= {"none", "full"} or run_.recompute_layers:
        raise UsageError("--step recomputes nothing or whole layers: pass --recompute none or full")
    own = FAMILIES[hugging_face.family(config)].cross_entropy
    if run_.implementation.cross_entropy != own:
        raise UsageError(f"--step has the loss of the model's own code: --cross-entropy {own}")
    if run_.optimizer not in ("adam", "sgd"):
        raise UsageError(f"--step runs --optimizer adam or sgd, not {run_.optimizer}")
    hugging_face.require(config)


def _iteration(
    config: Config,
    tracker: Tracker,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: dict[str, Tensor],
) -> None:
    for _ in range(min(config.microbatches, 2)):
        tracker.phase("forward")
        out = model(**batch)
        loss = out.loss
        if not config.run.implementation.holds_logits:
            del out
        tracker.phase("backward")
        loss.backward()
        out = loss = None
    tracker.phase("step")
    optimizer.step()
    tracker.phase("zero_grad")
    optimizer.zero_grad(set_to_none=not config.run.keep_gradients)


def _model(config: Config) -> nn.Module:
    known = configured(content_of_model(config), config.run)
    known.use_cache = False
    made: nn.Module = class_of(known).from_config(known, dtype=TYPES[config.run.precision])
    made.train()
    if "full" in config.run.recompute:
        new = "activation_checkpointing_enable"  # from transformers 5.24 on
        enable: Any = getattr(made, new, None) or made.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return made


def _batch(config: Config) -> dict[str, Tensor]:
    """Token ids (b, s) and labels (b, s)."""
    shape = config.run.micro_batch_size, config.run.seq_length
    ids = torch.zeros(shape, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids.clone()}


def _optimizer(config: Config, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    how: dict[str, Any] = {"lr": 1e-4}
    chosen = form(config)
    how |= {"foreach": chosen == "foreach"} if chosen != "fused" else {"fused": True}
    if config.run.optimizer == "sgd":
        return torch.optim.SGD(parameters, momentum=config.run.momentum or 0.0, **how)
    return torch.optim.AdamW(parameters, **how)


def _quiet() -> Any:
    """Without transformers' look at the values of the tokens."""
    from transformers import PreTrainedModel

    return mock.patch.object(
        PreTrainedModel, "warn_if_padding_and_no_attention_mask", mock.Mock(), create=True
    )
