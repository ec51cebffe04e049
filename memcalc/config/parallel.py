"""How a model is spread over ranks."""

from dataclasses import dataclass

from memcalc.config import fields
from memcalc.errors import ConfigError

CONTEXT_KINDS = {
    "ring": "keys and values go round from rank to rank (ring attention, Megatron's p2p)",
    "all_gather": "keys and values are gathered whole",
    "all_to_all": "heads are exchanged for tokens (Ulysses)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """The degrees of parallelism. Degree 1 is none.

    Attributes:
        tp: t, tensor parallel.
        sp: Whether sequence parallelism splits what tensor parallelism leaves whole.
        pp: p, pipeline parallel.
        vpp: m, virtual stages of a pipeline rank (the interleaved schedule).
        dp: Data parallel.
        cp: c, context parallel: ranks that split the whole sequence, in attention too.
        cp_kind: How attention sees the rest of the sequence: a word of ``CONTEXT_KINDS``.
        ep: e, expert parallel: ranks over which a layer's experts are spread.
        etp: Tensor parallel of the experts, or None where it is t, as everywhere else.

    Raises:
        ConfigError: A degree is out of its bounds, or two contradict each other.

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

    @property
    def ranks(self) -> int:
        """GPUs in all.

        >>> Parallel(tp=8, pp=35).ranks
        280
        """
        return self.tp * self.pp * self.dp * self.cp

    @property
    def expert_tp(self) -> int:
        """Tensor parallel of the experts.

        >>> Parallel(tp=8).expert_tp, Parallel(tp=8, etp=1).expert_tp
        (8, 1)
        """
        return self.tp if self.etp is None else self.etp

    def __post_init__(self) -> None:
        fields.word("cp_kind", self.cp_kind, CONTEXT_KINDS)
        for name in ("tp", "pp", "vpp", "dp", "cp", "ep"):
            fields.whole(name, getattr(self, name), 2**20)
        fields.whole("etp", self.expert_tp, 2**20)
        fields.flag("sp", self.sp)
        if self.vpp > 1 and self.pp == 1:
            raise ConfigError(f"vpp {self.vpp} (virtual pipeline stages) needs pp of at least 2")
