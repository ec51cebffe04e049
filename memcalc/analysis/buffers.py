"""Workspaces and buffers of frameworks, which a GPU holds beside states and activations.

The functions return the parts on one rank of one stage.
"""

from collections.abc import Iterable, Iterator
from math import prod

from memcalc.analysis.parts import Part
from memcalc.analysis.rank import Rank
from memcalc.config import Config
from memcalc.config.gpus import gpu
from memcalc.frameworks.record import READ, Buffer
from memcalc.graph.graph import OF_WEIGHT
from memcalc.lazy import resolve
from memcalc.units import MIB

PYTORCH_CUBLAS = "PyTorch aten/src/ATen/cuda/CublasHandlePool.cpp: parseChosenWorkspaceSize"
TE_WORKSPACE = "Transformer Engine cpp_extensions/gemm.py: get_cublas_workspace_size_bytes"
TE_STREAMS = "Transformer Engine cpp_extensions/gemm.py: get_cublas_workspace, grouped_gemm"
TE_DUMMY = "Transformer Engine module/base.py: get_dummy_wgrad"

HANDLES = 2  # cuBLAS handles: one of the forward thread, one of autograd's thread
GROUPED_STREAMS = 4  # of Transformer Engine's grouped GEMMs


def lasting(rank: Rank) -> list[Part]:
    """The buffers that last from the first step to the last.

    >>> from memcalc.config import load
    >>> config = load("llama-3-8b", tp=2, sp=True, gpu="h100", implementation="megatron")
    >>> [buffer.name for buffer in lasting(Rank(config, 0))][:2]
    ['cuBLAS workspaces', 'Transformer Engine workspace']
    """
    config, maker = rank.config, rank.config.run.implementation.maker
    return _parts([*_workspaces(config), *_dummies(rank), *_of(maker.lasting, rank)])


def between_steps(rank: Rank) -> list[Part]:
    """What the pipeline schedule keeps after an iteration."""
    return _parts(_of(rank.config.framework.between_steps, rank))


def of_batch(rank: Rank) -> list[Part]:
    """What stays of the last micro-batch until the next one."""
    return _parts(_of(rank.config.run.implementation.maker.batch, rank))


def in_a_pass(rank: Rank, phase: str) -> list[Part]:
    """What the pipeline's schedule and the data loader hold during a forward or backward pass.

    Args:
        rank: The rank.
        phase: ``forward`` or ``backward``.
    """
    return _parts(_of(rank.config.run.implementation.maker.in_a_pass, rank, phase))


def _of(function: str, rank: Rank, *phase: str) -> Iterable[Buffer]:
    """The buffers that a function of a framework finds, or none where it has no such function."""
    found: Iterable[Buffer] = resolve(function)(rank, *phase) if function else ()
    return found


def _parts(buffers: Iterable[Buffer]) -> list[Part]:
    there = (each for each in buffers if each.bytes)
    return [Part(each.name, each.bytes, "buffers", READ, each.source) for each in there]


def fuses_gradients(config: Config) -> bool:
    """Whether GEMMs add weight gradients to the gradient buffer, without tensors in between."""
    return config.framework.fuses_gradients and config.run.environment.fused_gradients


def unknown(config: Config) -> list[str]:
    """The libraries whose workspaces are not counted because no NVIDIA GPU is given.

    >>> from memcalc.config import load
    >>> unknown(load("llama-3-8b")), unknown(load("llama-3-8b", gpu="h100"))
    (['cuBLAS', 'Transformer Engine'], [])
    """
    if _capability(config) is not None:
        return []
    cublas = ["cuBLAS"] * (config.run.environment.cublas_bytes is None)
    return cublas + ["Transformer Engine"] * config.run.implementation.transformer_engine


def _capability(config: Config) -> int | None:
    """The compute capability of the run's GPU, times 10; None without an NVIDIA GPU."""
    return None if config.run.gpu is None else gpu(config.run.gpu).capability


def _workspaces(config: Config) -> Iterator[Buffer]:
    run, capability = config.run, _capability(config)
    name = "cuBLAS workspaces"
    said = run.environment.cublas_bytes
    if said is not None:
        yield Buffer(name, HANDLES * said, PYTORCH_CUBLAS)
    elif capability is not None:
        size = cublas_workspace(capability, run.environment.pytorch)
        yield Buffer(name, HANDLES * size, PYTORCH_CUBLAS)
    if capability is None or not config.run.implementation.transformer_engine:
        return
    size = (32 if capability >= 90 else 4) * MIB
    yield Buffer("Transformer Engine workspace", size, TE_WORKSPACE)
    if config.model.experts and run.implementation.expert_products == "grouped":
        yield Buffer(
            "Transformer Engine workspaces of grouped GEMMs",
            GROUPED_STREAMS * size,
            TE_STREAMS,
        )


def cublas_workspace(capability: int, version: tuple[int, ...] | None = None) -> int:
    """Bytes of a cuBLAS workspace of PyTorch, which cuBLASLt shares.

    By default it is 32 MiB from Hopper on, and 8.125 MiB before (CublasHandlePool.cpp:
    parseChosenWorkspaceSize). Blackwell has 32 MiB since PyTorch 2.12 (pytorch/pytorch pull request
    175344). For cuBLASLt see torch/backends/cuda/__init__.py: TORCH_CUBLASLT_UNIFIED_WORKSPACE.

    Args:
        capability: The GPU's compute capability, times 10.
        version: PyTorch's version; None is a recent version.

    >>> cublas_workspace(80), cublas_workspace(90)
    (8519680, 33554432)
    """
    large = capability == 90 or (capability > 90 and (version is None or version >= (2, 12)))
    return 32 * MIB if large else 4096 * 2 * 1024 + 16 * 8 * 1024


def _dummies(rank: Rank) -> Iterator[Buffer]:
    """Placeholders for weight gradients that are fused: one per shape of a weight."""
    config = rank.config
    if not config.run.implementation.transformer_engine or not fuses_gradients(config):
        return
    shapes: dict[tuple[int, ...], None] = {}
    for graph in rank.graphs.values():
        for op in graph.ops:
            if op.kind.gemm != OF_WEIGHT:
                continue
            for weight in op.weights:
                shape = tuple(axis.local for axis in weight.axes)
                shapes[shape[1:] if op.kind.of_experts else shape] = None
    total = sum(config.run.activation_bytes * prod(shape) for shape in shapes if len(shape) > 1)
    yield Buffer("dummy weight gradients", total, TE_DUMMY)
