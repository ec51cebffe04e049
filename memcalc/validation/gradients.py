"""Compare the gradients of a sharded layer with those of the unsharded layer."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from memcalc.config import Config, Parallel
from memcalc.validation.layers.modules import TYPES, Layer, Place, hidden_state

# Sums are in another order. The largest error seen in fp32 is 3e-6 of the largest value.
TOLERANCE = 2e-5


def gradient_error(
    rank: int, config: Config, build: Callable[[Config, Place], nn.Module] = Layer
) -> float:
    """The largest difference of a rank's gradients from the unsharded layer's, relative to them.

    The gradients of the input and of the weights are compared, except those that ranks still have
    to sum: norms' weights under sequence parallelism (DTensor sums those), and replicated key-value
    heads. Both layers run in fp32 and without dropout, whose masks differ between ranks.

    Args:
        rank: This rank; the process group must exist.
        config: The layer and its parallelism.
        build: Makes the layer or a rank's shard of it, with the same weights on every rank.
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
            continue  # shifts all scores of a query equally: its gradient is rounding error
        found, part = split[name], _part(name, expected, config, place)
        if hasattr(found, "full_tensor"):  # a DTensor
            found, part = found.full_tensor(), expected
        if part is not None:
            errors.append(float((found - part).abs().max() / expected.abs().max()))
    return float(torch.tensor(errors).max())  # max() would skip a NaN


def _gradients(
    config: Config, place: Place, build: Callable[[Config, Place], nn.Module]
) -> dict[str, Tensor]:
    """Gradients of a weighted sum of the layer's output, with a different weight per element."""
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
    """A rank's shard of an unsharded gradient, or None if ranks still have to sum theirs."""
    t, rank = place.t, place.rank
    copied = name in ("qkv.weights.1", "qkv.weights.2") and config.model.kv_heads < t
    if copied or ("norm" in name and place.sp and t > 1):
        return None
    if "norm" in name or (name == "x" and not place.sp):
        return whole
    if name in ("proj.weight", "fc2.weight"):
        return whole.chunk(t, 1)[rank]
    packed = name.startswith("fc1") and config.model.gated and config.run.implementation.fused_gate
    if packed:  # each rank packs its shards of gate and up
        return torch.cat([half.chunk(t)[rank] for half in whole.chunk(2)])
    return whole.chunk(t)[rank]
