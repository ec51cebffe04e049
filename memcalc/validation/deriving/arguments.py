"""A module's example inputs, and the axes of them that each letter stands for."""

from collections.abc import Mapping, Sequence
from keyword import iskeyword
from typing import Any

import torch
from torch import Tensor, nn

from memcalc.errors import UsageError

Places = Mapping[int, Mapping[int, str]]  # the letter of each axis of each tensor


def plain_module(module: Any) -> nn.Module:
    """A module that can run on tensors without values: for a compiled one, the original.

    Raises:
        UsageError: The module is scripted, traced or lazy, or no module.
    """
    if not isinstance(module, nn.Module):
        raise UsageError(f"derive needs a torch.nn.Module, not {type(module).__name__}")
    plain: nn.Module = getattr(module, "_orig_mod", module)
    if any(isinstance(each, torch.jit.ScriptModule) for each in plain.modules()):
        raise UsageError("derive cannot run a scripted or traced module; pass the original module")
    if any(map(nn.parameter.is_lazy, (*plain.parameters(), *plain.buffers()))):
        raise UsageError("a lazy module has no sizes yet; run it once, then derive it")
    return plain


def arguments(inputs: Any) -> tuple[list[Any], dict[str, Any]]:
    """Example inputs as positional arguments and keyword arguments.

    Raises:
        UsageError: They are neither a tensor, nor a sequence or a mapping.
    """
    if isinstance(inputs, Tensor):
        return [inputs], {}
    if isinstance(inputs, Mapping):
        return [], dict(inputs)
    if isinstance(inputs, Sequence) and not isinstance(inputs, (str, bytes)):
        return list(inputs), {}
    raise UsageError(
        "inputs must be a tensor, a sequence of arguments or a mapping of keyword arguments, not "
        f"{type(inputs).__name__}"
    )


def places_of(leaves: Sequence[Any], symbols: Mapping[str, Any]) -> Places:
    """The letter of each axis that has one, by the index of its tensor among the leaves.

    Raises:
        UsageError: As in ``derive``.
    """
    tensors = [number for number, each in enumerate(leaves) if isinstance(each, Tensor)]
    places: dict[int, dict[int, str]] = {}
    for letter, said in symbols.items():
        if not (isinstance(letter, str) and letter.isidentifier()) or iskeyword(letter):
            raise UsageError(f"a symbol must be a Python name, not {letter!r}")
        found = (
            [
                (number, axis)
                for number in tensors
                for axis, size in enumerate(leaves[number].shape)
                if size == said
            ]
            if isinstance(said, int)
            else [_axis(leaves, tensors, letter, pair) for pair in _pairs(said)]
        )
        if not found:
            raise UsageError(f"no axis of the inputs has size {letter} = {said}")
        for number, axis in found:
            other = places.setdefault(number, {}).setdefault(axis, letter)
            if other != letter:
                raise UsageError(
                    f"axis {axis} of input {tensors.index(number)} is both {other} and {letter}; "
                    "choose inputs of different sizes, or give the axes of each symbol"
                )
    sizes: dict[str, int] = {}
    for number, axes in places.items():
        for axis, letter in axes.items():
            size = leaves[number].shape[axis]
            if sizes.setdefault(letter, size) != size:
                raise UsageError(f"{letter} is both {sizes[letter]} and {size} in the inputs")
    return places


def _pairs(said: Any) -> list[tuple[int, int]]:
    try:
        several = list(said)
        pairs = [several] if all(isinstance(each, int) for each in several) else several
        return [(int(number), int(axis)) for number, axis in pairs]
    except (TypeError, ValueError):
        raise UsageError(
            f"a symbol must be a size or axes such as (input 0, axis 1), not {said!r}"
        ) from None


def _axis(
    leaves: Sequence[Any], tensors: Sequence[int], letter: str, pair: tuple[int, int]
) -> tuple[int, int]:
    number, axis = pair
    if not 0 <= number < len(tensors) or not 0 <= axis < leaves[tensors[number]].dim():
        raise UsageError(f"{letter}: input {number} does not exist or has no axis {axis}")
    return tensors[number], axis
