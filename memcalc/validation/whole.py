"""Hugging Face's whole models, built from a config.json on meta, as deep as is needed.

transformers' own classes alone are built; no code comes from where the file does.
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
from memcalc.errors import InputError, nearest
from memcalc.validation.derivation import (
    Derived,
    DeriveError,
    Kept,
    derive_from,
    kept_bytes,
    total,
)
from memcalc.validation.hugging_face import NoAttentionError
from memcalc.validation.modules import TYPES

OUTSIDE = "outside"
TRIES = 3  # depths at which a model is looked at
MOST_LAYERS = 24  # of a stack that are looked at to see every kind
MOST_DEEP = 1000  # layers of a stack that are built
DEPTHS = ("num_hidden_layers", "num_layers", "num_decoder_layers")
NUMBERS = re.compile(r"idx|index|number|_id$")  # of a layer among its like


class Stack(NamedTuple):
    """A stack of layers of a model.

    Attributes:
        path: The path of its list of layers.
        kinds: For each layer the first layer that is built as it is.
    """

    path: str
    kinds: tuple[int, ...]


class Whole(nn.Module):
    """A model of transformers, token ids (b, s) -> logits: of images, pixels (b, channels, y, x).

    Args:
        content: Its config.json, or of several parts the language model's.
        run: The precision and the kernels.
        depth: How many layers to build of each stack; by default as many as there are.

    Raises:
        InputError: transformers does not know the family, or refuses what the file says.
        NoAttentionError: The family has no such attention.
    """

    def __init__(self, content: Mapping[str, Any], run: Run, depth: int | None = None) -> None:
        super().__init__()
        config = _configured(content, run, depth)
        self.family: str = config.model_type
        self.images = hasattr(config, "image_size") and not hasattr(config, "vocab_size")
        self.pixels = (getattr(config, "num_channels", 3), *_square(config)) if self.images else ()
        self.paired: bool = config.is_encoder_decoder
        self.run = run
        try:
            with torch.device("meta"), _without_values():
                made = _class_of(config).from_config(config, dtype=TYPES[run.precision])
        except Exception as error:  # whatever the family's own code raises
            if isinstance(error, ValueError) and "attention implementation" in str(error):
                raise NoAttentionError(
                    f"{self.family} has no sdpa attention in transformers; choose "
                    "transformers-eager"
                ) from error
            raise InputError(
                f"transformers does not build this {self.family}: {type(error).__name__}: "
                f"{_first(error)}"
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
        """Its input without values: b texts of s tokens, or b images."""
        if not self.images:
            return torch.empty(b, s, dtype=torch.int64, device="meta")
        dtype = next(self.model.parameters()).dtype
        return torch.empty(b, *self.pixels, dtype=dtype, device="meta")

    def letters(self) -> dict[str, int]:
        """The letters of its input, with examples, whose multiples may be measured."""
        return {"b": 3} if self.images else {"s": 64, "b": 3}

    def sizes(self) -> dict[str, int]:
        """The run's own sizes, by the same letters."""
        own = {"s": self.run.seq_length, "b": self.run.micro_batch_size}
        return {letter: own[letter] for letter in self.letters()}

    def build(self, sizes: Mapping[str, Any]) -> tuple[nn.Module, list[Tensor], dict[str, Any]]:
        """The model and its input, as ``derive_from`` asks for them; a size not said is its own."""
        at = {**self.sizes(), **sizes}
        return self, [self.example(at.get("s"), at["b"])], {}

    def stacks(self) -> list[Stack]:
        """The outermost lists of layers, with which of their layers are built alike."""
        found: list[Stack] = []
        for path, module in self.named_modules():
            inside = any(path.startswith(f"{stack.path}.") for stack in found)
            if isinstance(module, nn.ModuleList) and len(module) > 0 and not inside:
                built = [_built(layer) for layer in module]
                found.append(Stack(path, tuple(built.index(each) for each in built)))
        return found


class Part(NamedTuple):
    """What one kind of layer keeps, or what is kept outside of all.

    Attributes:
        name: The kind of layer, or ``outside``.
        layers: How many of the whole model's layers are so.
        tensors: What is kept, by modules within the layer.
    """

    name: str
    layers: int
    tensors: tuple[Kept, ...]


def derived_model(content: Mapping[str, Any], run: Run) -> tuple[Derived, Whole]:
    """The closed form of what a model keeps, as deep as shows every kind of layer, and that model.

    It holds at the run's own sizes. A layer more must keep what the layer of its kind keeps.

    Raises:
        InputError, NoAttentionError: As of ``Whole``.
        DeriveError: The model cannot be derived, or its layers do not keep alike.
    """
    kinds = [stack.kinds for stack in Whole(content, run).stacks()]
    first = max((max(each[:MOST_LAYERS]) for each in kinds), default=0) + 1
    deepest = max((len(each) for each in kinds), default=1)
    later = max((kind for each in kinds for kind in each), default=0)
    if later >= first:
        raise DeriveError(
            f"layer {later} is built as none of the first {MOST_LAYERS}, which alone are looked at"
        )
    for depth in range(first, first + TRIES):
        model = Whole(content, run, depth)
        derived = _derived(model)
        if depth >= deepest or _one_more(derived, model, Whole(content, run, depth + 1), kinds):
            return derived, model
    raise DeriveError(f"layers beyond the first {first} keep something else")


