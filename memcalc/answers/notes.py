"""Notes that a table needs so that its numbers do not mislead, and what titles say."""

from memcalc.analysis.activations import ACCOUNTINGS
from memcalc.analysis.stages import output_bytes
from memcalc.answers.warnings import warnings
from memcalc.blocks.layer import kinds, layer_graph
from memcalc.config import Config
from memcalc.config.gpus import gpu
from memcalc.config.implementation import CROSS_ENTROPIES
from memcalc.config.recompute import METHODS, POLICIES
from memcalc.graph.graph import OF_ATTENTION
from memcalc.units import counted, format_bytes

MASKED = (
    "with a mask, sdpa runs PyTorch's memory-efficient kernel, which saves a copy of the mask (its "
    "rows padded to a multiple of 8)"
)


OF_LOSS = "holds_logits"  # an assumption that only answers with a loss show


def notes(config: Config, accounting: str | None = None) -> tuple[str, ...]:
    """Implementation and accounting, assumptions, and every warning."""
    kernels = config.run.implementation
    lines = [f"implementation: {kernels.name} ({kernels.attention} attention; {kernels.source})"]
    if accounting is not None:
        lines.append(f"accounting: {accounting} ({ACCOUNTINGS[accounting]})")
    assumed = [each.words for each in config.assumed if each.setting != OF_LOSS]
    if assumed:
        lines.append(f"assumed: {', '.join(assumed)}")
    lines += _of_spread(config)
    lines += method_note(config)
    if config.run.policy == POLICIES["selective"]:
        lines += flash_note(config)
    lines += _of_experts(config, accounting)
    lines += _of_windows(config)
    lines += _of_own_calls(config)
    lines += _of_further_tokens(config)
    lines += _of_stacks(config, accounting)
    return (*lines, *(f"warning: {warning}" for warning in warnings(config)))


def _of_spread(config: Config) -> list[str]:
    """How layers are distributed if model chunks do not divide their number."""
    parallel = config.parallel
    said = (parallel.layout, parallel.first_stage_layers, parallel.last_stage_layers)
    rest = config.model.layers + parallel.embedding_as_layer + parallel.loss_as_layer
    rest %= parallel.chunks
    if not rest or said != (None, None, None):
        return []
    what = "stages" if parallel.chunks_per_rank == 1 else "model chunks"
    return [
        f"assumed: {config.model.layers} layers on {parallel.chunks} {what}: one more on "
        f"{'the first' if rest == 1 else f'each of the first {rest}'} than on the others"
    ]


def _of_experts(config: Config, accounting: str | None) -> list[str]:
    model, run, experts = config.model, config.run, config.model.experts
    if experts is None:
        return []
    lines = [f"experts: balanced routing (--imbalance {run.imbalance:g})"]
    if run.imbalance != 1:
        load = f"{run.imbalance:g} times a balanced share"
        lines = [f"experts: the busiest expert rank receives {load} of the routed tokens"]
    if run.imbalance % 1:
        lines[0] += " (rounded up to whole tokens, except in formulas)"
    if experts.capacity_factor is not None:
        lines[0] += f", at most {experts.capacity_factor:g} times that share (the capacity factor)"
    if model.moe_layers is not None:
        dense = model.moe_layers.count(0)
        lines[0] += f"; {dense} of {model.layers} layers are dense"
    if accounting == "exact":
        lines.append(
            "not counted: indices of routed tokens, about 8 to 24 bytes per token and chosen expert"
        )
    return lines


def _of_windows(config: Config) -> list[str]:
    model, masked = config.model, config.masked_layers == "windowed"
    window = model.sliding_window
    if window is None or (config.run.seq_length <= window and not masked):
        return []
    number = model.layers if model.window_layers is None else sum(model.window_layers)
    kept = "this does not change their memory"
    if masked:
        kept = f"transformers makes a mask for sequences of {window} tokens or more; {MASKED}"
    return [
        f"{number} of {model.layers} layers attend to {window} tokens (sliding window): {kept}; "
        "their FLOPs are counted over the whole sequence"
    ]


def _of_own_calls(config: Config) -> list[str]:
    """What is kept by a family whose transformers code calls PyTorch's attention itself."""
    if not (config.model.calls_attention and config.masked_layers == "all"):
        return []
    if attention_kernels(config):
        return [f"transformers' code for this family always makes a mask; {MASKED}"]
    return [
        "transformers' code for this family passes fewer key heads than query heads to sdpa, which "
        "no fused kernel supports: PyTorch's math backend runs, unfused, and saves its GEMM inputs "
        "in fp32"
    ]


def _of_further_tokens(config: Config) -> list[str]:
    number = config.model.mtp_layers
    if not number:
        return []
    return [
        f"mtp: the last stage has {number} multi-token-prediction layer{'s' * (number > 1)}, "
        f"{'each ' * (number > 1)}with a head; `memcalc models` does not count these parameters"
    ]


def _of_stacks(config: Config, accounting: str | None) -> list[str]:
    model = config.model
    if model.encoder_layers is None:
        return []
    lines = [
        f"encoder-decoder: {model.encoder_layers} encoder and {model.layers} decoder layers; "
        f"assumed: source and target have {config.run.seq_length} tokens each"
    ]
    if accounting is not None:
        lines.append(
            f"outside the layers: the encoder's output, {format_bytes(output_bytes(config))} per "
            "rank, kept once for all decoder layers"
        )
    return lines


