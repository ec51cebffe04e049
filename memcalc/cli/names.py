"""Other tools' names of options, and suggestions for an unknown option."""

import re
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches

from memcalc.config.optimizers import NAMES
from memcalc.errors import UsageError
from memcalc.lazy import resolve

# Another tool's name -> memcalc's option, or the option with its value.
ALIASES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("--tensor-model-parallel-size", "--tensor-parallel-size", "--tensor-parallel"), ("--tp",)
    ),
    **dict.fromkeys(
        ("--pipeline-model-parallel-size", "--pipeline-parallel-size", "--pipeline-parallel"),
        ("--pp",),
    ),
    **dict.fromkeys(
        (
            "--virtual-pipeline-model-parallel-size",
            "--num-virtual-stages-per-pipeline-rank",
            "--virtual-stages",
        ),
        ("--vpp",),
    ),
    **dict.fromkeys(("--context-parallel-size", "--context-parallel"), ("--cp",)),
    **dict.fromkeys(
        ("--expert-model-parallel-size", "--expert-parallel-size", "--expert-parallel"), ("--ep",)
    ),
    **dict.fromkeys(("--expert-tensor-parallel-size", "--expert-tensor-parallel"), ("--etp",)),
    **dict.fromkeys(("--data-parallel-size", "--data-parallel"), ("--dp",)),
    "--sequence-parallel": ("--sp",),
    "--no-sequence-parallel": ("--no-sp",),
    **dict.fromkeys(
        (
            *("--seq", "--seq-len", "--seqlen", "--sequence-length", "--context-length"),
            *("--max-seq-len", "--max-seq-length"),
        ),
        ("--seq-length",),
    ),
    **dict.fromkeys(
        ("--mbs", "--micro-batch", "--per-device-train-batch-size"), ("--micro-batch-size",)
    ),
    **dict.fromkeys(("--gbs", "--global-batch", "--train-batch-size"), ("--global-batch-size",)),
    "--vocab": ("--vocab-size",),
    "--zero-stage": ("--zero",),
    "--use-distributed-optimizer": ("--distributed-optimizer",),
    "--main-grads-dtype": ("--main-grads",),
    "--main-params-dtype": ("--main-params",),
    "--gradient-checkpointing": ("--recompute", "full"),
    "--recompute-activations": ("--recompute", "selective"),
    "--recompute-granularity": ("--recompute",),
    "--recompute-num-layers": ("--recompute-layers",),
    "--microbatch-group-size-per-virtual-pipeline-stage": ("--microbatch-group-size",),
    "--pipeline-model-parallel-layout": ("--layout",),
    "--decoder-first-pipeline-num-layers": ("--first-stage-layers",),
    "--decoder-last-pipeline-num-layers": ("--last-stage-layers",),
    "--account-for-embedding-in-pipeline-split": ("--embedding-as-layer",),
    "--account-for-loss-in-pipeline-split": ("--loss-as-layer",),
    **dict.fromkeys(
        ("--flash", "--flash-attn", "--flash-attention", "--use-flash-attn"),
        ("--attention", "flash"),
    ),
    "--with": ("--versions",),
    "--optim": ("--optimizer",),
    "--dtype": ("--precision",),
    "--bf16": ("--precision", "bf16"),
    "--fp16": ("--precision", "fp16"),
    "--fp32": ("--precision", "fp32"),
    "--json": ("--format", "json"),
    "--csv": ("--format", "csv"),
}

# Another spelling of an option's value -> memcalc's.
SPELLINGS = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float8": "fp8",
    # a name that says the form of the step too is not one word of an option
    **{name: key for name, key in NAMES.items() if not name.endswith("_fused")},
    "fsdp": "fsdp2",
    "zbv": "zb-v",
    "zbh1": "zb-h1",
    "zbh2": "zb-h2",
}

_BATCH = (
    "use --micro-batch-size (sequences per forward pass) or --global-batch-size (sequences per "
    "optimizer step)"
)
_GPUS = "the number of GPUs is --tp x --pp x --cp x --dp; set --dp"
_SIZES = "sizes come from MODEL; for a model of your own, write a JSON file (see docs/layers.md)"
_OFFLOAD = (
    "offloading of parameters and optimizer states is not modeled; --recompute offload "
    "offloads activations"
)
_LORA = "adapters are not modeled; --frozen names the parts that are not trained"
_FSDP = "use --zero 3 --sharder fsdp2 (or megatron-fsdp)"
_TALK = "use `memcalc memory --explain`, which shows every part of each peak"

