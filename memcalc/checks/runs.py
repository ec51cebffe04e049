"""Measured training runs, read from a file of JSON lines.

A row has one of two forms: that of Megatron-LM's functional tests, with the arguments of the
launch, or that of SimuMax's runs, with model, parallelism and run. Both are turned into Megatron-LM
arguments, which are read like those of any launch file.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from memcalc.config import Config
from memcalc.config.allocator import expandable
from memcalc.config.environment import Environment
from memcalc.config.gpus import is_gpu
from memcalc.config.merge import configure
from memcalc.config.readers import parse, place, read_bytes
from memcalc.config.readers.megatron.model_args import read_yaml
from memcalc.config.readers.megatron.names import is_read
from memcalc.config.readers.shell.marks import shown
from memcalc.errors import ConfigError, InputError
from memcalc.units import MIB

MAX_BYTES = 64 * 2**20
MAX_LINE = 2**18  # bytes: measured rows have some thousands
MAX_ROWS = 100_000
MOST = 2**50  # the most bytes that a row may state

# The program that the arguments are for, by the first word of a row's id; else pretrain_gpt.py.
PROGRAMS = {"bert": "pretrain_bert.py", "t5": "pretrain_t5.py"}
BERT_VOCABULARY = 30522  # bert-large-uncased

# PyTorch's version in each container family; on Blackwell it decides the size of cuBLAS's
# workspaces. `lts` is NVIDIA's container 25.09 (Megatron-LM's docker/.ngc_version.lts). `dev`
# changes, lately to 26.08; most rows of GB200 show that it has PyTorch 2.12 or later
# (docs/runs.md).
PYTORCH = {"dev": (2, 12), "lts": (2, 9)}


class Measured(NamedTuple):
    """Bytes measured on a rank of one stage.

    Attributes:
        stage: The stage, counted from 0.
        peak: The allocator's peak.
        steady: Bytes allocated between steps, or None if they were not measured.
    """

    stage: int
    peak: int
    steady: int | None


class MeasuredRun(NamedTuple):
    """A row.

    Attributes:
        id: The row's name.
        config: The run; None if memcalc refuses it.
        measured: Measured bytes of each measured stage.
        values: The launch arguments with their values, as words.
        gpu: The name of the GPU, or None if it is unknown.
        world: The number of GPUs, or None if it is unknown.
        notes: What was assumed.
        met: The argument reader's warnings: options that are not modeled or not known.
        flags: What else in the row memcalc does not know.
        refused: Why memcalc refuses the run.
    """

    id: str
    config: Config | None
    measured: Sequence[Measured]
    values: Mapping[str, str]
    gpu: str | None
    world: int | None
    notes: Sequence[str]
    met: Sequence[str] = ()
    flags: Sequence[str] = ()
    refused: str = ""


def read(path: Path) -> list[MeasuredRun]:
    """The rows of a file.

    Raises:
        InputError: The file cannot be read, or a row has neither form.
    """
    found: dict[str, tuple[int, MeasuredRun]] = {}
    for number, line in _lines(path):
        where = f"{place(path)}: line {number}"
        run = _run(parse(line, where), where)
        if run.id in found:
            raise InputError(f"{where}: the id {run.id!r} is on line {found[run.id][0]} too")
        found[run.id] = number, run
    return [run for _, run in found.values()]


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(BytesIO(read_bytes(path, MAX_BYTES)), 1):
        if number > MAX_ROWS:
            raise InputError(f"{place(path)}: more than {MAX_ROWS} lines")
        if len(line) > MAX_LINE:
            raise InputError(f"{place(path)}: line {number} is longer than {MAX_LINE} bytes")
        if line.strip():
            yield number, line


def _run(row: Mapping[str, Any], where: str) -> MeasuredRun:
    """A row of either form, from its JSON."""
    found = _Row(row, where)
    name = found.text("id")
    return (_of_megatron if "args" in row else _of_simumax)(name, found)


class _Row:
    """A JSON object; its methods check the type of a value and return it."""

    def __init__(self, content: Mapping[str, Any], where: str, name: str = "") -> None:
        self.content = content
        self.where = where
        self.name = name

    def _refuse(self, key: str, what: str) -> InputError:
        return InputError(f"{self.where}: {self.name}{key} must be {what}")

    def inside(self, key: str, needed: bool = True) -> "_Row":
        value = self.content.get(key)
        if value is None and not needed:
            value = {}
        if not isinstance(value, dict):
            raise self._refuse(key, "an object")
        return _Row(value, self.where, f"{self.name}{key}.")

    def text(self, key: str) -> str:
        value = self.content.get(key)
        if not isinstance(value, str) or not 0 < len(value) <= 1000 or not value.isprintable():
            raise self._refuse(key, "a line of text")
        return value

    def maybe(self, key: str) -> str | None:
        """A line of text, or None."""
        return None if self.content.get(key) is None else self.text(key)

    def count(self, key: str) -> int | None:
        value = self.content.get(key)
        if value is not None and (type(value) is not int or not 1 <= value <= 2**31):
            raise self._refuse(key, f"a whole number from 1 to {2**31}, or null")
        return value

    def size(self, key: str) -> int:
        """Bytes."""
        value = self.content.get(key)
        if type(value) is not int or not 1 <= value <= MOST:
            raise self._refuse(key, f"a whole number of bytes from 1 to {MOST}")
        return value

    def mebibytes(self, key: str) -> list[int]:
        """Bytes, from a list of sizes in MiB."""
        values = self.content.get(key)
        if not isinstance(values, list) or not values or len(values) > 2**20:
            raise self._refuse(key, "a list of sizes in MiB, one per stage")
        for value in values:
            if type(value) not in (int, float) or not 0 < value <= MOST / MIB:
                raise self._refuse(key, f"a list of sizes in MiB above 0, up to {MOST // MIB}")
        return [round(value * MIB) for value in values]

    def words(self) -> dict[str, str]:
        """Arguments or variables with their values as words; a flag that is set is ``True``.

        The items of a list are joined with spaces; false and null are left out.
        """
        found = {}
        for key, value in self.content.items():
            values = value if isinstance(value, list) else [value]
            plain = all(_is_plain(each) for each in values) and len(values) <= 1000
            if not plain or not re.fullmatch(r"[A-Za-z][\w-]{0,99}", key):
                raise self._refuse(
                    key[:40], "a number, a text, a list of these, true, false or null"
                )
            if value is not False and value is not None:
                found[key] = " ".join(map(str, values))
        return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, str):
        return len(value) <= 1000
    return value is None or (isinstance(value, int) and len(str(value)) <= 100)


def _of_megatron(name: str, row: _Row) -> MeasuredRun:
    """A run of Megatron-LM's functional tests, measured on the last rank."""
    values = {key.replace("_", "-"): word for key, word in row.inside("args").words().items()}
    program = PROGRAMS.get(name.split(".")[0], "pretrain_gpt.py")
    size = row.inside("vocabulary", needed=False).count("size")
    notes = []
    if size is None and program == "pretrain_bert.py":
        size = BERT_VOCABULARY
        notes.append(f"vocabulary {size} (bert-large-uncased)")
    if size is not None:
        values.setdefault("vocab-size", str(size))
    if row.content.get("gpus_assumed") is True:
        notes.append("the number of GPUs (the row says gpus_assumed)")
    variables, image = row.inside("env", needed=False).words(), row.maybe("image")
    if image not in PYTORCH:
        why = f"image {shown(image)} is unknown" if image else "the row names no image"
        notes.append(f"a recent PyTorch, because {why}")
    if (kernel := _attention(variables)) and values.get("transformer-impl") != "local":
        values.setdefault("attention-backend", kernel)
    environment = {
        "pytorch": PYTORCH.get(image or ""),
        "cublas_workspace": variables.get("CUBLAS_WORKSPACE_CONFIG"),
        "deterministic": variables.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") == "0",
        "expandable_segments": _expandable(variables, row.where),
    }
    measured = row.inside("measured")
    peak, unknown = measured.size("peak_bytes"), measured.content.get("steady_bytes") is None
    steady = None if unknown else measured.size("steady_bytes")
    run = _run_of(name, row.maybe("gpu"), values, row.count("gpus"), program, environment)
    last = run.config.parallel.pp - 1 if run.config else 0
    return run._replace(measured=(Measured(last, peak, steady),), notes=notes)


