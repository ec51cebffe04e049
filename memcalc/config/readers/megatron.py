"""Megatron-LM: arguments of a launch script, or of a YAML file with ``MODEL_ARGS``.

The arguments' names and defaults are those of ``megatron/training/arguments.py``. A value that only
a running shell knows is never guessed: for the model it is an error, for parallelism and run it is
left out with a warning. Both name it.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from memcalc.config import fields, pipeline, recompute
from memcalc.config.config import RunSource, Source
from memcalc.config.environment import Environment
from memcalc.config.implementation import IMPLEMENTATIONS as KERNELS
from memcalc.config.model import Model
from memcalc.config.optimizers import NAMES
from memcalc.config.readers import shell
from memcalc.config.readers.keys import listed
from memcalc.config.readers.megatron_names import (
    ACTIVATIONS,
    BACKENDS,
    CONTEXT_KINDS,
    CROSS_ENTROPIES,
    FLAGS,
    HARMLESS,
    HARMLESS_FAMILIES,
    IMPLEMENTATIONS,
    LAUNCHER,
    MODELLED,
    NORMS,
    NOTHING,
    POSITIONS,
    RESHARDING,
    SHARDING,
    SIZES,
    TELLING,
    UNMODELLED,
    UNMODELLED_VALUES,
    VALUES,
)
from memcalc.config.run import MOMENTS
from memcalc.errors import ConfigError, InputError, nearest

Answer = TypeVar("Answer")


class _OpenError(InputError):
    """The value of an argument is known only to a running shell."""


@dataclass
class _Arguments:
    """Arguments by name, without their dashes, with what is assumed and not modelled."""

    words: Mapping[str, Sequence[str]]
    loose: Sequence[str] = ()  # open values that may hold further arguments
    assumed: list[str] = field(default_factory=list)
    unmodelled: list[str] = field(default_factory=list)

    def text(self, name: str) -> str | None:
        """The one value of an argument, or None where it is missing."""
        if name not in self.words:
            return None
        values = self.words[name]
        self._closed(name, values[:1])
        known = [value for value in values if not shell.opened(value)]
        if len(known) != 1:
            raise ConfigError(f"--{name} takes one value, not {len(known)}")
        return known[0]

    def count(self, name: str) -> int | None:
        """A whole number."""
        value = self.text(name)
        if value is not None and not re.fullmatch(r"[-+]?[0-9]{1,18}", value):
            raise InputError(f"--{name} must be a whole number, not {value[:40]!r}")
        return None if value is None else int(value)

    def number(self, name: str) -> float | None:
        """A number."""
        value = self.text(name)
        if value is not None and not re.fullmatch(r"-?[0-9.]{1,20}(e[-+]?[0-9]{1,2})?", value):
            raise InputError(f"--{name} must be a number, not {value[:40]!r}")
        try:
            return None if value is None else float(value)
        except ValueError as error:
            raise InputError(f"--{name} must be a number, not {value!r}") from error

    def word(self, name: str, known: Mapping[str, str]) -> str | None:
        """The meaning of a word."""
        value = self.text(name)
        if value is not None and value not in known:
            shown = value[:40]
            raise InputError(f"--{name} {shown!r} is not modelled; {nearest(shown, known)}")
        return None if value is None else known[value]

    def flag(self, name: str) -> bool:
        """Whether an argument is given."""
        return name in self.words

    def several(self, name: str) -> list[str]:
        """All values of an argument, given as words or as a list: ``[a b]``, ``a,b``."""
        values = self.words.get(name, ())
        self._closed(name, values)
        return re.sub(r"[\[\]'\",]", " ", " ".join(values)).split()

    def run(self, ask: Callable[..., Answer], *given: Any) -> Answer | None:
        """A setting of parallelism or run: None, with a warning, where its value is open."""
        try:
            return ask(*given)
        except _OpenError as error:
            self.unmodelled.append(f"{error}; set it on the command line")
            return None

    def defaulted(self, value: Answer | None, default: Answer, fact: str) -> Answer:
        """A value, or Megatron's default, which is listed as assumed."""
        if value is not None:
            return value
        self.assumed.append(f"{fact} {default} (Megatron's default)")
        return default

    def _closed(self, name: str, values: Iterable[str]) -> None:
        names = [each for value in values for each in shell.opened(value)]
        if names:
            raise _OpenError(
                f"--{name} has no known value: the file does not determine {listed(names)}"
            )


