"""A model, its parallelism and its run together, checked against each other."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from memcalc.config import fields, pipeline
from memcalc.config.effect import nothing_recomputed, without_effect
from memcalc.config.environment import Environment, environment
from memcalc.config.gpus import gpu
from memcalc.config.implementation import IMPLEMENTATIONS, Implementation
from memcalc.config.model import Model
from memcalc.config.parallel import Parallel
from memcalc.config.run import Run
from memcalc.errors import ConfigError, nearest
from memcalc.frameworks import FRAMEWORKS, SHARDERS, of_step
from memcalc.frameworks.megatron import DISTRIBUTED_OPTIMIZER
from memcalc.frameworks.record import Framework


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that memcalc needs to know to answer a question.

    Attributes:
        model: The model.
        parallel: How it is split over ranks.
        run: How it is trained.
        assumed: What was not given and memcalc assumed.
        unmodelled: What the input says and memcalc does not model, or not in the answer asked for.

    Raises:
        ConfigError: A parallel size does not divide the axis that it shards.

    >>> model = Model(name="toy", layers=1, hidden_size=512, heads=8)
    >>> Config(model, Parallel(tp=3), Run(seq_length=128))
    Traceback (most recent call last):
        ...
    memcalc.errors.ConfigError: --tp 3 must divide heads 8
    """

    model: Model
    parallel: Parallel
    run: Run
    assumed: tuple[str, ...] = ()
    unmodelled: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, kind in (("model", Model), ("parallel", Parallel), ("run", Run)):
            fields.instance(name, getattr(self, name), kind)
        model, tp = self.model, self.parallel.tp
        tensor = ("--tp", tp)
        fields.divides(tensor, ("heads", model.heads))
        if model.kv_heads >= tp:
            fields.divides(tensor, ("kv_heads", model.kv_heads))
        else:
            fields.divides(("kv_heads", model.kv_heads), tensor)
            fields.divides(tensor, ("(heads + 2 x kv_heads) x head_size", _qkv_width(model)))
        fields.divides(tensor, ("ffn_size", model.ffn_size))
        self._experts_divide()
        chunks = self.parallel.chunks
        if chunks > 1 and model.encoder_layers is not None:
            raise ConfigError(
                f"pipeline stages of encoder-decoders are not modelled: {model.name} needs --pp "
                f"1, not {self.parallel.pp}"
            )
        counted = self.parallel.embedding_as_layer + self.parallel.loss_as_layer
        if self.parallel.layout is None and chunks > model.layers + counted:
            raise ConfigError(
                f"{chunks} model chunks (--pp x chunks per rank) need as many layers; "
                f"{model.name} has {model.layers}"
            )
        self.parallel.spread(model.layers + (model.encoder_layers or 0), model.mtp_layers)
        if self.run.global_batch_size is not None:
            at_once = self.run.micro_batch_size * self.parallel.dp
            fields.divides(
                ("--micro-batch-size x --dp", at_once),
                ("--global-batch-size", self.run.global_batch_size),
            )
            self._batches_run(at_once)
        ranks = self.parallel.cp * (tp if self.parallel.sp else 1)
        name = "--cp"
        if self.parallel.sp:
            name = "--cp x --tp (with --sp)" if self.parallel.cp > 1 else "--tp (with --sp)"
        fields.divides((name, ranks), ("--seq-length", self.run.seq_length))
        if self.parallel.cp > 1 and self.parallel.cp_kind == "all_to_all":
            name = "kv_heads" if model.kv_heads < model.heads else "heads"
            exchanged = ("--cp x --tp (with --cp-kind all_to_all)", self.parallel.cp * tp)
            fields.divides(exchanged, (name, getattr(model, name)))

    def _batches_run(self, at_once: int) -> None:
        """Refuse a global batch whose micro-batches the pipeline's schedule cannot run."""
        order = self.parallel.order
        refuses = self.parallel.scheduling.refuses
        if refused := refuses(self.parallel.pp, self.parallel.group, self.microbatches):
            why, valid = refused
            nearest_valid = " or ".join(str(number * at_once) for number in valid)
            raise ConfigError(
                f"--global-batch-size {self.run.global_batch_size} does not fit schedule {order}: "
                f"{why}; nearest valid --global-batch-size: {nearest_valid}"
            )

    def _experts_divide(self) -> None:
        """Refuse expert parallelism that does not divide the experts, or without experts."""
        model, parallel = self.model, self.parallel
        if model.experts is None:
            if parallel.ep > 1 or parallel.etp is not None:
                raise ConfigError(f"--ep and --etp need experts; {model.name} has none")
            return
        assert model.expert_ffn_size is not None
        fields.divides(("--ep", parallel.ep), ("experts", model.experts))
        of_experts = ("--tp" if parallel.etp is None else "--etp", parallel.expert_tp)
        fields.divides(of_experts, ("expert_ffn_size", model.expert_ffn_size))
        _ = parallel.expert_replicas  # raises if the ranks of a stage are not a multiple
        if model.shared_ffn_size is not None:
            fields.divides(("--tp", parallel.tp), ("shared_ffn_size", model.shared_ffn_size))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Settings that are not modelled, and settings without effect."""
        lines = list(self.unmodelled)
        kernels = self.run.implementation
        lines += self.ineffective
        if self.model.experts and self.parallel.tp > 1 and not self.parallel.sp:
            lines.append(
                "Megatron-core refuses experts with tensor parallelism but no sequence "
                "parallelism (pass --sp); counted as if every rank dispatched all tokens"
            )
        if self.run.precision == "fp8":
            lines.append(
                "fp8: linears are counted as keeping their inputs once, in 8 bits, as in "
                "Transformer Engine's sources; not measured"
            )
        windowed = self.masked_layers == "windowed" and 0 not in (self.model.window_layers or ())
        flash = kernels.attention == "flash" and self.masked_layers != "all" and not windowed
        if flash and self.run.precision == "fp32":
            lines.append(
                "flash attention kernels do not support fp32: counted as if they did (set "
                "--attention unfused, or --precision bf16)"
            )
        most = self.model.max_seq_length
        if most is not None and self.run.seq_length > most:
            lines.append(
                f"sequence length {self.run.seq_length} exceeds the model's context length {most}"
            )
        if kernels.maker.sharded_as and self.parallel.tp > 1:
            lines.append(
                f"{kernels.maker.title}'s layers were not measured with tensor parallelism: the "
                f"tensors are counted as --implementation {kernels.maker.sharded_as} shards them"
            )
        if self.run.frozen:
            lines.append(
                "--frozen uses less memory than counted (activations are counted as if all parts "
                "were trained)"
            )
        lines += self._stacks_warnings()
        if kernels.packs_value and self.model.position == "rotary":
            lines += self._packed_value()
        return tuple(lines)

    @property
    def ineffective(self) -> tuple[str, ...]:
        """The warnings of settings without effect."""
        lines = without_effect(self.model, self.parallel, self.run)
        if self.run.recompute_layers == 0:
            lines.append("--recompute-layers 0 recomputes nothing")
        return (*lines, *nothing_recomputed(self.model, self.run))

    def _stacks_warnings(self) -> list[str]:
        """Kernels of T5 that are counted as others."""
        model, kernels = self.model, self.run.implementation
        lines = []
        if model.position == "relative" and kernels.attention == "flash":
            instead = "counted as if they did"
            if kernels.keeps_masks:
                instead = (
                    "counted as PyTorch's memory-efficient kernel, with a bias kept by every layer"
                )
            lines.append(
                f"flash attention kernels do not support a relative position bias: {instead}"
            )
        clamps = kernels.maker.clamps_fp16 and model.encoder_layers is not None
        if clamps and self.run.precision == "fp16":
            lines.append(
                f"{kernels.maker.title}'s T5 clamps hidden states in fp16; the memory that this "
                "uses is not counted"
            )
        return lines

    def _packed_value(self) -> list[str]:
        """What Megatron-core keeps besides the value, which is a view of a packed tensor."""
        model, run = self.model, self.run
        if model.kv_heads != model.heads:  # repeating K and V copies them
            return []
        width = 2 * model.heads * model.head_size // self.parallel.tp
        more = run.activation_bytes * run.seq_length * run.micro_batch_size * width
        return [
            "not counted: Megatron-core's value is a view of the packed QKV tensor, so query and "
            f"key are kept beside their rotated copies: {more} more bytes per layer"
        ]

    @property
    def masked_layers(self) -> str:
        """Which layers' fused attention saves a mask: all, windowed, or none.

        A windowed layer has one if the sequence is at least as long as the window (transformers
        masking_utils.py: _ignore_causal_mask_sdpa). A bias of relative positions counts as a mask.

        >>> from memcalc.config import load
        >>> run = {"implementation": "transformers-sdpa"}
        >>> [load("gemma-3-27b", seq_length=s, **run).masked_layers for s in (1023, 1024)]
        ['none', 'windowed']
        """
        model, kernels = self.model, self.run.implementation
        if kernels.attention != "flash" or not kernels.keeps_masks:
            return "none"
        if model.calls_attention or model.position == "relative":
            return "all"
        window = model.sliding_window
        return "none" if window is None or self.run.seq_length < window else "windowed"

    @property
    def framework(self) -> Framework:
        """The framework that runs the step: the layers' own, or the sharder's."""
        return of_step(self.run.implementation.framework, self.parallel.sharder)

    @property
    def microbatches(self) -> int:
        """Micro-batches per iteration; by default as many as fill the pipeline."""
        if self.run.global_batch_size is None:
            return self.parallel.filling
        return self.run.global_batch_size // (self.run.micro_batch_size * self.parallel.dp)

    @property
    def sequences(self) -> int:
        """Sequences per iteration over all ranks: the global batch size."""
        return self.microbatches * self.run.micro_batch_size * self.parallel.dp

    @property
    def padded(self) -> "Config":
        """The same with a vocabulary that tensor-parallel ranks divide, padded as in Megatron-LM.

        >>> model = Model(name="toy", layers=1, hidden_size=512, heads=8, vocab_size=50257)
        >>> Config(model, Parallel(tp=4), Run(seq_length=128)).padded.model.vocab_size
        50688
        """
        size, tp = self.model.vocab_size, self.parallel.tp
        if size is None or size % tp == 0:
            return self
        assumed = list(self.assumed)
        model = replace(self.model, vocab_size=fields.padded(size, 128, tp, assumed))
        return replace(self, model=model, assumed=tuple(assumed))

    def on_gpu(self, name: str) -> "Config":
        """The same on a GPU, with the attention kernel that Transformer Engine chooses there.

        A kernel that the input names stays.

        >>> from memcalc.config import load
        >>> load("llama-3-8b").on_gpu("a100").run.implementation.batch_first
        True
        """
        kernels = self.run.implementation
        said = {"gpu": name, "environment": self.run.environment}
        kernels = replace(kernels, batch_first=_batch_first(kernels, said))
        return replace(self, run=replace(self.run, gpu=name, implementation=kernels))

    def with_parallel(self, **degrees: Any) -> "Config":
        """The same model and run with other parallel sizes."""
        return replace(self, parallel=replace(self.parallel, **degrees))


@dataclass(frozen=True, slots=True)
class Source:
    """The content of a file or a catalogue entry.

    Attributes:
        model: The model.
        settings: Its parallelism and run settings, by the names of ``SETTINGS``.
        assumed: What the reader assumed.
        unmodelled: What the file sets and memcalc does not model.
        accumulation: As in ``RunSource``.
    """

    model: Model
    settings: Mapping[str, Any]
    assumed: tuple[str, ...] = ()
    unmodelled: tuple[str, ...] = ()
    accumulation: int | None = None


@dataclass(frozen=True, slots=True)
class RunSource:
    """The content of a file with parallelism and run settings but no model.

    Attributes:
        settings: Its settings, by the names of ``SETTINGS``.
        assumed: What the reader assumed.
        unmodelled: What the file sets and memcalc does not model.
        accumulation: Gradient accumulation steps, where the file gives these rather than the
            global batch size.
    """

    settings: Mapping[str, Any]
    assumed: tuple[str, ...] = ()
    unmodelled: tuple[str, ...] = ()
    accumulation: int | None = None


PARALLEL_SETTINGS = (
    *("tp", "sp", "pp", "vpp", "dp", "cp", "cp_kind", "ep", "etp", "schedule"),
    *("microbatch_group_size", "first_stage_layers", "last_stage_layers", "layout"),
    *("embedding_as_layer", "loss_as_layer", "zero", "sharder", "shard_copies"),
)
# Settings of sharding that a newer setting replaces.
OF_SHARDING = {
    "distributed_optimizer": ("zero", "sharder", "shard_copies"),
    "sharder": ("zero", "distributed_optimizer", "shard_copies"),
    "zero": ("distributed_optimizer", "shard_copies"),
}
OF_A_SPLIT = ("first_stage_layers", "last_stage_layers", "layout")  # for one pp and vpp only
RUN_SETTINGS = (
    "seq_length",
    "micro_batch_size",
    "global_batch_size",
    "precision",
    "gpu",
    "imbalance",
    "recompute_method",
    "recompute_layers",
    *("optimizer", "main_grads", "main_params", "moments", "fp8_params", "frozen", "bucket"),
    "environment",
)
OTHER_SETTINGS = (
    *("recompute", "implementation", "attention", "expert_products", "dropout"),
    *("cross_entropy", "batch_first", "softmax_fp32", "fused_gate", "gathers_tokens"),
    *("distributed_optimizer", "vocab_size", "vocab_multiple"),
)
SETTINGS = (*PARALLEL_SETTINGS, *RUN_SETTINGS, *OTHER_SETTINGS)


def configure(source: Source, overrides: Mapping[str, Any], run: RunSource | None = None) -> Config:
    """A Config from a source, the settings that override it, and defaults.

    Args:
        source: The model, with its parallelism and run settings.
        overrides: Settings that replace the source's; None leaves a setting as it is.
        run: Parallelism and run settings of another file, which override the source's.

    Raises:
        ConfigError: A setting is unknown or out of range, or the sequence length is unknown.
    """
    run = run or RunSource({})
    given = {name: fields.plain(value) for name, value in overrides.items() if value is not None}
    said = _overlaid(source.settings, run.settings, given)
    for name in said:
        if name not in SETTINGS:
            raise ConfigError(f"setting {name!r} is unknown; {nearest(name, SETTINGS)}")
    assumed = [*source.assumed, *run.assumed]
    if run.accumulation and "global_batch_size" not in {**run.settings, **given}:
        said.pop("global_batch_size", None)  # the model's belongs to another run
    _accumulate(said, run.accumulation or source.accumulation)
    if "seq_length" not in said:
        if source.model.max_seq_length is None:
            raise ConfigError(f"{source.model.name} has no context length: set --seq-length")
        said["seq_length"] = source.model.max_seq_length
        assumed.append(f"sequence length {said['seq_length']} (the model's context length)")
    if "micro_batch_size" not in said:
        assumed.append("micro-batch size 1")
    if "tp" not in said:
        assumed.append("no tensor parallelism")
    if "precision" not in said:
        assumed.append("bf16 activations")
    assumed += _shard(said)
    if said.get("zero") and "dp" not in said:
        assumed.append("one data-parallel rank")
    if "environment" in said:
        said["environment"] = environment(said["environment"])
    kernels = _implementation(said)
    if "implementation" not in said:
        assumed.append(f"implementation {kernels.name}")
    chosen: dict[str, Any] = {name: said[name] for name in RUN_SETTINGS if name in said}
    if "recompute" in said:
        chosen["recompute"] = _words(said["recompute"])
    parallel = Parallel(**{name: said[name] for name in PARALLEL_SETTINGS if name in said})
    model = _with_vocabulary(source.model, said, parallel.tp, assumed)
    return Config(
        _with_dropout(model, said.get("dropout")),
        parallel,
        Run(**chosen, implementation=kernels),
        tuple(assumed),
        (*source.unmodelled, *run.unmodelled),
    )


def _overlaid(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Settings over settings; a new setting also removes those that belong to the old one.

    A new recomputation removes its number of layers, a new pipeline size how layers were split, a
    new schedule the model chunks, and a new sharding who did it.
    """
    said: dict[str, Any] = {}
    for settings in layers:
        schedule = pipeline.SCHEDULES.get(settings.get("schedule", pipeline.SEVERAL_CHUNKS))
        if schedule is None or schedule.chunks is not None:
            said.pop("vpp", None)
            said.pop("microbatch_group_size", None)
        for name, forgotten in OF_SHARDING.items():
            if name in settings:
                said = {key: value for key, value in said.items() if key not in forgotten}
        if said.get("pp") != settings.get("pp", said.get("pp")):
            for name in OF_A_SPLIT:
                said.pop(name, None)
        if "recompute" in settings:
            said.pop("recompute_method", None)
            said.pop("recompute_layers", None)
        said |= settings
    return said


