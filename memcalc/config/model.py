"""What a model is: its sizes and the kinds of its parts."""

from dataclasses import dataclass
from typing import Any

from memcalc.config import fields
from memcalc.errors import ConfigError

NORMS = ("layernorm", "rmsnorm")
GATED = ("swiglu", "geglu")
ACTIVATIONS = ("gelu", "gelu_new", "silu", *GATED)
POSITIONS = ("learned", "rotary", "none")

_DERIVED: Any = None  # a default that follows from other fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A transformer with one kind of layer: attention and an MLP, each behind a norm.

    Attributes:
        name: What the model is called.
        layers: L, transformer layers.
        hidden_size: h.
        heads: a, attention (query) heads.
        kv_heads: k, key and value heads: equal to ``heads`` (multi-head attention) unless given.
        head_size: d, the size of one head: ``hidden_size / heads`` unless given.
        ffn_size: f, the width of the MLP: ``4 * hidden_size`` unless given. Of a gated MLP, the
            width of the gate and of the up projection each.
        vocab_size: v, or None where it is unknown (one layer does not need it).
        max_seq_length: The longest sequence that the model is meant for, or None.
        norm: ``layernorm`` or ``rmsnorm``.
        activation: ``gelu``, ``gelu_new`` (GPT-2's tanh form) or ``silu``, or gated: ``swiglu`` or
            ``geglu``.
        position: ``learned``, ``rotary`` or ``none``.
        qkv_bias: Whether the query, key and value projections have a bias.
        proj_bias: Whether the attention's output projection has a bias.
        mlp_bias: Whether the linears of the MLP have a bias.
        causal: Whether a token attends only to those before it.
        softmax_fp32: Whether the attention asks for its softmax in fp32 (Llama's code does, GPT-2's
            does not). An implementation may have its own way.
        tied_embeddings: Whether the head's weight is the embedding's.
        attention_dropout: The dropout probability of the attention's softmax.
        hidden_dropout: The dropout probability of the attention's and the MLP's output.
        embedding_dropout: The dropout probability of the embedding.
        source: Where the facts were seen.

    Raises:
        ConfigError: A value is out of its bounds, or two contradict each other.

    >>> gpt3 = Model(name="gpt-3", layers=96, hidden_size=12288, heads=96, vocab_size=51200)
    >>> gpt3.kv_heads, gpt3.head_size, gpt3.ffn_size
    (96, 128, 49152)
    """

    name: str
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int = _DERIVED
    head_size: int = _DERIVED
    ffn_size: int = _DERIVED
    vocab_size: int | None = None
    max_seq_length: int | None = None
    norm: str = "layernorm"
    activation: str = "gelu"
    position: str = "learned"
    qkv_bias: bool = True
    proj_bias: bool = True
    mlp_bias: bool = True
    causal: bool = True
    softmax_fp32: bool = False
    tied_embeddings: bool = True
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    embedding_dropout: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        fields.text("name", self.name)
        fields.text("source", self.source)
        fields.whole("layers", self.layers, 100_000)
        fields.whole("hidden_size", self.hidden_size, 2**24)
        fields.whole("heads", self.heads, 2**20)
        if self.kv_heads is None:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.head_size is None:
            fields.divides(("heads", self.heads), ("hidden_size", self.hidden_size))
            object.__setattr__(self, "head_size", self.hidden_size // self.heads)
        if self.ffn_size is None:
            object.__setattr__(self, "ffn_size", 4 * self.hidden_size)
        fields.whole("kv_heads", self.kv_heads, 2**20)
        fields.whole("head_size", self.head_size, 2**20)
        fields.whole("ffn_size", self.ffn_size, 2**26)
        fields.divides(("kv_heads", self.kv_heads), ("heads", self.heads))
        for name in ("vocab_size", "max_seq_length"):
            if getattr(self, name) is not None:
                fields.whole(name, getattr(self, name), 2**31)
        fields.word("norm", self.norm, NORMS)
        fields.word("activation", self.activation, ACTIVATIONS)
        fields.word("position", self.position, POSITIONS)
        for name in (
            "qkv_bias",
            "proj_bias",
            "mlp_bias",
            "causal",
            "softmax_fp32",
            "tied_embeddings",
        ):
            fields.flag(name, getattr(self, name))
        for name in ("attention_dropout", "hidden_dropout", "embedding_dropout"):
            fields.probability(name, getattr(self, name))
        if self.position == "rotary" and self.head_size % 2:
            raise ConfigError(f"rotary positions need an even head_size, not {self.head_size}")

    @property
    def gated(self) -> bool:
        """Whether the MLP multiplies an activated gate with a second projection."""
        return self.activation in GATED
