"""Options that commands share: one table, in the order of --help, and so one long file."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from memcalc.analysis.activations import ACCOUNTINGS
from memcalc.cli.command import Decorated, Number, Whole, Word, option, remember
from memcalc.config import IMPLEMENTATIONS, PRECISION_BYTES
from memcalc.config.catalog import names
from memcalc.config.gpus import aliases, gpus
from memcalc.config.implementation import ATTENTIONS, CROSS_ENTROPIES, EXPERT_PRODUCTS
from memcalc.config.optimizers import FORMS, OPTIMIZERS
from memcalc.config.parallel import CONTEXT_KINDS
from memcalc.config.pipeline import MOST, SCHEDULES
from memcalc.config.recompute import MEGATRON_MODULES, METHODS, POLICIES, REGIONS
from memcalc.config.run import FROZEN, MAIN_GRADS, MAIN_PARAMS, MOMENTS
from memcalc.frameworks import FRAMEWORKS, SHARDERS
from memcalc.render import RENDERERS

FORMATS = tuple(RENDERERS)
SIZE = Whole(1, 2**20)  # of a parallelism


def _words(*choices: Iterable[str]) -> Callable[..., list[CompletionItem]]:
    """A completion of one word, or of the last of several with commas."""

    def complete(
        ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        before, comma, last = incomplete.rpartition(",")
        words = [word for some in choices for word in some if word.startswith(last)]
        return [CompletionItem(f"{before}{comma}{word}") for word in words]

    return complete


def _models(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """A completion of MODEL: matching names of the catalog, or else files."""
    known = [CompletionItem(name) for name in names() if name.startswith(incomplete.lower())]
    return known or [CompletionItem(incomplete, type="file")]


def complete_gpus(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """A completion of a GPU's name or alias."""
    known = [name for each in gpus() for name in (each.name, *aliases(each))]
    return [CompletionItem(name) for name in known if name.startswith(incomplete.lower())]


