"""Assumptions, as records: settings that the input does not give, and the words for them."""

from typing import Any, NamedTuple

from memcalc.frameworks import FRAMEWORKS, SHARDERS

# memcalc's own defaults, which need no reason.
_DEFAULTS = {
    "tp": "no tensor parallelism",
    "dp": "one data-parallel rank",
    "precision": "{} activations",
}
_LABELS = {
    "seq_length": "sequence length",
    "micro_batch_size": "micro-batch size",
    "global_batch_size": "global batch size",
    "dp": "data-parallel size",
    "zero": "ZeRO stage",
    "padded_vocab_size": "vocabulary",
}


class Assumption(NamedTuple):
    """A setting, or a fact of the model, that the input does not give.

    Attributes:
        setting: Its name: memcalc's, or the file's own.
        value: The value that is assumed; None if ``why`` says all.
        why: The reason; empty for memcalc's own defaults.

    >>> Assumption("zero", 3, "the default of fsdp2").words
    'ZeRO stage 3 (the default of fsdp2)'
    >>> Assumption("precision", "bf16").words
    'bf16 activations'
    """

    setting: str
    value: Any
    why: str = ""

    @property
    def words(self) -> str:
        """The assumption as a note says it."""
        if self.value is None:
            return self.why
        if not self.why and self.setting in _DEFAULTS:
            return _DEFAULTS[self.setting].format(self.value)
        said = f"{_LABELS.get(self.setting, self.setting)} {self.value}"
        if self.setting == "main_grads":
            said = f"{self.value} gradients"
        elif self.setting == "sharder":
            said = f"{FRAMEWORKS[SHARDERS[self.value].framework].title}'s sharding"
        return f"{said} ({self.why})" if self.why else said
