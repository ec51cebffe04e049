"""Build Hugging Face's whole models from a config.json on meta, with as few layers as needed.

Only transformers' own classes are built; no code from the model's repository runs.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from memcalc.blocks.layer import kind_of
from memcalc.config import Config
from memcalc.config.run import Run
from memcalc.errors import InputError, NoLayerError
from memcalc.progress import doing
from memcalc.validation.deriving.derivation import DeriveError, derive_from, kept_bytes
from memcalc.validation.deriving.derived import Derived, Kept, total
from memcalc.validation.layers.models import class_of, configured
from memcalc.validation.layers.modules import TYPES
from memcalc.validation.measuring.valueless import error_text

OUTSIDE = "outside"
TRIES = 3  # depths that are tried
MOST_LAYERS = 24  # the first layers of a stack, in which every kind must occur
NUMBERS = re.compile(r"idx|index|number|_id$")  # attributes that hold a layer's number


class Stack(NamedTuple):
    """A stack of layers of a model.

    Attributes:
        path: The path of its list of layers.
        kinds: For each layer the first layer that is built in the same way.
    """

    path: str
    kinds: tuple[int, ...]


class Whole(nn.Module):
    """A model of transformers: token ids (b, s), or pixels (b, channels, y, x), -> logits.

    Args:
        content: Its config.json; for a model of several parts, the language model's.
        run: The precision and the kernels.
        depth: The layers to build of each stack; by default all.

    Raises:
        InputError: transformers does not know the family, or refuses the file.
        NoLayerError: The family has no such attention.
    """

    def __init__(self, content: Mapping[str, Any], run: Run, depth: int | None = None) -> None:
        super().__init__()
        config = configured(content, run, depth)
        self.family: str = config.model_type
        self.images = hasattr(config, "image_size") and not hasattr(config, "vocab_size")
        self.pixels = (getattr(config, "num_channels", 3), *_square(config)) if self.images else ()
        self.paired: bool = config.is_encoder_decoder
        self.run = run
        try:
            with torch.device("meta"), _uninitialized():
                made = class_of(config).from_config(config, dtype=TYPES[run.precision])
        except Exception as error:  # whatever the family's own code raises
            if isinstance(error, ValueError) and "attention implementation" in str(error):
                raise NoLayerError(
                    f"{self.family} has no sdpa attention in transformers; choose --implementation "
                    "transformers-eager"
                ) from error
            raise InputError(
                f"transformers cannot build this {self.family} model: {error_text(error)}"
            ) from error
        self.model = made.train()

    def forward(self, given: Tensor) -> Any:
        """What the model returns."""
        if self.images:
            return self.model(pixel_values=given)
        target = {"decoder_input_ids": given} if self.paired else {}
        with _as_one_text():
            return self.model(input_ids=given, use_cache=False, **target)

    def example(self, s: Any, b: Any) -> Tensor:
        """Its input without values: b sequences of s tokens, or b images."""
        if not self.images:
            return torch.empty(b, s, dtype=torch.int64, device="meta")
        dtype = next(self.model.parameters()).dtype
        return torch.empty(b, *self.pixels, dtype=dtype, device="meta")

    def letters(self) -> dict[str, int]:
        """The letters of its input, with example sizes; multiples of them may be measured."""
        return {"b": 3} if self.images else {"s": 64, "b": 3}

    def sizes(self) -> dict[str, int]:
        """The run's sizes of the same letters."""
        own = {"s": self.run.seq_length, "b": self.run.micro_batch_size}
        return {letter: own[letter] for letter in self.letters()}

    def build(self, sizes: Mapping[str, Any]) -> tuple[nn.Module, list[Tensor], dict[str, Any]]:
        """The model and its input, for ``derive_from``; sizes that are not given are the run's."""
        at = {**self.sizes(), **sizes}
        return self, [self.example(at.get("s"), at["b"])], {}

    def stacks(self) -> list[Stack]:
        """The outermost lists of layers, and which of their layers are built in the same way."""
        found: list[Stack] = []
        for path, module in self.named_modules():
            inside = any(path.startswith(f"{stack.path}.") for stack in found)
            if isinstance(module, nn.ModuleList) and len(module) > 0 and not inside:
                built = [_built(layer) for layer in module]
                found.append(Stack(path, tuple(built.index(each) for each in built)))
        return found


class ModelPart(NamedTuple):
    """What one kind of layer saves for backward, or the model outside its layers.

    Attributes:
        name: The kind of layer, or ``outside``.
        layers: How many of the model's layers are of this kind.
        tensors: What is saved, with the modules' paths within the layer.
    """

    name: str
    layers: int
    tensors: tuple[Kept, ...]


class DerivedModel(NamedTuple):
    """The formula of a model that is deep enough to show every kind of layer.

    Attributes:
        derived: What the model saves.
        model: The model, with the depth at which it was derived.
        kinds: For each stack of the model in its full depth the kinds of its layers.
    """

    derived: Derived
    model: Whole
    kinds: list[tuple[int, ...]]


