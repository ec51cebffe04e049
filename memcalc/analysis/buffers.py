"""Workspaces and buffers of frameworks, which a GPU holds beside states and activations.

The functions return the parts on one rank of one stage.
"""

from collections.abc import Iterator
from math import prod

from memcalc.analysis.parts import Part
from memcalc.analysis.schedule import places
from memcalc.analysis.stages import chunks, output_bytes
from memcalc.blocks.head import head_graph
from memcalc.blocks.layer import MOE_KINDS, layer_graph
from memcalc.config import Config
from memcalc.config.gpus import gpu
from memcalc.graph.graph import OF_WEIGHT
from memcalc.units import MIB

PYTORCH_CUBLAS = "PyTorch aten/src/ATen/cuda/CublasHandlePool.cpp: parseChosenWorkspaceSize"
TE_WORKSPACE = "Transformer Engine cpp_extensions/gemm.py: get_cublas_workspace_size_bytes"
TE_STREAMS = "Transformer Engine cpp_extensions/gemm.py: get_cublas_workspace, grouped_gemm"
TE_DUMMY = "Transformer Engine module/base.py: get_dummy_wgrad"
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

HANDLES = 2  # cuBLAS handles: one of the forward thread, one of autograd's thread
GROUPED_STREAMS = 4  # of Transformer Engine's grouped GEMMs
FRAMEWORK = "framework-dependent"


def lasting(config: Config, stage: int) -> list[Part]:
    """The buffers that last from the first step to the last.

    >>> from memcalc.config import load
    >>> config = load("llama-3-8b", tp=2, sp=True, gpu="h100", implementation="megatron")
    >>> [buffer.name for buffer in lasting(config, 0)][:2]
    ['cuBLAS workspaces', 'Transformer Engine workspace']
    """
    found = [*_workspaces(config), *_dummies(config, stage), *_gathered(config, stage)]
    found += _rotary(config)
    return [buffer for buffer in found if buffer.bytes]


def between_steps(config: Config, stage: int) -> list[Part]:
    """What the pipeline's schedule keeps after an iteration."""
    chunks_ = config.parallel.chunks_per_rank
    if config.parallel.pp == 1 or not steps_with_megatron(config):
        return []
    received = chunks_ - has_embedding(config, stage)
    number = 2 * received * output_bytes(config)
    name = "last input of each chunk and its gradient"
    found = [_buffer(name, number, MEGATRON_PIPELINE)]
    return [buffer for buffer in found if buffer.bytes]


def in_a_pass(config: Config, stage: int, phase: str) -> list[Part]:
    """What the pipeline's schedule and the data loader hold during a forward or backward pass.

    Args:
        config: The model, its parallelism and its run.
        stage: The stage, counted from 0.
        phase: ``forward`` or ``backward``.
    """
    parallel, found = config.parallel, []
    if not is_megatron(config):
        return []
    steps = steps_with_megatron(config)
    first = has_embedding(config, stage) and parallel.chunks_per_rank == 1
    if steps and parallel.pp > 1 and not first:
        if parallel.chunks_per_rank > 1:
            name, number = "input, output gradient and input gradient in transit", 3
        elif phase == "forward":
            name, number = "previous micro-batch: its input and the gradient of it", 2
        else:
            name, number = "previous micro-batch: gradient of its input", 1
        found.append(_buffer(name, number * output_bytes(config), MEGATRON_P2P))
    at_an_end = has_embedding(config, stage) or has_head(config, stage)
    if phase == "forward" and at_an_end and config.run.environment.loader_mask:
        run = config.run
        number = run.micro_batch_size * run.seq_length**2 // parallel.cp
        found.append(_buffer("attention mask from the data loader", number, MEGATRON_MASK))
    return [*found, *(_deferred(config, stage) if steps else ())]


def is_megatron(config: Config) -> bool:
    """Whether the layers are Megatron-core's."""
    return config.run.implementation.name.startswith("megatron")


def steps_with_megatron(config: Config) -> bool:
    """Whether Megatron-core also runs the iteration, with its schedule and gradient buffers.

    GEMMs accumulate weight gradients only in such a buffer (``main_grad``).
    """
    return is_megatron(config) and config.parallel.sharder in ("megatron", "megatron-fsdp")


def fuses_gradients(config: Config) -> bool:
    """Whether GEMMs add weight gradients to the gradient buffer, without tensors in between.

    Megatron-LM of 2022 does so too.
    """
    theirs = config.run.implementation.name == "paper" or steps_with_megatron(config)
    return theirs and config.run.environment.fused_gradients


def has_te(config: Config) -> bool:
    """Whether the layers are made of Transformer Engine's modules."""
    return config.run.implementation.norms_in_linears


def has_embedding(config: Config, stage: int) -> bool:
    """Whether a stage has the embedding."""
    return 0 in places(config.parallel, stage)


def has_head(config: Config, stage: int) -> bool:
    """Whether a stage has the head."""
    return config.parallel.chunks - 1 in places(config.parallel, stage)


def unknown(config: Config) -> list[str]:
    """The libraries whose workspaces are not counted because no NVIDIA GPU is given.

    >>> from memcalc.config import load
    >>> unknown(load("llama-3-8b")), unknown(load("llama-3-8b", gpu="h100"))
    (['cuBLAS', 'Transformer Engine'], [])
    """
    if _capability(config) is not None:
        return []
    cublas = ["cuBLAS"] * (config.run.environment.cublas_bytes is None)
    return cublas + ["Transformer Engine"] * has_te(config)


