"""Which kernels run: two implementations of one layer keep different tensors for backward."""

from dataclasses import dataclass
from typing import NamedTuple

from memcalc.config import fields
from memcalc.errors import ConfigError
from memcalc.frameworks import FRAMEWORKS
from memcalc.frameworks.record import Framework


class AttentionKernel(NamedTuple):
    """A way to compute attention.

    Attributes:
        summary: What it is, in a line.
        operation: The operation of one fused kernel, which keeps no tensor of s x s, as
            ``module:name``; nothing where scores and softmax are operations of their own.
    """

    summary: str
    operation: str


ATTENTIONS = {
    "flash": AttentionKernel(
        "one fused kernel, which keeps no tensor of s x s",
        "memcalc.graph.ops.attention:flash_attention",
    ),
    "unfused": AttentionKernel("scores, softmax and context, each an operation of its own", ""),
}


class CrossEntropy(NamedTuple):
    """A way to compute the loss.

    Attributes:
        summary: What it is, in a line.
        operation: Its operation, as ``module:name``.
        source: Where that is implemented.
        makes_logits: Whether all logits are in memory at once, and can be held.
        dropped: Whether its own training loop drops them before backward.
    """

    summary: str
    operation: str
    source: str
    makes_logits: bool = True
    dropped: bool = False