def derived_model(content: Mapping[str, Any], run: Run) -> DerivedModel:
    """The formula of a model.

    The formula holds at the run's sizes. One more layer must save what its kind of layer saves.

    Raises:
        InputError, NoLayerError: As in ``Whole``.
        DeriveError: The model cannot be derived, or layers of one kind save different tensors.
    """
    kinds = [stack.kinds for stack in Whole(content, run).stacks()]
    first = max((max(each[:MOST_LAYERS]) for each in kinds), default=0) + 1
    deepest = max((len(each) for each in kinds), default=1)
    later = max((kind for each in kinds for kind in each), default=0)
    if later >= first:
        raise DeriveError(
            f"layer {later} is of a kind that does not occur in the first {MOST_LAYERS} layers"
        )
    for depth in range(first, first + TRIES):
        model = Whole(content, run, depth)
        doing(f"deriving {model.family} with {depth} layer{'s' if depth > 1 else ''} per stack")
        derived = _derived(model)
        if depth >= deepest or _one_more(derived, model, Whole(content, run, depth + 1), kinds):
            return DerivedModel(derived, model, kinds)
    raise DeriveError(f"layers after the first {first} save other tensors than these")


def _derived(model: Whole) -> Derived:
    """The formula of a model, which holds at the run's sizes.

    If the formula of the usual example does not hold there, the run's sizes become the example. A
    size of 1 is then not a letter, as a symbol cannot be 1.
    """
    own, usual = model.sizes(), model.letters()
    larger = {letter: size for letter, size in own.items() if size > 1}
    near = {**usual, **larger}
    of_one = [{x: n for x, n in near.items() if x != one} for one in own.keys() - larger]
    for examples in (usual, near, *of_one, larger):
        if not examples:
            continue
        try:
            at = {letter: own[letter] for letter in examples}
            return derive_from(model.build, examples, "cuda", "meta", at=at)
        except DeriveError as error:
            other = error
    raise other


def _one_more(derived: Derived, model: Whole, deeper: Whole, kinds: list[tuple[int, ...]]) -> bool:
    """Whether one more layer in each stack adds what a layer of its kind saves."""
    stacks, depth = model.stacks(), max(len(stack.kinds) for stack in model.stacks())
    alike = {
        (stack.path, each[depth])
        for stack, each in zip(stacks, kinds, strict=True)
        if len(each) > depth
    }
    more = [
        each
        for each in derived.tensors
        for stack in stacks
        if (stack.path, within(each.module, stack)) in alike
    ]
    found = kept_bytes(deeper.build, derived.sizes, "cuda", "meta")
    return found == derived.value() + total(more).value(derived.sizes)


def parts(found: DerivedModel, known: Config | None = None) -> list[ModelPart]:
    """What each kind of layer saves, and what the model saves outside its layers.

    Layers of one kind save the same tensors.

    Args:
        found: The formula of the model.
        known: memcalc's reading of the model, which names the kinds; None if it cannot read it.
    """
    derived, model, deep = found
    layers: dict[tuple[int, int], list[Kept]] = {}
    outside: list[Kept] = []
    stacks = model.stacks()
    for each in derived.tensors:
        for index, stack in enumerate(stacks):
            number = within(each.module, stack)
            if number is not None:
                inner = each.module.removeprefix(f"{stack.path}.{number}").removeprefix(".")
                layers.setdefault((index, number), []).append(each._replace(module=inner))
                break
        else:
            outside.append(each._replace(module=each.module.removeprefix("model.")))
    alike: dict[tuple[Any, ...], list[int]] = {}
    for (index, number), tensors in layers.items():
        same = tuple((each.module, each.op, each.formula) for each in tensors)
        alike.setdefault((index, same), []).append(number)
    named: list[ModelPart] = []
    for (index, _), numbers in reversed(alike.items()):
        name = _kind_of(stacks, index, numbers[-1], known)
        if name in (part.name for part in named):
            name = f"{name} {numbers[-1]}"
        # layers beyond the derived depth save what the first one built in the same way saves
        beyond = deep[index][len(stacks[index].kinds) :]
        there = len(numbers) + sum(kind in numbers for kind in beyond)
        named.insert(0, ModelPart(name, there, tuple(layers[index, numbers[-1]])))
    return [*named, ModelPart(OUTSIDE, 1, tuple(outside))]


def _kind_of(stacks: list[Stack], index: int, number: int, known: Config | None) -> str:
    if known is not None:
        return kind_of(known, number + (index and (known.model.encoder_layers or 0)))
    return "layer" if len(stacks) == 1 else stacks[index].path.split(".")[-2]


def within(module: str, stack: Stack) -> int | None:
    """The number of the stack's layer that a module is in, or None."""
    if not module.startswith(f"{stack.path}."):
        return None
    return int(module.removeprefix(f"{stack.path}.").partition(".")[0])


def content_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's part of a config.json: all of it, or its text config."""
    for part in ("thinker_config", "text_config"):
        inner = raw.get(part)
        if isinstance(inner, Mapping):
            raw = inner
    return dict(raw)


def _built(layer: nn.Module) -> tuple[Any, ...]:
    """How a layer is built: its modules' classes, weights and flags, without the layer's number."""
    return tuple(
        (
            name,
            type(part).__name__,
            tuple((key, tuple(each.shape)) for key, each in part.named_parameters(recurse=False)),
            tuple(
                (key, value)
                for key, value in sorted(vars(part).items())
                if isinstance(value, (bool, int, str)) and not NUMBERS.search(key)
            ),
        )
        for name, part in layer.named_modules()
    )


def _square(config: Any) -> tuple[int, int]:
    size = config.image_size
    return (size, size) if isinstance(size, int) else tuple(size)


@contextmanager
def _uninitialized() -> Iterator[None]:
    """Build models without initializing their weights."""
    from transformers.initialization import no_init_weights

    with no_init_weights():
        yield


@contextmanager
def _as_one_text() -> Iterator[None]:
    """Make transformers treat each row as one sequence, without reading its values."""
    from transformers import masking_utils

    theirs = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = theirs
