"""``models``: the catalog."""

from dataclasses import fields
from typing import Any

from memcalc.analysis.parameters import active_parameters, parameters
from memcalc.answers.warnings import warnings
from memcalc.blocks.layer import kinds
from memcalc.config import Model, catalog, load
from memcalc.report import Column, Report

COLUMNS = (
    Column("name", "text"),
    Column("layers", "count"),
    Column("hidden_size", "count"),
    Column("heads", "count"),
    Column("kv_heads", "count"),
    Column("head_size", "count", detail=True),
    Column("ffn_size", "count"),
    Column("experts", "count", optional=True),
    Column("vocab_size", "count", optional=True),
    Column("max_seq_length", "count", detail=True, optional=True),
    Column("norm", "text", detail=True),
    Column("activation", "text", detail=True),
    Column("position", "text", detail=True),
    Column("source", "text", detail=True),
)
FACTS = (Column("fact", "text"), Column("value", "text"))


def models() -> Report:
    """The catalog's models with their sizes, each with its source.

    >>> [name for name in models().column("name") if name.startswith("llama-2")]
    ['llama-2-13b', 'llama-2-70b', 'llama-2-7b']
    """
    found = [source.model for source in catalog.entries()]
    return Report(
        "models",
        "Models of the catalog",
        COLUMNS,
        tuple(tuple(getattr(each, column.name) for column in COLUMNS) for each in found),
        notes=(f"other names: {', '.join(f'{k} ({v})' for k, v in catalog.ALIASES.items())}",),
        answer=f"{len(found)} models; `memcalc models NAME` shows all facts about one",
    )


def model(name: str) -> Report:
    """Every fact of one model, one row per fact, with its parameter counts.

    Raises:
        ConfigError: There is no such model.

    >>> facts = dict(model("mixtral-8x7b").rows)
    >>> facts["parameters"], facts["active parameters"]
    ('46,702,792,704', '12,879,925,248')
    """
    config = load(name)
    found = config.model
    facts = {each.name: getattr(found, each.name) for each in fields(Model) if each.compare}
    facts = {key: value for key, value in facts.items() if value is not None}
    layers = ", ".join(f"{count} {kind}" for kind, count in kinds(config).items())
    facts = {"name": facts.pop("name"), "kinds of layers": layers, **facts}
    if found.vocab_size is not None or found.classes is not None:
        facts["parameters"] = parameters(config)
    if found.experts is not None:
        facts["active parameters"] = active_parameters(config)
    return Report(
        "models",
        f"Facts about {found.name}",
        FACTS,
        tuple((key, _shown(value)) for key, value in facts.items()),
        {},
        tuple(f"warning: {line}" for line in warnings(config)),
        answer=_answer(found.name, facts),
    )


def _answer(name: str, facts: dict[str, Any]) -> str:
    """The size of a model in a line.

    >>> _answer("big", {"kinds of layers": "1 dense, 2 moe, 1 mtp", "parameters": 1000})
    'big has 1 dense, 2 MoE and 1 MTP layers and 1,000 parameters without the MTP layers'
    """
    kinds_ = facts["kinds of layers"].replace("moe", "MoE").replace("mtp", "MTP")
    line = f"{name} has {' and '.join(kinds_.rsplit(', ', 1))} layers"
    if "parameters" in facts:
        line += f" and {facts['parameters']:,} parameters"
        line += " without the MTP layers" if "MTP" in kinds_ else ""
    if "active parameters" in facts:
        line += f", {facts['active parameters']:,} of them active per token"
    return line


def _shown(value: Any) -> str:
    """A value in words: yes or no, a number, or a pattern of layers by its runs."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return _runs(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def _runs(pattern: tuple[int, ...]) -> str:
    """A pattern as ``moe_layers`` writes it.

    >>> _runs((0, 0, 0, 1, 1))
    '[0]*3+[1]*2'
    """
    runs: list[list[int]] = []
    for each in pattern:
        if runs and runs[-1][0] == each:
            runs[-1][1] += 1
        else:
            runs.append([each, 1])
    terms = [f"[{each}]*{count}" for each, count in runs]
    return "+".join(terms) if len(terms) <= 8 else f"{'+'.join(terms[:8])}+..."