def read_script(text: str, name: str) -> Source | RunSource:
    r"""Read a launch script; ``name`` is the model's name.

    Raises:
        InputError: Neither a command nor a variable of the script has Megatron-LM's arguments.
        ConfigError: Two arguments contradict each other, or a value is out of range.

    >>> script = "H=64\ntorchrun --nproc_per_node 8 x.py --num-layers 2 --hidden-size $H "
    >>> source = read_script(script + "--num-attention-heads 4 --micro-batch-size 1 --bf16", "x")
    >>> source.model.ffn_size, source.settings["dp"], source.settings["precision"]
    (256, 8, 'bf16')
    """
    script = shell.read(text)
    commands = _training(script)
    words, maybe = _options(commands)
    said = _Arguments(words, _loose(command for certain, command in commands if certain))
    if maybe:
        said.unmodelled.append(
            "ignored, because they depend on a condition that the file does not determine: "
            f"{listed(maybe)}"
        )
    if said.loose:
        said.unmodelled.append(
            f"arguments may be missing: the file does not determine {listed(said.loose)}"
        )
    programs = {word.rpartition("/")[2] for _, command in commands for word in command}
    return _source(said, name, _world(said, script), programs)


def read_yaml(
    content: Mapping[str, Any], name: str, world: int | None = None, program: str = ""
) -> Source | RunSource:
    """Read a YAML file with ``MODEL_ARGS``.

    Args:
        content: The YAML.
        name: The model's name.
        world: The number of GPUs, where it is known.
        program: The file name of the program that receives the arguments.

    Raises:
        InputError: ``MODEL_ARGS`` is not an object of arguments.
        ConfigError: As ``read_script``.

    >>> sizes = {"--num-layers": 2, "--hidden-size": 64, "--num-attention-heads": 4}
    >>> arguments = {**sizes, "--swiglu": True, "--sequence-parallel": False}
    >>> read_yaml({"MODEL_ARGS": arguments}, "x").model.activation
    'swiglu'
    """
    given = content["MODEL_ARGS"]
    if not isinstance(given, dict):
        raise InputError("MODEL_ARGS must map arguments to values")
    words = {
        argument: _yaml_words(key, value)
        for key, value in given.items()
        if (argument := key.lstrip("-").replace("_", "-"))
        if value is not False and (value is not None or argument in VALUES)
    }
    return _source(_Arguments(words), name, world, {program})


def _yaml_words(key: str, value: Any) -> list[str]:
    if value is True or value is None:
        return []
    values = value if isinstance(value, list) else [value]
    if any(isinstance(each, (dict, list)) for each in values):
        raise InputError(f"{shell.shown(key)} must be a value or a list of values")
    texts = [str(each).replace("\0", " ") for each in values]
    return [re.sub(r"\$\{?(\w+)\}?", lambda m: shell.unknown(f"${m[1]}"), text) for text in texts]


def _training(script: shell.Script) -> list[tuple[bool, list[str]]]:
    """The training commands and what may be passed to them; without any, the variables."""
    commands = [(certain, _split(words)) for certain, words in script.commands]
    training = [_is_training(words) for _, words in commands]
    found = [each for each, trains in zip(commands, training, strict=True) if trains]
    if any(certain for certain, _ in found):
        return [
            (certain, words)
            for (certain, words), trains in zip(commands, training, strict=True)
            if trains or not certain
        ]
    if found:
        return [(True, words) for _, words in found]
    before: list[str] = []  # of each variable, the words before its first argument
    held: list[str] = []
    for values in script.variables.values():
        words = _split(values)
        first = next((i for i, word in enumerate(words) if _option(word)[0]), len(words))
        before += words[:first]
        held += words[first:]
    if held:
        return [(True, before + held)]
    raise InputError("no command with arguments such as --num-layers or --micro-batch-size")


