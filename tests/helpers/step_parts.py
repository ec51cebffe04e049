"""Losses and optimizers alone, on fake CUDA tensors: the most that they allocate."""

import functools
import importlib
import runpy
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from memcalc.validation.step.fake_cuda import FakeCuda
from memcalc.validation.step.tracker import Tracker


class NotHereError(Exception):
    """A library or a version of it is not installed."""


def needs(name):
    """Refuse what needs a library that is not there."""
    if find_spec(name) is None:
        raise NotHereError(name)


# Losses: of logits (N, V) from x (N, h) and a weight (V, h) in bf16

TOKENS, VOCABULARY, HIDDEN = 4096, 128256, 2048


def hugging_face(x, weight, labels, **how):
    """ForCausalLMLoss, whose caller holds the logits."""
    loss = importlib.import_module("transformers.loss.loss_utils").ForCausalLMLoss
    logits = functional.linear(x, weight)
    return loss(logits[None], labels[None], VOCABULARY, **how), logits


def in_16_bits(x, weight, labels):
    """F.cross_entropy of 16-bit logits."""
    logits = functional.linear(x, weight)
    return functional.cross_entropy(logits, labels), logits


def dropped(x, weight, labels):
    """Upcast logits, which nobody holds."""
    return functional.cross_entropy(functional.linear(x, weight).float(), labels), None


def held(x, weight, labels):
    """Upcast logits, which the caller holds."""
    logits = functional.linear(x, weight).float()
    return functional.cross_entropy(logits, labels), logits


def litgpt(x, weight, labels):
    """litgpt's, whose head makes chunks of 128 tokens (lm_head_chunk_size)."""
    needs("litgpt")
    loss = importlib.import_module("litgpt.utils").chunked_cross_entropy
    logits = [functional.linear(each, weight)[None] for each in x.split(128)]
    return loss(logits, labels[None], chunk_size=128), logits


def torchtune(x, weight, labels):
    """torchtune's, in 8 chunks of logits."""
    needs("torchtune")
    folder = Path(find_spec("torchtune").origin).parent  # the package needs many others
    source = runpy.run_path(str(folder / "modules" / "loss" / "ce_chunked_output_loss.py"))
    loss = source["CEWithChunkedOutputLoss"](8)
    logits = [functional.linear(each, weight)[None] for each in x.chunk(8)]
    return loss(logits, labels[None]), None


def recomputed(x, weight, labels):
    """8 chunks that are checkpointed with their GEMM."""

    def chunk(x, labels):
        logits = functional.linear(x, weight).float()
        return functional.cross_entropy(logits, labels, reduction="sum")

    parts = zip(x.chunk(8), labels.chunk(8), strict=True)
    total = sum(checkpoint(chunk, *each, use_reentrant=False) for each in parts)
    return total / TOKENS, None


def liger(x, weight, labels):
    """Liger's cross entropy."""
    needs("liger_kernel")
    loss = importlib.import_module("liger_kernel.transformers").LigerCrossEntropyLoss()
    logits = functional.linear(x, weight)
    return loss(logits, labels), logits


def liger_linear(x, weight, labels):
    """Liger's cross entropy with its GEMM."""
    needs("liger_kernel")
    module = importlib.import_module("liger_kernel.transformers")
    return module.LigerFusedLinearCrossEntropyLoss()(weight, x, labels), None


LOSSES = {
    "hf_ForCausalLMLoss": hugging_face,
    "hf_num_items_in_batch": functools.partial(hugging_face, num_items_in_batch=TOKENS),
    "F_cross_entropy_16bit": in_16_bits,
    "torchtitan_float": dropped,
    "float_held": held,
    "litgpt_chunks_128": litgpt,
    "torchtune_chunked_8": torchtune,
    "checkpointed_chunks_8": recomputed,
    "liger_ce": liger,
    "liger_fused_linear": liger_linear,
}


