"""Batch, precision, kernels and buffers of a run."""

from typing import Any

from memcalc.config.assumption import Assumption
from memcalc.config.environment import Environment
from memcalc.config.implementation import IMPLEMENTATIONS as KERNELS
from memcalc.config.readers.megatron.arguments import Arguments
from memcalc.config.readers.megatron.model import vocab_multiple
from memcalc.config.readers.megatron.names import BACKENDS, CROSS_ENTROPIES, IMPLEMENTATIONS
from memcalc.errors import ConfigError


def run(said: Arguments) -> dict[str, Any]:
    """Batch, precision, kernels and buffers."""
    if said.flag("bf16") and said.flag("fp16"):
        raise ConfigError("--bf16 and --fp16 are mutually exclusive")
    batch = said.run(said.count, "global-batch-size")
    if batch is not None and "rampup-batch-size" in said.words:
        why = "at the end of its ramp-up"
        said.assumed.append(Assumption("global_batch_size", batch, why))
    precision = next((name for name in ("bf16", "fp16") if said.flag(name)), None)
    if said.text("fp8-format"):
        precision = "fp8"
    if precision is None and "micro-batch-size" in said.words:
        precision = said.defaulted(None, "fp32", "precision")
    implementation = said.run(said.word, "transformer-impl", IMPLEMENTATIONS)
    if said.flag("use-legacy-models"):
        implementation = "megatron-local"
    if said.text("spec") == "local":
        implementation = "megatron-local"
    attention = said.run(said.word, "attention-backend", BACKENDS)
    kernel = said.text("attention-backend")
    kernels = KERNELS.get(str(implementation))
    if kernels and not kernels.transformer_engine:  # only Transformer Engine has backends
        attention = "flash" if said.flag("use-flash-attn") else None
    experts = said.words.get("num-experts", ["0"])[0] != "0"
    dispatcher = said.run(said.text, "moe-token-dispatcher-type")
    length = "encoder-seq-length" if "encoder-seq-length" in said.words else "seq-length"
    return {
        "seq_length": said.run(said.count, length),
        "micro_batch_size": said.run(said.count, "micro-batch-size"),
        "global_batch_size": batch,
        "precision": precision,
        "implementation": implementation or "megatron",
        "attention": attention or None,
        "batch_first": {"flash": True, "fused": False}.get(kernel or ""),
        "fused_gate": False if said.flag("no-bias-swiglu-fusion") else None,
        "softmax_fp32": said.flag("no-masked-softmax-fusion") or None,
        "cross_entropy": said.run(_cross_entropy, said),
        "gathers_tokens": (experts and dispatcher in (None, "allgather")) or None,
        "expert_products": "sequential" if experts and not said.flag("moe-grouped-gemm") else None,
        "environment": said.run(_environment, said),
        "vocab_multiple": said.run(vocab_multiple, said),
    }


def _cross_entropy(said: Arguments) -> str | None:
    """The cross-entropy kernel."""
    if not said.flag("cross-entropy-loss-fusion"):
        return None
    return said.word("cross-entropy-fusion-impl", CROSS_ENTROPIES) or "native"


def _environment(said: Arguments) -> Environment:
    """Settings that decide which buffers there are."""
    limit = said.count("wgrad-deferral-limit") or 2**31
    return Environment(
        deterministic=said.flag("deterministic-mode"),
        fused_gradients=not said.flag("no-gradient-accumulation-fusion"),
        deferred_gradients=limit if said.flag("defer-embedding-wgrad-compute") else 0,
        loader_mask=not said.flag("no-create-attention-mask-in-dataloader"),
    )
