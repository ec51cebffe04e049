"""The four conjugate collectives, with Megatron-LM's names: f, f-bar, g and g-bar.

The sequence is the first axis. A linear after g saves its shard, and gathers it again in backward.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

_shapes_alone: list[Any] = []  # the number of pretended ranks, while only shapes matter


@contextmanager
def shapes_alone(t: Any) -> Iterator[None]:
    """Make collectives return tensors of the right shapes for t pretended ranks, or a symbol t."""
    _shapes_alone.append(t)
    try:
        yield
    finally:
        _shapes_alone.pop()


def gather(shard: Tensor) -> Tensor:
    """(s/t, ...) on every rank -> (s, ...) on every rank."""
    if _shapes_alone:
        return shard.new_empty((_shapes_alone[-1] * shard.shape[0], *shard.shape[1:]))
    shards = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, shard.contiguous())
    return torch.cat(shards)


def reduce(partial: Tensor) -> Tensor:
    """A partial sum on every rank -> the sum on every rank."""
    total = partial.clone(memory_format=torch.contiguous_format)
    if _shapes_alone:
        return total
    dist.all_reduce(total)
    return total


def reduce_scatter(partial: Tensor) -> Tensor:
    """A partial sum (s, ...) on every rank -> the rank's part of the sum, (s/t, ...).

    gloo has no reduce-scatter, so every backend reduces and slices.
    """
    if _shapes_alone:
        return partial.new_empty((partial.shape[0] // _shapes_alone[-1], *partial.shape[1:]))
    return reduce(partial).chunk(dist.get_world_size())[dist.get_rank()].clone()


class Copy(Function):
    """f: identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The input itself."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """The sum of every rank's gradient."""
        return reduce(grads[0])


class Reduce(Function):
    """f-bar: all-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor) -> Tensor:
        """The sum of every rank's part."""
        return reduce(partial)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """The gradient itself."""
        return grads[0]


class Gather(Function):
    """g: all-gather forward, reduce-scatter backward."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor) -> Tensor:
        """(s/t, ...) -> (s, ...)."""
        return gather(shard)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """(s, ...) -> (s/t, ...)."""
        return reduce_scatter(grads[0])


class ReduceScatter(Function):
    """g-bar: reduce-scatter forward, all-gather backward."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor) -> Tensor:
        """(s, ...) -> (s/t, ...)."""
        return reduce_scatter(partial)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """(s/t, ...) -> (s, ...)."""
        return gather(grads[0])


class GatheredLinear(Function):
    """g and a linear in one, x (s/t, b, h) -> (s, b, out); it saves only the shard."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        """One GEMM of the gathered input per weight (out, h)."""
        ctx.save_for_backward(shard, *weights)
        x = gather(shard)
        return tuple(x @ weight.t() for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        """The gradients of the shard and of the weights, with the input gathered again."""
        shard, *weights = ctx.saved_tensors
        x = gather(shard).flatten(0, 1)
        dx = sum(grad @ weight for grad, weight in zip(grads, weights, strict=True))
        assert isinstance(dx, Tensor)
        return (reduce_scatter(dx), *(grad.flatten(0, 1).t() @ x for grad in grads))
