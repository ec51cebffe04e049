"""A ``config.json`` as the families read it: aliases, nulls, and numbers in quotes."""

import re
from collections.abc import Mapping
from typing import Any

from memcalc.config.assumption import Assumption
from memcalc.errors import ConfigError, InputError, nearest

# The names of each fact; messages use the first.
ALIASES = {
    "layers": (
        *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"),
        *("base_num_decoder_layers", "encoder_layers"),
    ),
    "hidden_size": (
        *("hidden_size", "n_embd", "d_model", "dim", "embed_dim", "base_emb_dim", "hidden_dim"),
    ),
    "heads": (
        *("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"),
    ),
    "kv_heads": (
        *("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_n_heads", "n_head_kv"),
        *("multi_query_group_num", "num_query_groups"),
    ),
    "head_size": ("head_dim", "d_kv"),
    "ffn_size": (
        *("intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size"),
        *("ffn_embed_dim", "mlp_dim"),
    ),
    "vocab_size": ("vocab_size",),
    "max_seq_length": (
        *("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length"),
    ),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "experts_per_token": (
        *("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_router_topk"),
    ),
    "sliding_window": ("sliding_window", "sliding_window_size"),
    "first_dense": ("first_k_dense_replace",),
    "mtp_layers": ("num_nextn_predict_layers", "num_mtp_layers"),
}
ACTIVATION = ("hidden_activation", "hidden_act", "activation_function", "activation")

# Activations by their names in configs: of plain and of gated MLPs.
PLAIN = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_new": "gelu_new",
    "gelu_python_tanh": "gelu_new",
    "gelu_fast": "gelu_fast",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "relu2": "squared_relu",
}
T5 = {
    "relu": "relu",
    "gelu": "gelu",
    "gated-gelu": "geglu_new",
    "gated-silu": "swiglu",
    "gated-swish": "swiglu",
}
GATED = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu"}


class Content:
    """A config, with the keys that were read and what had to be assumed.

    Args:
        content: The config's keys, all at one level.
        defaults: The defaults of the family's own code for missing facts.

    Attributes:
        read: The keys that were read.
        assumed: An assumption for each fact that the config does not give.
        unmodelled: A line for each fact that memcalc's ``Model`` cannot express.

    >>> said = Content({"n_layer": "12", "n_head": None}, {"heads": 8})
    >>> said.fact("layers"), said.fact("heads"), said.get("attn_pdrop", 0.1)
    (12, 8, 0.1)
    >>> [each.words for each in said.assumed]
    ['n_layer 12 (in quotes in the config)', "heads 8 (the family's default)"]
    """

    def __init__(self, content: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._content = content
        self._defaults = defaults
        self.read: set[str] = set()
        self.assumed: list[Assumption] = []
        self.unmodelled: list[str] = []

    def get(self, key: str, default: Any = None) -> Any:
        """A value, or the default where the key is missing or null."""
        self.read.add(key)
        value = self._content.get(key)
        return default if value is None else value

    def states(self, key: str) -> bool:
        """Whether the key is present, even with a null."""
        return key in self._content

    def fact(self, fact: str) -> Any:
        """A fact under any of its names, or the family's default, or None.

        Raises:
            ConfigError: Two of its names disagree.
        """
        found = {name: self.size(name) for name in self._names(fact)}
        found = {name: value for name, value in found.items() if value is not None}
        values = list(found.values())
        if any(value != values[0] for value in values):
            pairs = " and ".join(f"{n} {v!r:.20}" for n, v in found.items())
            raise ConfigError(f"{pairs} contradict each other")
        if values:
            return values[0]
        default = self._defaults.get(fact)
        if default is not None:
            self.assumed.append(Assumption(fact, default, "the family's default"))
        return default

    def size(self, key: str, default: Any = None) -> Any:
        """A value; digits in quotes are read as a number."""
        value = self.get(key, default)
        if isinstance(value, str) and re.fullmatch("[0-9]{1,12}", value):
            self.assumed.append(Assumption(key, int(value), "in quotes in the config"))
            return int(value)
        return value

    def optional(self, fact: str) -> Any:
        """A fact for which a null means none; a missing key means the default."""
        stated = [name for name in self._names(fact) if self.states(name)]
        if stated and all(self.get(name) is None for name in stated):
            return None
        return self.fact(fact)

    def dropout(self, key: str, default: float) -> Any:
        """A dropout probability, with a line where the family's default is not 0."""
        if default and self.get(key) is None:
            self.assumed.append(Assumption(key, default, "the family's default"))
        return self.get(key, default)

    def activation(self, known: Mapping[str, str], default: str) -> str:
        """The activation, under any of its names, by memcalc's name.

        Raises:
            InputError: It is not modeled.
            ConfigError: Two names of it disagree.
        """
        said = {key: self.get(key) for key in ACTIVATION}
        words = {key: _word(name, known) for key, name in said.items() if name is not None}
        if len(set(words.values())) > 1:
            pairs = " and ".join(f"{key} {said[key]}" for key in words)
            raise ConfigError(f"{pairs} contradict each other")
        return next(iter(words.values()), known[default])

    def word(self, key: str, known: Mapping[str, str], default: str) -> str:
        """The activation of one key, by memcalc's name.

        Raises:
            InputError: It is not modeled.
        """
        return _word(self.get(key, default), known)

    def _names(self, fact: str) -> tuple[str, ...]:
        """A fact's names.

        Next to ``dim``, ``hidden_dim`` is Mistral's name of the MLP's width; next to the number of
        decoder layers, ``num_layers`` is T5's name of the number of encoder layers.
        """
        if fact == "layers" and self._content.get("num_decoder_layers") is not None:
            return tuple(name for name in ALIASES[fact] if name != "num_layers")
        if self.states("dim") and self.states("hidden_dim"):
            if fact == "hidden_size":
                return tuple(name for name in ALIASES[fact] if name != "hidden_dim")
            if fact == "ffn_size":
                return (*ALIASES[fact], "hidden_dim")
        return ALIASES[fact]


def _word(name: Any, known: Mapping[str, str]) -> str:
    if not isinstance(name, str) or name not in known:
        shown = str(name)[:40]
        raise InputError(f"activation {shown!r} is not modeled; {nearest(shown, known)}")
    return known[name]
