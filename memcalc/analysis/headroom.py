"""What a GPU has in use beyond what is allocated: estimated, and never mixed with it.

PyTorch's allocator reserves more than it gives out, for what it has free is in pieces; the driver
reports beside that CUDA's context and NCCL's buffers, which no allocator counts.
"""

from fractions import Fraction

from memcalc.analysis.device import StageMemory
from memcalc.analysis.parts import Part
from memcalc.config import Config
from memcalc.units import MIB

RESERVED = (
    "measured: 2.8 to 9.3 % more reserved than allocated at the peaks of twelve Megatron-LM runs "
    "on B200, 4.4 % in the median (SimuMax v1.2, docs/b200)"
)
CONTEXT = (
    "measured: 426 MiB of a process that has only begun to use CUDA, with PyTorch 2.10 "
    "(unslothai/unsloth-zoo pull request 1053); about 400 (pytorch/pytorch issue 109888)"
)
COMMUNICATORS = (
    "measured: 544 MB of a communicator of two ranks and 688 MB of more, on A100s with NVLink "
    "(NVIDIA/nccl issue 964)"
)

FRAGMENTED = Fraction(44, 1000)
CONTEXT_BYTES = 426 * MIB
PAIR, GROUP = 544 * 10**6, 688 * 10**6


def headroom(config: Config, memory: StageMemory) -> list[Part]:
    """What is in use beside the peak of a stage: estimated, each with what it was measured on.

    >>> from memcalc.analysis.device import device
    >>> from memcalc.config import load
    >>> config = load("22b", pp=2)
    >>> [part.name for part in headroom(config, device(config)[0])]
    ['reserved and free', 'CUDA context', 'NCCL communicators']
    """
    degrees = (config.parallel.tp, config.parallel.pp, config.parallel.replicas)
    groups = sum(PAIR if degree == 2 else GROUP for degree in degrees if degree > 1)
    if config.parallel.ep > 1:
        groups += PAIR if config.parallel.ep == 2 else GROUP
    found = [
        _estimated("reserved and free", round(FRAGMENTED * memory.peak.bytes), RESERVED),
        _estimated("CUDA context", CONTEXT_BYTES, CONTEXT),
        _estimated("NCCL communicators", groups, COMMUNICATORS),
    ]
    return [part for part in found if part.bytes]


def reserved(memory: StageMemory) -> int:
    """What PyTorch's allocator reserves at the peak of a stage, estimated."""
    return memory.peak.bytes + round(FRAGMENTED * memory.peak.bytes)


def on_driver(config: Config, memory: StageMemory) -> int:
    """What nvidia-smi shows at the peak of a stage, estimated."""
    return memory.peak.bytes + sum(part.bytes for part in headroom(config, memory))


def _estimated(name: str, size: int, source: str) -> Part:
    return Part(name, size, "buffers", "estimated", source)