# A name of what is not one option of memcalc -> what to use instead.
CONCEPTS = {
    **dict.fromkeys(("--batch", "--batch-size", "--bs"), _BATCH),
    **dict.fromkeys(
        ("--world-size", "--num-gpus", "--gpus", "--nproc-per-node", "--ngpus", "--n-gpus"), _GPUS
    ),
    "--nodes": _GPUS,
    "--nnodes": _GPUS,
    **dict.fromkeys(
        (
            *("--layers", "--num-layers", "--hidden", "--hidden-size", "--ffn-hidden-size"),
            *("--heads", "--num-attention-heads", "--num-query-groups", "--num-experts"),
        ),
        _SIZES,
    ),
    "--model": "MODEL needs no option: `memcalc memory 175b`",
    "--config": "MODEL needs no option: `memcalc memory config.json`",
    **dict.fromkeys(("--lora", "--qlora", "--peft", "--lora-rank"), _LORA),
    **dict.fromkeys(("--offload", "--cpu-offload", "--optimizer-cpu-offload"), _OFFLOAD),
    **dict.fromkeys(("--fsdp", "--fsdp2", "--use-torch-fsdp2", "--use-megatron-fsdp"), _FSDP),
    "--ddp": "plain data parallelism is the default (--zero 0); set --dp",
    "--deepspeed": "use --zero with --sharder deepspeed, or --run with its JSON file",
    **dict.fromkeys(("--verbose", "--debug"), _TALK),
    "--quiet": "progress and warnings are on stderr: 2>/dev/null hides them",
    **dict.fromkeys(
        ("--gradient-accumulation-steps", "--grad-accum", "--num-microbatches"),
        "use --global-batch-size: accumulation steps x --micro-batch-size x --dp",
    ),
    "--num-layers-per-virtual-pipeline-stage": "use --vpp: model chunks per pipeline rank",
    "--recompute-modules": "use --recompute with the modules, such as --recompute mlp,layernorm",
    "--attention-backend": "use --attention flash or --attention unfused",
    **dict.fromkeys(("--fp8", "--fp8-format"), "use --precision fp8"),
    **dict.fromkeys(("--vram", "--memory", "--gpu-memory"), "use --budget of `memcalc memory`"),
    **dict.fromkeys(("--hardware", "--device"), "use --gpu"),
}

OPTION = r"--[a-z][a-z0-9-]*"
# Whose names -> some of them, which help lists.
EXAMPLES = {
    "Megatron-LM's": ("--tensor-model-parallel-size", "--use-distributed-optimizer"),
    "Hugging Face's": ("--gradient-checkpointing", "--bf16"),
    "others:": ("--seq-len", "--mbs", "--gbs", "--zero-stage", "--json"),
}


def as_option(setting: str) -> str:
    """The option of a setting.

    >>> as_option("seq_length")
    '--seq-length'
    """
    return f"--{setting.replace('_', '-')}"


def examples(known: Collection[str]) -> str:
    """The sentence of help about other tools' names, with those of a command's options.

    >>> examples({"--tp", "--precision"})[29:]
    "Megatron-LM's (--tensor-model-parallel-size), Hugging Face's (--bf16)."
    """
    found = []
    for whose, aliases in EXAMPLES.items():
        if there := [alias for alias in aliases if ALIASES[alias][0] in known]:
            found.append(f"{whose} ({', '.join(there)})")
    return f"Other tools' names work too: {', '.join(found)}."