def _expandable(variables: Mapping[str, str], where: str) -> bool:
    """Whether environment variables ask for expandable segments."""
    try:
        return expandable(variables) is True
    except ConfigError as error:
        raise InputError(f"{where}: {error}") from None


def _attention(variables: Mapping[str, str]) -> str | None:
    """Megatron-LM's word for the attention kernel that Transformer Engine's variables allow.

    Each variable forbids one kernel if it is 0 (Transformer Engine, dot_product_attention/utils.py:
    get_attention_backend).

    >>> _attention({"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "0"})
    'unfused'
    """
    allowed = [
        word
        for word in ("flash", "fused", "unfused")
        if variables.get(f"NVTE_{word.upper()}_ATTN") != "0"
    ]
    return allowed[0] if len(allowed) == 1 or allowed == ["fused", "unfused"] else None


def _run_of(
    name: str,
    gpu: str | None,
    values: Mapping[str, str],
    world: int | None,
    program: str,
    environment: Mapping[str, Any],
) -> MeasuredRun:
    """The run that launch arguments describe, without measurements, or why memcalc refuses it."""
    run = MeasuredRun(name, None, (), values, gpu, world, ())
    if gpu is None or not is_gpu(gpu):
        run = run._replace(flags=(f"unknown GPU {gpu}" if gpu else "unknown GPU",))
        gpu = None
    arguments = {key: True if value == "True" else value for key, value in values.items()}
    try:
        source = read_yaml({"MODEL_ARGS": arguments}, name, world, program)
        if source.model is None:
            return run._replace(refused="the arguments describe no model")
        said = source.settings.get("environment", Environment())
        deterministic = said.deterministic or environment.get("deterministic", False)
        settings = replace(said, **{**environment, "deterministic": deterministic})
        config = configure(source, {"gpu": gpu, "environment": settings})
    except (ConfigError, InputError) as error:
        return run._replace(refused=str(error))
    return run._replace(config=config, met=source.unmodelled)