def _accumulate(said: dict[str, Any], accumulation: int | None) -> None:
    """Derive the missing one of global batch = micro-batch x accumulation steps x DP size."""
    if accumulation is None:
        return
    fields.whole("gradient accumulation steps", accumulation, 2**31)
    replicas, batch = said.get("dp", 1), said.get("global_batch_size")
    if type(replicas) is not int:
        return  # an error of Parallel
    if batch is None and type(said.get("micro_batch_size", 1)) is int:
        said["global_batch_size"] = said.get("micro_batch_size", 1) * accumulation * replicas
    elif "micro_batch_size" not in said and type(batch) is int:
        fields.divides(
            ("gradient accumulation steps x --dp", max(1, accumulation * replicas)),
            ("--global-batch-size", batch),
        )
        said["micro_batch_size"] = batch // max(1, accumulation * replicas)


def _shard(said: dict[str, Any]) -> list[str]:
    """Complete the settings of sharding, and return what is assumed."""
    assumed = []
    distributed = said.pop("distributed_optimizer", None)
    if distributed is not None:
        fields.flag("distributed_optimizer", distributed)
    meant = DISTRIBUTED_OPTIMIZER
    if distributed and any(said.get(name, value) != value for name, value in meant.items()):
        raise ConfigError(
            f"--distributed-optimizer means --zero {meant['zero']} --sharder {meant['sharder']}, "
            "and contradicts any other"
        )
    if distributed:
        said |= meant
    if "sharder" not in said:
        usual = (name for name, each in SHARDERS.items() if said.get("zero") in each.default_for)
        name = next(usual, Parallel().sharder)
        if name != Parallel().sharder:
            said["sharder"] = name
            title = FRAMEWORKS[SHARDERS[name].framework].title
            assumed.append(f"{title}'s sharding (the default for ZeRO stage {said['zero']})")
    sharder = SHARDERS.get(str(said.get("sharder")))
    if sharder and sharder.default_stage is not None and "zero" not in said:
        said["zero"] = sharder.default_stage
        assumed.append(f"ZeRO stage {said['zero']} (the default of {said['sharder']})")
    if sharder and sharder.weights_dtype and "main_grads" not in said:
        narrow = {"fp32": "fp32", "fp16": "fp16"}.get(str(said.get("precision")), "bf16")
        said["main_grads"] = narrow
        if narrow == "bf16" and not said.get("zero"):
            assumed.append(f"bf16 gradients ({sharder.since})")
    return assumed