def _is_training(words: Iterable[str]) -> bool:
    return any(_option(word)[0] in TELLING for word in words)


def _split(words: Iterable[str]) -> list[str]:
    """Words, with those split that hold several arguments for ``bash -c`` or ``eval``."""
    found: list[str] = []
    for word in words:
        found += word.split() if " --" in f" {word}" else [word]
    return found


def _option(word: str) -> tuple[str, str | None]:
    """The name and value of ``--name=value``; an empty name for words that are no argument."""
    match = re.match(r"--([A-Za-z][\w-]*)(?:=(.*))?$", word, re.DOTALL)
    return (match[1].replace("_", "-"), match[2]) if match else ("", None)


def _options(commands: Iterable[tuple[bool, list[str]]]) -> tuple[dict[str, list[str]], list[str]]:
    """The arguments of commands that run, and the names of those that may be passed."""
    words: dict[str, list[str]] = {}
    maybe: dict[str, None] = {}
    for certain, command in commands:
        for name, values in _command_options(command).items():
            if _harmless(name):
                words.setdefault(name, values)
            elif not certain:
                maybe[name] = None
            elif words.setdefault(name, values) != values:
                both = " and ".join(shell.shown(" ".join(v)) for v in (words[name], values))
                raise ConfigError(f"two commands have different values for --{name}: {both}")
    return words, [f"--{name}" for name in maybe if name not in words]


def _command_options(command: Iterable[str]) -> dict[str, list[str]]:
    """Arguments of one command; the last one of a name counts, as in Megatron's parser."""
    found: dict[str, list[str]] = {}
    values: list[str] | None = None
    for word in command:
        name, value = _option(word)
        if name:
            values = found[name] = [] if value is None else [_unquoted(value)]
        elif values is not None:
            values.append(_unquoted(word))
    return {name: values[:1] if name in LAUNCHER else values for name, values in found.items()}


def _unquoted(word: str) -> str:
    """A value without the quotes that are left inside an evaluated string."""
    return word[1:-1] if len(word) > 1 and word[0] == word[-1] and word[0] in "'\"" else word


def _loose(commands: Iterable[list[str]]) -> list[str]:
    """Open values that may hold arguments rather than the value of one."""
    found: list[str] = []
    for command in commands:
        taken = 0  # values that the last argument may still take
        for word in command[1:]:
            name, value = _option(word)
            if name:
                many = name.startswith(("data", "train-data", "valid-data", "test-data"))
                taken = 0 if name in FLAGS or value is not None else len(command) if many else 1
            elif taken:
                taken -= 1
            elif word.startswith("\0") and word.count("\0") == 2:
                found += shell.opened(word)
    return list(dict.fromkeys(found))


def is_read(name: str) -> bool:
    """Whether an argument is read, or its effect on memory is known.

    >>> is_read("num-layers"), is_read("seed"), is_read("no-such-argument")
    (True, True, False)
    """
    return name in UNMODELLED or name in FLAGS or name in VALUES or _harmless(name)


def _harmless(name: str) -> bool:
    if name in UNMODELLED or name in FLAGS or name in VALUES:
        return False
    return name in HARMLESS or name in LAUNCHER or name.startswith(HARMLESS_FAMILIES)


