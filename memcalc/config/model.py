"""What a model is: its sizes and the kinds of its parts, each with its meaning: one long file."""

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, replace
from dataclasses import fields as dataclass_fields
from typing import Any

from memcalc.config import fields, pipeline
from memcalc.errors import ConfigError, nearest

NORMS = ("layernorm", "rmsnorm")
GATED = ("swiglu", "geglu", "geglu_new", "clamped_swiglu")
ACTIVATIONS = ("gelu", "gelu_new", "gelu_fast", "silu", "relu", "squared_relu", *GATED)
POSITIONS = ("learned", "rotary", "alibi", "relative", "none")
ROUTERS = ("softmax", "sigmoid")
ROUTER_DTYPES = {
    "cast": "scores in fp32, and the weights of a token's experts in the activations' dtype (Qwen)",
    "scores": "scores and weights in fp32 (Mixtral)",
    "chosen": "nothing: scores are those of a token's experts alone, in the activations' dtype "
    "(gpt-oss)",
    "fp32": "the router's product in fp32 too (DeepSeek)",
}
NORM_SCALES = {
    "cast": "after the cast to the activations' dtype (Llama); a LayerNorm is one kernel (GPT-2)",
    "fp32": "in fp32, before the cast (gpt-oss); a LayerNorm is a chain of operations (Command-R)",
    "one_plus": "in fp32, by 1 + weight (Gemma)",
}

# Where a layer has its norms and residuals, relative to attention and MLP.
BLOCKS = {
    "pre_norm": "a norm before each sublayer (GPT-2, Llama)",
    "post_norm": "a norm after each residual sum (BERT)",
    "sandwich": "a norm before and after each sublayer (Gemma-2)",
    "parallel": "both sublayers read one norm's output, side by side (Command-R, Falcon-7B)",
    "parallel_two_norms": "side by side, each behind a norm of its own (GPT-NeoX, Falcon-40B)",
}

_DERIVED: Any = None  # a default that follows from other fields
_LARGEST = 2**31