def _qkv_width(model: Model) -> int:
    return (model.heads + 2 * model.kv_heads) * model.head_size


def _implementation(said: Mapping[str, Any]) -> Implementation:
    name = said.get("implementation", "megatron")
    if isinstance(name, Implementation):
        kernels = name
    else:
        fields.word("implementation", name, IMPLEMENTATIONS)
        kernels = IMPLEMENTATIONS[name]
    if said.get("attention") not in (None, kernels.attention):
        if others := kernels.maker.attentions:
            named = " or ".join(f"{name} ({kernel})" for kernel, name in others.items())
            raise ConfigError(
                f"--implementation {kernels.name} has {kernels.attention} attention: for "
                f"the other, use {named}"
            )
        source = f"otherwise {kernels.source}"
        kernels = replace(kernels, attention=said["attention"], source=source)
    given = ("expert_products", "cross_entropy", "batch_first", "softmax_fp32", "fused_gate")
    chosen = {name: said[name] for name in (*given, "gathers_tokens") if name in said}
    if "batch_first" in chosen:
        return replace(kernels, **chosen, kernel_by_gpu=False)
    return replace(kernels, **chosen, batch_first=_batch_first(kernels, said))


def _batch_first(kernels: Implementation, said: Mapping[str, Any]) -> bool:
    """Whether Transformer Engine by default runs FlashAttention rather than cuDNN's kernel.

    It does before Hopper, and on Blackwell in deterministic mode (Transformer Engine,
    dot_product_attention/utils.py: get_attention_backend).
    """
    name = said.get("gpu")
    if name is None or not kernels.kernel_by_gpu or kernels.attention != "flash":
        return kernels.batch_first
    deterministic = said.get("environment", Environment()).deterministic
    capability = gpu(name).capability
    if capability is None:
        return kernels.batch_first
    return capability < 90 or (capability >= 100 and deterministic)


