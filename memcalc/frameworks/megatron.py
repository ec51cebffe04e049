"""Megatron-LM: its layers and its step today, the step of 2022, and its sharders."""

from collections.abc import Iterator

from memcalc.frameworks.record import ESTIMATED, Accuracy, Buffer, Framework, Rank, Sharder

MEGATRON_BUFFER = "Megatron-core tensor_parallel/layers.py: get_global_memory_buffer"
MEGATRON_TOKENS = (
    "Megatron-core transformer/moe/token_dispatcher.py: MoEAllGatherTokenDispatcher.token_dispatch"
)
MEGATRON_SCORES = "Megatron-core transformer/dot_product_attention.py: matmul_input_buffer"
MEGATRON_PIPELINE = "Megatron-core pipeline_parallel/schedules.py: set_input_tensor, retain_grad"
MEGATRON_P2P = "Megatron-core pipeline_parallel/schedules.py, p2p_communication.py"
MEGATRON_DEFERRED = "Megatron-core tensor_parallel/layers.py: grad_output_buffer"
TORCH_LEAF = "PyTorch torch/csrc/autograd/functions/accumulate_grad.h: AccumulateGrad.variable"
MEGATRON_MASK = (
    "Megatron-LM megatron/core/datasets/gpt_dataset.py: _get_ltor_masks_and_position_ids"
)
MEGATRON_ROTARY = "Megatron-core models/common/embeddings/rotary_pos_embedding.py: lru_cache"

MEGATRON = Framework(
    title="Megatron-LM",
    kernels="megatron",
    accuracy=Accuracy(196, "0.19", "23.5", "docs/runs.md"),
    steps_with=("megatron", "megatron-fsdp"),
    fuses_gradients=True,  # into main_grad
    gradients_in_backward=False,
    global_buffer=True,
    reentrant=True,  # tensor_parallel/random.py: CheckpointFunction
    known_order=True,
    clamps_fp16=False,
    whole_models=False,
    layers="own",
    built=True,
    local_spec=True,
    dtensor=False,
    masks_from_to=(),
    attentions={},
    sharded_as="",
    optimizer_step="fused",  # Megatron-core optimizer/__init__.py: FusedAdam of TE or Apex
    counts_steps=False,
    widens_states=True,
    momentum=0.9,  # Megatron-core optimizer/optimizer_config.py: sgd_momentum
    ends_in_root=False,
    lasting="memcalc.frameworks.megatron:lasting",
    in_a_pass="memcalc.frameworks.megatron:in_a_pass",
    between_steps="memcalc.frameworks.megatron:between_steps",
    batch="",
)

# What Korthikanti et al. 2022 count: activations, weights, gradients and states, and no buffers.
MEGATRON_2022 = MEGATRON._replace(
    title="Megatron-LM of 2022",
    kernels="paper",
    accuracy=None,
    steps_with=("megatron", "megatron-fsdp", "deepspeed", "fsdp2", "nanotron"),
    built=False,
    global_buffer=False,
    reentrant=False,
    known_order=False,
    lasting="",
    in_a_pass="",
    between_steps="",
)

DISTRIBUTED_OPTIMIZER = {"zero": 1, "sharder": "megatron"}  # what the flag of this name means

SHARDER = Sharder(
    summary="Megatron-LM's distributed optimizer, over data- and context-parallel ranks",
    framework="megatron",
    source="Megatron-core param_and_grad_buffer.py, optimizer.py, distrib_optimizer.py",
    stages=(0, 1),
    refusal="shards optimizer states only (--zero 1): for --zero {zero} use --sharder deepspeed, "
    "fsdp2 or megatron-fsdp",
    pipeline_stages=(0, 1),
    pipeline_refusal="",
    any_model=False,
    default_stage=None,
    default_for=(0, 1),
    over_context=True,
    own_master=False,
    gathered_at=None,
    gathers={1: ("step",)},
    gathers_certainty=ESTIMATED,
    reduce_buffer="",
    around_root="",
    bucket=None,
    buckets={},
    bucket_source="",
    step_elements=None,
    weights_dtype=False,
    since="",
    known_order=True,
    flat=False,
)

