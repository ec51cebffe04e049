"""PyTorch: plain modules and its own step; FSDP2."""

from collections.abc import Iterator

from memcalc.frameworks.record import READ, Buffer, Framework, Rank, Sharder

GATHER = "PyTorch distributed/fsdp/_fully_shard/_fsdp_param_group.py: wait_for_unshard"
PREFETCH = "PyTorch distributed/fsdp/_fully_shard/_fsdp_param_group.py: _backward_prefetch"
ROOT = "PyTorch distributed/fsdp/_fully_shard/_fsdp_state.py: _auto_reshard_after_forward"
REDUCE = "PyTorch distributed/fsdp/_fully_shard/_fsdp_collectives.py: foreach_reduce"
BACKWARD = "PyTorch torch/autograd/__init__.py: backward, _make_grads"
DDP = "PyTorch torch/csrc/distributed/c10d/reducer.cpp: initialize_buckets"

TORCH = Framework(
    title="PyTorch",
    kernels="torch",
    accuracy=None,
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
    masks_from_to=(),
    attentions={},
    sharded_as="",
    optimizer_step="foreach",  # optim/optimizer.py: _default_to_fused_or_foreach, on CUDA
    counts_steps=True,  # optim/adam.py: _init_group, with fused
    widens_states=False,
    momentum=0,  # optim/sgd.py
    ends_in_root=True,
    lasting="memcalc.frameworks.torch:lasting",
    in_a_pass="memcalc.frameworks.torch:in_a_pass",
    between_steps="",
    batch="",
)

FSDP2 = Sharder(
    summary="PyTorch's fully_shard, whose weight shards are the master weights",
    framework="torch",
    source="PyTorch distributed/fsdp/_fully_shard/_fsdp_param.py",
    stages=(2, 3),
    refusal="needs --zero 3, or 2 to keep weights gathered after forward, not {zero}",
    pipeline_stages=(2, 3),
    pipeline_refusal="",
    any_model=True,
    default_stage=3,
    default_for=(),
    over_context=True,
    own_master=True,
    gathered_at=2,
    gathers={2: ("forward",), 3: ("forward", "backward")},
    gathers_certainty=READ,
    reduce_buffer="PyTorch distributed/fsdp/_fully_shard/_fsdp_collectives.py: foreach_reduce",
    around_root="memcalc.frameworks.torch:fsdp2",
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


def in_a_pass(rank: Rank, phase: str) -> Iterator[Buffer]:
    """The loss and its gradient, fp32, which the caller of backward refers to."""
    if rank.head and phase != "forward" and rank.steps_itself:
        yield Buffer("the loss and its gradient", 2 * 4, BACKWARD)


def fsdp2(rank: Rank, moment: str, weight: int, gradient: int) -> Iterator[Buffer]:
    """What FSDP2 gathers and reduces at a moment of a pass, beside gradients that autograd makes.

    Each layer is a unit; the embedding, the head and all else are the root. A unit is gathered into
    one block, from which its parameters are copied. In forward, that block stays until the next
    unit is gathered; in backward, the next unit is gathered while one runs. Gradients of a unit are
    copied to a block in the dtype in which they are reduced, which stays until the next unit's.

    Args:
        rank: The rank.
        moment: ``forward``, ``loss``, ``head backward``, ``backward``, ``embedding backward`` or
            ``root reduction``.
        weight: Bytes per element of gathered weights.
        gradient: Bytes per element of reduced gradients.
    """
    layer, root = rank.layer_size, rank.root_size
    resharded = rank.config.parallel.zero == 3
    whole = root if resharded else rank.root_size + rank.layer_sizes
    if moment == "root reduction":  # the root's weights are freed before
        yield Buffer("the root's gradients in the reduce buffer", gradient * root, REDUCE)
        return
    yield Buffer("gathered weights that stay", weight * whole, ROOT)
    if moment == "forward":
        copies = 2 if resharded else 1
        yield Buffer(
            "gathered weights of a layer, and their block", copies * weight * layer, GATHER
        )
    elif moment == "head backward" and resharded:
        yield Buffer("gathered weights of the last layer", weight * layer, PREFETCH)
    elif moment == "backward":
        if resharded:
            name = "gathered weights of one layer and the next"
            yield Buffer(name, 2 * weight * layer, PREFETCH)
        yield Buffer("a layer's gradients in the reduce buffer", gradient * layer, REDUCE)
    elif moment == "embedding backward":
        yield Buffer("a layer's gradients in the reduce buffer", gradient * layer, REDUCE)