def _words(value: Any) -> tuple[str, ...]:
    """``"attention,mlp"`` or a list of words as a tuple of words."""
    words = value.split(",") if isinstance(value, str) else value
    if not isinstance(words, (list, tuple)) or not all(isinstance(w, str) for w in words):
        raise ConfigError("--recompute must be a policy, or regions separated by commas")
    return tuple(word.strip() for word in words)


def _with_vocabulary(model: Model, said: Mapping[str, Any], tp: int, assumed: list[str]) -> Model:
    """The model with another vocabulary size, padded where the run's framework pads it."""
    size = said.get("vocab_size")
    if size is None:
        return model
    if model.classes is not None:
        raise ConfigError(f"{model.name} is a classifier and has no vocabulary: drop --vocab-size")
    fields.whole("vocab_size", size, 2**31)
    multiple = said.get("vocab_multiple")
    if multiple is not None:
        fields.whole("vocab_multiple", multiple, 2**31)
        size = fields.padded(size, multiple, tp, assumed)
    return replace(model, vocab_size=size)


def _with_dropout(model: Model, dropout: float | None) -> Model:
    if dropout is None:
        return model
    fields.probability("dropout", dropout)
    return replace(
        model,
        attention_dropout=dropout,
        hidden_dropout=dropout,
        embedding_dropout=dropout,
    )