# SimuMax's names of sizes, as arguments of Megatron-LM.
SIZES = {
    "hidden_size": "hidden-size",
    "num_attention_heads": "num-attention-heads",
    "num_query_groups": "num-query-groups",
    "kv_channels": "kv-channels",
    "ffn_hidden_size": "ffn-hidden-size",
    "num_layers": "num-layers",
    "moe_ffn_hidden_size": "moe-ffn-hidden-size",
    "moe_shared_expert_intermediate_size": "moe-shared-expert-intermediate-size",
    "num_experts": "num-experts",
    "moe_router_topk": "moe-router-topk",
    "q_lora_rank": "q-lora-rank",
    "kv_lora_rank": "kv-lora-rank",
    "qk_head_dim": "qk-head-dim",
    "qk_pos_emb_head_dim": "qk-pos-emb-head-dim",
    "v_head_dim": "v-head-dim",
}
DEGREES = {
    "tensor": "tensor-model-parallel-size",
    "pipeline": "pipeline-model-parallel-size",
    "context": "context-parallel-size",
    "expert": "expert-model-parallel-size",
    "expert_tensor": "expert-tensor-parallel-size",
}
CONTEXT = {"ring": "p2p", "ulysses": "a2a", "all_to_all": "a2a", "allgather": "all_gather"}
PRECISIONS = ("bf16", "fp16", "fp32")
# The modules that Megatron-core can recompute selectively.
MODULES = ["core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"]
# Other keys that are read or do not matter for memory. Any further key is taken as the Megatron-LM
# argument of the same name.
READ = {
    "model": "first_dense_layers multi_latent_attention swiglu vocab_size",
    "parallel": "context_comm data distributed_optimizer sequence_parallel",
    "run": "attention bias cross_entropy_fusion cross_entropy_fusion_impl dropout framework "
    "main_grads micro_batch_size micro_batches normalization precision recompute seq_length "
    "tied_embeddings",
}


