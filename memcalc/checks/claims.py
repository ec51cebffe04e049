"""A claim: a printed number or formula, what the engine says, and the verdict on both."""

from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NamedTuple, TypeAlias

from memcalc import resources

Ours: TypeAlias = int | Fraction | str | None

VERDICTS = {
    "agrees": "equal, or the printed bound holds",
    "agrees_rounding": "equal to the printed digits",
    "agrees_reading": "equal within the error of reading a figure",
    "paper_slip": "differs, and the explanation says why",
    "measured": "the authors' timing: there is nothing to derive",
    "not_derivable": "a quantity that it rests on is not printed",
}


class Claim(NamedTuple):
    """A row of ``data/paper``: where it stands, what is printed, and what verdict is expected.

    Attributes:
        id: Its name; it begins with where it stands.
        model: The catalogue's model that it is about, or nothing.
        quantity: What to compute, or nothing.
        relation: How ours relates to the printed: ``=``, ``<`` or ``>``.
        printed: What is printed, digit by digit; of a figure, what was read off it.
        unit: The unit of both.
        tolerance: How far ours may be off, by rounding or reading, or None.
        page: The page.
        obtained: ``printed``, ``timing``, ``figure``, or ``summary`` of what another says of it.
        verdict: The verdict expected, by hand.
        explanation: Why they differ, or what to know.
    """

    id: str
    model: str
    quantity: str
    relation: str
    printed: str
    unit: str
    tolerance: Fraction | None
    page: int
    obtained: str
    verdict: str
    explanation: str

    @property
    def source(self) -> str:
        """Where it stands, in words.

        >>> next(claims()).source
        'abstract'
        """
        first = self.id.split("/")[0]
        word = first.rstrip("0123456789.ABC")
        return f"{word} {first[len(word) :]}".strip()

    @property
    def number(self) -> Fraction | None:
        """What is printed, as an exact number; None where it is a formula or a word."""
        return None if self.unit in ("formula", "text") else Fraction(self.printed)


def claims() -> Iterator[Claim]:
    """Every claim of ``data/paper``, in the order of its files and rows."""
    for name in resources.names("paper", ".csv"):
        for row in resources.rows(f"paper/{name}.csv"):
            fields: dict[str, Any] = dict(row)
            fields["tolerance"] = Fraction(row["tolerance"]) if row["tolerance"] else None
            fields["page"] = int(row["page"])
            yield Claim(**fields)


def verdict(claim: Claim, ours: Ours) -> str:
    """The verdict that printed value, tolerance and ours lead to.

    A formula's ``ours`` is the printed text itself where the two are equal as functions.
    """
    if claim.obtained == "timing":
        return "measured"
    if ours is None:
        return "not_derivable"
    if claim.number is None:
        return "agrees" if ours == claim.printed else "paper_slip"
    assert not isinstance(ours, str)
    if claim.relation == "<":
        return "agrees" if ours < claim.number else "paper_slip"
    if claim.relation == ">":
        return "agrees" if ours > claim.number else "paper_slip"
    if ours == claim.number:
        return "agrees"
    if claim.tolerance is not None and abs(ours - claim.number) <= claim.tolerance:
        return "agrees_reading" if claim.obtained == "figure" else "agrees_rounding"
    return "paper_slip"
