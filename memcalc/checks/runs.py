"""Measured training runs, read from a file of JSON lines: what was run, and what was measured.

Two forms of rows are known: those of Megatron-LM's own functional tests, with the arguments of the
launch, and those of SimuMax's runs, with the model, its parallelism and its run. Either becomes
Megatron-LM's arguments, and these are read as those of any launch file.
"""

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from memcalc.config import Config
from memcalc.config.config import RunSource, configure
from memcalc.config.environment import Environment
from memcalc.config.readers import megatron, parse, shell
from memcalc.errors import ConfigError, InputError
from memcalc.units import MIB

MAX_BYTES = 64 * 2**20
MAX_ROWS = 100_000
MOST = 2**50  # bytes that a GPU may have held

# The program that a row's arguments were given to, by the first word of its id.
PROGRAMS = {"bert": "pretrain_bert.py", "t5": "pretrain_t5.py"}
BERT_VOCABULARY = 30522  # bert-large-uncased

# Of a container family, PyTorch's version: what decides cuBLAS's workspaces on Blackwell.
PYTORCH = {"dev": (2, 12), "lts": (2, 6)}


class Measured(NamedTuple):
    """What was measured on a rank of one stage, in bytes.

    Attributes:
        stage: The stage, counted from 0.
        peak: The allocator's peak.
        steady: What is allocated between steps, or None where that was not measured.
    """

    stage: int
    peak: int
    steady: int | None


class MeasuredRun(NamedTuple):
    """A row.

    Attributes:
        id: What the row is called.
        config: What was run; None where memcalc refuses it.
        measured: What was measured, stage by stage.
        values: The launch's arguments with their values, as words.
        gpu: The GPU, by its name.
        world: How many GPUs there were, or None where that is unknown.
        notes: What was assumed.
        met: What the reader of the arguments met and memcalc does not model, or does not know.
        refused: Why memcalc refuses what was run.
    """

    id: str
    config: Config | None
    measured: Sequence[Measured]
    values: Mapping[str, str]
    gpu: str
    world: int | None
    notes: Sequence[str]
    met: Sequence[str] = ()
    refused: str = ""


def read(path: Path) -> list[MeasuredRun]:
    """The rows of a file.

    Raises:
        InputError: The file cannot be read, or a row of it is of neither form.
    """
    found: dict[str, tuple[int, MeasuredRun]] = {}
    for number, line in _lines(path):
        where = f"{path}: line {number}"
        run = _run(parse(line, where), where)
        if run.id in found:
            raise InputError(f"{where}: the id {run.id!r} stands on line {found[run.id][0]} too")
        found[run.id] = number, run
    if not found:
        raise InputError(f"{path}: the file has no rows")
    return [run for _, run in found.values()]


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    if not os.path.isfile(path):
        problem = "not a regular file" if os.path.exists(path) else "no such file"
        raise InputError(f"{path}: {problem}")
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    if len(data) > MAX_BYTES:
        raise InputError(f"{path}: larger than {MAX_BYTES // 2**20} MiB")
    lines = [(number, line) for number, line in enumerate(data.splitlines(), 1) if line.strip()]
    if len(lines) > MAX_ROWS:
        raise InputError(f"{path}: more than {MAX_ROWS} rows")
    yield from lines


def _run(row: Mapping[str, Any], where: str) -> MeasuredRun:
    """A row of either form, from its JSON."""
    return (_of_megatron if "args" in row else _of_simumax)(_Row(row, where))


class _Row:
    """A JSON object whose values are asked for by their type."""

    def __init__(self, content: Mapping[str, Any], where: str, name: str = "") -> None:
        self.content = content
        self.where = where
        self.name = name

    def _refuse(self, key: str, what: str) -> InputError:
        return InputError(f"{self.where}: {self.name}{key} must be {what}")

    def inside(self, key: str) -> "_Row":
        value = self.content.get(key)
        if not isinstance(value, dict):
            raise self._refuse(key, "an object")
        return _Row(value, self.where, f"{self.name}{key}.")

    def text(self, key: str) -> str:
        value = self.content.get(key)
        if not isinstance(value, str) or not 0 < len(value) <= 1000 or not value.isprintable():
            raise self._refuse(key, "a line of text")
        return value

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
        """Bytes, from a list of numbers of MiB."""
        values = self.content.get(key)
        if not isinstance(values, list) or not values or len(values) > 2**20:
            raise self._refuse(key, "a list of numbers of MiB, one a stage")
        for value in values:
            if type(value) not in (int, float) or not 0 < value <= MOST / MIB:
                raise self._refuse(key, f"a list of numbers of MiB above 0, up to {MOST // MIB}")
        return [round(value * MIB) for value in values]

    def words(self) -> dict[str, str]:
        """Arguments or variables, each one value as a word; of a flag the word is ``True``."""
        found = {}
        for key, value in self.content.items():
            plain = isinstance(value, str) or type(value) in (int, bool)
            plain = plain or (type(value) is float and math.isfinite(value))
            if not plain or not re.fullmatch(r"[A-Za-z][\w-]{0,99}", key) or len(str(value)) > 1000:
                raise self._refuse(key[:40], "a number, a word or true")
            if value is not False:
                found[key] = str(value)
        return found