def _derived(model: Whole) -> Derived:
    """The form of a model that holds at its own sizes.

    Where PyTorch decides otherwise there than at the examples, the examples are its own sizes; a
    size of 1 that no symbol stands for is no letter.
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
    """Whether a model with a layer more in each stack keeps what a layer of its kind keeps more."""
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


def parts(
    derived: Derived,
    model: Whole,
    content: Mapping[str, Any],
    run: Run,
    known: Config | None = None,
) -> list[Part]:
    """What a layer of each kind keeps, and what is kept outside: a kind is layers that keep alike.

    Args:
        derived: What the model keeps.
        model: The model, as deep as it was looked at.
        content: Its config.json.
        run: Its run.
        known: The same as memcalc reads it, which names the kinds; None where it does not.
    """
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
    deep = [stack.kinds for stack in Whole(content, run).stacks()]
    found: list[Part] = []
    for (index, _), numbers in reversed(alike.items()):
        name = _kind_of(stacks, index, numbers[-1], known)
        if name in (part.name for part in found):
            name = f"{name} {numbers[-1]}"
        # every layer beyond those that were looked at keeps what the first of its kind does
        beyond = deep[index][len(stacks[index].kinds) :]
        there = len(numbers) + sum(kind in numbers for kind in beyond)
        found.insert(0, Part(name, there, tuple(layers[index, numbers[-1]])))
    return [*found, Part(OUTSIDE, 1, tuple(outside))]


def _kind_of(stacks: list[Stack], index: int, number: int, known: Config | None) -> str:
    if known is not None:
        return kind_of(known, number + (index and (known.model.encoder_layers or 0)))
    return "layer" if len(stacks) == 1 else stacks[index].path.split(".")[-2]


def within(module: str, stack: Stack) -> int | None:
    """The number of the layer of a stack that a module is in; None outside of all."""
    if not module.startswith(f"{stack.path}."):
        return None
    return int(module.removeprefix(f"{stack.path}.").partition(".")[0])


def content_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What a config.json says of its language model: all of it, or its text's part."""
    for part in ("thinker_config", "text_config"):
        inner = raw.get(part)
        if isinstance(inner, Mapping):
            raw = inner
    return dict(raw)


def _configured(content: Mapping[str, Any], run: Run, depth: int | None) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    kernels = run.implementation
    words = {k: v for k, v in content.items() if k not in ("model_type", *_BESIDE)}
    family = str(content.get("model_type"))
    if family not in CONFIG_MAPPING:
        family = _SAID_OTHERWISE.get(family, family)
    if family not in CONFIG_MAPPING:
        raise InputError(
            f"transformers has no family {family[:40]!r}; {nearest(family, CONFIG_MAPPING)}"
        )
    try:
        config = AutoConfig.for_model(family, **words)
        _bounded(config)
        if depth is not None:
            _cut(config, depth)
    except Exception as error:  # whatever its validation raises
        raise InputError(
            f"transformers refuses this config of {family}: {_first(error)}"
        ) from error
    config._attn_implementation = "eager" if kernels.attention == "unfused" else "sdpa"
    if any("expert" in key for key in words):
        config._experts_implementation = f"{kernels.expert_products}_mm"
    return config


# Families whose code is another's.
_SAID_OTHERWISE = {"kimi_k2": "deepseek_v3"}

# What says nothing of the model, or asks for what is not there.
_BESIDE = ("architectures", "quantization_config", "auto_map", "torch_dtype", "dtype", "use_cache")


def _bounded(config: Any) -> None:
    """Refuse more layers than any model has: each of them would be built."""
    for key in DEPTHS:
        if isinstance(layers := getattr(config, key, None), int) and layers > MOST_DEEP:
            raise ValueError(f"{key} is {layers}, and {MOST_DEEP} at the most are built")


def _cut(config: Any, depth: int) -> None:
    """Leave so many layers of each stack, and of each list of a fact a layer."""
    there = {key: getattr(config, key) for key in DEPTHS if getattr(config, key, None)}
    lists = {
        key: value
        for key, value in vars(config).items()
        if isinstance(value, list) and len(value) in there.values()
    }
    for key, value in there.items():
        setattr(config, key, min(value, depth))
    for key, value in lists.items():
        setattr(config, key, value[:depth])


def _class_of(config: Any) -> Any:
    """The class of models that a config is for."""
    import transformers as hub
    from transformers.models.auto import modeling_auto as auto

    kind = type(config)
    masked = kind in auto.MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False)
    if config.is_encoder_decoder:
        return hub.AutoModelForSeq2SeqLM
    if kind in auto.MODEL_FOR_CAUSAL_LM_MAPPING and not masked:
        return hub.AutoModelForCausalLM
    if masked:
        return hub.AutoModelForMaskedLM
    if kind in auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
        return hub.AutoModelForImageClassification
    return hub.AutoModel


def _built(layer: nn.Module) -> tuple[Any, ...]:
    """How a layer is built: its parts' classes, weights and switches, without its own number."""
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


def _first(error: Exception) -> str:
    return " ".join(str(error).split())[:160]


@contextmanager
def _without_values() -> Iterator[None]:
    """Build models whose weights nobody fills."""
    from transformers.initialization import no_init_weights

    with no_init_weights():
        yield


@contextmanager
def _as_one_text() -> Iterator[None]:
    """Let transformers take every row for one text, rather than look for several in its values."""
    from transformers import masking_utils

    theirs = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = theirs
