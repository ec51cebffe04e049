"""A module's example inputs, and which of their axes a letter stands for."""

from collections.abc import Iterable, Mapping, Sequence
from keyword import iskeyword
from typing import Any

import torch
from torch import Tensor, nn

from memcalc.errors import UsageError

Places = Mapping[int, Mapping[int, str]]  # the letter of each axis of each tensor


def plain_module(module: Any) -> nn.Module:
    """A module that can run on tensors without values: of a compiled one, what it was made of.

    Raises:
        UsageError: There is none.
    """
    if not isinstance(module, nn.Module):
        raise UsageError(f"a torch.nn.Module is derived, not {type(module).__name__}")
    plain: nn.Module = getattr(module, "_orig_mod", module)
    if any(isinstance(each, torch.jit.ScriptModule) for each in plain.modules()):
        raise UsageError("a scripted or traced module is not derived: choose what it was made of")
    if any(map(nn.parameter.is_lazy, (*plain.parameters(), *plain.buffers()))):
        raise UsageError("a lazy module has no sizes yet: run it once before it is derived")
    return plain


def arguments(inputs: Any) -> tuple[list[Any], dict[str, Any]]:
    """Example inputs as arguments in their order, and those by name.

    Raises:
        UsageError: They are neither a tensor, nor a sequence or a mapping.
    """
    if isinstance(inputs, Tensor):
        return [inputs], {}
    if isinstance(inputs, Mapping):
        return [], dict(inputs)
    if isinstance(inputs, Iterable) and not isinstance(inputs, str):
        return list(inputs), {}
    raise UsageError(
        f"inputs are a tensor, a sequence or a mapping of them, not {type(inputs).__name__}"
    )


def places_of(leaves: Sequence[Any], symbols: Mapping[str, Any]) -> Places:
    """The letter of each axis that has one, by the number of the tensor among the leaves.

    Raises:
        UsageError: As of ``derive``.
    """
    tensors = [number for number, each in enumerate(leaves) if isinstance(each, Tensor)]
    places: dict[int, dict[int, str]] = {}
    for letter, said in symbols.items():
        if not (isinstance(letter, str) and letter.isidentifier()) or iskeyword(letter):
            raise UsageError(f"a letter is a name, not {letter!r}")
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
            raise UsageError(f"no axis of the inputs is {letter} = {said}")
        for number, axis in found:
            other = places.setdefault(number, {}).setdefault(axis, letter)
            if other != letter:
                raise UsageError(
                    f"axis {axis} of input {tensors.index(number)} is {other} and {letter}: give "
                    "examples of different sizes, or the axes of each letter"
                )
    sizes: dict[str, int] = {}
    for number, axes in places.items():
        for axis, letter in axes.items():
            size = leaves[number].shape[axis]
            if sizes.setdefault(letter, size) != size:
                raise UsageError(f"{letter} is {sizes[letter]} and {size} in the inputs")
    return places


def _pairs(said: Any) -> list[tuple[int, int]]:
    try:
        several = list(said)
        pairs = [several] if all(isinstance(each, int) for each in several) else several
        return [(int(number), int(axis)) for number, axis in pairs]
    except (TypeError, ValueError):
        raise UsageError(
            f"a letter stands for a size, or for axes as in (0, 1), not for {said!r}"
        ) from None


def _axis(
    leaves: Sequence[Any], tensors: Sequence[int], letter: str, pair: tuple[int, int]
) -> tuple[int, int]:
    number, axis = pair
    if not 0 <= number < len(tensors) or not 0 <= axis < leaves[tensors[number]].dim():
        raise UsageError(f"{letter}: no axis {axis} of an input {number}")
    return tensors[number], axis
