"""What a model is: its sizes and the kinds of its parts."""

from dataclasses import dataclass, field
from typing import Any

from memcalc.config import fields, pipeline
from memcalc.errors import ConfigError

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
        q_lora_rank: Multi-head latent attention (MLA): the width that the query is compressed to,
            or None where it is not.
        kv_lora_rank: MLA: the width that key and value are compressed to; None is no MLA. With
            MLA, ``head_size`` is that of query and key, with ``rope_head_size`` in it.
        rope_head_size: MLA: the part of ``head_size`` that is rotated, whose key all heads share.
        v_head_size: MLA: the size of a value head.
        experts: Experts of a mixture-of-experts (MoE) layer, or None.
        experts_per_token: MoE: how many of them each token goes to.
        expert_ffn_size: MoE: the width of one expert.
        shared_ffn_size: MoE: the width of the experts that every token goes to, together.
        shared_gate: MoE: whether a learned gate scales what the shared experts give.
        moe_layers: MoE: a 1 for each layer of experts and a 0 for each dense one, of width
            ``ffn_size``; None: all, or without ``experts`` none.
        router: MoE: ``softmax`` or ``sigmoid``, which scores the experts.
        router_bias: MoE: whether the router's projection has a bias.
        router_dtype: MoE: what of the router is in fp32: a word of ``ROUTER_DTYPES``.
        router_norm: MoE: whether the scores of a token's experts are divided by their sum.
        capacity_factor: MoE: each expert takes this multiple of a balanced share of tokens and
            drops the rest; None is dropless.
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
        image_size: Pixels of a side of the images that a vision encoder reads, or None.
        patch_size: Pixels of a side of the patches that become its tokens, with one of the class
            before them: ``max_seq_length`` follows.
        image_channels: Channels per pixel.
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
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    rope_head_size: int | None = None
    v_head_size: int | None = None
    experts: int | None = None
    experts_per_token: int | None = None
    expert_ffn_size: int | None = None
    shared_ffn_size: int | None = None
    shared_gate: bool = False
    moe_layers: tuple[int, ...] | None = None
    router: str = "softmax"
    router_bias: bool = False
    router_dtype: str = "scores"
    router_norm: bool = False
    capacity_factor: float | None = None
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
    image_size: int | None = None
    patch_size: int | None = None
    image_channels: int = 3
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

    def __post_init__(self) -> None:
        fields.settle(self)
        fields.text("name", self.name)
        fields.text("source", self.source)
        if self.family is not None:
            fields.text("family", self.family)
        fields.whole("layers", self.layers, pipeline.MOST)
        fields.whole("hidden_size", self.hidden_size, 2**24)
        fields.whole("heads", self.heads, 2**20)
        self._derive("kv_heads", self.heads)
        if self.head_size is None:
            fields.divides(("heads", self.heads), ("hidden_size", self.hidden_size))
        self._derive("head_size", self.hidden_size // self.heads)
        self._derive("ffn_size", 4 * self.hidden_size)
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
                fields.whole(name, getattr(self, name), 2**31)
        for name in _POSITIVE:
            if getattr(self, name) is not None:
                fields.positive(name, getattr(self, name))
        for name in ("attention_dropout", "hidden_dropout", "embedding_dropout"):
            fields.probability(name, getattr(self, name))
        if type(self.mtp_layers) is not int or self.mtp_layers:
            fields.whole("mtp_layers", self.mtp_layers, 1000)
        rotated = self.rope_head_size or self.head_size
        if self.position == "rotary" and rotated % 2:
            raise ConfigError(f"rotary positions need an even head_size, not {rotated}")
        self._latent()
        self._mixture()
        self._relative()
        self._stacks()
        self._vision()
        self._pattern("window_layers", self.sliding_window, "sliding_window")
        self._pattern("moe_layers", self.experts, "experts")

    def _latent(self) -> None:
        """What multi-head latent attention needs, and what needs it."""
        needed = ("rope_head_size", "v_head_size")
        if self.kv_lora_rank is None:
            for name in ("q_lora_rank", *needed):
                if getattr(self, name) is not None:
                    raise ConfigError(f"{name} needs kv_lora_rank (multi-head latent attention)")
            return
        for name in needed:
            if getattr(self, name) is None:
                raise ConfigError(f"kv_lora_rank (multi-head latent attention) needs {name}")
        assert self.rope_head_size is not None
        if self.rope_head_size >= self.head_size:
            raise ConfigError(
                f"rope_head_size {self.rope_head_size} must be less than head_size "
                f"{self.head_size}, which includes it"
            )
        if self.kv_heads != self.heads:
            raise ConfigError("multi-head latent attention needs kv_heads equal to heads")

    def _mixture(self) -> None:
        """What a mixture of experts needs, and what needs it."""
        if self.experts is None:
            for name in ("experts_per_token", "expert_ffn_size", "shared_ffn_size"):
                if getattr(self, name) is not None:
                    raise ConfigError(f"{name} needs experts")
            return
        self._derive("experts_per_token", 1)
        self._derive("expert_ffn_size", self.ffn_size)
        assert self.experts_per_token is not None
        if self.experts_per_token > self.experts:
            raise ConfigError(
                f"experts_per_token {self.experts_per_token} must be at most experts {self.experts}"
            )

    def _relative(self) -> None:
        """The table that relative positions need, and nothing else does."""
        if self.position == "relative":
            self._derive("relative_buckets", 32)
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
            "multi-head latent attention": self.latent,
            "multi-token prediction layers": self.mtp_layers > 0,
        }
        found = [what for what, there in other.items() if there]
        if found or not self.causal:
            raise ConfigError(
                "an encoder-decoder is modeled like T5 (causal decoder, block pre_norm, no "
                "learned positions, no experts): it cannot have "
                f"{found[0] if found else 'a bidirectional decoder'}"
            )

    def _vision(self) -> None:
        """The tokens of an image: its patches, and one for its class."""
        fields.whole("image_channels", self.image_channels, 1000)
        if self.image_size is None and self.patch_size is None:
            return
        fields.whole("image_size", self.image_size, 2**15)
        assert self.image_size is not None
        fields.whole("patch_size", self.patch_size, self.image_size)
        assert self.patch_size is not None
        self._derive("max_seq_length", (self.image_size // self.patch_size) ** 2 + 1)

    def _pattern(self, name: str, needs: int | None, what: str) -> None:
        """A 0 or 1 for each layer, where they are given."""
        given = getattr(self, name)
        if given is not None:
            object.__setattr__(self, name, fields.pattern(name, given, self.layers))
            if needs is None and any(getattr(self, name)):
                raise ConfigError(f"{name} needs {what}")

    def _derive(self, name: str, value: int) -> None:
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)

    @property
    def latent(self) -> bool:
        """Whether the attention is multi-head latent attention (MLA)."""
        return self.kv_lora_rank is not None

    @property
    def gated(self) -> bool:
        """Whether the MLP multiplies an activated gate with a second projection."""
        return self.activation in GATED


_WORDS = {
    "norm": NORMS,
    "block": BLOCKS,
    "activation": ACTIVATIONS,
    "position": POSITIONS,
    "router": ROUTERS,
    "router_dtype": ROUTER_DTYPES,
    "norm_scale": NORM_SCALES,
}
_FLAGS = (
    *("qkv_bias", "proj_bias", "mlp_bias", "router_bias", "causal", "softmax_fp32"),
    *("tied_embeddings", "qk_norm", "attention_sinks", "shared_gate", "router_norm", "norm_bias"),
    *("embedding_norm", "final_norm", "head_transform", "head_bias", "pooled"),
    *("packed_qkv", "repeated_kv", "calls_attention", "norm_keeps_input", "drops_activation"),
)
_SIZES = (
    *("vocab_size", "max_seq_length", "sliding_window", "q_lora_rank", "kv_lora_rank"),
    *("rope_head_size", "v_head_size", "experts", "experts_per_token", "expert_ffn_size"),
    *("shared_ffn_size", "token_types", "relative_buckets", "classes"),
)
_POSITIVE = ("attention_softcap", "final_softcap", "capacity_factor")