def _of_megatron(row: _Row) -> MeasuredRun:
    """A run of Megatron-LM's functional tests, measured by the last rank."""
    name = row.text("id")
    values, variables = row.inside("args").words(), row.inside("env").words()
    program = PROGRAMS.get(name.split(".")[0], "pretrain_gpt.py")
    size = row.inside("vocabulary").count("size")
    notes = []
    if size is None and program == "pretrain_bert.py":
        size = BERT_VOCABULARY
        notes.append(f"vocabulary {size} (bert-large-uncased)")
    if size is not None:
        values.setdefault("vocab-size", str(size))
    world = row.count("gpus")
    given = row.text("image")
    environment = Environment(
        pytorch=PYTORCH.get(given),
        cublas_workspace=variables.get("CUBLAS_WORKSPACE_CONFIG"),
        deterministic=variables.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") == "0",
    )
    measured = row.inside("measured")
    peak, steady = measured.size("peak_bytes"), measured.size("steady_bytes")
    gpu = row.text("gpu")
    config, met, refused = _config(name, values, world, program, gpu, environment)
    last = config.parallel.pp - 1 if config else 0
    found = (Measured(last, peak, steady),)
    return MeasuredRun(name, config, found, values, gpu, world, notes, met, refused)


def _config(
    name: str,
    values: Mapping[str, str],
    world: int | None,
    program: str,
    gpu: str,
    environment: Environment,
) -> tuple[Config | None, Sequence[str], str]:
    """The Config of a launch's arguments, what it does not model of them, or why there is none."""
    arguments = {key: True if value == "True" else value for key, value in values.items()}
    try:
        source = megatron.read_yaml({"MODEL_ARGS": arguments}, name, world, program)
        if isinstance(source, RunSource):
            return None, (), "no arguments of a model"
        said = source.settings.get("environment", Environment())
        environment = replace(
            said,
            pytorch=environment.pytorch,
            cublas_workspace=environment.cublas_workspace,
            deterministic=said.deterministic or environment.deterministic,
        )
        config = configure(source, {"gpu": gpu.lower(), "environment": environment})
    except (ConfigError, InputError) as error:
        return None, (), str(error)
    return config, source.unmodelled, ""


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
# The other keys of its objects that are read, or say nothing about memory.
READ = {
    "model": "first_dense_layers multi_latent_attention swiglu vocab_size",
    "parallel": "context_comm data distributed_optimizer sequence_parallel",
    "run": "attention bias cross_entropy_fusion cross_entropy_fusion_impl dropout framework "
    "main_grads micro_batch_size micro_batches normalization precision recompute seq_length "
    "tied_embeddings",
}


def _of_simumax(row: _Row) -> MeasuredRun:
    """A run of Megatron-LM that SimuMax measured, on every stage."""
    name, world, gpu = row.text("id"), row.count("gpus"), row.text("gpu")
    model, parallel, run = row.inside("model"), row.inside("parallel"), row.inside("run")
    vocabulary = model.count("vocab_size")
    notes = ["no mask from the data loader"]
    values = {**_model_words(model), **_parallel_words(parallel, model), **_run_words(run)}
    batch = (run.count(key) or 1 for key in ("micro_batch_size", "micro_batches"))
    values["global-batch-size"] = str(prod(batch) * (parallel.count("data") or 1))
    if vocabulary is not None:
        values["vocab-size"] = str(vocabulary + 1)
        notes.append("a token more than vocab_size, which Megatron-LM's NullTokenizer adds")
    peaks = row.inside("measured").mebibytes("peak_allocated_mib_by_stage")
    if len(peaks) != (stages := parallel.count("pipeline") or 1):
        raise InputError(f"{row.where}: peaks of {len(peaks)} stages, where there are {stages}")
    measured = [Measured(stage, peak, None) for stage, peak in enumerate(peaks)]
    environment = Environment(pytorch=_pytorch(str(run.content.get("framework"))))
    config, met, refused = _config(name, values, world, "pretrain_gpt.py", gpu, environment)
    met = (*met, *_not_read({"model": model, "parallel": parallel, "run": run}))
    return MeasuredRun(name, config, measured, values, gpu, world, notes, met, refused)


