"""LaTeX: a booktabs table with exact numbers and formulas in math mode."""

from typing import Any

from memcalc import units
from memcalc.report import Report

_ESCAPES = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}


def render(report: Report) -> str:
    r"""The report as a LaTeX ``table`` (it needs the package booktabs).

    >>> from memcalc.report import Column
    >>> print(render(Report("demo", "Two", (Column("n", "count"),), ((2,),))), end="")
    % needs \usepackage{booktabs}
    \begin{table}
    \caption{Two}
    \begin{tabular}{r}
    \toprule
    n \\
    \midrule
    2 \\
    \bottomrule
    \end{tabular}
    \end{table}
    """
    alignment = "".join("l" if c.unit in ("text", "formula") else "r" for c in report.columns)
    header = " & ".join(_escaped(column.name.replace("_", " ")) for column in report.columns)
    body = [
        " & ".join(_cell(v, c.unit) for v, c in zip(row, report.columns, strict=True)) + r" \\"
        for row in report.rows
    ]
    lines = [
        *([f"% {' '.join(report.answer.split())}"] if report.answer else []),
        r"% needs \usepackage{booktabs}",
        r"\begin{table}",
        rf"\caption{{{_escaped(report.title)}}}",
        rf"\begin{{tabular}}{{{alignment}}}",
        r"\toprule",
        rf"{header} \\",
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}",
        *(f"% {' '.join(note.split())}" for note in report.notes),
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _cell(value: Any, unit: str) -> str:
    if value is None:
        return "--"
    if hasattr(value, "latex"):
        return f"${value.latex()}$"
    return units.number(value, unit) if isinstance(value, float) else _escaped(str(value))


def _escaped(text: str) -> str:
    return "".join(_ESCAPES.get(character, character) for character in text)
