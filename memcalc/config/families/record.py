"""What is known of a Hugging Face family, as plain data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from memcalc.config.families.content import Content
from memcalc.config.model import Model

Facts = dict[str, Any]
Word = str | Callable[[Model, bool | None], Any]


class Remaining(NamedTuple):
    """How a family's layer differs from the exact ledger.

    Attributes:
        bytes: The bytes that the layer saves and the ledger does not have; None if transformers has
            no such layer.
        cause: The reason.
    """

    bytes: int | None
    cause: str


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models: how its config.json is read and written, and what its layer is.

    Attributes:
        read: From its config.json to fields of Model. A missing key has the default of the
            family's class in transformers.
        architectures: Names in ``architectures``, for a config.json without ``model_type``.
        defaults: Defaults of the family's class for facts that ``Content.fact`` reads.
        four_h: Whether the MLP is 4 x hidden_size wide where the config gives no width.
        built_as: The family whose layer transformers builds for this one; "" is itself.
        layer: The class of its layer in transformers; "" if memcalc does not build it.
        words: For each key of its config.json the name of a fact of ``Model.of``, or a function of
            a Model and of whether the first layer is dense (None: the layers are those of the
            model).
        names: For each part of the layer, the ledger's operations and the layer's modules in it,
            except the module of the part's own name.
        packs: Linears that its layer computes as one: ``qkv``, ``gate`` (gate and up).
        cross_entropy: The loss of its class in transformers: a word of ``CROSS_ENTROPIES``.
        remaining: By implementation, how its layer differs from the ledger; the layers of all other
            implementations equal it.
    """

    read: Callable[[Content], Facts]
    architectures: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    four_h: bool = False
    built_as: str = ""
    layer: str = ""
    words: Mapping[str, Word] = field(default_factory=dict)
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    packs: tuple[str, ...] = ()
    cross_entropy: str = "torch"
    remaining: Mapping[str, Remaining] = field(default_factory=dict)

    def write(self, model: Model, dense: bool | None = None) -> dict[str, Any]:
        """A model as a config.json of the family, of which ``read`` gives the model's facts.

        Args:
            model: The model.
            dense: Whether the first layer is dense; None: the layers are those of the model.
        """
        facts = model.facts()
        return {
            key: facts[word] if isinstance(word, str) else word(model, dense)
            for key, word in self.words.items()
        }
