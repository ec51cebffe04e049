"""Warnings about a Config: what is not modeled, counted as something else, or without effect."""

from memcalc.answers.effect import nothing_frozen, nothing_recomputed, without_effect
from memcalc.config import Config
from memcalc.config.gpus import Gpu, gpu
from memcalc.units import counted

# The first CUDA compute capability that has it, times 10.
CAPABILITIES = {"bf16": 80}
FLASH = 80


def warnings(config: Config) -> tuple[str, ...]:
    """Settings that are not modeled, and settings without effect."""
    lines = list(config.unmodelled)
    kernels = config.run.implementation
    lines += ineffective(config)
    if config.model.experts and config.parallel.tp > 1 and not config.parallel.sp:
        lines.append(
            "Megatron-core requires --sp for MoE with --tp > 1; without it, every "
            "tensor-parallel rank is assumed to dispatch all tokens"
        )
    if config.run.precision == "fp8":
        lines.append(
            "fp8: each linear is assumed to save its input once, in fp8 (from Transformer "
            "Engine's source; not measured)"
        )
    if config.run.gpu is not None:
        lines += of_gpu(gpu(config.run.gpu), config.run.precision)
    windowed = config.masked_layers == "windowed" and 0 not in (config.model.window_layers or ())
    flash = kernels.fused_attention and config.masked_layers != "all" and not windowed
    if flash and config.run.precision == "fp32":
        lines.append(
            "flash attention kernels do not support fp32: counted as if they did (set "
            "--attention unfused, or --precision bf16)"
        )
    capability = gpu(config.run.gpu).capability if config.run.gpu else None
    if flash and kernels.transformer_engine and capability and capability < FLASH:
        lines.append(
            "Transformer Engine's flash attention kernels need CUDA compute capability 8.0: "
            "counted as if the GPU had it (set --attention unfused)"
        )
    most = config.model.max_seq_length
    if most is not None and config.run.seq_length > most:
        lines.append(
            f"sequence length {config.run.seq_length} exceeds the model's context length {most}"
        )
    if kernels.maker.sharded_as and config.parallel.tp > 1:
        lines.append(
            f"{kernels.maker.title}'s layers were not measured with tensor parallelism: the "
            f"tensors are counted as --implementation {kernels.maker.sharded_as} shards them"
        )
    if {*config.run.frozen} - {*nothing_frozen(config.model, config.run)}:
        lines.append(
            "--frozen: activations are counted as if all parts were trained; the run saves fewer"
        )
    lines += _of_stacks(config)
    if kernels.packs_value and config.model.position == "rotary":
        lines += _packed_value(config)
    return tuple(lines)


def of_gpu(found: Gpu, precision: str) -> list[str]:
    """A precision that the tensor cores of an NVIDIA GPU do not support."""
    if found.capability is None or found.capability >= CAPABILITIES.get(precision, 0):
        return []
    other = "fp16" if found.peaks["fp16"] else "fp32"
    return [
        f"{found.name} has no tensor cores for {precision}, and PyTorch emulates it: counted as if "
        f"it had (set --precision {other})"
    ]


def ineffective(config: Config) -> tuple[str, ...]:
    """The warnings of settings without effect."""
    lines = without_effect(config.model, config.parallel, config.run)
    if config.run.recompute_layers == 0:
        lines.append("--recompute-layers 0 recomputes nothing")
    lines += _too_many_recomputed(config)
    return (*lines, *nothing_recomputed(config.model, config.run))


def _too_many_recomputed(config: Config) -> list[str]:
    """More layers to recompute than a model chunk has."""
    model, number = config.model, config.run.recompute_layers or 0
    chunks = config.parallel.spread(model.layers + (model.encoder_layers or 0), model.mtp_layers)
    most = max(chunk.layers for chunk in chunks)
    if number <= most:
        return []
    return [
        f"--recompute-layers {number} recomputes all layers: a model chunk has "
        f"{counted(most, 'layer')}"
    ]


def _of_stacks(config: Config) -> list[str]:
    """Kernels of T5 that are counted as others."""
    model, kernels = config.model, config.run.implementation
    lines = []
    if model.position == "relative" and kernels.fused_attention:
        instead = "counted as if they did"
        if kernels.keeps_masks:
            instead = (
                "counted as PyTorch's memory-efficient kernel, with a bias kept by every layer"
            )
        lines.append(f"flash attention kernels do not support a relative position bias: {instead}")
    clamps = kernels.maker.clamps_fp16 and model.encoder_layers is not None
    if clamps and config.run.precision == "fp16":
        lines.append(
            f"{kernels.maker.title}'s T5 clamps hidden states in fp16; the memory that this "
            "uses is not counted"
        )
    return lines


def _packed_value(config: Config) -> list[str]:
    """What Megatron-core keeps besides the value, which is a view of a packed tensor."""
    model, run = config.model, config.run
    if model.kv_heads != model.heads:  # repeating K and V copies them
        return []
    width = 2 * model.heads * model.head_size // config.parallel.tp
    more = run.activation_bytes * run.seq_length * run.micro_batch_size * width
    return [
        "not counted: Megatron-core's value is a view of the packed QKV tensor, so query and "
        f"key are kept beside their rotated copies: {more} more bytes per layer"
    ]
