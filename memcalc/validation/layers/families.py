"""The families of Hugging Face whose layers memcalc builds, with their config.json and names."""

from typing import Any

from memcalc.blocks.layer import DENSE, WINDOWED
from memcalc.config import Model, families
from memcalc.config.families import names as shared

_DENSE_KINDS = (DENSE, WINDOWED[DENSE])

FAMILIES = {name: each for name, each in families.FAMILIES.items() if each.layer}


def as_config(family: str, model: Model, kind: str = "") -> dict[str, Any]:
    """A model as a config.json of a family.

    Its first layer is of the given kind; without a kind, layers are those of the model.

    >>> from memcalc.config import load
    >>> as_config("gpt2", load("gpt2").model, "dense")["n_inner"]
    3072
    """
    return FAMILIES[family].write(model, kind in _DENSE_KINDS if kind else None)


def parts(family: str, kind: str = "") -> dict[str, str]:
    """The part of a family's layer that each operation of the ledger and each module belongs to.

    A dense layer of a MoE model has the parts of an MLP.
    """
    names = FAMILIES[family].names
    if kind in _DENSE_KINDS and "experts" in names:
        mlp = {part: shared.PARTS[part] for part in ("fc1", "act_fn", "mlp")}
        names = {part: those for part, those in names.items() if part != "experts"} | mlp
    return {each: part for part, those in names.items() for each in those}