MEGATRON_FSDP = SHARDER._replace(
    summary="Megatron-FSDP, over data- and context-parallel ranks",
    source="Megatron-core distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py",
    stages=(0, 1, 2, 3),
    refusal="",
    pipeline_stages=(0, 1, 2, 3),
    default_stage=3,
    default_for=(),
    gathers={1: ("step",), 2: ("step",), 3: ("forward", "backward")},
    known_order=False,
)


def lasting(rank: Rank) -> Iterator[Buffer]:
    """The buffer that linears, attention and dispatcher share, and the table of rotary angles."""
    model, run, parallel = rank.config.model, rank.config.run, rank.config.parallel
    kernels = run.implementation
    whole = run.activation_bytes * run.seq_length * run.micro_batch_size * model.hidden_size
    gathers = parallel.sp and parallel.tp > 1 and (rank.head or not kernels.transformer_engine)
    sizes = [(whole // parallel.cp if gathers else 0, MEGATRON_BUFFER)]
    if not kernels.transformer_engine and not kernels.fused_attention:
        heads = model.heads // parallel.tp
        scores = run.activation_bytes * run.micro_batch_size * heads * run.seq_length**2
        sizes.append((scores // parallel.cp**2, MEGATRON_SCORES))
    if rank.experts and kernels.gathers_tokens and parallel.ep * parallel.expert_tp > 1:
        shard = whole // parallel.cp // (parallel.tp if parallel.sp else 1)
        sizes.append((shard * parallel.ep * parallel.expert_tp, MEGATRON_TOKENS))
    size, source = max(sizes)
    yield Buffer("Megatron's GlobalMemoryBuffer", size, source)
    if model.position == "rotary":
        width = model.latent.rope_head_size if model.latent else model.head_size
        size = 4 * run.seq_length * width // parallel.cp  # fp32, for a rank's tokens
        yield Buffer("rotary embedding table", size, MEGATRON_ROTARY)


def in_a_pass(rank: Rank, phase: str) -> Iterator[Buffer]:
    """What its pipeline schedule and its data loader hold while a micro-batch passes.

    Args:
        rank: The rank.
        phase: ``forward`` or ``backward``.
    """
    run, parallel = rank.config.run, rank.config.parallel
    first = rank.embedding and parallel.chunks_per_rank == 1
    if rank.steps_itself and parallel.pp > 1 and not first:
        if parallel.chunks_per_rank > 1:
            name, number = "input, output gradient and input gradient in transit", 3
        elif phase == "forward":
            name, number = "stage input of the previous micro-batch, and its gradient", 2
        else:
            name, number = "gradient of the previous micro-batch's stage input", 1
        yield Buffer(name, number * rank.output_bytes, MEGATRON_P2P)
    if phase == "forward" and (rank.embedding or rank.head) and run.environment.loader_mask:
        size = run.micro_batch_size * run.seq_length**2 // parallel.cp
        yield Buffer("attention mask from the data loader", size, MEGATRON_MASK)
    if rank.steps_itself:
        yield from _deferred(rank)


def between_steps(rank: Rank) -> Iterator[Buffer]:
    """What its pipeline schedule keeps after an iteration."""
    parallel = rank.config.parallel
    if parallel.pp > 1:
        received = parallel.chunks_per_rank - rank.embedding
        name = "last stage input of each model chunk, and its gradient"
        yield Buffer(name, 2 * received * rank.output_bytes, MEGATRON_PIPELINE)


def _deferred(rank: Rank) -> Iterator[Buffer]:
    """Logit gradients and hidden states of micro-batches whose head gradient is deferred.

    A hidden state keeps its micro-batch's autograd graph alive, and with it the leaf of this graph:
    the input that the stage received, with its gradient. Those of the current and the previous
    micro-batch are counted elsewhere.
    """
    config = rank.config
    run, parallel = config.run, config.parallel
    number = min(run.environment.deferred_gradients, config.microbatches)
    if number and rank.head:
        assert config.model.vocab_size is not None
        tokens = run.activation_bytes * run.seq_length * run.micro_batch_size // parallel.cp
        each = tokens * config.model.vocab_size // parallel.tp + rank.output_bytes
        name = "logit gradients and hidden states for the deferred head gradient"
        yield Buffer(name, number * each, MEGATRON_DEFERRED)
        leaves = max(0, min(number, config.microbatches - 2)) if parallel.pp > 1 else 0
        name = "stage inputs of the deferred micro-batches and their gradients"
        yield Buffer(name, 2 * leaves * rank.output_bytes, TORCH_LEAF)
