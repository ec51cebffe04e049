"""What is recorded of a framework: whose layers run, who runs the step, and who shards.

Records are plain data. The few functions that only one framework needs stand in its own file. They
are named in its record, and called with a ``Rank``.
"""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, Protocol

READ, ESTIMATED = "framework-dependent", "estimated"  # how sure a size is; see analysis.parts


class Accuracy(NamedTuple):
    """How far memcalc's peaks were off measured runs of a framework's step.

    Attributes:
        runs: The number of runs.
        median: The median of the absolute errors, in percent.
        worst: The largest one.
        source: Where the runs and their errors are listed.
    """

    runs: int
    median: str
    worst: str
    source: str


class Framework(NamedTuple):
    """A framework: what its layers and its training step do beside the physics of a graph.

    Attributes:
        title: Its name in messages.
        kernels: The implementation whose layers its step runs where none is named.
        accuracy: How far peaks were off measured runs of its step; None: there are none.
        steps_with: The sharders with which it runs the step of its own layers. With another one,
            that sharder's framework runs it.
        fuses_gradients: Whether its step has a buffer in which GEMMs accumulate weight gradients
            directly, without a tensor of their own.
        gradients_in_backward: Whether autograd makes a gradient when backward reaches its weight,
            and ``zero_grad`` frees it after the step; otherwise it has a place in a buffer.
        global_buffer: Whether its linears gather a sharded input again into a buffer that lasts.
        reentrant: Whether its checkpoint holds the outputs of a recomputed region, and their
            gradients, until the region's backward is done.
        known_order: Whether the order of its allocations is known, and so which blocks of PyTorch's
            allocator stay unsplit.
        clamps_fp16: Whether its T5 clamps hidden states in fp16.
        whole_models: Whether it builds whole models from a ``config.json``.
        layers: Whose layers run for its own where none are named: a word of ``validate --against``
            and of ``derive --from``.
        built: Whether its layers can be built today.
        local_spec: Whether Megatron-core's local layer spec is one of its own.
        dtensor: Whether its layers are plain modules that DTensor shards.
        masks_from_to: The first and the last version that makes a mask for every causal model, so
            that no flash kernel runs; or nothing.
        attentions: The implementation of each attention kernel, where an implementation is named
            after its kernel; else nothing.
        sharded_as: The implementation as which its tensors are sharded under tensor parallelism,
            where its own sharding was never measured; else nothing.
        optimizer_step: The form of its optimizer's step where none is named: a word of
            ``memcalc.config.optimizers.FORMS``.
        counts_steps: Whether a fused Adam keeps a step counter, fp32, on the GPU for each weight.
        widens_states: Whether its fused Adam makes fp32 copies of narrower states.
        momentum: The momentum of its SGD where none is named.
        ends_in_root: Whether FSDP2 shards the embedding and the head as one unit, the root, which
            stays gathered from forward to the end of backward; else each is a unit like a layer.
        lasting: The function of the buffers that last from step to step, as ``module:name``, or
            nothing.
        in_a_pass: That of what is held while a micro-batch passes.
        between_steps: That of what its pipeline schedule holds after a step.
        batch: That of what stays of the last micro-batch until the next one.
    """

    title: str
    kernels: str
    accuracy: Accuracy | None
    steps_with: Collection[str]
    fuses_gradients: bool
    gradients_in_backward: bool
    global_buffer: bool
    reentrant: bool
    known_order: bool
    clamps_fp16: bool
    whole_models: bool
    layers: str
    built: bool
    local_spec: bool
    dtensor: bool
    masks_from_to: tuple[tuple[int, int], tuple[int, int]] | tuple[()]
    attentions: Mapping[str, str]
    sharded_as: str
    optimizer_step: str
    counts_steps: bool
    widens_states: bool
    momentum: float
    ends_in_root: bool
    lasting: str
    in_a_pass: str
    between_steps: str
    batch: str


class Sharder(NamedTuple):
    """A ZeRO or FSDP implementation, which shards over data-parallel ranks.

    Attributes:
        summary: What it is, in a line.
        framework: The framework that it belongs to, a key of ``FRAMEWORKS``.
        source: Where it keeps weights, gradients and optimizer states.
        stages: The ZeRO stages that it has.
        refusal: Why another stage is refused; ``{zero}`` stands for it.
        pipeline_stages: Those that it has under pipeline parallelism.
        pipeline_refusal: Why another stage is refused there, likewise.
        any_model: Whether it shards other frameworks' models as they are, such as Hugging Face's.
        default_stage: The stage where none is named; None is 0.
        default_for: The stages for which it is the default.
        over_context: Whether context-parallel ranks share the shards too.
        own_master: Whether the sharded weight is the master weight.
        gathered_at: The stage at which weights stay gathered from forward to backward, or None.
        gathers: For each stage, the phases in which weights are gathered.
        gathers_certainty: How sure the size of gathered layers is.
        reduce_buffer: The source of a buffer for one layer's gradients, or nothing.
        around_root: The function of what is gathered and reduced at each moment where the ends are
            in the root, as ``module:name``, or nothing.
        bucket: The default elements of a bucket of gradients that are reduced, or None.
        buckets: The number of these buckets, for each stage.
        bucket_source: Where these are allocated.
        step_elements: The most elements that its step updates at once, at stage 3, or None.
        weights_dtype: Whether gradients are accumulated and reduced in the weights' dtype.
        since: The versions that do so.
        known_order: Whether the order of its allocations is known.
        flat: Whether its optimizer updates one flat tensor per rank, rather than the rank's shard
            of each weight.
    """

    summary: str
    framework: str
    source: str
    stages: Collection[int]
    refusal: str
    pipeline_stages: Collection[int]
    pipeline_refusal: str
    any_model: bool
    default_stage: int | None
    default_for: Collection[int]
    over_context: bool
    own_master: bool
    gathered_at: int | None
    gathers: Mapping[int, Collection[str]]
    gathers_certainty: str
    reduce_buffer: str
    around_root: str
    bucket: int | None
    buckets: Mapping[int, int]
    bucket_source: str
    step_elements: int | None
    weights_dtype: bool
    since: str
    known_order: bool
    flat: bool


class Rank(Protocol):
    """What a framework's functions ask of a rank (``memcalc.analysis.rank.Rank``)."""

    config: Any  # a Config, which itself refers to these records

    @property
    def embedding(self) -> bool:
        """Whether it has the embedding."""

    @property
    def head(self) -> bool:
        """Whether it has the head."""

    @property
    def experts(self) -> bool:
        """Whether one of its layers has experts."""

    @property
    def trained(self) -> int:
        """The number of its trained parameters, before data-parallel ranks shard them."""

    @property
    def root_size(self) -> int:
        """The number of parameters of its embedding and head."""

    @property
    def layer_sizes(self) -> int:
        """The number of parameters of all its layers."""

    @property
    def layer_size(self) -> int:
        """The number of parameters of its largest layer."""

    @property
    def output_bytes(self) -> int:
        """The bytes that it sends to the next stage for one micro-batch."""

    @property
    def steps_itself(self) -> bool:
        """Whether the framework of its layers also runs the step."""


class Buffer(NamedTuple):
    """A buffer of a framework on a rank.

    Attributes:
        name: What it is.
        bytes: Its bytes.
        source: The file of the framework that allocates it.
    """

    name: str
    bytes: int
    source: str