def _not_read(objects: Mapping[str, _Row]) -> Iterator[str]:
    """A line for each key that is not read, where its value may ask for something."""
    for name, row in objects.items():
        known = {*READ[name].split(), *SIZES, *DEGREES}
        for key, value in row.content.items():
            nothing = value is not True and value in (None, False, 1, "none")
            if key not in known and not nothing:
                yield f"not used, for memcalc does not know it: {name}.{shell.shown(key[:40])}"


def _model_words(model: _Row) -> dict[str, str]:
    """The model, as arguments of Megatron-LM."""
    values = {ours: str(size) for theirs, ours in SIZES.items() if (size := model.count(theirs))}
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
            raise InputError(f"{model.where}: model.first_dense_layers must be of the layers")
        if dense:
            values["moe-layer-freq"] = f"[0]*{dense}+[1]*{layers - dense}"
    return {**values, "position-embedding-type": "rope"}


def _parallel_words(parallel: _Row, model: _Row) -> dict[str, str]:
    """The parallelism, as arguments of Megatron-LM; of a dense model, nothing of experts."""
    values = {
        ours: str(degree)
        for theirs, ours in DEGREES.items()
        if (degree := parallel.count(theirs))
        if model.count("num_experts") or not theirs.startswith("expert")
    }
    flags = {
        "sequence-parallel": parallel.content.get("sequence_parallel") is True,
        "use-distributed-optimizer": parallel.content.get("distributed_optimizer") is True,
    }
    values |= {flag: "True" for flag, there in flags.items() if there}
    if parallel.content.get("context_comm") is not None:
        values["cp-comm-type"] = parallel.text("context_comm")
    return values


def _run_words(run: _Row) -> dict[str, str]:
    """The run, as arguments of Megatron-LM."""
    values = {
        ours: str(size)
        for theirs, ours in (("seq_length", "seq-length"), ("micro_batch_size", "micro-batch-size"))
        if (size := run.count(theirs))
    }
    flags = {
        "bf16" if run.text("precision") == "fp8" else run.text("precision"): True,
        "disable-bias-linear": run.content.get("bias") is False,
        "untie-embeddings-and-output-weights": run.content.get("tied_embeddings") is False,
        "grad-reduce-in-bf16": run.content.get("main_grads") == "bf16",
        "cross-entropy-loss-fusion": run.content.get("cross_entropy_fusion") is True,
        "no-create-attention-mask-in-dataloader": True,
    }
    values |= {flag: "True" for flag, there in flags.items() if there}
    if run.content["precision"] == "fp8":
        values["fp8-format"] = "hybrid"
    if run.content.get("cross_entropy_fusion_impl") is not None:
        values["cross-entropy-fusion-impl"] = run.text("cross_entropy_fusion_impl")
    if run.content.get("normalization") is not None:
        values["normalization"] = run.text("normalization")
    if run.content.get("attention") not in (None, "flash"):  # which flash kernel is not said
        values["attention-backend"] = run.text("attention")
    dropout = run.content.get("dropout")
    if type(dropout) in (int, float):
        values |= {"attention-dropout": str(dropout), "hidden-dropout": str(dropout)}
    recomputed = run.content.get("recompute")
    if recomputed not in (None, "none"):
        values["recompute-granularity"] = run.text("recompute")
        if recomputed == "full":
            values |= {"recompute-method": "uniform", "recompute-num-layers": "1"}
    return values


def _pytorch(framework: str) -> tuple[int, int] | None:
    """PyTorch's version, by Transformer Engine's: what came before 2.13 came with an older one."""
    version = re.search(r"Transformer Engine (\d{1,4})\.(\d{1,4})", framework)
    old = version is not None and (int(version[1]), int(version[2])) < (2, 13)
    return (2, 10) if old else None
