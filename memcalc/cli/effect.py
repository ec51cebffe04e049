"""Warnings about options without effect, found by asking the question again without each option."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from memcalc.answers.warnings import ineffective
from memcalc.cli.names import as_option
from memcalc.config import Config
from memcalc.config.catalog import sources
from memcalc.config.gpus import gpu
from memcalc.config.merge import configure
from memcalc.errors import MemcalcError
from memcalc.report import Report

SIZES = ("dp", "global_batch_size")  # often without effect on memory, as the title shows
LONG = 8192  # tokens per sequence in usual training; contexts of inference are longer
MOST_CHUNKS = 256  # with more model chunks, asking again takes seconds, and no option is checked

Answer = TypeVar("Answer")


def answered(target: str, settings: Mapping[str, Any], ask: Callable[[Config], Report]) -> Report:
    """The answer for MODEL and the options, with a warning for each option without effect.

    A long sequence length that was not set begins the answer.

    Args:
        target: MODEL.
        settings: The options.
        ask: The question.
    """
    config, report, lines = checked(
        target, settings, ask, lambda each: ((each.rows, each.answer), each.title)
    )
    answer, s = report.answer, config.run.seq_length
    assumed = {each.setting for each in config.assumed}
    if s > LONG and "seq_length" in assumed and report.command != "formula":
        answer = f"at s {s} (set -s): {answer}"
    return replace(report, notes=(*report.notes, *lines), answer=answer)


def checked(
    target: str,
    settings: Mapping[str, Any],
    ask: Callable[[Config], Answer],
    shown: Callable[[Answer], tuple[Any, str]],
) -> tuple[Config, Answer, list[str]]:
    """The Config of MODEL and the options, the answer, and a warning for each idle option.

    An option has no effect if the answer shows the same numbers without it. There is no warning for
    an option that states a default, one that another warning names, or a size of the run that the
    title states.

    Args:
        target: MODEL.
        settings: The options.
        ask: The question.
        shown: The numbers and the title that an answer shows.
    """
    source, run = sources(target, settings.get("run"))
    given = {name: value for name, value in settings.items() if value is not None and name != "run"}
    config = configure(source, given, run)
    answer = ask(config)
    if len(given) == 0 or config.parallel.chunks > MOST_CHUNKS:
        return config, answer, []
    numbers, title = shown(answer)

    def idle(name: str) -> bool:
        rest = {other: value for other, value in given.items() if other != name}
        try:
            without = configure(source, rest, run)
            warned = {*ineffective(config)} - {*ineffective(without)}
            if warned or _facts(without) == _facts(config):
                return False
            same, same_title = shown(ask(without))
        except MemcalcError:  # another option needs this one
            return False
        return same == numbers and (same_title == title or name not in SIZES)

    return (
        config,
        answer,
        [
            f"warning: {_written(name, given[name])} has no effect on this answer"
            for name in given
            if idle(name)
        ],
    )


def _facts(config: Config) -> tuple[Config, Any]:
    """What settings say: a config without their spelling and origin, its policy and its chunks."""
    parallel, order, model = config.parallel, config.parallel.order, config.model
    layers = parallel.spread(model.layers + (model.encoder_layers or 0), model.mtp_layers)
    named = replace(
        parallel,
        schedule=parallel.schedule if parallel.schedule not in (None, order) else order,
        microbatch_group_size=parallel.group if parallel.vpp > 1 else None,
        etp=parallel.expert_tp if model.experts else None,
        layout=None,
        first_stage_layers=None,
        last_stage_layers=None,
    )
    whole = "full" in config.run.recompute
    method = config.run.recompute_method or ("uniform" if whole else None)
    name = config.run.gpu and gpu(config.run.gpu).name
    run = replace(config.run.recomputing("full" if whole else "none"), gpu=name)
    run = replace(run, recompute_method=method, recompute_layers=config.run.recompute_layers)
    same = replace(config, parallel=named, run=run, assumed=(), unmodelled=())
    return same, (config.run.policy, layers)


def _written(name: str, value: Any) -> str:
    """An option without its value; a flag that is off, as --no-flag."""
    return as_option(f"no_{name}" if value is False else name)
