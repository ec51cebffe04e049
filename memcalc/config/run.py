"""How a training step runs: sizes, precision, kernels and recomputation."""

from dataclasses import dataclass, replace

from memcalc.config import fields, pipeline
from memcalc.config.environment import Environment, environment
from memcalc.config.gpus import Gpu, gpu
from memcalc.config.implementation import IMPLEMENTATIONS, Implementation
from memcalc.config.optimizers import FORMS, OPTIMIZERS
from memcalc.config.recompute import METHODS, POLICIES, REGIONS, Policy, policy
from memcalc.errors import ConfigError
from memcalc.frameworks import FRAMEWORKS

FP8 = 89  # the first CUDA compute capability with fp8, times 10
PRECISION_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 2}
# Tokens routed to the busiest expert rank under an unbalanced router, as a multiple of a balanced
# share: the usual capacity factor (Fedus et al. 2021, arXiv 2101.03961, section 2.2).
UNBALANCED = 1.25

# Bytes per element of gradients and optimizer states, by dtype.
MAIN_GRADS = {"fp32": 4, "bf16": 2, "fp16": 2}
MAIN_PARAMS = {"fp32": 4, "fp16": 2, "remainder": 2, "none": 0}
MOMENTS = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}

FROZEN = (*REGIONS, "embedding", "head")  # the parts of a model that may be frozen


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The settings of a training run.

    Attributes:
        seq_length: s, tokens per sequence.
        micro_batch_size: b, sequences per micro-batch.
        global_batch_size: Sequences per iteration, over all ranks, or None if unknown.
        precision: The dtype of activations: ``bf16``, ``fp16`` or ``fp32``; with ``fp8`` they are
            bf16, and linears keep their inputs in 8 bits.
        recompute: Words that say what backward recomputes: a policy (``none``, ``selective``,
            ``full``, ``save_linear``) or names of regions (``attention``, ``mlp``, ...).
        recompute_method: What ``recompute_layers`` counts, under full recomputation: a word of
            ``memcalc.config.recompute.METHODS``, or None, where every layer is recomputed alone.
        recompute_layers: That number, or None: 1 of uniform, all of block; 0 is no recomputation.
        implementation: The kernels.
        framework: The framework that runs the step, a word of ``FRAMEWORKS``; None: that of the
            layers, or the sharder's.
        imbalance: Tokens routed to the busiest expert rank, as a multiple of a balanced share: 1
            with a balanced router, ``ep`` where it receives all tokens.
        gpu: The name of the GPU, or None if unknown.
        optimizer: A word of ``OPTIMIZERS``.
        optimizer_step: The form of its step, a word of ``FORMS``, or None: the framework's.
        momentum: The momentum of SGD and RMSprop, or None: the framework's.
        weight_decay: The weight decay.
        ema: Whether a moving average of the weights is kept, in their dtype.
        main_grads: The dtype that gradients accumulate in, over micro-batches.
        main_params: The dtype of the master weights: ``remainder`` is the 16 bits that bf16
            weights leave out of fp32, ``none`` is no copy.
        moments: The dtype of the optimizer's moments.
        fp8_params: Whether linears' weights are fp8 themselves, under ``fp8`` precision.
        frozen: Parts that are not trained: names of regions, ``embedding`` or ``head``.
        bucket: Elements of a bucket of gradients that are reduced together, where the framework
            has buckets of its own.
        keep_gradients: Whether gradients stay allocated after the step, where autograd makes them
            in backward.
        environment: The settings of libraries.

    Raises:
        ConfigError: A value is out of range.

    >>> Run(seq_length=2048).activation_bytes
    2
    """

    seq_length: int
    micro_batch_size: int = 1
    global_batch_size: int | None = None
    precision: str = "bf16"
    recompute: tuple[str, ...] = ("none",)
    recompute_method: str | None = None
    recompute_layers: int | None = None
    implementation: Implementation = IMPLEMENTATIONS["megatron"]
    framework: str | None = None
    imbalance: float = 1
    gpu: str | None = None
    optimizer: str = "adam"
    optimizer_step: str | None = None
    momentum: float | None = None
    weight_decay: float = 0
    ema: bool = False
    main_grads: str = "fp32"
    main_params: str = "fp32"
    moments: str = "fp32"
    fp8_params: bool = False
    frozen: tuple[str, ...] = ()
    bucket: int | None = None
    keep_gradients: bool = False
    environment: Environment = Environment()  # noqa: RUF009 - it cannot change

    def __post_init__(self) -> None:
        fields.settle(self)
        fields.whole("seq_length", self.seq_length, 2**31)
        fields.whole("micro_batch_size", self.micro_batch_size, 2**24)
        if self.global_batch_size is not None:
            fields.whole("global_batch_size", self.global_batch_size, 2**31)
        fields.word("precision", self.precision, PRECISION_BYTES)
        if isinstance(self.recompute, str):
            object.__setattr__(self, "recompute", tuple(self.recompute.split(",")))
        if not isinstance(self.implementation, Implementation):
            fields.word("implementation", self.implementation, IMPLEMENTATIONS)
            object.__setattr__(self, "implementation", IMPLEMENTATIONS[self.implementation])
        if self.framework is not None:
            fields.word("framework", self.framework, FRAMEWORKS)
        self._method(policy(self.recompute))
        fields.between("imbalance", self.imbalance, 1, 1e9)
        if self.gpu is not None:
            self._runs_on(gpu(self.gpu))
        object.__setattr__(self, "environment", environment(self.environment))
        self._training()

    def _runs_on(self, found: Gpu) -> None:
        """Refuse a GPU on which Transformer Engine refuses fp8 (its pytorch/fp8.py)."""
        if self.precision == "fp8" and found.capability is not None and found.capability < FP8:
            raise ConfigError(
                f"{found.name} has no fp8, which needs CUDA compute capability 8.9 or later: pass "
                "another --gpu, or --precision bf16"
            )

    def _training(self) -> None:
        """Check the optimizer, its dtypes and the frozen parts."""
        fields.word("optimizer", self.optimizer, OPTIMIZERS)
        self._optimizer()
        fields.word("main_grads", self.main_grads, MAIN_GRADS)
        fields.word("main_params", self.main_params, MAIN_PARAMS)
        fields.word("moments", self.moments, MOMENTS)
        fields.flag("fp8_params", self.fp8_params)
        fields.flag("keep_gradients", self.keep_gradients)
        frozen = self.frozen.split(",") if isinstance(self.frozen, str) else self.frozen
        if not isinstance(frozen, (list, tuple)):
            raise ConfigError(f"--frozen must name parts of the model, not {fields.shown(frozen)}")
        for word in frozen:
            fields.word("frozen", word, FROZEN)
        object.__setattr__(self, "frozen", tuple(frozen))
        if self.bucket is not None:
            fields.whole("bucket", self.bucket, 2**40)
        if self.fp8_params and self.precision != "fp8":
            raise ConfigError("--fp8-params needs --precision fp8")
        if self.main_params == "remainder" and self.precision not in ("bf16", "fp8"):
            raise ConfigError(f"--main-params remainder needs bf16 weights, not {self.precision}")

    def _optimizer(self) -> None:
        """Check what is said of the optimizer's step."""
        if self.optimizer_step is not None:
            fields.word("optimizer_step", self.optimizer_step, FORMS)
            steps = OPTIMIZERS[self.optimizer].steps
            if self.optimizer_step not in steps:
                raise ConfigError(
                    f"--optimizer-step {self.optimizer_step} does not exist for --optimizer "
                    f"{self.optimizer}, which has {', '.join(steps)}"
                )
        if self.momentum is not None:
            fields.probability("momentum", self.momentum)
        fields.between("weight_decay", self.weight_decay, 0, 1e9)
        fields.flag("ema", self.ema)

    def recomputing(self, *words: str) -> "Run":
        """The same run with another recomputation.

        >>> Run(seq_length=2048).recomputing("full").recompute
        ('full',)
        """
        return replace(self, recompute=words, recompute_method=None, recompute_layers=None)

    def _method(self, chosen: Policy) -> None:
        """Refuse a method or number of layers without full recomputation."""
        if self.recompute_method is not None:
            fields.word("recompute_method", self.recompute_method, METHODS)
        if self.recompute_layers is not None and self.recompute_layers != 0:
            fields.whole("recompute_layers", self.recompute_layers, pipeline.MOST)
        for name in ("recompute_method", "recompute_layers"):
            if getattr(self, name) is not None and chosen != POLICIES["full"]:
                raise ConfigError(f"--{name.replace('_', '-')} needs --recompute full")

    @property
    def policy(self) -> Policy:
        """What backward recomputes.

        >>> Run(seq_length=2048, recompute=("selective",)).policy.regions
        frozenset({'core_attention'})
        """
        return POLICIES["none"] if self.recompute_layers == 0 else policy(self.recompute)

    @property
    def activation_bytes(self) -> int:
        """Bytes per element of an activation."""
        return PRECISION_BYTES[self.precision]
