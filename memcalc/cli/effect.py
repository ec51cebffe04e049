"""Options without effect are named: the question is asked again without each of them."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from memcalc.config import Config
from memcalc.config.catalog import sources
from memcalc.config.config import configure
from memcalc.errors import MemcalcError
from memcalc.report import Report

SIZES = ("dp", "global_batch_size")  # often without effect on memory, as the title shows
MOST_CHUNKS = 256  # model chunks of a pipeline whose question is asked again; more take seconds


def answered(target: str, settings: Mapping[str, Any], ask: Callable[[Config], Report]) -> Report:
    """The answer for MODEL and the options, with a warning for each option without effect.

    An option has no effect if the rows and the answer are the same without it. One that states what
    holds anyway, as a default, is not named; nor is one that a warning names already, nor a size of
    the run that the title states.

    Args:
        target: MODEL.
        settings: The options.
        ask: The question.
    """
    source, run = sources(target, settings.get("run"))
    given = {name: value for name, value in settings.items() if value is not None and name != "run"}
    config = configure(source, given, run)
    report = ask(config)
    if len(given) == 0 or config.parallel.chunks > MOST_CHUNKS:
        return report

    def idle(name: str) -> bool:
        rest = {other: value for other, value in given.items() if other != name}
        try:
            without = configure(source, rest, run)
            if _facts(without) == _facts(config) or _said(config) - _said(without):
                return False
            again = ask(without)
        except MemcalcError:  # the others need it
            return False
        if name in SIZES and again.title != report.title:
            return False
        return (again.rows, again.answer) == (report.rows, report.answer)

    lines = [
        f"warning: {_written(name, given[name])} has no effect on this answer"
        for name in given
        if idle(name)
    ]
    return replace(report, notes=(*report.notes, *lines))


def _facts(config: Config) -> Config:
    """A config without where its facts are from."""
    return replace(config, assumed=(), unmodelled=())


def _said(config: Config) -> set[str]:
    """The warnings that name a setting without effect."""
    return {line for line in config.warnings if "has no effect" in line or "nothing" in line}


def _written(name: str, value: Any) -> str:
    """An option as it is typed, without its value."""
    return f"--{'no-' if value is False else ''}{name.replace('_', '-')}"