def canonical(
    args: Iterable[str],
    known: Collection[str],
    options: Mapping[str, str] | None = None,
    flags: Collection[str] = (),
) -> list[str]:
    """A command line with other tools' names as the command's own, and _ in names as -.

    Args:
        args: The command line.
        known: The names that the command knows.
        options: For each name of an option that may be given once, the name of the option.
        flags: Those of these names that take no value.

    Raises:
        UsageError: An option is given twice with different values, under any of its names.

    >>> canonical(["22b", "--seq_len=8", "--bf16"], {"--seq-length", "--precision"})
    ['22b', '--seq-length=8', '--precision', 'bf16']
    """
    words = list(args)
    found: list[str] = []
    said: dict[str, dict[str, str]] = {}  # option -> its value -> what it was written as
    for place, word in enumerate(words):
        if word == "--":
            return [*found, *words[place:]]
        name, equals, value = word.partition("=")
        if re.match("-[a-z]", word):
            name, equals, value = word[:2], word[2:], word[2:]
        dashed = name.replace("_", "-")
        own, *its_value = ALIASES.get(dashed, (dashed,))
        if options and own in options:
            following = value if equals else " ".join(words[place + 1 : place + 2])
            alone = own in flags or its_value
            value_ = (its_value or [own])[0] if alone else following
            values = said.setdefault(options[own], {})
            values.setdefault(spelled(value_), name if alone else f"{name} {following}")
            if len(values) > 1:
                raise UsageError(f"{' and '.join(values.values())} contradict each other: drop one")
        if not name.startswith("--") or name in known or (its_value and equals):
            found.append(word)
        elif dashed in known or own in known:
            found += [f"{dashed if dashed in known else own}{equals}{value}", *its_value]
        else:
            found.append(word)
    return found


def spelled(value: str) -> str:
    """A value of an option in memcalc's spelling.

    >>> spelled("torch.bfloat16"), spelled("AdamW"), spelled("llama")
    ('bf16', 'adam', 'llama')
    """
    return SPELLINGS.get(value.lower().removeprefix("torch."), value)


def written(name: str, args: Iterable[str]) -> str:
    """The unknown option as it was written: of ``-tp 8``, click names ``-t`` alone."""
    if name.startswith("--"):
        return name
    return next((word.partition("=")[0] for word in args if word.startswith(name)), name)


def hint(wrong: str, known: Collection[str], command: str) -> str:
    """A suggestion for an unknown option.

    >>> hint("--tpp", {"--tp", "--pp"}, "memcalc layer")
    'did you mean --tp?'
    >>> hint("--fsdp", {"--zero", "--sharder"}, "memcalc comm")
    'use --zero 3 --sharder fsdp2 (or megatron-fsdp)'
    >>> hint("--fsdp", {"--tp", "--pp"}, "memcalc flops")
    'in `memcalc memory`: use --zero 3 --sharder fsdp2 (or megatron-fsdp)'
    """
    name = f"--{wrong.lstrip('-').replace('_', '-').lower()}"
    if wrong != name and name in known:
        return f"did you mean {name}?"
    similar = {f"{name}-size", name.replace("--num-", "--")} & {*known}  # rnn has options for sizes
    if name in CONCEPTS and not similar:
        line = CONCEPTS[name]
        elsewhere = "`memcalc" not in line and not {*re.findall(OPTION, line)} <= {*known}
        return f"in `memcalc memory`: {line}" if elsewhere else line
    if others := _commands_with(ALIASES.get(name, (name,))[0]):
        more = " and others" if len(others) > 3 else ""
        verb = "has" if len(others) == 1 else "have"
        return f"`memcalc {'`, `memcalc '.join(others[:3])}`{more} {verb} it"
    starts = [each for each in sorted(known) if len(name) > 4 and each.startswith(name)]
    close = starts or _close(name.lstrip("-"), known)
    return f"did you mean {' or '.join(close)}?" if close else f"`{command} --help` lists all"


def _close(word: str, known: Collection[str]) -> list[str]:
    """The option whose name, or another tool's name for it, is most similar to a word."""
    spelled = {each.lstrip("-"): each for each in known if each.startswith("--")}
    spelled |= {
        alias.lstrip("-"): " ".join(here) for alias, here in ALIASES.items() if here[0] in known
    }
    return [spelled[each] for each in get_close_matches(word, spelled, 1, 0.7)]


def _commands_with(name: str) -> list[str]:
    """The commands that have an option."""
    commands = resolve("memcalc.cli.main:COMMANDS")
    return [
        command
        for command, (reference, _) in commands.items()
        if any(name in each.opts for each in resolve(reference).params)
    ]
