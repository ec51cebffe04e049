"""A Report: the answer to a question, as a table with units and notes.

``memcalc.render`` shows it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from memcalc import units
from memcalc.lazy import resolve

if TYPE_CHECKING:
    import pandas as pd

UNITS = ("bytes", "flops", "seconds", "percent", "ratio", "count", "text", "formula")
LEAST = {"bytes": 0, "flops": 0, "seconds": 0, "percent": 0, "count": 1}


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a report.

    Attributes:
        name: What the column is called, in every output.
        unit: One of ``UNITS``.
        detail: 0: always shown. Else a text table that is too wide leaves the column out, the
            largest detail first, and always if the column is empty.
        title: What text and HTML call it, if not its name; ``{unit}`` is the unit of its cells.
        optional: Whether a value may be unknown (None).
        choices: Every value that a text may have; any text if there are none.
        least: The least value of a number, if it is not its unit's (``LEAST``); ``-math.inf`` if
            there is none.
        definition: What JSON has instead of a number or a text, by its name in the schema's own
            definitions.
        description: What the schema of JSON says about the values.
    """

    name: str
    unit: str
    detail: int = 0
    title: str = ""
    optional: bool = False
    choices: tuple[str, ...] = ()
    least: float | None = None
    definition: str = ""
    description: str = ""

    def __post_init__(self) -> None:
        assert self.unit in UNITS, self.unit

    @property
    def words(self) -> str:
        """What people call it, without a unit."""
        return self.title or self.name.replace("_", " ")

    def header(self, unit: str) -> str:
        """What people call it, with the unit in which its cells are shown."""
        if "{unit}" in self.title:
            return self.title.format(unit=unit)
        return f"{self.words.removesuffix(self.unit).rstrip()} {unit}".strip()


def with_detail(columns: Sequence[Column], **details: int) -> tuple[Column, ...]:
    """The columns, some of them with another ``detail``.

    >>> [column.detail for column in with_detail((Column("n", "count"), Column("b", "bytes")), b=1)]
    [0, 1]
    """
    return tuple(replace(each, detail=details.get(each.name, each.detail)) for each in columns)


@dataclass(frozen=True, slots=True)
class Report:
    """The answer to one question.

    Attributes:
        command: The question, by the name of its command.
        title: One line that says what the table holds.
        columns: The table's columns.
        rows: The table's rows, each with one value per column; None is unknown.
        symbols: The letters of the formulas with their values here.
        notes: What was assumed, what is not modeled, and what to know when reading the table.
        failures: Checks that did not hold, one line each.
        answer: The answer in one line. Text, markdown, HTML and LaTeX begin with it; it is the
            first note in JSON.
        good: Whether the answer is good news, which colors it on a terminal; None has no color.

    >>> report = Report("demo", "Two", (Column("n", "count"),), ((1,), (2,)))
    >>> report.records()
    [{'n': 1}, {'n': 2}]
    """

    command: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Any, ...], ...]
    symbols: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()
    answer: str = ""
    good: bool | None = None

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows)

    def records(self) -> list[dict[str, Any]]:
        """The rows as dictionaries, in order."""
        names = [column.name for column in self.columns]
        return [dict(zip(names, row, strict=True)) for row in self.rows]

    def column(self, name: str) -> list[Any]:
        """The values of one column, in order."""
        index = [column.name for column in self.columns].index(name)
        return [row[index] for row in self.rows]

    def render(self, format: str = "text", wide: bool = False) -> str:  # noqa: A002 - the command line's own word
        """The report in an output format: text, json, csv, markdown, latex or html.

        Args:
            format: The output format.
            wide: Whether text and HTML show columns of detail, however wide the terminal is.

        Raises:
            UsageError: There is no such format.
        """
        rendered: str = resolve("memcalc.render:render")(self, format, wide)
        return rendered

    def to_frame(self) -> "pd.DataFrame":
        """The rows as a pandas data frame; title, answer, notes and symbols are in ``attrs``."""
        plain = [
            [v if v is None or isinstance(v, (int, float)) else str(v) for v in row]
            for row in self.rows
        ]
        names = [column.name for column in self.columns]
        frame: pd.DataFrame = resolve("pandas:DataFrame")(plain, columns=names)
        frame.attrs = {
            "title": self.title,
            "answer": self.answer,
            "notes": list(self.notes),
            "symbols": dict(self.symbols),
            "units": {column.name: column.unit for column in self.columns},
        }
        return frame

    def __str__(self) -> str:
        return self.render("text")

    def __repr__(self) -> str:
        return self.render("text")

    def _repr_html_(self) -> str:
        return self.render("html")


def scales(columns: Sequence[Column], rows: Sequence[Sequence[Any]]) -> dict[str, units.Scale]:
    """For people: the scale that suits all columns of bytes, of FLOPs, and of seconds."""
    found = {}
    for unit in units.SCALES:
        at = [number for number, column in enumerate(columns) if column.unit == unit]
        found[unit] = units.common_scale(unit, [row[number] for row in rows for number in at])
    return found