def _world(said: _Arguments, script: shell.Script) -> int | None:
    """The number of GPUs that a script starts, where it says so."""

    def held(*names: str) -> str:
        found = [script.variables[name] for name in names if script.variables.get(name)]
        return found[0][0] if found else ""

    def given(name: str) -> str:
        return next(iter(said.words.get(name, ())), "")

    launched = (
        given("nproc-per-node") or given("num-gpus"),
        given("nnodes") or given("num-nodes") or "1",
    )
    variables = held("GPUS_PER_NODE", "NPROC_PER_NODE"), held("NNODES", "NUM_NODES")
    for pair in (launched, variables, (held("WORLD_SIZE"), "1")):
        if all(re.fullmatch(r"[0-9]{1,6}", each) for each in pair):
            return int(pair[0]) * int(pair[1])
    return None


def _source(
    said: _Arguments, name: str, world: int | None, programs: Iterable[str]
) -> Source | RunSource:
    """The source that arguments describe, with or without a model."""
    for without in (each for each in said.words if each in VALUES and not said.words[each]):
        raise ConfigError(f"--{without} needs a value")
    settings = {**_parallel(said, world), **_run(said)}
    settings |= said.run(_states, said, settings["precision"]) or {}
    model = None
    if any(size in said.words for size in SIZES):
        model = _model(said, name, settings["tp"] or 1, programs)
    layers = model.layers if model else None
    settings |= said.run(_spread, said) or {}
    settings["vpp"] = said.run(_chunks, said, layers, settings)
    if settings["vpp"] in (None, 1):
        settings["microbatch_group_size"] = None  # the schedule is not interleaved
    if settings["pp"] in (None, 1):
        settings |= {"first_stage_layers": None, "last_stage_layers": None}
    settings |= said.run(_recompute, said) or {}
    _tell(said)
    known = {key: value for key, value in settings.items() if value is not None}
    lines = tuple(said.assumed), tuple(said.unmodelled)
    return RunSource(known, *lines) if model is None else Source(model, known, *lines)