def _named(name: str, default: Any = MISSING) -> Any:
    """A field of a record that has another name in files and in ``Model.of``."""
    return field(default=default, metadata={"name": name})


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention (MLA): ranks, and the sizes of a head's parts.

    Attributes:
        q_lora_rank: The width that the query is compressed to, or None where it is not.
        kv_lora_rank: The width that key and value are compressed to.
        rope_head_size: The part of the model's ``head_size`` that is rotated, whose key all heads
            share.
        v_head_size: The size of a value head.

    Raises:
        ConfigError: A value is missing or out of its bounds.

    >>> Latent(kv_lora_rank=512, rope_head_size=64, v_head_size=128).q_lora_rank is None
    True
    """

    q_lora_rank: int | None = None
    kv_lora_rank: int
    rope_head_size: int
    v_head_size: int

    def __post_init__(self) -> None:
        fields.settle(self)
        for each in dataclass_fields(self):
            if each.name != "q_lora_rank" or self.q_lora_rank is not None:
                fields.whole(each.name, getattr(self, each.name), _LARGEST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts (MoE): what an MoE layer has in place of the MLP.

    Attributes:
        number: Experts of a layer; ``experts`` in files.
        top_k: How many of them each token goes to; ``experts_per_token`` in files.
        ffn_size: The width of one expert, the model's ``ffn_size`` unless given;
            ``expert_ffn_size`` in files.
        shared_ffn_size: The width of the experts that every token goes to, together, or None.
        shared_gate: Whether a learned gate scales what the shared experts give.
        router: ``softmax`` or ``sigmoid``, which scores the experts.
        router_bias: Whether the router's projection has a bias.
        router_dtype: What of the router is in fp32: a word of ``ROUTER_DTYPES``.
        router_norm: Whether the scores of a token's experts are divided by their sum.
        capacity_factor: Each expert takes this multiple of a balanced share of tokens and drops
            the rest; None is dropless.

    Raises:
        ConfigError: A value is out of its bounds.

    >>> Experts(number=8, top_k=2).router
    'softmax'
    """

    number: int = _named("experts")
    top_k: int = _named("experts_per_token", _DERIVED)
    ffn_size: int = _named("expert_ffn_size", _DERIVED)
    shared_ffn_size: int | None = None
    shared_gate: bool = False
    router: str = "softmax"
    router_bias: bool = False
    router_dtype: str = "scores"
    router_norm: bool = False
    capacity_factor: float | None = None

    def __post_init__(self) -> None:
        fields.settle(self)
        _derive(self, "top_k", 1)
        fields.whole("experts", self.number, _LARGEST)
        fields.whole("experts_per_token", self.top_k, _LARGEST)
        for name, size in (
            ("expert_ffn_size", self.ffn_size),
            ("shared_ffn_size", self.shared_ffn_size),
        ):
            if size is not None:
                fields.whole(name, size, _LARGEST)
        if self.top_k > self.number:
            raise ConfigError(
                f"experts_per_token {self.top_k} must be at most experts {self.number}"
            )
        fields.word("router", self.router, ROUTERS)
        fields.word("router_dtype", self.router_dtype, ROUTER_DTYPES)
        for name in ("shared_gate", "router_bias", "router_norm"):
            fields.flag(name, getattr(self, name))
        if self.capacity_factor is not None:
            fields.positive("capacity_factor", self.capacity_factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vision:
    """The images that a vision encoder reads.

    Attributes:
        image_size: Pixels of a side of the images.
        patch_size: Pixels of a side of the patches that become tokens.
        channels: Channels per pixel; ``image_channels`` in files.

    Raises:
        ConfigError: A value is out of its bounds.

    >>> Vision(image_size=224, patch_size=16).tokens
    197
    """

    image_size: int
    patch_size: int
    channels: int = _named("image_channels", 3)

    def __post_init__(self) -> None:
        fields.settle(self)
        fields.whole("image_channels", self.channels, 1000)
        fields.whole("image_size", self.image_size, 2**15)
        fields.whole("patch_size", self.patch_size, self.image_size)

    @property
    def tokens(self) -> int:
        """One token per patch of an image, and one for its class."""
        return (self.image_size // self.patch_size) ** 2 + 1

    @property
    def pixels(self) -> int:
        """The pixels of a patch, over all channels."""
        return self.channels * self.patch_size**2


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A transformer of layers of attention and an MLP, dense or of experts.

    Attributes:
        name: What the model is called.
        layers: L, transformer layers; of an encoder-decoder, the decoder's.
        encoder_layers: Of an encoder-decoder, the encoder's layers; None is no encoder-decoder.
        hidden_size: h.
        heads: a, attention (query) heads.
        kv_heads: k, key and value heads: equal to ``heads`` (multi-head attention) unless given.
        head_size: d, the size of one head: ``hidden_size / heads`` unless given.
        ffn_size: f, the width of the MLP: ``4 * hidden_size`` unless given. Of a gated MLP, the
            width of the gate and of the up projection each.
        vocab_size: v, or None where it is unknown (one layer does not need it).
        max_seq_length: The longest sequence that the model is meant for, or None.
        norm: ``layernorm`` or ``rmsnorm``.
        block: Where a layer has its norms and residuals: a word of ``BLOCKS``.
        activation: ``gelu``, ``gelu_new`` (GPT-2's tanh form), ``gelu_fast`` (GPT-NeoX's),
            ``silu``, ``relu`` or ``squared_relu``, or gated: ``swiglu``, ``geglu``, ``geglu_new``
            (by GPT-2's tanh form) or ``clamped_swiglu`` (gpt-oss's).
        position: ``learned``, ``rotary``, ``alibi``, ``relative`` (a learned bias of the scores for
            each distance, one table for each stack: T5) or ``none``.
        relative_buckets: Rows of that table: 32 unless given.
        qk_norm: Whether each head's query and key pass a norm.
        attention_sinks: Whether each head has a learned logit that takes part in its softmax.
        attention_softcap: The bound that tanh puts on scores, or None.
        final_softcap: The bound that tanh puts on logits, or None.
        sliding_window: How many tokens a windowed layer's token attends to, or None.
        window_layers: A 1 for each windowed layer and a 0 for each that sees the whole sequence;
            None: all, or without a ``sliding_window`` none.
        moe_layers: A 1 for each layer of experts and a 0 for each dense one, of width
            ``ffn_size``; None: all, or without ``experts`` none.
        latent: Multi-head latent attention, or None where the model has none. With it,
            ``head_size`` is that of query and key, with the rotated part in it.
        experts: The mixture of experts, or None where the model has none.
        mtp_layers: Layers that predict further tokens (multi-token prediction), beside ``layers``.
        packed_qkv: Whether query, key and value are one product's output in the model's own code
            (GPT-NeoX, Phi-3), of which an implementation may keep views.
        repeated_kv: Whether the model's own code repeats key and value to all query heads for a
            flash kernel too (Falcon-40B).
        calls_attention: Whether the model's own code calls PyTorch's attention itself, always with
            a mask, and without a word of it where query heads share a key and value head (Falcon).
        norm_scale: How the model's own code scales what a norm has normalized: a word of
            ``NORM_SCALES``.
        norm_keeps_input: Whether RMSNorm multiplies its input as it is, beside the fp32 copy that
            it squares (T5).
        norm_bias: Whether LayerNorms have a bias.
        embedding_norm: Whether a norm follows the embedding (BLOOM, BERT).
        final_norm: Whether a norm precedes the head.
        drops_activation: Whether hidden dropout is also applied to the MLP's activation (T5).
        vision: The images that a vision encoder reads, or None. ``max_seq_length`` follows.
        classes: Classes that a vision encoder's head predicts from the first token, or None.
        token_types: Rows of a table of token types that the embedding adds (BERT), or None.
        head_transform: Whether a linear, an activation and a norm precede the logits (BERT).
        head_bias: Whether the logits have a bias.
        pooled: Whether a linear and a two-class head on the first token come with the logits
            (BERT's next-sentence prediction).
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
        family: Its family in transformers (``model_type``), or None where it is unknown. Two models
            that differ in it alone are equal.

    Raises:
        ConfigError: A value is out of its bounds, or two contradict each other.

    >>> gpt3 = Model(name="gpt-3", layers=96, hidden_size=12288, heads=96, vocab_size=51200)
    >>> gpt3.kv_heads, gpt3.head_size, gpt3.ffn_size
    (96, 128, 49152)
    >>> sizes = {"name": "toy", "layers": 2, "hidden_size": 64, "heads": 4, "ffn_size": 128}
    >>> toy = Model(**sizes, experts=Experts(number=8, top_k=2))
    >>> toy.experts.ffn_size
    128
    >>> toy == Model.of(**sizes, experts=8, experts_per_token=2)
    True
    """

    name: str
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int = _DERIVED
    head_size: int = _DERIVED
    ffn_size: int = _DERIVED
    encoder_layers: int | None = None
    vocab_size: int | None = None
    max_seq_length: int | None = None
    norm: str = "layernorm"
    block: str = "pre_norm"
    activation: str = "gelu"
    position: str = "learned"
    relative_buckets: int | None = None
    qk_norm: bool = False
    attention_sinks: bool = False
    attention_softcap: float | None = None
    final_softcap: float | None = None
    sliding_window: int | None = None
    window_layers: tuple[int, ...] | None = None
    moe_layers: tuple[int, ...] | None = None
    latent: Latent | None = None
    experts: Experts | None = None
    mtp_layers: int = 0
    packed_qkv: bool = False
    repeated_kv: bool = False
    calls_attention: bool = False
    norm_scale: str = "cast"
    norm_keeps_input: bool = False
    norm_bias: bool = True
    embedding_norm: bool = False
    final_norm: bool = True
    drops_activation: bool = False
    vision: Vision | None = None
    classes: int | None = None
    token_types: int | None = None
    head_transform: bool = False
    head_bias: bool = False
    pooled: bool = False
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
    family: str | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, **facts: Any) -> "Model":
        """A model from the flat names of files, where each record's fields are the model's own.

        Args:
            facts: Fields of ``Model``, and of ``Latent``, ``Experts`` and ``Vision`` under their
                names in files. A record is None if none of its fields is given.

        Raises:
            ConfigError: A name is unknown, or a fact needs a record that is not given.

        >>> sizes = {"name": "toy", "layers": 2, "hidden_size": 64, "heads": 4}
        >>> Model.of(**sizes, experts=8, experts_per_token=2).experts.top_k
        2
        """
        for name in facts:
            if name not in FACTS:
                raise ConfigError(f"a model has no {name!r}; {nearest(name, FACTS)}")
        plain = {each.name for each in dataclass_fields(cls)} - {*_RECORDS}
        own = {name: value for name, value in facts.items() if name in plain}
        return cls(**own, **{name: _record(name, facts) for name in _RECORDS})

    def facts(self) -> dict[str, Any]:
        """Every field under its flat name, those of a record that is None with their defaults.

        >>> sizes = {"name": "toy", "layers": 2, "hidden_size": 64, "heads": 4}
        >>> toy = Model.of(**sizes, experts=8)
        >>> Model.of(**toy.facts() | {"experts_per_token": 2}).experts.top_k
        2
        """
        found: dict[str, Any] = {}
        for each in dataclass_fields(self):
            value = getattr(self, each.name)
            if each.name not in _RECORDS:
                found[each.name] = value
            for name, own in _RECORDS.get(each.name, {}).items():
                found[name] = _default(own) if value is None else getattr(value, own.name)
        return found

    def __post_init__(self) -> None:
        fields.settle(self)
        fields.text("name", self.name)
        fields.text("source", self.source)
        if self.family is not None:
            fields.text("family", self.family)
        fields.whole("layers", self.layers, pipeline.MOST)
        fields.whole("hidden_size", self.hidden_size, 2**24)
        fields.whole("heads", self.heads, 2**20)
        _derive(self, "kv_heads", self.heads)
        if self.head_size is None:
            fields.divides(("heads", self.heads), ("hidden_size", self.hidden_size))
        _derive(self, "head_size", self.hidden_size // self.heads)
        _derive(self, "ffn_size", 4 * self.hidden_size)
        fields.whole("kv_heads", self.kv_heads, 2**20)
        fields.whole("head_size", self.head_size, 2**20)
        fields.whole("ffn_size", self.ffn_size, 2**26)
        fields.divides(("kv_heads", self.kv_heads), ("heads", self.heads))
        for name, choices in _WORDS.items():
            fields.word(name, getattr(self, name), choices)
        for name in _FLAGS:
            fields.flag(name, getattr(self, name))
        for name in _SIZES:
            if getattr(self, name) is not None:
                fields.whole(name, getattr(self, name), _LARGEST)
        for name in _POSITIVE:
            if getattr(self, name) is not None:
                fields.positive(name, getattr(self, name))
        for name in ("attention_dropout", "hidden_dropout", "embedding_dropout"):
            fields.probability(name, getattr(self, name))
        if type(self.mtp_layers) is not int or self.mtp_layers:
            fields.whole("mtp_layers", self.mtp_layers, 1000)
        for name, kind in _KINDS.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise ConfigError(
                    f"{name} must be a record {kind.__name__}, not {fields.shown(value)}"
                )
        rotated = self.latent.rope_head_size if self.latent else self.head_size
        if self.position == "rotary" and rotated % 2:
            raise ConfigError(f"rotary positions need an even head_size, not {rotated}")
        self._heads_of_latent()
        if self.experts and self.experts.ffn_size is None:
            own = replace(self.experts, ffn_size=self.ffn_size)
            object.__setattr__(self, "experts", own)
        self._relative()
        self._stacks()
        if self.vision:
            _derive(self, "max_seq_length", self.vision.tokens)
        self._pattern("window_layers", "sliding_window")
        self._pattern("moe_layers", "experts")

    def _heads_of_latent(self) -> None:
        """Refuse heads that multi-head latent attention cannot have."""
        if self.latent is None:
            return
        if self.latent.rope_head_size >= self.head_size:
            raise ConfigError(
                f"rope_head_size {self.latent.rope_head_size} must be less than head_size "
                f"{self.head_size}, which includes it"
            )
        if self.kv_heads != self.heads:
            raise ConfigError("multi-head latent attention needs kv_heads equal to heads")

    def _relative(self) -> None:
        """The table that relative positions need, and nothing else does."""
        if self.position == "relative":
            _derive(self, "relative_buckets", 32)
        elif self.relative_buckets is not None:
            raise ConfigError("relative_buckets needs relative positions")

    def _stacks(self) -> None:
        """Refuse an encoder-decoder of another form than T5's."""
        if self.encoder_layers is None:
            return
        fields.whole("encoder_layers", self.encoder_layers, pipeline.MOST)
        other = {
            f"block {self.block}": self.block != "pre_norm",
            "learned positions": self.position == "learned",
            "experts": self.experts is not None,
            "multi-head latent attention": self.latent is not None,
            "multi-token prediction layers": self.mtp_layers > 0,
        }
        found = [what for what, there in other.items() if there]
        if found or not self.causal:
            raise ConfigError(
                "an encoder-decoder is modeled like T5 (causal decoder, block pre_norm, no "
                "learned positions, no experts): it cannot have "
                f"{found[0] if found else 'a bidirectional decoder'}"
            )

    def _pattern(self, name: str, needs: str) -> None:
        """A 0 or 1 for each layer, where they are given."""
        given = getattr(self, name)
        if given is not None:
            object.__setattr__(self, name, fields.pattern(name, given, self.layers))
            if getattr(self, needs) is None and any(getattr(self, name)):
                raise ConfigError(f"{name} needs {needs}")

    @property
    def gated(self) -> bool:
        """Whether the MLP multiplies an activated gate with a second projection."""
        return self.activation in GATED


def _derive(record: Any, name: str, value: int) -> None:
    if getattr(record, name) is None:
        object.__setattr__(record, name, value)


def _default(own: "Field[Any]") -> Any:
    return None if own.default is MISSING else own.default


def _record(name: str, facts: Mapping[str, Any]) -> Any:
    """A record of a model, from flat facts; None where all of its own are missing or defaults."""
    names = _RECORDS[name]
    values = {flat: facts.get(flat, _default(own)) for flat, own in names.items()}
    given = [x for x, own in names.items() if values[x] not in (None, _default(own))]
    missing = [x for x, own in names.items() if values[x] is None and own.default is MISSING]
    if not given:
        return None
    if missing:
        raise ConfigError(f"{given[0]} needs {missing[0]}")
    return _KINDS[name](**{own.name: values[flat] for flat, own in names.items()})


_KINDS = {"latent": Latent, "experts": Experts, "vision": Vision}
# The fields of each record by their names in files.
_RECORDS = {
    name: {own.metadata.get("name", own.name): own for own in dataclass_fields(kind)}
    for name, kind in _KINDS.items()
}
FACTS = tuple(
    name for each in dataclass_fields(Model) for name in _RECORDS.get(each.name, (each.name,))
)
OF_EXPERTS = (*_RECORDS["experts"], "moe_layers")  # facts that a dense model does not have
_WORDS = {
    "norm": NORMS,
    "block": BLOCKS,
    "activation": ACTIVATIONS,
    "position": POSITIONS,
    "norm_scale": NORM_SCALES,
}
_FLAGS = (
    *("qkv_bias", "proj_bias", "mlp_bias", "causal", "softmax_fp32", "tied_embeddings"),
    *("qk_norm", "attention_sinks", "norm_bias", "embedding_norm", "final_norm"),
    *("head_transform", "head_bias", "pooled", "packed_qkv", "repeated_kv", "calls_attention"),
    *("norm_keeps_input", "drops_activation"),
)
_SIZES = (
    *("vocab_size", "max_seq_length", "sliding_window", "token_types", "relative_buckets"),
    "classes",
)
_POSITIVE = ("attention_softcap", "final_softcap")