def setting(config: Config) -> str:
    """The model and its sizes, for a title.

    >>> from memcalc.config import load
    >>> setting(load("22b"))
    '22b (s 2048, b 4, tp 8, fp16)'
    """
    run, parallel = config.run, config.parallel
    sizes = f"s {run.seq_length}, b {run.micro_batch_size}, tp {parallel.tp}"
    if parallel.cp > 1:
        sizes += f", cp {parallel.cp}"
    if parallel.ep > 1:
        sizes += f", ep {parallel.ep}"
    sequence = ", sequence parallel" if parallel.sp else ""
    return f"{_short(config)} ({sizes}{sequence}, {run.precision})"


def whole_setting(config: Config) -> str:
    """The same with more parallel sizes, ZeRO, the global batch and the GPU.

    >>> from memcalc.config import load
    >>> whole_setting(load("22b"))
    '22b (s 2048, b 4, tp 8, pp 1, cp 1, dp 1, ZeRO 0, global batch 4, fp16, a100-80gb)'
    """
    run, parallel = config.run, config.parallel
    sizes = {
        "s": run.seq_length,
        "b": run.micro_batch_size,
        "tp": parallel.tp,
        "pp": parallel.pp,
        "vpp": parallel.vpp if parallel.vpp > 1 else None,
        "cp": parallel.cp,
        "ep": parallel.ep if config.model.experts else None,
        "dp": parallel.dp,
        "ZeRO": parallel.zero,
        "global batch": config.sequences,
    }
    words = [f"{name} {size}" for name, size in sizes.items() if size is not None]
    words += ["sequence parallel"] * parallel.sp + [run.precision]
    words += [gpu(run.gpu).name] if run.gpu else []
    return f"{_short(config)} ({', '.join(words)})"


def _short(config: Config) -> str:
    """The model's name, cut where it is long."""
    name = config.model.name
    return name if len(name) <= 60 else f"{name[:57]}..."


def recomputation(config: Config) -> str:
    """What is recomputed, for a title.

    >>> from memcalc.config import load
    >>> recomputation(load("22b")), recomputation(load("22b", recompute="selective"))
    ('no recomputation', 'selective recomputation')
    >>> recomputation(load("22b", recompute="attention,mlp"))
    'recomputing attention, mlp'
    """
    run = config.run
    words = [word for word in run.recompute if word != "none"]
    if not words or run.recompute_layers == 0:
        return "no recomputation"
    number = run.recompute_layers
    method = f" ({run.recompute_method or 'uniform'} {number})" if number is not None else ""
    if words in (["selective"], ["full"]):
        return f"{words[0]} recomputation{method}"
    if words == ["offload"]:
        return "activations offloaded"
    what = "recompute policy" if {*words} & POLICIES.keys() else "recomputing"
    return f"{what} {', '.join(words)}{method}"


def method_note(config: Config) -> tuple[str, ...]:
    """Which layers are recomputed, where not all are recomputed alike."""
    run = config.run
    if run.recompute_layers is None:
        return ()
    method = run.recompute_method or "uniform"
    what = METHODS[method].format(counted(run.recompute_layers, "layer"))
    return (f"{method} {run.recompute_layers}: {what}",)


def flash_note(config: Config) -> tuple[str, ...]:
    """Why selective recomputation saves next to nothing under a flash kernel."""
    if attention_kernels(config) != {"flash_attention"}:
        return ()
    return (
        "selective recomputation saves almost nothing here: a flash kernel keeps no s x s tensor, "
        "and the output projection keeps the attention's output anyway",
    )


def attention_kernels(config: Config) -> set[str]:
    """The fused attention kernels that a model's layers run.

    >>> from memcalc.config import load
    >>> attention_kernels(load("llama-3-8b")), attention_kernels(load("22b"))
    ({'flash_attention'}, set())
    """
    graphs = [layer_graph(config, kind=kind) for kind in kinds(config)]
    return {op.kind.name for graph in graphs for op in graph.ops if op.kind.gemm == OF_ATTENTION}


def loss_note(config: Config) -> tuple[str, ...]:
    """How the loss is computed, where not as Megatron-LM does.

    >>> from memcalc.config import load
    >>> loss_note(load("t5-11b", implementation="transformers-sdpa", holds_logits=False))
    ("loss: torch-16bit (PyTorch's log_softmax and nll_loss of the logits in their own dtype)",)
    """
    word = config.run.implementation.cross_entropy
    if word == "unfused":
        return ()
    held = [f"; assumed: {each.words}" for each in config.assumed if each.setting == OF_LOSS]
    return (f"loss: {word} ({CROSS_ENTROPIES[word].summary}){''.join(held)}",)


def batch_note(config: Config) -> str:
    """The global batch, and whether it is assumed."""
    what = "enough micro-batches to fill the pipeline"
    if config.parallel.pp == 1:
        what = "one micro-batch per data-parallel rank"
    assumed = f" (assumed: {what})"
    said = "" if config.run.global_batch_size else assumed
    return f"a global batch of {config.sequences}{said}"