def unmodelled(values: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Arguments that are not modelled, with the likely sign of the error and why.

    Args:
        values: The arguments, each with its value as it is written.

    >>> list(unmodelled({"moe-token-dispatcher-type": "flex", "cuda-graph-impl": "none"}))
    [('--moe-token-dispatcher-type flex', 'counted as all-to-all')]
    """
    for name, reason in UNMODELLED.items():
        value = values.get(name)
        if value is not None and value not in NOTHING and (name, value) not in MODELLED:
            yield f"--{name}", reason
    for (name, value), reason in UNMODELLED_VALUES.items():
        if values.get(name) == value:
            yield f"--{name} {value}", reason


def _tell(said: _Arguments) -> None:
    """A line for each argument that is not modelled, and one for all unknown ones."""
    values = {name: " ".join(words) for name, words in said.words.items()}
    said.unmodelled.extend(f"{what} is not modelled: {why}" for what, why in unmodelled(values))
    unknown = [name for name in said.words if not is_read(name)]
    if unknown:
        names = listed(f"--{name[:40]}" for name in sorted(unknown))
        said.unmodelled.append(f"unknown to memcalc, ignored: {names}")


def _parallel(said: _Arguments, world: int | None) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "tp": said.run(said.count, "tensor-model-parallel-size"),
        "pp": said.run(said.count, "pipeline-model-parallel-size"),
        "cp": said.run(said.count, "context-parallel-size"),
        "cp_kind": said.run(said.word, "cp-comm-type", CONTEXT_KINDS),
        "ep": said.run(said.count, "expert-model-parallel-size"),
        "etp": said.run(said.count, "expert-tensor-parallel-size"),
        "sp": said.flag("sequence-parallel") or None,
        "dp": None,
    }
    size = math.prod(settings[degree] or 1 for degree in ("tp", "pp", "cp"))
    if world and size > 0 and world % size == 0:
        settings["dp"] = world // size
    elif world:
        said.assumed.append(
            f"data-parallel size 1 (the file's {world} GPUs are not a multiple of TP x PP x CP = "
            f"{size})"
        )
    return settings


def _run(said: _Arguments) -> dict[str, Any]:
    if said.flag("bf16") and said.flag("fp16"):
        raise ConfigError("--bf16 and --fp16 are mutually exclusive")
    if "rampup-batch-size" in said.words:
        said.assumed.append("global batch size at the end of its ramp-up")
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
        "global_batch_size": said.run(said.count, "global-batch-size"),
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
        "vocab_multiple": said.run(_vocab_multiple, said),
    }


def _cross_entropy(said: _Arguments) -> str | None:
    """The cross-entropy kernel."""
    if not said.flag("cross-entropy-loss-fusion"):
        return None
    return said.word("cross-entropy-fusion-impl", CROSS_ENTROPIES) or "native"


def _environment(said: _Arguments) -> Environment:
    """Settings that decide which buffers there are."""
    limit = said.count("wgrad-deferral-limit") or 2**31
    return Environment(
        deterministic=said.flag("deterministic-mode"),
        fused_gradients=not said.flag("no-gradient-accumulation-fusion"),
        deferred_gradients=limit if said.flag("defer-embedding-wgrad-compute") else 0,
        loader_mask=not said.flag("no-create-attention-mask-in-dataloader"),
    )


def _spread(said: _Arguments) -> dict[str, Any]:
    """How the layers are split over the pipeline stages."""
    return {
        "first_stage_layers": said.count("decoder-first-pipeline-num-layers"),
        "last_stage_layers": said.count("decoder-last-pipeline-num-layers"),
        "layout": said.text("pipeline-model-parallel-layout"),
        "embedding_as_layer": said.flag("account-for-embedding-in-pipeline-split") or None,
        "loss_as_layer": said.flag("account-for-loss-in-pipeline-split") or None,
        "microbatch_group_size": said.count("microbatch-group-size-per-virtual-pipeline-stage"),
    }


def _states(said: _Arguments, precision: str | None) -> dict[str, Any]:
    """The optimizer, the dtypes of its states, and how they are sharded.

    Gradients accumulate in fp32 under bf16, and in fp16 under fp16, unless an argument says
    otherwise. The dtypes of a precision-aware optimizer need its flag.
    """
    settings: dict[str, Any] = {
        "optimizer": said.word("optimizer", NAMES),
        "distributed_optimizer": said.flag("use-distributed-optimizer") or None,
        "shard_copies": said.count("num-distributed-optimizer-instances"),
        "fp8_params": said.flag("fp8-param-gather") or None,
    }
    if said.flag("use-megatron-fsdp") or said.flag("use-custom-fsdp"):
        strategy = said.word("data-parallel-sharding-strategy", SHARDING)
        settings |= {"distributed_optimizer": None, "zero": int(strategy or 0)}
        settings["sharder"] = "megatron-fsdp"
    if said.flag("use-torch-fsdp2"):
        return settings | {"shard_copies": None, "zero": _resharding(said), "sharder": "fsdp2"}
    if settings["shard_copies"] is not None and not (
        settings["distributed_optimizer"] or settings.get("zero")
    ):
        settings["shard_copies"] = None
    if said.flag("grad-reduce-in-bf16"):
        settings["main_grads"] = "bf16"
    elif precision == "fp16" and not said.flag("accumulate-allreduce-grads-in-fp32"):
        settings["main_grads"] = "fp16"
    if not said.flag("use-precision-aware-optimizer"):
        return settings
    main = said.text("main-params-dtype") or "fp32"
    moments = {said.text(f"exp-avg{which}-dtype") or "fp32" for which in ("", "-sq")}
    if len(moments) > 1:
        said.unmodelled.append(
            "moments of two dtypes are not modelled: both are counted in the wider one"
        )
    remainder = main == "fp32" and precision == "bf16"  # stored as the bits that bf16 lacks
    return settings | {
        "main_grads": said.text("main-grads-dtype") or "fp32",
        "main_params": "remainder" if remainder else main,
        "moments": max(moments, key=lambda name: MOMENTS.get(name, 0)),
    }


def _resharding(said: _Arguments) -> int:
    """The ZeRO stage of PyTorch's FSDP2: 2 where gathered weights stay after forward."""
    if said.flag("torch-fsdp2-no-reshard-after-forward"):
        return 2
    name = "torch-fsdp2-reshard-after-forward"
    if re.fullmatch(r"[0-9]{1,9}", said.text(name) or ""):
        said.unmodelled.append(
            f"--{name} {said.text(name)} is not modelled: uses more memory than counted (weights "
            "are sharded over fewer ranks after forward)"
        )
        return 3
    return int(said.word(name, RESHARDING) or 3)


def _chunks(said: _Arguments, layers: int | None, settings: Mapping[str, Any]) -> int | None:
    """Model chunks per pipeline rank."""
    stages = settings["pp"] or 1
    virtual = said.count("num-virtual-stages-per-pipeline-rank")
    each = said.count("num-layers-per-virtual-pipeline-stage")
    if settings.get("layout") is not None and stages > 0:
        chunks = len(pipeline.layout(settings["layout"]))
        fields.divides(("--pipeline-model-parallel-size", stages), ("chunks of the layout", chunks))
        return chunks // stages
    if each is not None and virtual is not None:
        raise ConfigError(
            "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank "
            "are mutually exclusive"
        )
    if each is None or layers is None:
        return virtual
    layers += bool(settings.get("embedding_as_layer")) + bool(settings.get("loss_as_layer"))
    if min(each, stages) < 1 or layers % (each * stages):
        raise ConfigError(
            f"--num-layers-per-virtual-pipeline-stage {each} x --pipeline-model-parallel-size "
            f"{stages} must divide layers {layers}"
        )
    return layers // (each * stages)


def _recompute(said: _Arguments) -> dict[str, Any]:
    """The settings of recomputation."""
    granularity = said.text("recompute-granularity")
    if said.flag("recompute-activations") or said.flag("moe-layer-recompute"):
        granularity = "selective"
    if said.flag("checkpoint-activations") or (
        granularity is None and said.flag("activations-checkpoint-method")
    ):
        granularity = "full"
    if granularity in (None, "none"):
        return {}
    if granularity == "full":
        return _full(said)
    if granularity != "selective":
        raise InputError(
            f"--recompute-granularity {granularity[:40]!r} is unknown; "
            "choose from 'full', 'selective'"
        )
    modules = said.several("recompute-modules")
    modules += ["moe"] * (said.flag("moe-layer-recompute") and "moe" not in modules)
    words = _selective(said, modules or ["core_attn"])
    return {"recompute": words} if words else {}


def _full(said: _Arguments) -> dict[str, Any]:
    number = said.count("recompute-num-layers")
    method = said.text("recompute-method")
    settings: dict[str, Any] = {"recompute": "full"}
    if number is not None:
        settings["recompute_layers"] = number
    if method is not None:
        fields.word("--recompute-method", method, recompute.METHODS)
        settings["recompute_method"] = method
    return settings


def _selective(said: _Arguments, modules: Iterable[str]) -> str | None:
    """Megatron's names of modules, of which ``recompute`` knows most."""
    modules = list(dict.fromkeys(modules))
    known = [module for module in modules if module in recompute.WORDS]
    if other := [module for module in modules if module not in recompute.WORDS]:
        said.unmodelled.append(
            f"--recompute-modules {listed(other)} is not modelled: uses less memory than counted"
        )
    return ",".join(known) or None


def _model(said: _Arguments, name: str, tp: int, programs: Iterable[str]) -> Model:
    layers = said.count("encoder-num-layers" if "num-layers" not in said.words else "num-layers")
    sizes = {
        "layers": ("num-layers", layers),
        "hidden_size": ("hidden-size", said.count("hidden-size")),
        "heads": ("num-attention-heads", said.count("num-attention-heads")),
    }
    for argument, value in sizes.values():
        if value is None:
            hint = f": it may be in {listed(said.loose)}, which is unknown" if said.loose else ""
            raise InputError(f"--{argument} is missing{hint}")
    whole = {fact: value or 0 for fact, (_, value) in sizes.items()}
    fields.whole("layers", whole["layers"], pipeline.MOST)
    fields.whole("hidden_size", whole["hidden_size"], 2**24)
    facts = {
        **whole,
        **_kinds(said),
        **_widths(said, whole["hidden_size"]),
        **_dropouts(said),
        **_windows(said, whole["layers"]),
        **(_latent(said, whole["heads"]) if said.flag("multi-latent-attention") else _heads(said)),
        **_experts(said, whole["layers"]),
        "vocab_size": _vocabulary(said, tp),
        "max_seq_length": said.count("max-position-embeddings"),
        "mtp_layers": said.count("mtp-num-layers"),
    }
    if any(program.startswith("pretrain_bert") for program in programs):
        binary = not said.flag("bert-no-binary-head")
        facts |= {"causal": False, "head_transform": True, "head_bias": True, "pooled": binary}
        facts["token_types"] = 2 if binary else None
    if any(program.startswith("pretrain_t5") for program in programs):
        said.unmodelled.append(
            "pretrain_t5 trains an encoder and a decoder: only one of them is counted"
        )
    stated = {fact: value for fact, value in facts.items() if value is not None}
    return Model(name=name, source="Megatron-LM arguments", **stated)


def _kinds(said: _Arguments) -> dict[str, Any]:
    """Norms, biases, positions and the other words and flags."""
    biases = not said.flag("disable-bias-linear")
    position = said.word("position-embedding-type", POSITIONS) or "learned"
    if position == "learned" and said.flag("no-position-embedding"):
        position = "none"
    if said.flag("use-rotary-position-embeddings") or said.flag("multi-latent-attention"):
        position = "rotary"
    fp32 = said.flag("attention-softmax-in-fp32") or said.flag("apply-query-key-layer-scaling")
    return {
        "norm": said.word("normalization", NORMS),
        "position": position,
        "qkv_bias": biases or said.flag("add-qkv-bias"),
        "proj_bias": biases,
        "mlp_bias": biases,
        "qk_norm": said.flag("qk-layernorm"),
        "attention_sinks": said.text("softmax-type") == "learnable",
        "softmax_fp32": fp32,
        "tied_embeddings": not said.flag("untie-embeddings-and-output-weights"),
    }


def _widths(said: _Arguments, hidden: int) -> dict[str, Any]:
    """The activation, and the MLP's width, whose default depends on the activation."""
    chosen = [name for name in ACTIVATIONS if said.flag(name)]
    if len(chosen) > 1:
        raise ConfigError(f"{' and '.join(f'--{name}' for name in chosen)} are mutually exclusive")
    width = said.count("ffn-hidden-size")
    if width is None:
        gated = chosen == ["swiglu"]
        width = 8 * hidden // 192 * 64 if gated else 4 * hidden
        said.assumed.append(f"ffn_size {width} (Megatron's default)")
    return {"activation": ACTIVATIONS[chosen[0]] if chosen else "gelu", "ffn_size": width}


def _dropouts(said: _Arguments) -> dict[str, Any]:
    attention = said.defaulted(said.number("attention-dropout"), 0.1, "attention-dropout")
    hidden = said.defaulted(said.number("hidden-dropout"), 0.1, "hidden-dropout")
    return {
        "attention_dropout": attention,
        "hidden_dropout": hidden,
        "embedding_dropout": hidden,
    }


def _heads(said: _Arguments) -> dict[str, Any]:
    groups = said.count("num-query-groups")
    if said.flag("group-query-attention"):
        groups = said.defaulted(groups, 1, "num-query-groups")
    elif groups is not None:
        said.unmodelled.append("--num-query-groups has no effect without --group-query-attention")
        groups = None
    return {"kv_heads": groups, "head_size": said.count("kv-channels")}


def _latent(said: _Arguments, heads: int) -> dict[str, Any]:
    """Multi-head latent attention."""
    rank = said.count("kv-lora-rank")
    if rank is None:
        raise InputError(
            "--multi-latent-attention needs --kv-lora-rank, whose default differs between versions"
        )
    rotated = said.defaulted(said.count("qk-pos-emb-head-dim"), 64, "qk-pos-emb-head-dim")
    plain = said.defaulted(said.count("qk-head-dim"), 128, "qk-head-dim")
    return {
        "kv_heads": heads,
        "head_size": plain + rotated,
        "rope_head_size": rotated,
        "v_head_size": said.defaulted(said.count("v-head-dim"), 128, "v-head-dim"),
        "q_lora_rank": said.count("q-lora-rank"),
        "kv_lora_rank": rank,
    }


def _windows(said: _Arguments, layers: int) -> dict[str, Any]:
    """Sliding windows: ``left,right`` are tokens besides the token itself; -1 is unlimited."""
    window = "".join(said.several("window-size")[:1]).strip("()")
    if not window:
        return {}
    if not re.fullmatch(r"-1|[0-9]{1,9}", window):
        raise InputError(f"--window-size must start with a whole number, not {window[:40]!r}")
    if window == "-1":
        return {}
    skipped = _frequency(said, "window-attn-skip-freq", layers, lambda layer, n: (layer + 1) % n)
    return {"sliding_window": int(window) + 1, "window_layers": skipped}


def _experts(said: _Arguments, layers: int) -> dict[str, Any]:
    """Mixture of experts."""
    experts = said.count("num-experts")
    if not experts:
        return {}
    capacity = said.number("moe-expert-capacity-factor")
    return {
        "experts": experts,
        "experts_per_token": said.defaulted(said.count("moe-router-topk"), 2, "moe-router-topk"),
        "expert_ffn_size": said.count("moe-ffn-hidden-size"),
        "shared_ffn_size": said.count("moe-shared-expert-intermediate-size"),
        "shared_gate": said.flag("moe-shared-expert-gate"),
        "moe_layers": _frequency(said, "moe-layer-freq", layers, lambda layer, n: layer % n == 0),
        "router": said.text("moe-router-score-function"),
        "capacity_factor": capacity if capacity is not None and capacity >= 0 else None,
    }


def _frequency(said: _Arguments, name: str, layers: int, chosen: Callable[[int, int], Any]) -> Any:
    """A 0 or 1 per layer, from a number or a pattern; None where the argument is missing."""
    values = said.words.get(name)
    if values is None:
        return None
    said._closed(name, values)
    pattern = "".join(values)
    if re.fullmatch(r"[0-9]{1,9}", pattern):
        if int(pattern) < 1:
            raise ConfigError(f"--{name} must be at least 1")
        return tuple(int(bool(chosen(layer, int(pattern)))) for layer in range(layers))
    listed = said.several(name)
    if len(listed) > 1 and set(listed) <= {"0", "1"}:  # a YAML list
        return tuple(int(value) for value in listed)
    return pattern


def _vocabulary(said: _Arguments, tp: int) -> int | None:
    """The vocabulary size, padded as Megatron pads it."""
    padded = said.count("padded-vocab-size")
    size = said.count("vocab-size")
    if padded is not None or size is None:
        return padded
    size += said.count("extra-vocab-size") or 0
    return fields.padded(size, _vocab_multiple(said), tp, said.assumed)


def _vocab_multiple(said: _Arguments) -> int:
    """The multiple that the vocabulary is padded to, per tensor-parallel rank."""
    multiple = said.count("make-vocab-size-divisible-by")
    return 128 if multiple is None else multiple