# Heading of --help -> setting -> its option. [default: ...] applies if MODEL has no value.
_GROUPED: dict[str, dict[str, Callable[..., Any]]] = {
    "Answer": {
        "accounting": partial(
            option,
            "--accounting",
            type=Word(ACCOUNTINGS),
            default="paper",
            help="paper leaves small buffers out, as Korthikanti et al. 2022; exact counts every "
            "byte.  [default: paper]",
        ),
    },
    "Model": {
        "vocab_size": partial(
            option,
            "--vocab-size",
            type=Whole(1, 2**31),
            help="Vocabulary size before padding.  [default: the model's]",
        ),
    },
    "Run": {
        "run": partial(
            option,
            "--run",
            metavar="FILE",
            help="Take parallelism and run settings from FILE: DeepSpeed JSON, or any format of "
            "MODEL.  [default: those of MODEL]",
        ),
        "seq_length": partial(
            option,
            "-s",
            "--seq-length",
            type=Whole(1, 2**31),
            common=True,
            help="Sequence length in tokens.  [default: the model's context length]",
        ),
        "micro_batch_size": partial(
            option,
            "-b",
            "--micro-batch-size",
            type=Whole(1, 2**24),
            common=True,
            help="Sequences per micro-batch.  [default: 1]",
        ),
        "global_batch_size": partial(
            option,
            "--global-batch-size",
            type=Whole(1, 2**31),
            common=True,
            help="Sequences per optimizer step over all ranks.  "
            "[default: enough to fill the pipeline]",
        ),
        "precision": partial(
            option,
            "--precision",
            type=Word(PRECISION_BYTES),
            help="Dtype of weights and activations. fp8: linears save fp8 inputs, and keep "
            "fp8 copies of their bf16 weights.  [default: bf16]",
        ),
        "dropout": partial(
            option,
            "--dropout",
            type=Number(),
            metavar="P",
            help="Dropout probability, at least 0 and less than 1.  [default: 0]",
        ),
    },
    "Parallelism": {
        "tp": partial(
            option, "--tp", type=SIZE, common=True, help="Tensor-parallel size.  [default: 1]"
        ),
        "sp": partial(
            option,
            "--sp/--no-sp",
            default=None,
            common=True,
            help="Sequence parallelism over the tensor-parallel ranks.  [default: off]",
        ),
        "cp": partial(option, "--cp", type=SIZE, help="Context-parallel size.  [default: 1]"),
        "cp_kind": partial(
            option,
            "--cp-kind",
            type=Word(CONTEXT_KINDS),
            metavar="KIND",
            help="How context parallelism exchanges keys and values: ring, all_gather, or "
            "all_to_all (Ulysses).  [default: ring]",
        ),
        "ep": partial(
            option, "--ep", type=SIZE, common=True, help="Expert-parallel size.  [default: 1]"
        ),
        "etp": partial(
            option,
            "--etp",
            type=SIZE,
            help="Tensor-parallel size of the experts.  [default: as --tp]",
        ),
        "imbalance": partial(
            option,
            "--imbalance",
            type=Number(),
            help="Tokens routed to the busiest expert rank, as a multiple of a balanced share: "
            "from 1 to --ep, which is all tokens.  [default: 1]",
        ),
        "dp": partial(
            option, "--dp", type=SIZE, common=True, help="Data-parallel size.  [default: 1]"
        ),
    },
    "Pipeline": {
        "pp": partial(
            option, "--pp", type=SIZE, common=True, help="Pipeline-parallel size.  [default: 1]"
        ),
        "vpp": partial(
            option,
            "--vpp",
            type=SIZE,
            help="Model chunks per pipeline rank; 2 or more: interleaved schedule.  [default: 1]",
        ),
        "schedule": partial(
            option,
            "--schedule",
            type=Word(SCHEDULES),
            metavar="NAME",
            help=f"Pipeline schedule: {', '.join(SCHEDULES)}.  "
            "[default: 1f1b; interleaved with --vpp]",
        ),
        "microbatch_group_size": partial(
            option,
            "--microbatch-group-size",
            type=Whole(1, 2**31),
            help="Interleaved schedule: micro-batches that run through one model chunk before the "
            "next.  [default: as --pp]",
        ),
        "layout": partial(
            option,
            "--layout",
            metavar="CHUNKS",
            help="Layers per model chunk, such as 1,2,2,3, or Megatron's letters, such as "
            "Et|(tt|)*2tL.  [default: layers split evenly]",
        ),
        "first_stage_layers": partial(
            option,
            "--first-stage-layers",
            type=Whole(1, MOST),
            help="Layers of the first stage.  [default: as the other stages]",
        ),
        "last_stage_layers": partial(
            option,
            "--last-stage-layers",
            type=Whole(1, MOST),
            help="Layers of the last stage.  [default: as the other stages]",
        ),
        "embedding_as_layer": partial(
            option,
            "--embedding-as-layer",
            is_flag=True,
            default=None,
            help="Count the embedding as one layer when layers are split over stages (Megatron: "
            "--account-for-embedding-in-pipeline-split).  [default: off]",
        ),
        "loss_as_layer": partial(
            option,
            "--loss-as-layer",
            is_flag=True,
            default=None,
            help="Count the loss as one layer when layers are split over stages (Megatron: "
            "--account-for-loss-in-pipeline-split).  [default: off]",
        ),
    },
    "Sharding and optimizer": {
        "zero": partial(
            option,
            "--zero",
            type=Whole(0, 3),
            metavar="0-3",
            common=True,
            help="ZeRO stage, by what is sharded: 0 nothing, 1 optimizer states, 2 gradients too, "
            "3 weights too.  [default: 0; 3 with --sharder fsdp2 or megatron-fsdp]",
        ),
        "sharder": partial(
            option,
            "--sharder",
            type=Word(SHARDERS),
            metavar="NAME",
            common=True,
            help=f"Framework whose sharding is modeled: {', '.join(SHARDERS)}.  "
            "[default: megatron; deepspeed for --zero 2 and 3]",
        ),
        "shard_copies": partial(
            option,
            "--shard-copies",
            type=SIZE,
            help="Replicas of each shard (hybrid sharding, HSDP).  [default: 1]",
        ),
        "distributed_optimizer": partial(
            option,
            "--distributed-optimizer",
            is_flag=True,
            default=None,
            help="Same as --zero 1 --sharder megatron.  [default: off]",
        ),
        "optimizer": partial(
            option,
            "--optimizer",
            type=Word(OPTIMIZERS),
            metavar="NAME",
            help=f"Optimizer: {', '.join(OPTIMIZERS)}; adam includes AdamW.  [default: adam]",
        ),
        "optimizer_step": partial(
            option,
            "--optimizer-step",
            type=Word(FORMS),
            help="How the optimizer updates weights: foreach (all at once, with temporary copies "
            "of all), fused (one kernel, in place) or loop (one by one).  [default: foreach for "
            "torch, transformers and fsdp2; else fused]",
        ),
        "momentum": partial(
            option,
            "--momentum",
            type=Number(),
            help="Momentum of sgd and rmsprop; 0 keeps none.  [default: 0.9 for Megatron-LM's sgd; "
            "else 0]",
        ),
        "weight_decay": partial(
            option,
            "--weight-decay",
            type=Number(),
            help="Weight decay, which sgd, adagrad and rmsprop add to copies of the gradients.  "
            "[default: 0]",
        ),
        "ema": partial(
            option,
            "--ema",
            is_flag=True,
            default=None,
            help="Keep a moving average of the weights, in their dtype.  [default: off]",
        ),
        "main_grads": partial(
            option,
            "--main-grads",
            type=Word(MAIN_GRADS),
            help="Gradient accumulation dtype.  [default: fp32; the weights' dtype with DeepSpeed]",
        ),
        "main_params": partial(
            option,
            "--main-params",
            type=Word(MAIN_PARAMS),
            metavar="DTYPE",
            help="Dtype of the master weights: fp32, fp16, remainder (the 16 bits that bf16 leaves "
            "out), or none.  [default: fp32]",
        ),
        "moments": partial(
            option,
            "--moments",
            type=Word(MOMENTS),
            help="Dtype of the optimizer's moments.  [default: fp32]",
        ),
        "fp8_params": partial(
            option,
            "--fp8-params",
            is_flag=True,
            default=None,
            help="Store weights in fp8 as well, not only GEMM inputs.  [default: off]",
        ),
        "frozen": partial(
            option,
            "--frozen",
            metavar="PARTS",
            shell_complete=_words(FROZEN),
            help="Parts that are not trained: embedding, head, or regions of --recompute, "
            "separated by commas.  [default: none]",
        ),
        "keep_gradients": partial(
            option,
            "--keep-gradients/--no-keep-gradients",
            default=None,
            help="Whether gradients stay allocated after the step, as with PyTorch's "
            "zero_grad(set_to_none=False).  [default: they are freed]",
        ),
        "bucket": partial(
            option,
            "--bucket",
            type=Whole(1, 2**40),
            help="DeepSpeed's reduce_bucket_size: elements per gradient bucket.  "
            "[default: 500,000,000]",
        ),
    },
    "Recomputation": {
        "recompute": partial(
            option,
            "--recompute",
            metavar="POLICY",
            common="What backward recomputes: none, selective, full, or regions such as mlp,norm.  "
            "[default: none]",
            shell_complete=_words(POLICIES, REGIONS, MEGATRON_MODULES),
            help="What backward recomputes: none; selective; full; save_linear (all but GEMMs); "
            "selective_op (torchtitan's); offload; regions (core_attention, attention, "
            "cross_attention, mla_up, mlp, moe, expert_act, shared_experts, norm, layer); or "
            "Megatron's --recompute-modules (core_attn, layernorm, mla_up_proj, mlp, moe, moe_act, "
            "shared_experts), of which layernorm, mla_up_proj and moe_act also free and recompute "
            "the output. Separate several with commas.  [default: none]",
        ),
        "recompute_method": partial(
            option,
            "--recompute-method",
            type=Word(METHODS),
            help="With --recompute full: uniform (a checkpoint per N layers), or block (only the "
            "first N layers of each model chunk); N is --recompute-layers.  [default: uniform]",
        ),
        "recompute_layers": partial(
            option,
            "--recompute-layers",
            type=Whole(0, MOST),
            help="Layers per checkpoint (uniform), or layers recomputed in each model chunk "
            "(block).  [default: 1 (uniform); all (block)]",
        ),
    },
    "Kernels": {
        "implementation": partial(
            option,
            "--implementation",
            type=Word(IMPLEMENTATIONS),
            metavar="NAME",
            help=f"Framework whose layer is modeled: {', '.join(IMPLEMENTATIONS)}.  "
            "[default: megatron; paper for 22b, 175b, 530b and 1t]",
        ),
        "framework": partial(
            option,
            "--framework",
            type=Word(FRAMEWORKS),
            metavar="NAME",
            help=f"Framework that runs the step: {', '.join(FRAMEWORKS)}; without "
            "--implementation, its usual layers too.  [default: the layers' or the sharder's]",
        ),
        "versions": partial(
            option,
            "--versions",
            metavar="NAME=VERSION,...",
            help="Versions of libraries, such as transformers=4.57,torch=2.9; --with is the same.  "
            "[default: recent ones]",
        ),
        "attention": partial(
            option,
            "--attention",
            type=Word(ATTENTIONS),
            help="Attention kernel.  [default: the implementation's]",
        ),
        "expert_products": partial(
            option,
            "--expert-products",
            type=Word(EXPERT_PRODUCTS),
            metavar="KIND",
            help="How expert GEMMs run: grouped (one kernel for all experts), sequential (one GEMM "
            "per expert), or batched (one GEMM per routed token).  [default: the "
            "implementation's]",
        ),
        "cross_entropy": partial(
            option,
            "--cross-entropy",
            type=Word(CROSS_ENTROPIES),
            metavar="KIND",
            help="How the loss is computed: unfused, native (Megatron-core), te (Transformer "
            "Engine); torch (of an fp32 copy of the logits), torch-16bit, torch-fp32, compiled, "
            "loss-parallel (PyTorch); torchtune-chunked, litgpt, chunked-recomputed; liger, "
            "liger-linear (or chunked), cut.  [default: unfused; torch for torch and "
            "transformers-*, torch-16bit for bert, t5 and vit models]",
        ),
        "holds_logits": partial(
            option,
            "--holds-logits/--no-holds-logits",
            default=None,
            help="Whether the training loop refers to the logits until backward is over: out = "
            "model(...); out.loss.backward() does, Hugging Face's Trainer and torchtitan do not.  "
            "[default: off; on for torch and transformers-*]",
        ),
    },
    "GPU": {
        "gpu": partial(
            option,
            "--gpu",
            metavar="NAME",
            common=True,
            shell_complete=complete_gpus,
            help="GPU: a name from `memcalc gpus`.  [default: none]",
        ),
    },
    "Output": {
        "format": partial(
            option,
            "--format",
            "format_",
            type=Word(FORMATS),
            metavar="FORMAT",
            common=True,
            help=f"Output format: {', '.join(FORMATS)}.  [default: by the suffix of -o, else text]",
        ),
        "wide": partial(
            option,
            "--wide",
            is_flag=True,
            expose_value=False,
            callback=remember,
            help="Show all columns, even if they do not fit the terminal.  [default: off]",
        ),
        "output": partial(
            option,
            "-o",
            "--output",
            metavar="FILE",
            type=click.Path(path_type=Path),
            common=True,
            help="Write to FILE.  [default: stdout]",
        ),
        "force": partial(
            option,
            "--force",
            is_flag=True,
            expose_value=False,
            callback=remember,
            help="Let -o replace an input file.  [default: off]",
        ),
    },
}