def _of_simumax(name: str, row: _Row) -> MeasuredRun:
    """A run of Megatron-LM that SimuMax measured on every stage."""
    model, parallel, run = row.inside("model"), row.inside("parallel"), row.inside("run")
    vocabulary = model.count("vocab_size")
    notes = ["the data loader makes no attention mask"]
    further, unread = _further({"model": model, "parallel": parallel, "run": run})
    values = {
        **_model_words(model),
        **_parallel_words(parallel, model),
        **_run_words(run),
        **further,
    }
    copies = parallel.count("data")
    batch = (run.count(key) or 1 for key in ("micro_batch_size", "micro_batches"))
    values["global-batch-size"] = str(prod(batch) * (copies or 1))
    if vocabulary is not None:
        values["vocab-size"] = str(vocabulary + 1)
        notes.append("one token more than vocab_size, added by Megatron-LM's NullTokenizer")
    peaks = row.inside("measured").mebibytes("peak_allocated_mib_by_stage")
    stages = parallel.count("pipeline") or 1
    if len(peaks) != stages:
        raise InputError(f"{row.where}: {len(peaks)} peaks for {stages} pipeline stages")
    measured = [Measured(stage, peak, None) for stage, peak in enumerate(peaks)]
    world = row.count("gpus")
    if world is None and copies is not None:
        world = copies * prod(parallel.count(key) or 1 for key in ("tensor", "pipeline", "context"))
    environment = {"pytorch": _pytorch(str(run.content.get("framework")))}
    gpu = row.maybe("gpu")
    found = _run_of(name, gpu, values, world, "pretrain_gpt.py", environment)
    return found._replace(measured=measured, notes=notes, flags=(*found.flags, *unread))


def _further(objects: Mapping[str, _Row]) -> tuple[dict[str, str], list[str]]:
    """Keys with the names of Megatron-LM arguments, and a line for each unknown key."""
    values: dict[str, str] = {}
    unread = []
    for name, row in objects.items():
        known = {*READ[name].split(), *SIZES, *DEGREES}
        for key, value in row.content.items():
            if key in known or value in (None, False, "none"):
                continue
            argument = key.replace("_", "-")
            if is_read(argument):
                values |= _Row({argument: value}, row.where, row.name).words()
            elif value is True or value != 1:
                unread.append(f"not read: {name}.{shown(key)}")
    precision = objects["run"].text("precision").lower()
    if precision not in PRECISIONS and "fp8" not in precision:
        unread.append(f"not read: run.precision {shown(precision)}")
    return values, unread


def _model_words(model: _Row) -> dict[str, str]:
    """The model, as arguments of Megatron-LM."""
    values = {
        ours: str(model.count(theirs))
        for theirs, ours in SIZES.items()
        if model.content.get(theirs) not in (None, 0)
    }
    flags = {
        "group-query-attention": "num-query-groups" in values,
        "multi-latent-attention": model.content.get("multi_latent_attention") is True,
        "swiglu": model.content.get("swiglu") is True,
    }
    values |= {flag: "True" for flag, there in flags.items() if there}
    if "num-experts" in values:
        values |= {"moe-grouped-gemm": "True", "moe-token-dispatcher-type": "alltoall"}
        dense = model.content.get("first_dense_layers")
        layers = model.count("num_layers") or 0
        if dense is not None and (type(dense) is not int or not 0 <= dense <= layers):
            raise InputError(
                f"{model.where}: model.first_dense_layers must be from 0 to num_layers"
            )
        if dense:
            values["moe-layer-freq"] = f"[0]*{dense}+[1]*{layers - dense}"
    return {**values, "position-embedding-type": "rope"}


