"""``layer``: the activation memory of one layer under each technique, as the paper's table 2."""

from dataclasses import replace
from typing import Any, NamedTuple

from memcalc import symbols
from memcalc.analysis.layers import layer_bytes
from memcalc.answers.notes import flash_note, notes, setting
from memcalc.blocks.layer import kinds, usual_kind
from memcalc.config import Config
from memcalc.errors import ConfigError
from memcalc.formulas import layer_formula
from memcalc.report import Column, Report, with_detail
from memcalc.units import format_bytes


class Technique(NamedTuple):
    """A row of the paper's table 2."""

    name: str
    tensor_parallel: bool
    sequence_parallel: bool
    policy: str

    def of(self, config: Config) -> Config:
        """A config under this technique: its own tensor-parallel size, or 1."""
        tp = config.parallel.tp if self.tensor_parallel else 1
        parallel = replace(config.parallel, tp=tp, sp=self.sequence_parallel)
        run = config.run.recomputing(self.policy)
        try:
            return replace(config, parallel=parallel, run=run)
        except ConfigError as error:
            raise ConfigError(f"technique {self.name}: {error}") from error


TECHNIQUES = (
    Technique("none", False, False, "none"),
    Technique("tensor", True, False, "none"),
    Technique("tensor+sequence", True, True, "none"),
    Technique("tensor+selective", True, False, "selective"),
    Technique("tensor+sequence+selective", True, True, "selective"),
    Technique("full", True, False, "full"),
)


def techniques(config: Config) -> list[Technique]:
    """The techniques that a config allows: those with sequence parallelism only if it divides s."""
    parallel = config.parallel
    divided = config.run.seq_length % (parallel.cp * parallel.tp) == 0
    return [each for each in TECHNIQUES if divided or not each.sequence_parallel]


COLUMNS = (
    Column("layer_kind", "text"),
    Column("technique", "text", choices=tuple(each.name for each in TECHNIQUES)),
    Column("formula", "formula"),
    Column("bytes", "bytes"),
    Column("percent_of_tensor", "percent", title="% of tensor parallel"),
)


def layer(config: Config, accounting: str = "paper") -> Report:
    """Bytes that one layer keeps for backward on one rank, under each technique.

    The techniques are the report's rows, so the config's own sequence parallelism and
    recomputation have no effect. Under ``full`` every rank keeps the whole input of the layer, as
    the paper counts it.

    Args:
        config: The model and its run; the tensor-parallel size is taken from it.
        accounting: ``paper`` or ``exact``.

    >>> from memcalc.config import load
    >>> report = layer(load("175b"))
    >>> [bytes // 2**20 for bytes in report.column("bytes")]
    [2736, 552, 342, 312, 102, 48]
    """
    under = {technique: technique.of(config) for technique in techniques(config)}
    rows: list[tuple[Any, ...]] = []
    for kind in kinds(config):
        sizes = {t.name: layer_bytes(each, accounting, kind) for t, each in under.items()}
        for technique, each in under.items():
            letters = symbols.symbolic(each, technique.tensor_parallel)
            formula = layer_formula(each, accounting, letters, kind)
            size = sizes[technique.name]
            rows.append((kind, technique.name, formula, size, 100 * size / sizes["tensor"]))
    lines = tuple(dict.fromkeys((*notes(config, accounting), *flash_note(config))))
    if config.parallel.tp == 1:
        lines += ("tensor-parallel size 1: rows with tensor parallelism equal those without",)
    if len(under) < len(TECHNIQUES):
        ranks = f"--tp {config.parallel.tp}"
        if config.parallel.cp > 1:
            ranks = f"--cp x --tp = {config.parallel.cp * config.parallel.tp}"
        lines += (
            f"rows with sequence parallelism are left out: {ranks} does not divide --seq-length "
            f"{config.run.seq_length}",
        )
    lines += symbols.legend({letter for _, _, formula, *_ in rows for letter in formula.letters})
    return Report(
        "layer",
        f"Activations of one layer per GPU: {setting(config.with_parallel(sp=False))}",
        with_detail(COLUMNS, layer_kind=len(kinds(config)) == 1),
        tuple(rows),
        symbols.values(config),
        lines,
        answer=_answer(config, rows),
    )


def _answer(config: Config, rows: list[tuple[Any, ...]]) -> str:
    """What a layer of the usual kind keeps at most and at least, short of full recomputation."""
    usual, several = usual_kind(config), len(kinds(config)) > 1
    size = {name: format_bytes(bytes_) for kind, name, _, bytes_, _ in rows if kind == usual}
    first = f"one {usual + ' ' if several else ''}layer keeps {size['tensor']} per GPU"
    if config.parallel.tp == 1:
        if size["tensor+selective"] == size["tensor"]:
            return f"{first}; selective recomputation saves nothing, full keeps {size['full']}"
        return f"{first}; {size['tensor+selective']} with selective recomputation"
    least, what = size["tensor+selective"], "selective recomputation"
    if "tensor+sequence+selective" in size:
        least, what = size["tensor+sequence+selective"], f"sequence parallelism and {what}"
    return f"{first} with tensor-parallel size {config.parallel.tp}; {least} with {what}"
