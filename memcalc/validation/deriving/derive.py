"""``derive``: the formula of what a layer, a whole model or any module saves for backward.

memcalc's own layer runs on symbols of all its sizes, a Hugging Face model on symbols of its tokens,
and a user's module on the symbols that the user names. The first two can be compared with the
ledger.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from memcalc import symbols
from memcalc.answers.notes import notes, recomputation, setting
from memcalc.answers.warnings import warnings
from memcalc.config import IMPLEMENTATIONS, Config, Run, catalog
from memcalc.errors import ConfigError, InputError, NoLayerError, UsageError, nearest
from memcalc.frameworks import FRAMEWORKS
from memcalc.progress import doing
from memcalc.report import Column, Report, with_detail
from memcalc.validation.deriving import beside, whole
from memcalc.validation.deriving.derivation import derive
from memcalc.validation.deriving.derived import total
from memcalc.validation.deriving.forms import forms, how
from memcalc.validation.deriving.symbolic_layer import derived_layer
from memcalc.validation.factory import factory, types, users_code
from memcalc.validation.layers import families, hugging_face
from memcalc.validation.layers.models import content_of_model
from memcalc.validation.require import require, require_precision

AGAINST = ("ledger",)

COLUMNS = (
    Column("layer_kind", "text"),
    Column("tensor", "text"),
    Column("module", "text", detail=True),
    Column("op", "text", detail=True),
    Column("formula", "formula"),
    Column("ledger_formula", "formula", detail=True),
    Column("difference", "formula"),
)


def derive_layer(config: Config, against: str | None = None) -> Report:
    """The formula of memcalc's own layer, in all its sizes.

    Args:
        config: The model, its parallelism and its run.
        against: ``ledger`` to compare it with the exact ledger.

    Raises:
        UsageError: memcalc has no PyTorch layer of this kind.
        DeriveError: The layer cannot be derived.

    >>> from memcalc.config import load
    >>> report = derive_layer(load("175b", sp=True, recompute="selective"))
    >>> print(report.column("formula")[-1])
    b*h*s*(34 + 16/h)/t
    """
    _require_against(against)
    if config.run.implementation.maker.whole_models:
        raise UsageError(
            f"--implementation {config.run.implementation.name} needs --from transformers"
        )
    require(config, "meta", "own", instead="--from transformers")
    doing(f"deriving one layer of {config.model.name}")
    derived = derived_layer(config)
    title = f"one layer of {setting(config)}, {recomputation(config)}"
    about = (
        "layer: memcalc's own, in plain PyTorch, with stand-ins for fused kernels",
        *notes(config, "exact"),
    )
    sizes = symbols.values(config)
    if against:
        rows = {"layer": beside.beside_layer(config, derived.tensors)}
        return _beside(title, rows, sizes, (*how(derived), *about))
    return forms(title, {"layer": derived.tensors}, sizes, (*how(derived), *about))


def derive_model(target: str, against: str | None = None, **settings: Any) -> Report:
    """The formulas of a Hugging Face model: of each kind of layer, and of the rest of the model.

    Args:
        target: As in ``memcalc.load``: a config.json, an id of the Hub, or a catalog name.
        against: ``ledger`` to compare the layers with the exact ledger.
        settings: As in ``memcalc.load``; sizes, precision, kernels and dropout have an effect.

    Raises:
        ConfigError, InputError: As in ``memcalc.load``; or transformers does not build the model.
        UsageError: The family has no such attention in transformers, or memcalc has no ledger of
            the model.
        DeriveError: The model cannot be derived.
    """
    _require_against(against)
    theirs, made = _derived_model(target, settings)
    derived, model, _ = made
    content, config, run, said_of_it = theirs
    if against and config is None:
        raise UsageError(
            f"--against ledger: memcalc has no ledger of {target}, as its family is unknown"
        )
    found = whole.parts(made, config)
    inside, outside = found[:-1], found[-1]
    kernels = run.implementation
    own = model.sizes()
    sizes = {letter: own[letter] for letter in derived.sizes}
    said = ", ".join(f"{letter} {size}" for letter, size in own.items())
    name = config.model.name if config else content["model_type"]
    title = f"{name} in transformers ({said}, {run.precision}, {kernels.attention} attention)"
    number = ", ".join(f"{part.layers} {part.name}" for part in inside)
    about = (
        *how(derived),
        f"model: transformers' {type(model.model).__name__}, with logits and without a loss; "
        "stand-ins replace CUDA's dropout and attention kernels",
        *((f"layers: {number}",) if number else ()),
        *said_of_it,
    )
    if against and config is not None:
        rows = {
            part.name: beside.beside_hugging_face(
                config, part.name.split(" ")[0], model.family, part.tensors, derived.sizes
            )
            for part in inside
        }
        rest = f"outside the layers, not compared: {total(outside.tensors)} bytes"
        return _beside(title, rows, sizes, (*about, rest))
    return forms(title, {part.name: part.tensors for part in found}, sizes, about)


def _derived_model(
    target: str, settings: Mapping[str, Any]
) -> tuple["_Theirs", whole.DerivedModel]:
    """A derived model, with eager attention if no option names one and its family has no sdpa."""
    asked = settings.get("implementation") or settings.get("attention")
    try:
        theirs = _Theirs.of(target, settings)
        return theirs, whole.derived_model(theirs.content, theirs.run)
    except NoLayerError:
        if asked:
            raise
    theirs = _Theirs.of(target, {**settings, "implementation": _KERNELS["unfused"]})
    assumed = "assumed: eager attention, as the family has no sdpa attention"
    theirs = theirs._replace(notes=(assumed, *theirs.notes))
    return theirs, whole.derived_model(theirs.content, theirs.run)


# --attention -> the implementation of Hugging Face's that has it.
_KERNELS = FRAMEWORKS["transformers"].attentions


class _Theirs(NamedTuple):
    """A Hugging Face model: its config.json, memcalc's reading of it, and its run."""

    content: Mapping[str, Any]
    config: Config | None
    run: Run
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, target: str, settings: Mapping[str, Any]) -> "_Theirs":
        """A target's model, with the family's usual kernels where the settings give none."""
        given = {name: value for name, value in settings.items() if value is not None}
        usual = _KERNELS[given.pop("attention", "flash")]
        asked = given.setdefault("implementation", usual)
        if "attention" in settings and settings["attention"] and asked != usual:
            raise UsageError(f"--attention {settings['attention']} needs --implementation {usual}")
        if asked not in IMPLEMENTATIONS or not IMPLEMENTATIONS[asked].maker.whole_models:
            raise UsageError(
                "--from transformers needs --implementation transformers-eager or "
                f"transformers-sdpa, not {asked}"
            )
        require_precision(given.get("precision", "bf16"))
        content = catalog.content(target)
        if content is None:
            config = catalog.load(target, **given)
            hugging_face.require(config)
            return cls(content_of_model(config), config, config.run)
        text = whole.content_of(content) | _dropout(content, given.get("dropout"))
        try:
            config = catalog.load(target, **given)
        except NoLayerError:
            raise
        except (ConfigError, InputError) as error:
            known = {
                k: given[k] for k in ("seq_length", "micro_batch_size", "precision") if k in given
            }
            run = Run(**{"seq_length": 4096, **known}, implementation=IMPLEMENTATIONS[asked])
            return cls(text, None, run, (f"no ledger: {error}",))
        return cls(text, config, config.run, tuple(f"warning: {x}" for x in warnings(config)))