def _parallel_words(parallel: _Row, model: _Row) -> dict[str, str]:
    """The parallelism, as arguments of Megatron-LM; without experts in a dense model."""
    values = {
        ours: str(degree)
        for theirs, ours in DEGREES.items()
        if (degree := parallel.count(theirs))
        if model.content.get("num_experts") or not theirs.startswith("expert")
    }
    flags = {
        "sequence-parallel": parallel.content.get("sequence_parallel") is True,
        "use-distributed-optimizer": parallel.content.get("distributed_optimizer") is True,
    }
    values |= {flag: "True" for flag, there in flags.items() if there}
    kind = parallel.maybe("context_comm")
    if kind not in (None, "none"):
        values["cp-comm-type"] = CONTEXT.get(kind, kind)
    return values


def _run_words(run: _Row) -> dict[str, str]:
    """The run, as arguments of Megatron-LM."""
    values = {
        ours: str(size)
        for theirs, ours in (("seq_length", "seq-length"), ("micro_batch_size", "micro-batch-size"))
        if (size := run.count(theirs))
    }
    precision = run.text("precision").lower()
    flags = {
        precision if precision in PRECISIONS else "bf16": precision != "fp32",
        "accumulate-allreduce-grads-in-fp32": run.content.get("main_grads") == "fp32",
        "disable-bias-linear": run.content.get("bias") is False,
        "untie-embeddings-and-output-weights": run.content.get("tied_embeddings") is False,
        "grad-reduce-in-bf16": run.content.get("main_grads") == "bf16",
        "cross-entropy-loss-fusion": run.content.get("cross_entropy_fusion") is True,
        "no-create-attention-mask-in-dataloader": True,
    }
    values |= {flag: "True" for flag, there in flags.items() if there}
    if "fp8" in precision:
        values["fp8-format"] = "hybrid"
    for theirs in ("cross_entropy_fusion_impl", "normalization"):
        if (word := run.maybe(theirs)) is not None:
            values[theirs.replace("_", "-")] = word
    attention = run.maybe("attention")
    if attention not in (None, "flash"):  # "flash" may be either flash kernel
        values["attention-backend"] = attention
    dropout = run.content.get("dropout")
    if type(dropout) in (int, float):
        values |= {"attention-dropout": str(dropout), "hidden-dropout": str(dropout)}
    return values | _recompute_words(run)


def _recompute_words(run: _Row) -> dict[str, str]:
    """Recomputation: a granularity, or the modules of selective recomputation."""
    said = run.content.get("recompute")
    words = said if isinstance(said, list) else re.split(r"[\s,+]+", str(said or "none"))
    if words == ["none"]:
        return {}
    if words in (["full"], ["full_block"]):
        return {
            "recompute-granularity": "full",
            "recompute-method": "uniform",
            "recompute-num-layers": "1",
        }
    if all(word in MODULES for word in words):
        return {"recompute-granularity": "selective", "recompute-modules": " ".join(words)}
    return {"recompute-granularity": str(said)[:100]}


def _pytorch(framework: str) -> tuple[int, int] | None:
    """PyTorch's version, from Transformer Engine's: before 2.13 it came with an older PyTorch."""
    version = re.search(r"Transformer Engine (\d{1,4})\.(\d{1,4})", framework)
    old = version is not None and (int(version[1]), int(version[2])) < (2, 13)
    return (2, 10) if old else None
