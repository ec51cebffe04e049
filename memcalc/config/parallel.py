"""How a model is spread over ranks."""

from dataclasses import dataclass

from memcalc.config import fields
from memcalc.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """The degrees of parallelism. Degree 1 is none.

    Attributes:
        tp: t, tensor parallel.
        sp: Whether sequence parallelism splits what tensor parallelism leaves whole.
        pp: p, pipeline parallel.
        vpp: m, virtual stages of a pipeline rank (the interleaved schedule).
        dp: Data parallel.

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

    @property
    def ranks(self) -> int:
        """GPUs in all.

        >>> Parallel(tp=8, pp=35).ranks
        280
        """
        return self.tp * self.pp * self.dp

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "vpp", "dp"):
            fields.whole(name, getattr(self, name), 2**20)
        fields.flag("sp", self.sp)
        if self.vpp > 1 and self.pp == 1:
            raise ConfigError(f"vpp {self.vpp} (virtual pipeline stages) needs pp of at least 2")