def _dropout(content: Mapping[str, Any], probability: float | None) -> dict[str, float]:
    """The keys of a config.json for its dropouts, with a probability that replaces the file's."""
    if probability is None:
        return {}
    words = families.FAMILIES.get(str(content.get("model_type")))
    if words is None:
        raise UsageError(
            "--dropout: memcalc does not know this family's keys for dropout; set them in its "
            "config.json"
        )
    return {
        key: probability
        for key, word in words.words.items()
        if word in ("attention_dropout", "hidden_dropout")
    }


def derive_target(
    target: str, letters: Mapping[str, int], at: Mapping[str, int], device: str = "cuda"
) -> Report:
    """The formula of the module that ``package.module:factory`` makes. This runs its code.

    Args:
        target: The factory, which returns a module and its inputs, and may return symbols too.
        letters: The size of each letter in these inputs, beside the factory's own symbols.
        at: Sizes at which to evaluate the formula; by default those of the inputs.
        device: The device whose kernels to count: ``cuda`` or ``cpu``.

    Raises:
        UsageError: There is no such factory, or it fails, or it returns something else.
        DeriveError: The module cannot be derived, or its formula does not hold at these sizes.
    """
    doing(f"calling {target}")
    module, inputs, own, told = _made(target)
    doing(f"deriving {target}")
    derived = derive(module, inputs, {**own, **letters}, device, at)
    about = (*told, f"module: {type(module).__name__}; kernels: {device}")
    sizes = {**derived.sizes, **at}
    return forms(target, {"": derived.tensors}, sizes, (*how(derived), *about))


def _made(target: str) -> tuple[nn.Module, Any, Mapping[str, Any], Sequence[str]]:
    """What a factory returns, and what it warns of."""
    with users_code(target) as told:
        made = factory(target)()
    if isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], nn.Module):
        module, inputs, letters = made if len(made) == 3 else (*made, {})
        if isinstance(letters, Mapping):
            return module, inputs, letters, told
    raise UsageError(
        f"{target} must return (module, inputs) or (module, inputs, symbols), where symbols is a "
        f"mapping; it returned {types(made)}"
    )


def _require_against(against: str | None) -> None:
    if against not in (None, *AGAINST):
        raise UsageError(f"against {against!r} is unknown; {nearest(str(against), AGAINST)}")


def _beside(
    title: str,
    parts: Mapping[str, Sequence[beside.ComparedTensor]],
    sizes: Mapping[str, int],
    about: Sequence[str],
) -> Report:
    """The rows of each part; those that differ are failures."""
    rows = [
        (name, row.tensor, row.module, row.op, row.derived, row.ledger, row.difference)
        for name, found in parts.items()
        for row in found
    ]
    failures = tuple(
        f"{name}: {row.tensor} differs: PyTorch minus ledger is {row.difference} bytes"
        for name, found in parts.items()
        for row in found
        if row.difference.expression != 0
    )
    return Report(
        "derive",
        f"Saved for backward by {title}, compared with the ledger",
        with_detail(COLUMNS, layer_kind=len(parts) == 1),
        tuple(rows),
        dict(sizes),
        tuple(about),
        failures,
        answer=_compared(parts),
        good=not failures,
    )


def _compared(parts: Mapping[str, Sequence[beside.ComparedTensor]]) -> str:
    """The comparison in one line."""
    totals = {name: found[-1].difference for name, found in parts.items()}
    differing = {name: each for name, each in totals.items() if each.expression != 0}
    if differing:
        terms = ", ".join(f"{name} by {each} bytes" for name, each in differing.items())
        return f"differs from the ledger: {terms}"
    tensors = sum(row.difference.expression != 0 for found in parts.values() for row in found)
    if tensors:
        return f"differs from the ledger in {tensors} tensors, whose differences cancel"
    if len(parts) > 1:
        return f"equal to the ledger: {', '.join(parts)}"
    totals_ = [str(found[-1].derived) for found in parts.values()]
    return f"equal to the ledger: {', '.join(totals_) or 0} bytes"
