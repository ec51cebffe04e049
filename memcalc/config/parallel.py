"""How a model is split over ranks."""

import math
from dataclasses import dataclass

from memcalc.config import fields, pipeline
from memcalc.config.pipeline import Chunk
from memcalc.errors import ConfigError
from memcalc.frameworks import SHARDERS
from memcalc.frameworks.record import Sharder

CONTEXT_KINDS = {
    "ring": "keys and values are passed from rank to rank (ring attention, Megatron's p2p)",
    "all_gather": "keys and values are all-gathered",
    "all_to_all": "all-to-all from sharded tokens to sharded heads (Ulysses)",
}
ZERO = {
    0: "nothing",
    1: "optimizer states",
    2: "optimizer states and gradients",
    3: "optimizer states, gradients and weights",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """The parallel sizes. Size 1 means none.

    Attributes:
        tp: t, tensor-parallel size.
        sp: Whether sequence parallelism shards what tensor parallelism replicates.
        pp: p, pipeline-parallel size.
        vpp: m, model chunks per pipeline rank (the interleaved schedule).
        dp: Data-parallel size.
        cp: c, context-parallel size: ranks that shard the sequence, in attention too.
        cp_kind: How context parallelism exchanges keys and values: a word of ``CONTEXT_KINDS``.
        ep: e, expert-parallel size: ranks over which the experts of a layer are sharded.
        etp: Tensor-parallel size of the experts; None is t.
        schedule: The pipeline's schedule, a word of ``memcalc.config.pipeline.SCHEDULES``; None is
            1F1B, interleaved where a rank has several model chunks.
        microbatch_group_size: Of the interleaved schedule, how many micro-batches run through one
            chunk before the next one's turn; None is p.
        first_stage_layers: Layers of the first stage, or None where it has as many as the others.
        last_stage_layers: Layers of the last stage, likewise.
        layout: The layers of each model chunk, as ``memcalc.config.pipeline.layout``
            reads it; None where the layers are split evenly.
        embedding_as_layer: Whether an even split counts the embedding as a layer.
        loss_as_layer: Whether it counts the loss as one.
        zero: What data-parallel ranks shard, a key of ``ZERO``: Megatron's distributed
            optimizer is 1, and no more; fully sharded data parallelism 3.
        sharder: Whose sharding it is, a key of ``memcalc.frameworks.SHARDERS``.
        shard_copies: How many copies of the shards there are: hybrid sharding's replicas,
            instances of Megatron's distributed optimizer.

    Raises:
        ConfigError: A size is out of range, or two settings contradict each other.

    >>> Parallel(tp=8, sp=True).tp
    8
    """

    tp: int = 1
    sp: bool = False
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    cp: int = 1
    cp_kind: str = "ring"
    ep: int = 1
    etp: int | None = None
    schedule: str | None = None
    microbatch_group_size: int | None = None
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    layout: tuple[Chunk, ...] | None = None
    embedding_as_layer: bool = False
    loss_as_layer: bool = False
    zero: int = 0
    sharder: str = "megatron"
    shard_copies: int = 1

    @property
    def order(self) -> str:
        """The name of the schedule that runs; one stage always runs 1F1B.

        >>> Parallel(pp=4).order, Parallel(pp=4, vpp=2).order, Parallel(schedule="zb-v").order
        ('1f1b', 'interleaved', '1f1b')
        """
        if self.pp == 1:
            return pipeline.ONE_CHUNK
        default = pipeline.SEVERAL_CHUNKS if self.vpp > 1 else pipeline.ONE_CHUNK
        return self.schedule or default

    @property
    def sharding(self) -> Sharder:
        """The record of who shards over data-parallel ranks.

        >>> Parallel(sharder="fsdp2", zero=3).sharding.own_master
        True
        """
        return SHARDERS[self.sharder]

    @property
    def scheduling(self) -> pipeline.Schedule:
        """The record of the schedule that runs."""
        return pipeline.SCHEDULES[self.order]

    @property
    def interleaves(self) -> bool:
        """Whether the schedule that runs takes model chunks per rank as ``vpp`` says."""
        return self.scheduling.chunks is None

    @property
    def chunks_per_rank(self) -> int:
        """Model chunks per pipeline rank.

        >>> Parallel(pp=4, schedule="zb-v").chunks_per_rank
        2
        """
        return self.scheduling.chunks or self.vpp

    @property
    def copies(self) -> int:
        """Pipeline ranks that hold each model chunk, each for a part of the micro-batches."""
        return self.scheduling.ranks_per_chunk

    @property
    def chunks(self) -> int:
        """The model chunks of the whole pipeline, from the embedding to the loss.

        >>> Parallel(pp=4, vpp=2).chunks, Parallel(pp=4, schedule="dualpipe").chunks
        (8, 4)
        """
        return self.pp * self.chunks_per_rank // self.copies

    @property
    def filling(self) -> int:
        """Micro-batches that fill the pipeline: p per chunk of a rank, and 2p for ZB-H2.

        Under the interleaved schedule, rounded up to whole groups.

        >>> Parallel(pp=4, vpp=2).filling, Parallel(pp=4, schedule="zb-h2").filling
        (8, 8)
        >>> Parallel(pp=4, vpp=2, microbatch_group_size=6).filling
        12
        """
        number = self.pp * (self.scheduling.filling or self.chunks_per_rank)
        if self.interleaves:
            return -(-number // self.group) * self.group
        return number

    @property
    def group(self) -> int:
        """Micro-batches that run through a chunk before the next one's turn: p unless set.

        >>> Parallel(pp=4, vpp=2).group
        4
        """
        return self.microbatch_group_size or self.pp

    def spread(self, layers: int, further: int = 0) -> tuple[Chunk, ...]:
        """The layers of each model chunk, in the order of the pipeline.

        Args:
            layers: The layers of the model.
            further: Its multi-token prediction layers: in the last chunk unless the layout says
                otherwise.

        Raises:
            ConfigError: The layout does not match the model or the pipeline, or the layers of the
                first and last stages leave a number that the others do not divide.

        >>> [chunk.layers for chunk in Parallel(pp=4, first_stage_layers=1).spread(10)]
        [1, 3, 3, 3]
        """
        if self.layout is not None:
            found = self.layout
            if len(found) != self.chunks or sum(chunk.layers for chunk in found) != layers:
                raise ConfigError(
                    f"--layout has {sum(chunk.layers for chunk in found)} layers in {len(found)} "
                    f"chunks; the model has {layers} layers, and --pp x chunks per rank is "
                    f"{self.chunks}"
                )
            if (placed := sum(chunk.further for chunk in found)) == further:
                return found
            if placed:
                raise ConfigError(
                    f"--layout has {placed} multi-token prediction layers (m); the model has "
                    f"{further}"
                )
            numbers = [chunk.layers for chunk in found]
        elif self.first_stage_layers is not None or self.last_stage_layers is not None:
            numbers = pipeline.uneven(
                layers, self.pp, self.vpp, self.first_stage_layers, self.last_stage_layers
            )
        else:
            counted = self.embedding_as_layer, self.loss_as_layer
            numbers = pipeline.even(layers, self.chunks, *counted)
        *before, last = numbers
        return (*(Chunk(number) for number in before), Chunk(last, further))

    @property
    def ranks(self) -> int:
        """The number of GPUs.

        >>> Parallel(tp=8, pp=35).ranks
        280
        """
        return self.tp * self.pp * self.dp * self.cp

    @property
    def replicas(self) -> int:
        """Ranks that hold the same parameters, except experts.

        >>> Parallel(tp=8, dp=4, cp=2).replicas
        8
        """
        return self.dp * (self.cp if self.sharding.over_context else 1)

    @property
    def expert_replicas(self) -> int:
        """Ranks of a stage that hold the same experts; 1 where the data-parallel size is not given.

        >>> Parallel(tp=4, dp=8, ep=8, etp=1).expert_replicas, Parallel(ep=8).expert_replicas
        (4, 1)

        Raises:
            ConfigError: The ranks of the experts do not divide those of the stage.
        """
        ranks, spread = self.tp * self.cp * self.dp, self.ep * self.expert_tp
        if self.dp == 1 and ranks < spread:  # dp is also 1 where it is not given
            return 1
        self.experts_fit()
        return ranks // spread

    def experts_fit(self) -> None:
        """Refuse experts whose ranks do not divide those of a stage.

        >>> Parallel(ep=8, dp=4).experts_fit()
        Traceback (most recent call last):
            ...
        memcalc.errors.ConfigError: --ep 8 x --tp 1 needs a multiple of 8 ranks per stage, but \
--tp x --cp x --dp = 4: pass --dp 8
        """
        each, needed = self.tp * self.cp, self.ep * self.expert_tp
        if each * self.dp % needed:
            name = "--tp" if self.etp is None else "--etp"
            step = math.lcm(needed, each) // each
            raise ConfigError(
                f"--ep {self.ep} x {name} {self.expert_tp} needs a multiple of {needed} ranks per "
                f"stage, but --tp x --cp x --dp = {each * self.dp}: pass --dp "
                f"{-(-self.dp // step) * step}"
            )

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel size of the experts.

        >>> Parallel(tp=8).expert_tp, Parallel(tp=8, etp=1).expert_tp
        (8, 1)
        """
        return self.tp if self.etp is None else self.etp

    def __post_init__(self) -> None:
        fields.settle(self)
        fields.word("cp_kind", self.cp_kind, CONTEXT_KINDS)
        fields.whole("pp", self.pp, pipeline.MOST_STAGES)
        for name in ("tp", "vpp", "dp", "cp", "ep"):
            fields.whole(name, getattr(self, name), 2**20)
        fields.whole("etp", self.expert_tp, 2**20)
        for name in ("sp", "embedding_as_layer", "loss_as_layer"):
            fields.flag(name, getattr(self, name))
        if self.vpp > 1 and self.pp == 1:
            raise ConfigError(f"--vpp {self.vpp} needs --pp of at least 2")
        self._schedule()
        self._split()
        self._sharding()

    def _schedule(self) -> None:
        """Refuse a schedule that does not fit the pipeline."""
        size = self.microbatch_group_size
        if size is not None:
            fields.whole("microbatch_group_size", size, 2**31)
            if self.vpp == 1:
                raise ConfigError(
                    f"--microbatch-group-size {size} needs --vpp of at least 2 (interleaved "
                    "schedule)"
                )
            if size < self.pp:
                raise ConfigError(f"--microbatch-group-size {size} must be at least --pp {self.pp}")
        if self.schedule is None:
            return
        fields.word("schedule", self.schedule, pipeline.SCHEDULES)
        if self.pp == 1:
            return  # it has no effect, which is warned about
        if self.interleaves and self.vpp == 1:
            raise ConfigError(f"--schedule {self.schedule} needs --vpp of at least 2")
        if not self.interleaves and self.vpp > 1:
            interleaved = " or ".join(n for n, s in pipeline.SCHEDULES.items() if s.chunks is None)
            raise ConfigError(
                f"--vpp {self.vpp} needs --schedule {interleaved}, not {self.schedule}"
            )
        if self.copies > 1 and self.pp % self.copies:
            raise ConfigError(f"--schedule {self.schedule} needs an even --pp, not {self.pp}")

    def _split(self) -> None:
        """Refuse two ways of placing the layers at once, or one that the schedule cannot have."""
        if self.layout is not None:
            object.__setattr__(self, "layout", pipeline.layout(self.layout))
        two_chunks = [name for name, each in pipeline.SCHEDULES.items() if each.chunks == 2]
        for name in ("first_stage_layers", "last_stage_layers"):
            if getattr(self, name) is not None:
                fields.whole(name, getattr(self, name), pipeline.MOST)
                if self.pp == 1 or self.schedule in two_chunks:
                    raise ConfigError(
                        f"--{name.replace('_', '-')} needs --pp of at least 2, and a schedule "
                        f"other than {' and '.join(two_chunks)}"
                    )
        ways = {
            "--layout": self.layout is not None,
            "--first-stage-layers and --last-stage-layers": (
                self.first_stage_layers,
                self.last_stage_layers,
            )
            != (None, None),
            "--embedding-as-layer and --loss-as-layer": self.embedding_as_layer
            or self.loss_as_layer,
        }
        chosen = [way for way, there in ways.items() if there]
        if len(chosen) > 1:
            raise ConfigError(f"{chosen[1]} cannot be combined with {chosen[0]}")

    def _sharding(self) -> None:
        """Refuse a sharding that the sharder does not have."""
        if type(self.zero) is not int or self.zero not in ZERO:
            raise ConfigError(f"--zero must be 0, 1, 2 or 3, not {fields.shown(self.zero)}")
        fields.word("sharder", self.sharder, SHARDERS)
        sharder = self.sharding
        if self.zero not in sharder.stages:
            why = sharder.refusal.format(zero=self.zero)
            raise ConfigError(f"--sharder {self.sharder} {why}")
        if self.pp > 1 and self.zero not in sharder.pipeline_stages:
            why = sharder.pipeline_refusal.format(zero=self.zero)
            raise ConfigError(f"--sharder {self.sharder} {why}")
        fields.whole("shard_copies", self.shard_copies, 2**20)
        if self.replicas > 1:
            ranks = "--dp x --cp" if sharder.over_context else "--dp"
            fields.divides(("--shard-copies", self.shard_copies), (ranks, self.replicas))
        if self.shard_copies > 1 and self.zero == 0:
            raise ConfigError("--shard-copies needs --zero 1, 2 or 3: with 0 nothing is sharded")