def loss_peak(name):
    """The peak of a loss beyond its inputs: bytes, phase and operation."""
    with FakeCuda(), Tracker() as tracker:
        x = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(VOCABULARY, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.empty(TOKENS, dtype=torch.long)
        before = sum(each.untyped_storage().nbytes() for each in (x, weight, labels))
        tracker.reset_peaks()
        tracker.phase("forward")
        loss, kept = LOSSES[name](x, weight, labels)
        tracker.phase("backward")
        loss.backward()
        del loss, kept
    found = tracker.peak(rounded=False)
    return found.bytes - before, found.phase, found.op


# Optimizers: of 8 matrices of 4096 x 1024 and 8 vectors of 4096

HALF, FULL = torch.bfloat16, torch.float32


def adam(dtype=FULL, kind="AdamW", **how):
    """A dtype, and an optimizer of torch.optim."""
    return dtype, lambda params: getattr(torch.optim, kind)(params, **how)


def of_transformers(params):
    """Adafactor of transformers."""
    module = importlib.import_module("transformers.optimization")
    return module.Adafactor(params)


OPTIMIZERS = {
    "AdamW foreach bf16": adam(HALF, foreach=True),
    "AdamW foreach fp32": adam(foreach=True),
    "AdamW default bf16": adam(HALF),
    "AdamW loop bf16": adam(HALF, foreach=False),
    "AdamW fused bf16": adam(HALF, fused=True),
    "AdamW fused fp32": adam(fused=True),
    "AdamW foreach capturable fp32": adam(foreach=True, capturable=True),
    "AdamW foreach amsgrad fp32": adam(foreach=True, amsgrad=True),
    "Adam foreach weight_decay fp32": adam(kind="Adam", foreach=True, weight_decay=0.1),
    "SGD foreach momentum fp32": adam(kind="SGD", foreach=True, momentum=0.9),
    "SGD foreach momentum nesterov wd": adam(
        kind="SGD", foreach=True, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "SGD foreach plain": adam(kind="SGD", foreach=True),
    "torch Adafactor foreach fp32": adam(kind="Adafactor", foreach=True),
    "torch Adafactor loop fp32": adam(kind="Adafactor", foreach=False),
    "HF Adafactor bf16": (HALF, of_transformers),
    "Muon torch bf16": adam(HALF, "Muon"),
    "bnb AdamW8bit bf16": (
        HALF,
        lambda params: importlib.import_module("bitsandbytes").optim.AdamW8bit(params),
    ),
    "RMSprop foreach": adam(kind="RMSprop", foreach=True),
    "Adagrad foreach": adam(kind="Adagrad", foreach=True),
    "clip foreach": (FULL, None),
    "clip loop": (FULL, None),
}


def optimizer_peaks(name):
    """Most bytes a parameter beyond before, its operation, and bytes after: of two steps."""
    dtype, make = OPTIMIZERS[name]
    if name.startswith("bnb"):
        needs("bitsandbytes")
    with FakeCuda(), Tracker() as tracker:
        shapes = [(4096, 1024)] * 8 + [(4096,)] * 8
        params = [nn.Parameter(torch.empty(each, dtype=dtype)) for each in shapes]
        for each in params:
            each.grad = torch.empty_like(each)
        number, found = sum(each.numel() for each in params), []
        if name.startswith("Muon"):
            params = [each for each in params if each.dim() == 2]
        with torch.device("cpu"):  # where nothing says otherwise, as in a usual loop
            optimizer = make and make(params)
        for _ in range(2):
            tracker.reset_peaks()
            before = tracker.peak(rounded=False).bytes
            if optimizer:
                optimizer.step()
            else:
                nn.utils.clip_grad_norm_(params, 1.0, foreach=name == "clip foreach")
            peak = tracker.peak(rounded=False)
            tracker.reset_peaks()
            after = tracker.peak(rounded=False).bytes - before
            found.append(
                [
                    round((peak.bytes - before) / number, 4),
                    peak.op.removeprefix("aten.") or "reset",
                    round(after / number, 4),
                ]
            )
    return dict(zip(("first", "later"), found, strict=True))