EXPERT_PRODUCTS = ("grouped", "sequential", "batched")
_LOSSES = "memcalc.graph.ops.losses:"
_LIGER_LINEAR = CrossEntropy(
    "Liger's head and loss in one function, a chunk of tokens at a time: no logits are kept",
    f"{_LOSSES}liger_linear",
    "Liger-Kernel ops/fused_linear_cross_entropy.py (0.8.5)",
    makes_logits=False,
)
CROSS_ENTROPIES = {
    "unfused": CrossEntropy(
        "Megatron-core: an fp32 copy of the logits becomes their softmax in place",
        f"{_LOSSES}unfused",
        "Megatron-core tensor_parallel/cross_entropy.py",
    ),
    "native": CrossEntropy(
        "Megatron-core's fused kernel: one more copy of the logits while it runs",
        f"{_LOSSES}native",
        "Megatron-core fusions/fused_cross_entropy.py",
    ),
    "te": CrossEntropy(
        "Transformer Engine's kernel: overwrites the logits in place",
        f"{_LOSSES}te",
        "Transformer Engine pytorch/cross_entropy.py",
    ),
    "torch": CrossEntropy(
        "PyTorch's log_softmax and nll_loss of an fp32 copy of the logits",
        f"{_LOSSES}upcast",
        "transformers loss/loss_utils.py: ForCausalLMLoss; torchtitan components/loss.py",
    ),
    "torch-16bit": CrossEntropy(
        "PyTorch's log_softmax and nll_loss of the logits in their own dtype",
        f"{_LOSSES}as_they_are",
        "transformers models/t5/modeling_t5.py: CrossEntropyLoss",
    ),
    "torch-fp32": CrossEntropy(
        "PyTorch's log_softmax and nll_loss of logits that the model returns in fp32",
        f"{_LOSSES}returned_fp32",
        "torchtune modules/transformer.py: self.output(h).float()",
    ),
    "compiled": CrossEntropy(
        "PyTorch's, compiled by Inductor: no fp32 copy of the logits is written",
        f"{_LOSSES}compiled",
        "torchtitan components/loss.py: torch.compile(self.fn)",
    ),
    "loss-parallel": CrossEntropy(
        "DTensor's loss_parallel, over a vocabulary that tensor-parallel ranks shard",
        f"{_LOSSES}loss_parallel",
        "PyTorch distributed/tensor/parallel/loss.py",
    ),
    "torchtune-chunked": CrossEntropy(
        "torchtune's CEWithChunkedOutputLoss: all logits exist, and are upcast in 8 chunks",
        f"{_LOSSES}upcast_in_chunks",
        "torchtune modules/loss/ce_chunked_output_loss.py: CEWithChunkedOutputLoss",
        dropped=True,
    ),
    "litgpt": CrossEntropy(
        "litgpt's, of the logits in their own dtype, 128 tokens at a time",
        f"{_LOSSES}in_chunks",
        "litgpt utils.py: chunked_cross_entropy; finetune/lora.py: lm_head_chunk_size",
    ),
    "chunked-recomputed": CrossEntropy(
        "8 chunks of tokens, each checkpointed with the head's GEMM",
        f"{_LOSSES}recomputed_in_chunks",
        "PyTorch utils/checkpoint.py, around a chunk's GEMM and loss",
        makes_logits=False,
    ),
    "liger": CrossEntropy(
        "Liger's kernel: overwrites the logits with their gradient",
        f"{_LOSSES}liger",
        "Liger-Kernel ops/cross_entropy.py",
    ),
    "liger-linear": _LIGER_LINEAR,
    "chunked": _LIGER_LINEAR._replace(summary="the same as liger-linear"),
    "cut": CrossEntropy(
        "Apple's cut cross entropy: one kernel, and no logits in memory",
        f"{_LOSSES}cut",
        "ml-cross-entropy cut_cross_entropy/cce.py",
        makes_logits=False,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """The variants of operations that an implementation uses.

    Attributes:
        name: The word for it on the command line.
        framework: Whose layers these are: a key of ``memcalc.frameworks.FRAMEWORKS``.
        source: Where its choices were seen.
        attention: How attention is computed: a word of ``ATTENTIONS``.
        fused_norms: Whether RMSNorm is one kernel that keeps its input, or a chain of fp32
            operations that keeps more; so too LayerNorm, where the model's own code has a chain.
        fused_gelu: Whether the tanh form of GeLU is one kernel, or a chain where the model's own
            code has one (``gelu_new``, ``gelu_fast``).
        fused_gate: Whether a gated activation is one kernel that keeps its packed input, or an
            activation and a product that keep their inputs each.
        softmax_fp32: Whether the unfused softmax is kept in fp32 where the model asks for one. (A
            fused kernel keeps its output in the activations' dtype, whatever it computes in.)
        repeats_kv: Whether unfused attention repeats K and V to all heads before its products.
        keeps_gathered: Whether sequence parallelism keeps the gathered inputs of the linears,
            rather than gathering them again in backward.
        weighs_outputs: Whether experts' outputs are weighed after their second product, which keeps
            them, rather than before it.
        own_heads: Whether a flash kernel reads heads as the model's own code makes them: views
            of all that they were packed with, or repeated.
        fills_padding: Whether unfused attention that is not causal fills what is padded with zeros
            behind its softmax too, by a mask that each layer makes and keeps.
        keeps_masks: Whether a layer whose fused attention is given a mask or a bias of the scores
            (a window's, relative positions', or one that the model's own code makes) runs PyTorch's
            memory-efficient kernel, which keeps a copy of it. (Unfused, a sum keeps nothing.)
        sorts_routes: Whether routed tokens are sorted by expert with indices of 8 bytes, which are
            kept.
        copies_router: Whether a router whose product is in fp32 keeps an fp32 copy of its input;
            Megatron-core's own function keeps it as it is.
        norms_in_linears: Whether the norm before queries, keys and values, before a dense MLP and
            of MLA's latents is part of the linear behind it, and recomputed with that or not at all
            (Transformer Engine's ``LayerNormLinear``; Megatron-core, gpt_layer_specs.py).
        weighs_activations: Whether experts' activations are weighed by an operation of its own
            where they are not gated in one kernel, which keeps them. (Megatron-core's kernels of
            gated ones weigh as they activate.)
        sorts_chunks: Whether received tokens are sorted by a rank's experts
            with one more copy.
        shared_first: Whether shared experts run before the routed ones.
        holds_routed: Whether tokens on their way to the experts stay until the block returns, for
            its variables refer to them (Megatron-core, moe_layer.py: custom_forward).
        gathers_tokens: Whether expert ranks receive all tokens and select their own, where others
            receive only their own (Megatron-core's all-gather token dispatcher).
        expert_products: ``grouped``, one GEMM per expert in one call, ``sequential``, one expert
            after another, or ``batched``, one GEMM per routed token, which keeps a copy of its
            expert's weights.
        cross_entropy: How the loss is computed: a word of ``CROSS_ENTROPIES``.
        holds_logits: Whether the caller refers to the logits until backward is over, as in ``out =
            model(...); out.loss.backward()``.
        batch_first: Whether the flash kernel has batches before tokens, and its output is copied to
            the layers' order (FlashAttention; cuDNN's kernels take either).
        kernel_by_gpu: Whether the GPU decides ``batch_first``: Transformer Engine chooses between
            FlashAttention and cuDNN's kernel.
        fp32_statistics: Whether LayerNorm keeps its statistics in fp32, as on CUDA, or in the
            activations' dtype, as PyTorch's does on a CPU.
        transformer_engine: Whether Transformer Engine's modules make the layers, and allocate
            their workspaces.
        packs_value: Whether a rotary layer's value is a view of a packed tensor, which is kept.
        separate_linears: Whether query, key and value, and gate and up, have a weight each, unless
            the family's own code packs them (``Family.packs``).
        rotary_tables: Whether cosines and sines of the positions are computed in each forward pass,
            and kept once for all layers.
        rng_bytes: Bytes of random-number state that a flash kernel keeps.

    Raises:
        ConfigError: ``attention`` is unknown, or ``rng_bytes`` is not a count.

    >>> IMPLEMENTATIONS["paper"].attention
    'unfused'
    """

    name: str
    framework: str
    source: str
    attention: str = "flash"
    fused_norms: bool = True
    fused_gelu: bool = True
    fused_gate: bool = True
    softmax_fp32: bool = False
    repeats_kv: bool = False
    keeps_gathered: bool = False
    weighs_outputs: bool = False
    weighs_activations: bool = False
    sorts_chunks: bool = False
    shared_first: bool = False
    holds_routed: bool = False
    gathers_tokens: bool = False
    expert_products: str = "grouped"
    norms_in_linears: bool = False
    own_heads: bool = False
    fills_padding: bool = False
    keeps_masks: bool = False
    sorts_routes: bool = False
    copies_router: bool = False
    cross_entropy: str = "unfused"
    holds_logits: bool = False
    batch_first: bool = False
    kernel_by_gpu: bool = False
    fp32_statistics: bool = True
    transformer_engine: bool = False
    packs_value: bool = False
    separate_linears: bool = False
    rotary_tables: bool = False
    rng_bytes: int = 0

    @property
    def fused_attention(self) -> str:
        """The operation of the fused attention kernel, as ``module:name``, or nothing.

        >>> IMPLEMENTATIONS["megatron"].fused_attention, IMPLEMENTATIONS["paper"].fused_attention
        ('memcalc.graph.ops.attention:flash_attention', '')
        """
        return ATTENTIONS[self.attention].operation

    @property
    def loss(self) -> str:
        """The operation of the loss, as ``module:name``.

        >>> IMPLEMENTATIONS["torch"].loss
        'memcalc.graph.ops.losses:upcast'
        """
        return CROSS_ENTROPIES[self.cross_entropy].operation

    @property
    def maker(self) -> Framework:
        """The framework whose layers these are."""
        return FRAMEWORKS[self.framework]

    def __post_init__(self) -> None:
        fields.word("framework", self.framework, FRAMEWORKS)
        fields.word("attention", self.attention, ATTENTIONS)
        fields.word("expert_products", self.expert_products, EXPERT_PRODUCTS)
        fields.word("cross_entropy", self.cross_entropy, CROSS_ENTROPIES)
        for name in ("batch_first", "fused_gate", "gathers_tokens", "holds_logits", "softmax_fp32"):
            fields.flag(name, getattr(self, name))
        if type(self.rng_bytes) is not int or self.rng_bytes < 0:
            raise ConfigError(f"rng_bytes must be a whole number from 0, not {self.rng_bytes!r}")


IMPLEMENTATIONS = {
    record.name: record
    for record in (
        Implementation(
            name="paper",
            framework="megatron-2022",
            source="Megatron-LM of 2022, as Korthikanti et al. 2022 count it",
            attention="unfused",
        ),
        Implementation(
            name="megatron",
            framework="megatron",
            transformer_engine=True,
            source="Megatron-core with Transformer Engine layers",
            norms_in_linears=True,
            fills_padding=True,
            repeats_kv=True,
            weighs_activations=True,
            sorts_chunks=True,
            shared_first=True,
            holds_routed=True,
            kernel_by_gpu=True,
            rng_bytes=16,
        ),
        Implementation(
            name="megatron-local",
            framework="megatron",
            packs_value=True,
            source="Megatron-core's local layer spec with its fused softmax",
            attention="unfused",
            repeats_kv=True,
            weighs_activations=True,
            sorts_chunks=True,
            shared_first=True,
            holds_routed=True,
        ),
        Implementation(
            name="torch",
            framework="torch",
            source="plain PyTorch modules under DTensor tensor and sequence parallelism",
            fused_gate=False,
            keeps_gathered=True,
            cross_entropy="torch",
            holds_logits=True,
            rng_bytes=24,
        ),
        Implementation(
            name="transformers-eager",
            framework="transformers",
            source="Hugging Face transformers 5, attn_implementation='eager'",
            attention="unfused",
            fused_norms=False,
            fused_gelu=False,
            fused_gate=False,
            softmax_fp32=True,
            repeats_kv=True,
            keeps_gathered=True,
            weighs_outputs=True,
            own_heads=True,
            separate_linears=True,
            rotary_tables=True,
            sorts_routes=True,
            copies_router=True,
            cross_entropy="torch",
            holds_logits=True,
        ),
        Implementation(
            name="transformers-sdpa",
            framework="transformers",
            source="Hugging Face transformers 5, attn_implementation='sdpa' (a flash kernel, "
            "except where a mask is passed)",
            fused_norms=False,
            fused_gelu=False,
            fused_gate=False,
            softmax_fp32=True,
            repeats_kv=True,
            keeps_gathered=True,
            weighs_outputs=True,
            own_heads=True,
            keeps_masks=True,
            separate_linears=True,
            rotary_tables=True,
            sorts_routes=True,
            copies_router=True,
            cross_entropy="torch",
            holds_logits=True,
            rng_bytes=24,
        ),
    )
}
