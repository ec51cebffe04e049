"""Gradients: ranks together must be the unsplit layer."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from memcalc.config import Config, Parallel
from memcalc.validation.modules import TYPES, Layer, Place, hidden_state

# Sums are taken in another order. The largest error seen in fp32 is 3e-6 of the largest value.
TOLERANCE = 2e-5


def gradient_error(
    rank: int, config: Config, build: Callable[[Config, Place], nn.Module] = Layer
) -> float:
    """The largest error of a rank's gradients against the unsplit layer's, relative to the largest.

    Those of the input and of the weights are compared, but for what ranks have yet to sum: norms'
    weights under sequence parallelism (DTensor sums those), and key-value heads that several ranks
    hold. Both layers run in fp32 and without dropout, whose masks differ between ranks.

    Args:
        rank: This rank; the ranks' process group must be there.
        config: The layer and its split.
        build: What makes the layer, or a rank's part of it, with the same weights everywhere.
    """
    model = replace(config.model, attention_dropout=0.0, hidden_dropout=0.0)
    config = replace(config, model=model, run=replace(config.run, precision="fp32"))
    parallel = config.parallel
    place = Place("cpu", TYPES["fp32"], parallel.tp, rank, parallel.sp)
    split = _gradients(config, place, build)
    whole = _gradients(replace(config, parallel=Parallel()), Place("cpu", TYPES["fp32"]), build)
    errors = []
    for name, expected in whole.items():
        if name.endswith("key.bias") and model.position != "rotary":
            continue  # it moves all scores of a query alike: softmax leaves its gradient rounding
        found, part = split[name], _part(name, expected, config, place)
        if hasattr(found, "full_tensor"):  # a DTensor, which puts together what ranks have of it
            found, part = found.full_tensor(), expected
        if part is not None:
            errors.append(float((found - part).abs().max() / expected.abs().max()))
    return float(torch.tensor(errors).max())  # max() would pass over a NaN


def _gradients(
    config: Config, place: Place, build: Callable[[Config, Place], nn.Module]
) -> dict[str, Tensor]:
    """Gradients of a weighted sum of the layer's output, whose weights depend on the place."""
    layer, x = build(config, place), hidden_state(config, place)
    y = layer(x)
    s, b, h = config.run.seq_length, config.run.micro_batch_size, config.model.hidden_size
    weights = torch.linspace(-1, 1, s * b * h).view(s, b, h)
    if y.shape[0] != s:
        weights = weights.chunk(place.t)[place.rank]
    (y * weights).sum().backward()
    named = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    assert x.grad is not None
    return {"x": x.grad, **named}


def _part(name: str, whole: Tensor, config: Config, place: Place) -> Tensor | None:
    """A rank's part of an unsplit gradient, or None where ranks have yet to sum theirs."""
    t, rank = place.t, place.rank
    copied = name in ("qkv.weights.1", "qkv.weights.2") and config.model.kv_heads < t
    if copied or ("norm" in name and place.sp and t > 1):
        return None
    if "norm" in name or (name == "x" and not place.sp):
        return whole
    if name in ("proj.weight", "fc2.weight"):
        return whole.chunk(t, 1)[rank]
    packed = name.startswith("fc1") and config.model.gated and config.run.implementation.fused_gate
    if packed:  # each rank packs its own parts of the gate and of up
        return torch.cat([half.chunk(t)[rank] for half in whole.chunk(2)])
    return whole.chunk(t)[rank]
