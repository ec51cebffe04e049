"""PyTorch: plain modules and its own step; FSDP2."""

from collections.abc import Iterator

from memcalc.frameworks.record import READ, Buffer, Framework, Rank, Sharder

DDP = "PyTorch torch/csrc/distributed/c10d/reducer.cpp: initialize_buckets"

TORCH = Framework(
    title="PyTorch",
    steps_with=("megatron", "megatron-fsdp", "fsdp2"),
    fuses_gradients=False,
    gradients_in_backward=True,
    global_buffer=False,
    reentrant=False,
    known_order=False,
    clamps_fp16=False,
    whole_models=False,
    layers="own",
    built=True,
    local_spec=False,
    dtensor=True,
    attentions={},
    sharded_as="",
    optimizer_step="foreach",  # optim/optimizer.py: _default_to_fused_or_foreach, on CUDA
    widens_states=False,
    momentum=0,  # optim/sgd.py
    lasting="memcalc.frameworks.torch:lasting",
    in_a_pass="",
    between_steps="",
)

FSDP2 = Sharder(
    summary="PyTorch's fully_shard, whose weight shards are the master weights",
    framework="torch",
    source="PyTorch distributed/fsdp/_fully_shard/_fsdp_param.py",
    stages=(2, 3),
    refusal="needs --zero 3, or 2 to keep weights gathered after forward, not {zero}",
    pipeline_stages=(2, 3),
    pipeline_refusal="",
    default_stage=3,
    default_for=(),
    over_context=True,
    own_master=True,
    gathered_at=2,
    gathers={2: ("forward",), 3: ("forward", "backward")},
    gathers_certainty=READ,
    reduce_buffer="PyTorch distributed/fsdp/_fully_shard/_fsdp_collectives.py: foreach_reduce",
    bucket=None,
    buckets={},
    bucket_source="",
    step_elements=None,
    weights_dtype=False,
    since="",
    known_order=False,
    flat=False,
)


def lasting(rank: Rank) -> Iterator[Buffer]:
    """The buckets of DistributedDataParallel, beside the gradients (not as their memory)."""
    config = rank.config
    if rank.steps_itself and config.parallel.replicas > 1 and config.parallel.zero == 0:
        size = config.run.activation_bytes * rank.trained
        yield Buffer("DDP's buckets of gradients", size, DDP)
