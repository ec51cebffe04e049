"""Hugging Face transformers: its layers, in a step that PyTorch runs."""

from collections.abc import Iterator

from memcalc.frameworks import torch
from memcalc.frameworks.record import Accuracy, Buffer, Rank

ROTARY = "transformers models/llama/modeling_llama.py: LlamaRotaryEmbedding, inv_freq, twice"
BATCH = "transformers data/data_collator.py: DataCollatorForLanguageModeling, input_ids and labels"
LEARNED = "transformers models/gpt2/modeling_gpt2.py: GPT2Model.forward, position_ids"
MASK = "transformers masking_utils.py: eager_mask; PyTorch utils/checkpoint.py: its arguments"
POSITIONS = "PyTorch utils/checkpoint.py: checkpoint, its arguments; position_ids"

TRANSFORMERS = torch.TORCH._replace(
    title="Hugging Face",
    kernels="transformers-sdpa",
    accuracy=Accuracy(2, "0.02", "0.02", "docs/runs.md"),
    clamps_fp16=True,
    whole_models=True,
    layers="transformers",
    dtensor=False,
    masks_from_to=((4, 53), (4, 57)),  # masking_utils.py: find_packed_sequence_indices
    attentions={"unfused": "transformers-eager", "flash": "transformers-sdpa"},
    sharded_as="torch",
    lasting="memcalc.frameworks.transformers:lasting",
    in_a_pass="memcalc.frameworks.transformers:in_a_pass",
    batch="memcalc.frameworks.transformers:batch",
)


def lasting(rank: Rank) -> Iterator[Buffer]:
    """DDP's buckets, the labels, and the frequencies of rotary angles, fp32."""
    yield from torch.lasting(rank)
    model, run = rank.config.model, rank.config.run
    if rank.head:
        yield Buffer("labels", 8 * run.seq_length * run.micro_batch_size, BATCH)
    if model.position == "rotary":
        width = model.latent.rope_head_size if model.latent else model.head_size
        yield Buffer("frequencies of rotary angles", 2 * 4 * (width // 2), ROTARY)


def in_a_pass(rank: Rank, phase: str) -> Iterator[Buffer]:
    """The loss and its gradient; positions; what checkpoints of layers hold.

    Args:
        rank: The rank.
        phase: ``forward``, ``backward``, or ``end``, when the layers' backward is done.
    """
    yield from torch.in_a_pass(rank, phase)
    model, run = rank.config.model, rank.config.run
    if phase == "end":
        return
    if model.position == "learned" and rank.embedding:
        yield Buffer("position ids", 8 * run.seq_length, LEARNED)
    if "layer" not in run.policy.regions:
        return
    if model.position == "rotary":
        yield Buffer("position ids of the checkpoints", 8 * run.seq_length, POSITIONS)
    if model.causal and not run.implementation.fused_attention:
        size = run.activation_bytes * run.micro_batch_size * run.seq_length**2
        yield Buffer("mask of the checkpoints", size, MASK)


def batch(rank: Rank) -> Iterator[Buffer]:
    """The tokens of the last micro-batch; in a pass they are among the embedding's activations."""
    run = rank.config.run
    if rank.embedding:
        yield Buffer(
            "tokens of the last micro-batch", 8 * run.seq_length * run.micro_batch_size, BATCH
        )
