"""The Source that arguments describe, with or without a model."""

from collections.abc import Iterable

from memcalc.config.readers.keys import listed
from memcalc.config.readers.megatron.arguments import Arguments
from memcalc.config.readers.megatron.model import model
from memcalc.config.readers.megatron.names import SIZES, VALUES, is_read, unmodelled
from memcalc.config.readers.megatron.parallel import chunks, parallel, spread
from memcalc.config.readers.megatron.recompute import recomputation
from memcalc.config.readers.megatron.run import run
from memcalc.config.readers.megatron.states import states
from memcalc.config.source import Source
from memcalc.errors import ConfigError


def source(said: Arguments, name: str, world: int | None, programs: Iterable[str]) -> Source:
    """The source that arguments describe, with or without a model."""
    for without in (each for each in said.words if each in VALUES and not said.words[each]):
        raise ConfigError(f"--{without} needs a value")
    settings = {**parallel(said, world), **run(said)}
    settings |= said.run(states, said, settings["precision"]) or {}
    found = None
    if any(size in said.words for size in SIZES):
        found = model(said, name, settings["tp"] or 1, programs)
    layers = found.layers if found else None
    settings |= said.run(spread, said) or {}
    settings["vpp"] = said.run(chunks, said, layers, settings)
    if settings["vpp"] in (None, 1):
        settings["microbatch_group_size"] = None  # the schedule is not interleaved
    if settings["pp"] in (None, 1):
        settings |= {"first_stage_layers": None, "last_stage_layers": None}
    settings |= said.run(recomputation, said) or {}
    _tell(said)
    known = {key: value for key, value in settings.items() if value is not None}
    return Source(found, known, tuple(said.assumed), tuple(said.unmodelled))


def _tell(said: Arguments) -> None:
    """A line for each argument that is not modeled, and one for all unknown ones."""
    values = {name: " ".join(words) for name, words in said.words.items()}
    said.unmodelled.extend(f"{what} is not modeled: {why}" for what, why in unmodelled(values))
    unknown = [name for name in said.words if not is_read(name)]
    if unknown:
        names = listed(f"--{name[:40]}" for name in sorted(unknown))
        said.unmodelled.append(f"unknown to memcalc, ignored: {names}")
