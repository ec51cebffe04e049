"""``derive``: the closed form of a layer, of a whole model or of any module, from PyTorch itself.

A layer of memcalc's own runs on symbols of all its sizes, a model of Hugging Face on those of its
tokens, a module of the user's own on those that he names. The ledger may stand beside the first
two.
"""

import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from importlib import import_module
from typing import Any, NamedTuple

from torch import nn

from memcalc import symbols
from memcalc.answers.notes import notes, recomputation, setting
from memcalc.config import IMPLEMENTATIONS, Config, Run, catalog
from memcalc.errors import ConfigError, InputError, UsageError, nearest
from memcalc.report import Column, Report
from memcalc.validation import beside, families, hugging_face, whole
from memcalc.validation.derivation import Derived, derive, total
from memcalc.validation.forms import forms, how
from memcalc.validation.modules import TYPES
from memcalc.validation.symbolic_layer import derived_layer
from memcalc.validation.validate import require

AGAINST = ("ledger",)


def derive_layer(config: Config, against: str | None = None) -> Report:
    """The closed form of memcalc's own layer, in all its sizes.

    Args:
        config: The model, its parallelism and its run.
        against: ``ledger`` to hold the exact ledger beside it.

    Raises:
        UsageError: There is no such layer.
        DeriveError: It cannot be derived.

    >>> from memcalc.config import load
    >>> report = derive_layer(load("175b", sp=True, recompute="selective"))
    >>> print(report.column("formula")[-1])
    b*h*s*(34 + 16/h)/t
    """
    _require_against(against)
    if config.run.implementation.name.startswith("transformers-"):
        raise UsageError("Hugging Face's kernels are those of --from transformers")
    require(config, "meta", "own")
    derived = derived_layer(config)
    title = f"one layer of {setting(config)} keeps, {recomputation(config)}"
    about = (
        "layer: memcalc's own, in plain PyTorch; stand-ins for fused kernels",
        *notes(config, "exact"),
    )
    sizes = symbols.values(config)
    if against:
        rows = {"layer": beside.beside_layer(config, derived.tensors)}
        return _beside(title, rows, sizes, (*how(derived), *about))
    return forms(title, {"layer": derived.tensors}, sizes, (*how(derived), *about))


def derive_model(target: str, against: str | None = None, **settings: Any) -> Report:
    """The closed form of a model of Hugging Face: of a layer of each kind, and outside of them.

    Args:
        target: As of ``memcalc.load``: a config.json, an id of the Hub, or a name of the catalogue.
        against: ``ledger`` to hold the exact ledger beside the layers.
        settings: As of ``memcalc.load``; of them the sizes, precision, kernels and dropout count.

    Raises:
        ConfigError, InputError: As of ``memcalc.load``; or transformers does not build the model.
        UsageError: It has no such attention there, or memcalc has no ledger of it.
        DeriveError: It cannot be derived.
    """
    _require_against(against)
    theirs, derived, model = _derived_model(target, settings)
    content, config, run, said_of_it = theirs
    if against and config is None:
        raise UsageError(f"memcalc has no ledger of {target}: it does not know its family")
    found = whole.parts(derived, model, content, run, config)
    inside, outside = found[:-1], found[-1]
    kernels = run.implementation
    own = model.sizes()
    sizes = {letter: own[letter] for letter in derived.sizes}
    said = ", ".join(f"{letter} {size}" for letter, size in own.items())
    name = config.model.name if config else content["model_type"]
    title = f"{name} keeps in transformers ({said}, {run.precision}, {kernels.attention} attention)"
    number = ", ".join(f"{part.layers} {part.name}" for part in inside)
    about = (
        *how(derived),
        f"model: transformers' own {type(model.model).__name__}, its logits and no loss; stand-ins "
        "for CUDA's dropout and attention kernels",
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
        rest = f"outside the layers, which their ledger does not have: {total(outside.tensors)}"
        return _beside(title, rows, sizes, (*about, rest))
    return forms(title, {part.name: part.tensors for part in found}, sizes, about)


def _derived_model(
    target: str, settings: Mapping[str, Any]
) -> tuple["_Theirs", Derived, whole.Whole]:
    """A model, derived; with eager attention where nobody said which and it has no other."""
    asked = settings.get("implementation") or settings.get("attention")
    try:
        theirs = _Theirs.of(target, settings)
        return theirs, *whole.derived_model(theirs.content, theirs.run)
    except hugging_face.NoAttentionError:
        if asked:
            raise
    theirs = _Theirs.of(target, {**settings, "implementation": "transformers-eager"})
    assumed = "assumed: eager attention, since the family has no sdpa"
    theirs = theirs._replace(notes=(assumed, *theirs.notes))
    return theirs, *whole.derived_model(theirs.content, theirs.run)


class _Theirs(NamedTuple):
    """A model of Hugging Face: its config.json, the same as memcalc reads it, and its run."""

    content: Mapping[str, Any]
    config: Config | None
    run: Run
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, target: str, settings: Mapping[str, Any]) -> "_Theirs":
        """A target's, under settings, of which kernels not said are what the family has."""
        given = {name: value for name, value in settings.items() if value is not None}
        eager = given.pop("attention", None) == "unfused"
        asked = given.setdefault(
            "implementation", "transformers-eager" if eager else "transformers-sdpa"
        )
        if not str(asked).startswith("transformers-"):
            raise UsageError(
                f"implementation {asked} is not Hugging Face's: choose transformers-eager or -sdpa"
            )
        _require_type(given.get("precision", "bf16"))
        content = catalog.content(target)
        if content is None:
            config = catalog.load(target, **given)
            hugging_face.require(config)
            return cls(_content(config), config, config.run)
        try:
            config = catalog.load(target, **given)
        except (ConfigError, InputError) as error:
            known = {
                k: given[k] for k in ("seq_length", "micro_batch_size", "precision") if k in given
            }
            run = Run(**{"seq_length": 4096, **known}, implementation=IMPLEMENTATIONS[asked])
            return cls(whole.content_of(content), None, run, (f"no ledger: {error}",))
        words = families.FAMILIES.get(str(content.get("model_type")))
        text = whole.content_of(content)
        if "dropout" in given:
            if words is None:
                raise UsageError(
                    "--dropout has no word in this family's config.json: change it there"
                )
            text |= {
                key: given["dropout"]
                for key, word in words.words.items()
                if word in ("attention_dropout", "hidden_dropout")
            }
        return cls(text, config, config.run, tuple(f"warning: {x}" for x in config.warnings))


