"""A claim: a printed number or formula, what the engine says, and the verdict on both."""

import operator
from collections.abc import Iterator
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

import sympy

from memcalc import resources
from memcalc.checks.grammar import formula

VERDICTS = {
    "agrees": "equal, or the printed bound holds",
    "agrees_rounding": "equal within the rounding of what is printed",
    "agrees_reading": "equal within the error of reading a figure",
    "paper_slip": "differs from the printed value, and equals the corrected one",
    "measured": "the authors' timing; where FLOPs alone say something, it is the corrected value",
    "consistent": "a printed size that a GPU can hold, or a bound that holds, as the row assumes",
    "inconsistent": "one that it cannot, or that does not hold, as the row assumes",
    "not_derivable": "a quantity that it rests on is not printed",
    "unexplained": "differs from the printed value and from any corrected one: something is wrong",
}


class Derived(NamedTuple):
    """A formula that the engine has: values where the letters have values, numbers or symbols.

    Attributes:
        witnesses: Values, each with the letters at which it was derived.
        written: How the formula is written.
    """

    witnesses: list[tuple[Any, SimpleNamespace]]
    written: str

    def equals(self, text: str) -> bool:
        """Whether a printed formula has the same value at every witness."""
        printed = formula(text)
        return all(sympy.expand(value - printed(letters)) == 0 for value, letters in self.witnesses)


Ours: TypeAlias = int | Fraction | str | Derived | None


class Claim(NamedTuple):
    """A row of ``data/paper``: where it stands, what is printed, and what verdict is expected.

    Attributes:
        id: Its name; it begins with where it stands.
        model: The catalogue's model, or GPU, that it is about, or nothing.
        quantity: What to compute, or nothing.
        relation: How ours relates to the printed: ``=``, ``<`` or ``>``.
        printed: What is printed, digit by digit; of a figure, what was read off it.
        unit: The unit of both.
        tolerance: How far ours may be off, by rounding or reading, or None.
        page: The page, or None of what has none.
        obtained: ``printed``; ``timing`` for what the authors measured; ``figure`` for what was
            read off one; ``recomputed`` from two printed numbers; ``summary`` of what another text
            says of the paper; or ``assumed`` for what is printed but rests on what is not, which
            the row then assumes.
        verdict: The verdict expected, by hand.
        corrected: What it should be, by hand, where the printed value is a slip; of a timing, what
            FLOPs alone say.
        explanation: Why they differ, or what to know.
    """

    id: str
    model: str
    quantity: str
    relation: str
    printed: str
    unit: str
    tolerance: Fraction | None
    page: int | None
    obtained: str
    verdict: str
    corrected: str
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
            fields["page"] = int(row["page"]) if row["page"] else None
            yield Claim(**fields)


def verdict(claim: Claim, ours: Ours) -> str:
    """The verdict that follows from what is printed, its tolerance, and ours."""
    if claim.obtained == "timing":
        foreseen = ours is None or _is_corrected(claim, ours)
        return "measured" if foreseen else "unexplained"
    if ours is None:
        return "not_derivable"
    if claim.obtained == "assumed":
        return "consistent" if _holds(claim, ours) else "inconsistent"
    if _holds(claim, ours):
        return "agrees"
    if _within(claim, ours):
        return "agrees_reading" if claim.obtained == "figure" else "agrees_rounding"
    return "paper_slip" if _is_corrected(claim, ours) else "unexplained"


def _holds(claim: Claim, ours: Ours) -> bool:
    if isinstance(ours, Derived):
        return ours.equals(claim.printed)
    if claim.number is None or ours is None or isinstance(ours, str):
        return ours == claim.printed
    compare = {"=": operator.eq, "<": operator.lt, ">": operator.gt}[claim.relation]
    return bool(compare(ours, claim.number))


def _within(claim: Claim, ours: Ours) -> bool:
    if claim.tolerance is None or claim.number is None or not isinstance(ours, int | Fraction):
        return False
    return claim.relation == "=" and abs(ours - claim.number) <= claim.tolerance


def _is_corrected(claim: Claim, ours: Ours) -> bool:
    """Whether ours is the corrected value, to the digits that it is given to."""
    if not claim.corrected:
        return False
    if isinstance(ours, Derived):
        return ours.equals(claim.corrected)
    if not isinstance(ours, int | Fraction):
        return ours == claim.corrected
    digits = len(claim.corrected.partition(".")[2])
    return abs(ours - Fraction(claim.corrected)) <= Fraction(1, 2 * 10**digits)
