"""A model, its parallelism and its run together, checked against each other."""

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from memcalc.config import fields
from memcalc.config.assumption import Assumption
from memcalc.config.families import require_layer
from memcalc.config.kernels import batch_first
from memcalc.config.model import Model
from memcalc.config.parallel import Parallel
from memcalc.config.run import Run
from memcalc.errors import ConfigError
from memcalc.frameworks import FRAMEWORKS, of_step
from memcalc.frameworks.record import Framework

MOST_TP = 128  # the largest tensor-parallel size that a message names


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
        NoLayerError: The framework of the implementation does not have the model's layer.

    >>> model = Model(name="toy", layers=1, hidden_size=512, heads=8)
    >>> Config(model, Parallel(tp=3), Run(seq_length=128))
    Traceback (most recent call last):
        ...
    memcalc.errors.ConfigError: --tp 3 must divide heads 8: use 1, 2, 4 or 8
    """

    model: Model
    parallel: Parallel
    run: Run
    assumed: tuple[Assumption, ...] = ()
    unmodelled: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, kind in (("model", Model), ("parallel", Parallel), ("run", Run)):
            fields.instance(name, getattr(self, name), kind)
        model, tp = self.model, self.parallel.tp
        try:
            _tensor_parallel(model, tp)
        except ConfigError as error:
            raise ConfigError(f"{error}: use {_valid_tp(model)}") from error
        self._experts_divide()
        if model.family and self.run.implementation.maker.whole_models:
            require_layer(model.family, self.run.implementation.name)
        chunks = self.parallel.chunks
        if chunks > 1 and model.encoder_layers is not None:
            raise ConfigError(
                f"pipeline stages of encoder-decoders are not modeled: {model.name} needs --pp "
                f"1, not {self.parallel.pp}"
            )
        counted = self.parallel.embedding_as_layer + self.parallel.loss_as_layer
        if self.parallel.layout is None and chunks > model.layers + counted:
            raise ConfigError(
                f"{chunks} model chunks (--pp x chunks per rank) need at least {chunks} layers; "
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
                name = "--ep" if parallel.ep > 1 else "--etp"
                raise ConfigError(f"{name} needs experts; {model.name} has none")
            return
        fields.divides(("--ep", parallel.ep), ("experts", model.experts.number))
        if self.run.imbalance > parallel.ep > 1:
            raise ConfigError(
                f"--imbalance must be from 1 to --ep {parallel.ep}, not {self.run.imbalance:g}"
            )
        of_experts = ("--tp" if parallel.etp is None else "--etp", parallel.expert_tp)
        fields.divides(of_experts, ("expert_ffn_size", model.experts.ffn_size))
        _ = parallel.expert_replicas  # raises if the ranks of a stage are not a multiple
        if model.experts.shared_ffn_size is not None:
            shared = ("shared_ffn_size", model.experts.shared_ffn_size)
            fields.divides(("--tp", parallel.tp), shared)

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
        if not kernels.fused_attention or not kernels.keeps_masks:
            return "none"
        version, between = self.run.environment.transformers, kernels.maker.masks_from_to
        if version and between and model.causal and between[0] <= version <= between[1]:
            return "all"
        if model.calls_attention or model.position == "relative":
            return "all"
        window = model.sliding_window
        return "none" if window is None or self.run.seq_length < window else "windowed"

    @property
    def framework(self) -> Framework:
        """The framework that runs the step: the named one, the layers' own, or the sharder's.

        >>> from memcalc.config import load
        >>> load("gpt2").framework.title, load("gpt2", framework="torch").framework.title
        ('Megatron-LM', 'PyTorch')
        """
        if self.run.framework is not None:
            return FRAMEWORKS[self.run.framework]
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
        first = batch_first(kernels, name, self.run.environment)
        kernels = replace(kernels, batch_first=first)
        return replace(self, run=replace(self.run, gpu=name, implementation=kernels))

    def with_parallel(self, **degrees: Any) -> "Config":
        """The same model and run with other parallel sizes."""
        return replace(self, parallel=replace(self.parallel, **degrees))


def _tensor_parallel(model: Model, tp: int) -> None:
    """Refuse a tensor-parallel size that does not divide heads or the MLP's width."""
    tensor, kv_heads = ("--tp", tp), ("kv_heads", model.kv_heads)
    fields.divides(tensor, ("heads", model.heads))
    if model.kv_heads >= tp:
        fields.divides(tensor, kv_heads)
    else:
        fields.divides(kv_heads, tensor)
        width = (model.heads + 2 * model.kv_heads) * model.head_size
        fields.divides(tensor, ("(heads + 2 x kv_heads) x head_size", width))
    fields.divides(tensor, ("ffn_size", model.ffn_size))


def _valid_tp(model: Model) -> str:
    """The valid tensor-parallel sizes of a model, in words; of many the first."""
    sizes = []
    for tp in range(1, min(model.heads, MOST_TP) + 1):
        with suppress(ConfigError):
            _tensor_parallel(model, tp)
            sizes.append(str(tp))
    return " or ".join(filter(None, (", ".join(sizes[:-1]), sizes[-1])))
