"""DeepSpeed: its engine runs the step of another framework's layers, and ZeRO shards."""

from memcalc.frameworks.record import ESTIMATED, Sharder
from memcalc.frameworks.torch import TORCH

DEEPSPEED = TORCH._replace(
    title="DeepSpeed",
    kernels="transformers-sdpa",
    counts_steps=False,
    steps_with=("deepspeed",),
    optimizer_step="fused",  # runtime/engine.py: _configure_basic_optimizer, FusedAdam
    gradients_in_backward=False,
)

ZERO = Sharder(
    summary="DeepSpeed's ZeRO, over data- and sequence-parallel ranks",
    framework="deepspeed",
    source="DeepSpeed runtime/zero/stage_1_and_2.py, stage3.py",
    stages=(0, 1, 2, 3),
    refusal="",
    pipeline_stages=(0, 1),  # runtime/pipe/engine.py: PipelineEngine asserts this
    pipeline_refusal="has no --zero {zero} with --pp: use --zero 1, or --sharder fsdp2",
    any_model=True,
    default_stage=None,
    default_for=(2, 3),
    over_context=True,
    own_master=False,
    gathered_at=None,
    gathers={1: ("step",), 2: ("step",), 3: ("forward", "backward")},
    gathers_certainty=ESTIMATED,
    reduce_buffer="",
    around_root="",
    bucket=500_000_000,  # reduce_bucket_size
    buckets={1: 1, 2: 1, 3: 2},  # where communication overlaps by default
    bucket_source="DeepSpeed runtime/zero/stage_1_and_2.py, backward: ipg_buffer of "
    "reduce_bucket_size",
    step_elements=10**9,  # sub_group_size
    weights_dtype=True,  # 0.18.2, runtime/engine.py: get_data_types; up to 0.17 bf16 in fp32
    since="as in DeepSpeed 0.18 and later",
    known_order=False,
    flat=True,  # single_partition_of_fp32_groups
)
