"""Options that commands share, and what they all do: configure, and show."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click

from memcalc import files
from memcalc.analysis.activations import ACCOUNTINGS
from memcalc.config import IMPLEMENTATIONS, PRECISION_BYTES, Config, load
from memcalc.config.implementation import ATTENTIONS, CROSS_ENTROPIES, EXPERT_PRODUCTS
from memcalc.config.parallel import CONTEXT_KINDS, SHARDERS
from memcalc.config.pipeline import SCHEDULES
from memcalc.config.recompute import METHODS
from memcalc.config.run import MAIN_GRADS, MAIN_PARAMS, MOMENTS, OPTIMIZERS
from memcalc.errors import nearest
from memcalc.figures import SUFFIXES as FIGURES
from memcalc.render import SUFFIXES
from memcalc.report import Report

FORMATS = ("text", "json", "csv", "markdown", "latex")
WIDE = "memcalc.wide"  # where a command's context holds --wide

Command = TypeVar("Command", bound=Callable[..., Any])

_OPTIONS: dict[str, Callable[[Command], Command]] = {
    "seq_length": click.option(
        "-s", "--seq-length", type=click.IntRange(1, 2**31), help="Sequence length, in tokens."
    ),
    "micro_batch_size": click.option(
        "-b", "--micro-batch-size", type=click.IntRange(1, 2**24), help="Sequences a micro-batch."
    ),
    "run": click.option(
        "--run",
        metavar="FILE",
        help="A file whose parallelism and run replace the model's: DeepSpeed JSON, or any other "
        "that MODEL may be.",
    ),
    "tp": click.option("--tp", type=click.IntRange(1, 2**20), help="Tensor-parallel size."),
    "global_batch_size": click.option(
        "--global-batch-size", type=click.IntRange(1, 2**31), help="Sequences an iteration."
    ),
    "vocab_size": click.option(
        "--vocab-size",
        type=click.IntRange(1, 2**31),
        metavar="N",
        help="Tokens of the vocabulary, before a launch file's framework pads it.",
    ),
    "pp": click.option("--pp", type=click.IntRange(1, 2**20), help="Pipeline-parallel size."),
    "vpp": click.option("--vpp", type=click.IntRange(1, 2**20), help="Virtual pipeline stages."),
    "schedule": click.option(
        "--schedule",
        type=click.Choice(list(SCHEDULES)),
        help="The pipeline's schedule.  [default: 1f1b, interleaved with --vpp]",
    ),
    "microbatch_group_size": click.option(
        "--microbatch-group-size",
        type=click.IntRange(1, 2**31),
        metavar="N",
        help="Micro-batches that run through a chunk in turn, interleaved.  [default: as --pp]",
    ),
    "layout": click.option(
        "--layout",
        metavar="CHUNKS",
        help="Layers of each pipeline chunk, as 1,2,2,3, or Megatron's letters, as Et|(tt|)*2tL.",
    ),
    "first_stage_layers": click.option(
        "--first-stage-layers", type=click.IntRange(1, 100_000), help="Layers of the first stage."
    ),
    "last_stage_layers": click.option(
        "--last-stage-layers", type=click.IntRange(1, 100_000), help="Layers of the last stage."
    ),
    "embedding_as_layer": click.option(
        "--embedding-as-layer",
        is_flag=True,
        default=None,
        help="Count the embedding as a layer where layers are spread over stages.",
    ),
    "loss_as_layer": click.option(
        "--loss-as-layer", is_flag=True, default=None, help="Count the loss as a layer there."
    ),
    "dp": click.option("--dp", type=click.IntRange(1, 2**20), help="Data-parallel size."),
    "zero": click.option(
        "--zero",
        type=click.IntRange(0, 3),
        metavar="0-3",
        help="What data-parallel ranks split: optimizer states (1), gradients too (2), weights "
        "too (3).  [default: 0; of fsdp2 and megatron-fsdp 3]",
    ),
    "sharder": click.option(
        "--sharder",
        type=click.Choice(list(SHARDERS)),
        help="Who splits.  [default: megatron, of --zero 2 and 3 deepspeed]",
    ),
    "shard_copies": click.option(
        "--shard-copies",
        type=click.IntRange(1, 2**20),
        metavar="N",
        help="Copies of what is split: hybrid sharding.  [default: 1]",
    ),
    "distributed_optimizer": click.option(
        "--distributed-optimizer",
        is_flag=True,
        default=None,
        help="Megatron's word for --zero 1.",
    ),
    "optimizer": click.option(
        "--optimizer", type=click.Choice(list(OPTIMIZERS)), help="[default: adam]"
    ),
    "main_grads": click.option(
        "--main-grads",
        type=click.Choice(list(MAIN_GRADS)),
        help="Type in which gradients are summed.  [default: fp32, DeepSpeed's as weights']",
    ),
    "main_params": click.option(
        "--main-params",
        type=click.Choice(list(MAIN_PARAMS)),
        help="Type of the optimizer's own copy of narrow weights.  [default: fp32]",
    ),
    "moments": click.option(
        "--moments", type=click.Choice(list(MOMENTS)), help="Type of moments.  [default: fp32]"
    ),
    "fp8_params": click.option(
        "--fp8-params", is_flag=True, default=None, help="Weights are fp8, not only products."
    ),
    "frozen": click.option(
        "--frozen",
        metavar="PARTS",
        help="Parts that are not trained: embedding, head or regions of --recompute, with commas.",
    ),
    "bucket": click.option(
        "--bucket",
        type=click.IntRange(1, 2**40),
        metavar="N",
        help="Elements of DeepSpeed's bucket of gradients.  [default: 500,000,000]",
    ),
    "cp": click.option("--cp", type=click.IntRange(1, 2**20), help="Context-parallel size."),
    "cp_kind": click.option(
        "--cp-kind", type=click.Choice(list(CONTEXT_KINDS)), help="How attention sees all tokens."
    ),
    "ep": click.option("--ep", type=click.IntRange(1, 2**20), help="Expert-parallel size."),
    "etp": click.option(
        "--etp",
        type=click.IntRange(1, 2**20),
        help="Tensor-parallel size of the experts.  [default: as --tp]",
    ),
    "imbalance": click.option(
        "--imbalance",
        type=float,
        metavar="X",
        help="Routed tokens of the busiest rank, over its even share.  [default: 1]",
    ),
    "gpu": click.option("--gpu", help="The GPU, by its name in `memcalc gpus`."),
    "sp": click.option("--sp/--no-sp", default=None, help="Sequence parallelism beside --tp."),
    "recompute": click.option(
        "--recompute",
        metavar="POLICY",
        help="none, selective, full, save_linear, selective_op (torchtitan's), offload, a region "
        "(core_attention, attention, cross_attention, mla_up, mlp, moe, expert_act, "
        "shared_experts, norm, layer) or a word of "
        "Megatron's --recompute-modules (core_attn, layernorm, mla_up_proj, mlp, moe, moe_act, "
        "shared_experts); several with commas.",
    ),
    "recompute_method": click.option(
        "--recompute-method",
        type=click.Choice(list(METHODS)),
        help="What --recompute-layers counts, under full recomputation of pipeline stages.",
    ),
    "recompute_layers": click.option(
        "--recompute-layers",
        type=click.IntRange(0, 100_000),
        metavar="N",
        help="Layers recomputed together (uniform), or of each pipeline chunk (block).",
    ),
    "attention": click.option(
        "--attention", type=click.Choice(ATTENTIONS), help="The attention kernel."
    ),
    "expert_products": click.option(
        "--expert-products",
        type=click.Choice(EXPERT_PRODUCTS),
        help="One kernel for all experts, one product each, or one each routed token.  "
        "[default: grouped]",
    ),
    "cross_entropy": click.option(
        "--cross-entropy",
        type=click.Choice(list(CROSS_ENTROPIES)),
        help="How the loss is made.  [default: unfused]",
    ),
    "dropout": click.option(
        "--dropout", type=float, metavar="P", help="Probability of every dropout."
    ),
    "precision": click.option(
        "--precision", type=click.Choice(list(PRECISION_BYTES)), help="Type of activations."
    ),
    "implementation": click.option(
        "--implementation", type=click.Choice(list(IMPLEMENTATIONS)), help="Whose kernels run."
    ),
    "accounting": click.option(
        "--accounting",
        type=click.Choice(list(ACCOUNTINGS)),
        default="paper",
        show_default=True,
        help="paper leaves small buffers out; exact counts every byte.",
    ),
    "format": click.option(
        "--format",
        "format_",
        type=click.Choice(FORMATS),
        help="Output format.  [default: text, or by the suffix of -o]",
    ),
    "wide": click.option(
        "--wide",
        is_flag=True,
        expose_value=False,
        callback=lambda ctx, _, value: ctx.meta.update({WIDE: value}),
        help="Show every column of the table, however wide the terminal is.",
    ),
    "output": click.option(
        "-o", "--output", type=click.Path(path_type=Path), help="Write to a file, not to stdout."
    ),
}

model = click.argument("model")
RUN = ("run", "seq_length", "micro_batch_size", "tp", "cp", "cp_kind", "ep", "etp", "imbalance")
WHOLE = ("global_batch_size", "vocab_size")  # of an iteration of the whole model
PIPELINE = (
    *("pp", "vpp", "schedule", "microbatch_group_size", "layout", "first_stage_layers"),
    *("last_stage_layers", "embedding_as_layer", "loss_as_layer"),
)
SHARDS = (
    *("dp", "zero", "sharder", "shard_copies", "distributed_optimizer", "main_grads"),
    *("fp8_params", "frozen"),
)
STATES = (*SHARDS, "optimizer", "main_params", "moments", "bucket")
CHOICES = ("sp", "recompute", "recompute_method", "recompute_layers")
KERNELS = ("attention", "expert_products", "dropout", "precision", "implementation")
SHOW = ("wide", "format", "output")


def options(*names: str) -> Callable[[Command], Command]:
    """A decorator that adds shared options, in this order, to a command."""

    def add(command: Command) -> Command:
        for name in reversed(names):
            command = _OPTIONS[name](command)
        return command

    return add


def configure(target: str, settings: Mapping[str, Any], *unused: str) -> Config:
    """The Config of MODEL and the options; its warnings go to stderr.

    Args:
        target: MODEL.
        settings: The options.
        unused: A line for each option that has no effect on this command's answer.
    """
    config = load(target, **settings)
    config = replace(config, unmodelled=(*config.unmodelled, *unused))
    for warning in config.warnings:
        click.echo(f"memcalc: warning: {warning}", err=True)
    return config


def show(report: Report, format_: str | None, output: Path | None) -> None:
    """Print a report, or write it to a file in the format asked for, or by the file's suffix.

    Where the report has failures, they go to stderr and the exit status is 1.
    """
    suffix = output.suffix.lower() if output else ""
    if suffix in FIGURES:
        raise click.UsageError(f"a table is not written as {suffix}; see `memcalc plot`")
    if format_ is None and suffix and suffix not in SUFFIXES:
        hint = nearest(suffix, SUFFIXES)
        raise click.UsageError(f"no format is written as {suffix}; {hint}, or give --format")
    wide = bool(click.get_current_context().meta.get(WIDE))
    write(report.render(format_ or SUFFIXES.get(suffix, "text"), wide), output)
    for failure in report.failures:
        click.echo(f"memcalc: failed: {failure}", err=True)
    if report.failures:
        raise click.exceptions.Exit(1)


def write(text: str, output: Path | None) -> None:
    """Print a text, or write it to a file, whole or not at all; the file ``-`` is stdout."""
    if output is None or str(output) == "-":
        click.echo(_printable(text), nl=False)
    else:
        files.write(output, text.encode())


def _printable(text: str) -> str:
    """The text in what stdout's encoding can say: a line for a line, else an escape."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.replace("─", "-").encode(encoding, "backslashreplace").decode(encoding)
    return text


def refused(*names: str, because: str) -> Callable[[Command], Command]:
    """A decorator for options that other commands have and this one, for a reason, has not."""

    def refuse(ctx: click.Context, option: click.Parameter, value: Any) -> None:
        if value is not None:
            raise click.UsageError(f"{option.opts[0]} has no place here: {because}", ctx)

    def add(command: Command) -> Command:
        for name in names:
            flag = name != "--recompute"
            command = click.option(
                name, is_flag=flag, default=None, hidden=True, expose_value=False, callback=refuse
            )(command)
        return command

    return add