def _content(config: Config) -> dict[str, Any]:
    """A model of the catalogue as its family's config.json would say it."""
    family, model = hugging_face.family(config), config.model
    sizes = {"num_hidden_layers": model.layers, "vocab_size": model.vocab_size}
    return {
        "model_type": family,
        **{key: value for key, value in sizes.items() if value is not None},
        **families.described(family, model),
    }


def derive_target(
    target: str, letters: Mapping[str, int], at: Mapping[str, int], device: str = "cuda"
) -> Report:
    """The closed form of what ``package.module:factory`` makes. This runs its code.

    Args:
        target: The factory: it returns a module and its inputs, and may return their letters too.
        letters: Letters with their sizes in these inputs, beside the factory's own.
        at: Sizes at which to evaluate the form, where they are not the inputs' own.
        device: Whose kernels: ``cuda`` or ``cpu``.

    Raises:
        UsageError: There is no such factory, or it returns something else.
        DeriveError: The module cannot be derived, or its form does not hold at these sizes.
    """
    module, inputs, own = _made(target)
    derived = derive(module, inputs, {**own, **letters}, device, at)
    about = (f"module: {type(module).__name__}; whose kernels: {device}'s",)
    sizes = {**derived.sizes, **at}
    return forms(f"{target} keeps", {"": derived.tensors}, sizes, (*how(derived), *about))


def _made(target: str) -> tuple[nn.Module, Any, Mapping[str, Any]]:
    """What a factory returns, with the working directory among what can be imported."""
    place, _, name = target.partition(":")
    sys.path.insert(0, "")
    try:
        with redirect_stdout(sys.stderr):  # stdout is the answer's
            made = getattr(import_module(place), name)()
    except (Exception, SystemExit) as error:  # whatever the user's own code raises
        why = " ".join(str(error).split())[:160]
        raise UsageError(f"{target} makes no module: {type(error).__name__}: {why}") from error
    finally:
        sys.path.remove("")
    if isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], nn.Module):
        module, inputs, letters = made if len(made) == 3 else (*made, {})
        if isinstance(letters, Mapping):
            return module, inputs, letters
    raise UsageError(
        f"{target} must return a module and its inputs, and may return a mapping of letters; it "
        f"returned {_types(made)}"
    )


def _types(made: Any) -> str:
    """What something is; of a tuple, what its first items are."""
    if not isinstance(made, tuple):
        return type(made).__name__
    return ", ".join(type(each).__name__ for each in made[:4]) or "nothing"


def _require_against(against: str | None) -> None:
    if against not in (None, *AGAINST):
        raise UsageError(f"against {against!r} is unknown; {nearest(str(against), AGAINST)}")


def _require_type(precision: str) -> None:
    if precision not in TYPES:
        raise UsageError(f"{precision} is not derived: choose from {', '.join(TYPES)}")


def _beside(
    title: str,
    parts: Mapping[str, Sequence[beside.Row]],
    sizes: Mapping[str, int],
    about: Sequence[str],
) -> Report:
    """The rows of each part, and as failures those that differ."""
    rows = [
        (name, row.tensor, row.module, row.op, row.derived, row.ledger, row.difference)
        for name, found in parts.items()
        for row in found
    ]
    failures = tuple(
        f"{name}: of {row.tensor} PyTorch keeps {row.difference} beyond the ledger"
        for name, found in parts.items()
        for row in found
        if row.difference.expression != 0
    )
    return Report(
        "derive",
        f"What {title}, beside the ledger",
        (
            Column("layer_kind", "text", detail=len(parts) == 1),
            Column("tensor", "text"),
            Column("module", "text", detail=True),
            Column("op", "text", detail=True),
            Column("formula", "formula"),
            Column("ledger_formula", "formula"),
            Column("difference", "formula"),
        ),
        tuple(rows),
        dict(sizes),
        tuple(about),
        failures,
    )