def _capability(config: Config) -> int | None:
    """The compute capability of the run's GPU, times 10; None without an NVIDIA GPU."""
    return None if config.run.gpu is None else gpu(config.run.gpu).capability


def _workspaces(config: Config) -> Iterator[Part]:
    run, capability = config.run, _capability(config)
    name = "cuBLAS workspaces"
    said = run.environment.cublas_bytes
    if said is not None:
        yield _buffer(name, HANDLES * said, PYTORCH_CUBLAS)
    elif capability is not None:
        size = _cublas(capability, run.environment.pytorch)
        yield _buffer(name, HANDLES * size, PYTORCH_CUBLAS)
    if capability is None or not has_te(config):
        return
    size = (32 if capability >= 90 else 4) * MIB
    yield _buffer("Transformer Engine workspace", size, TE_WORKSPACE)
    if config.model.experts and run.implementation.expert_products == "grouped":
        yield _buffer(
            "Transformer Engine workspaces of grouped GEMMs",
            GROUPED_STREAMS * size,
            TE_STREAMS,
        )


def _cublas(capability: int, version: tuple[int, ...] | None) -> int:
    """PyTorch's default: 32 MiB from Hopper on, 8.125 MiB before; cuBLASLt shares the workspace.

    Blackwell has 32 MiB since PyTorch 2.12 (pytorch/pytorch pull request 175344). For cuBLASLt see
    torch/backends/cuda/__init__.py: TORCH_CUBLASLT_UNIFIED_WORKSPACE.
    """
    large = capability == 90 or (capability > 90 and (version is None or version >= (2, 12)))
    return 32 * MIB if large else 4096 * 2 * 1024 + 16 * 8 * 1024


def _dummies(config: Config, stage: int) -> Iterator[Part]:
    """Placeholders for weight gradients that are fused: one per shape of a weight."""
    run = config.run
    if not has_te(config) or not fuses_gradients(config):
        return
    shapes: dict[tuple[int, ...], None] = {}
    kinds = {kind for names in chunks(config, stage) for kind in names}
    graphs = [layer_graph(config, kind=kind) for kind in sorted(kinds)]
    if has_head(config, stage):
        graphs.append(head_graph(config))
    for graph in graphs:
        for op in graph.ops:
            if op.kind.gemm != OF_WEIGHT:
                continue
            for weight in op.weights:
                shape = tuple(axis.local for axis in weight.axes)
                shapes[shape[1:] if op.kind.of_experts else shape] = None
    total = sum(run.activation_bytes * prod(shape) for shape in shapes if len(shape) > 1)
    yield _buffer("dummy weight gradients", total, TE_DUMMY)


def _gathered(config: Config, stage: int) -> Iterator[Part]:
    """Megatron-core's global buffer, which its own linears, attention and dispatcher share."""
    run, parallel = config.run, config.parallel
    if not is_megatron(config):
        return
    whole = run.activation_bytes * run.seq_length * run.micro_batch_size * config.model.hidden_size
    gathers = parallel.sp and parallel.tp > 1 and (has_head(config, stage) or not has_te(config))
    sizes = [(whole // parallel.cp if gathers else 0, MEGATRON_BUFFER)]
    if not has_te(config) and run.implementation.attention == "unfused":
        heads = config.model.heads // parallel.tp
        scores = run.activation_bytes * run.micro_batch_size * heads * run.seq_length**2
        sizes.append((scores // parallel.cp**2, MEGATRON_SCORES))
    experts = any(kind in MOE_KINDS for names in chunks(config, stage) for kind in names)
    if experts and run.implementation.gathers_tokens and parallel.ep * parallel.expert_tp > 1:
        shard = whole // parallel.cp // (parallel.tp if parallel.sp else 1)
        sizes.append((shard * parallel.ep * parallel.expert_tp, MEGATRON_TOKENS))
    size, source = max(sizes)
    yield _buffer("Megatron's global buffer", size, source)


def _rotary(config: Config) -> Iterator[Part]:
    """The fp32 table of rotary angles for a rank's tokens."""
    model = config.model
    if is_megatron(config) and model.position == "rotary":
        width = model.rope_head_size or model.head_size
        size = 4 * config.run.seq_length * width // config.parallel.cp
        yield _buffer("rotary embedding table", size, MEGATRON_ROTARY)


def _deferred(config: Config, stage: int) -> Iterator[Part]:
    """Logit gradients and hidden states of micro-batches whose head gradient is deferred.

    A hidden state keeps its micro-batch's autograd graph alive, and with it the leaf of this graph:
    the input that the stage received, with its gradient. Those of the current and the previous
    micro-batch are counted elsewhere.
    """
    run, parallel = config.run, config.parallel
    number = min(run.environment.deferred_gradients, config.microbatches)
    if number and has_head(config, stage):
        assert config.model.vocab_size is not None
        tokens = run.activation_bytes * run.seq_length * run.micro_batch_size // parallel.cp
        each = tokens * config.model.vocab_size // parallel.tp + output_bytes(config)
        name = "logit gradients and hidden states for the deferred head gradient"
        yield _buffer(name, number * each, MEGATRON_DEFERRED)
        leaves = max(0, min(number, config.microbatches - 2)) if parallel.pp > 1 else 0
        name = "stage inputs of these micro-batches and their gradients"
        yield _buffer(name, 2 * leaves * output_bytes(config), TORCH_LEAF)


def _buffer(name: str, size: int, source: str) -> Part:
    return Part(name, size, "buffers", FRAMEWORK, source)