fill = option(
    "--fill",
    is_flag=True,
    group="Recomputation",
    help="Use free memory: skip recomputation for as many in-flight micro-batches as fit.  "
    "[default: off]",
)
margin = option(
    "--margin",
    group="GPU",
    metavar="SIZE|PERCENT",
    common=True,
    help="Memory to leave free beyond allocated bytes: 6GiB, 10%.  [default: the estimate of "
    "reserved memory, CUDA context and NCCL]",
)
budget = partial(
    option, "--budget", group="GPU", metavar="SIZE|GPU", common=True, shell_complete=complete_gpus
)  # its help depends on the command
model = click.argument("model", shell_complete=_models)
optional_model = click.argument("model", required=False, shell_complete=_models)
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
STATES = (
    *(*SHARDS, "optimizer", "optimizer_step", "momentum", "weight_decay", "ema"),
    *("main_params", "moments", "bucket", "keep_gradients"),
)
CHOICES = ("sp", "recompute", "recompute_method", "recompute_layers")
KERNELS = (
    "framework",
    "versions",
    "attention",
    "expert_products",
    "dropout",
    "precision",
    "implementation",
)
LOSS = ("cross_entropy", "holds_logits")
SHOW = ("wide", "format", "output", "force")


def options(*names: str) -> Callable[[Decorated], Decorated]:
    """A decorator that adds shared options to a command, in the order of --help."""

    def add(command: Decorated) -> Decorated:
        for group, among in reversed(_GROUPED.items()):
            for name in reversed(among):
                if name in names:
                    command = among[name](group=group)(command)
        return command

    return add
