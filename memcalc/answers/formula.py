"""``formula``: the closed form of one layer's activation memory, step by step."""

from memcalc import symbols
from memcalc.analysis.layers import layer_entries
from memcalc.answers.notes import notes, recomputation, setting
from memcalc.blocks.layer import kinds
from memcalc.config import Config
from memcalc.formulas import Formula
from memcalc.report import Column, Report

COLUMNS = (Column("step", "text", title="quantity"), Column("formula", "formula"))


def formula(config: Config, accounting: str = "paper") -> Report:
    """The activation memory of one layer in bytes: each tensor, the sum of each part, the whole.

    With a tensor-parallel size of 1 there is no letter t.

    Args:
        config: The model, its parallelism and its run.
        accounting: ``paper`` or ``exact``.

    Raises:
        UsageError: There is no such accounting.

    >>> from memcalc.config import load
    >>> steps = formula(load("175b")).records()
    >>> print(steps[-1]["step"], "=", steps[-1]["formula"])
    one layer = b*h*s*(10 + 24/t + 5*a*s/(h*t))
    """
    there = kinds(config)
    steps = {kind: _steps(config, kind, accounting) for kind in there}
    rows = [
        (step if len(there) == 1 else step.replace("one layer", f"one {kind} layer"), size)
        for kind, found in steps.items()
        for step, size in found
    ]
    letters = {letter for found in steps.values() for letter in found[-1][1].letters}
    return Report(
        "formula",
        f"Bytes that one layer keeps per GPU: {setting(config)}, {recomputation(config)}",
        COLUMNS,
        tuple(rows),
        symbols.values(config),
        (*notes(config, accounting), *_norm_note(rows), *symbols.legend(letters)),
        answer="; ".join(
            f"{kind + ': ' if len(there) > 1 else ''}{found[-1][1]} bytes per layer per GPU"
            for kind, found in steps.items()
        ),
    )


def _norm_note(rows: list[tuple[str, Formula]]) -> tuple[str, ...]:
    """Which norm is not among the norms."""
    fused = any(step.startswith("mlp:") and step.endswith("mlp_norm") for step, _ in rows)
    return ("mlp has the norm that Transformer Engine fuses into fc1; norm, all others",) * fused


def _steps(config: Config, kind: str, accounting: str) -> list[tuple[str, Formula]]:
    rows = []
    parts: dict[str, Formula] = {}
    for entry in layer_entries(config, accounting, symbols.symbolic(config), kind):
        size = Formula(entry.tensor.bytes)
        part = entry.part
        parts[part] = Formula(parts[part].expression + size.expression) if part in parts else size
        rows.append((f"{part}: {entry.tensor.name}, kept by {', '.join(entry.ops)}", size))
    rows += [(f"sum of {part}", size) for part, size in parts.items()]
    return [*rows, ("one layer", Formula(sum(size.expression for size in parts.values())))]
