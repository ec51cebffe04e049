"""A claim: a printed number or formula, memcalc's own value, and the verdict on both."""

import operator
from collections.abc import Iterator
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

from memcalc import resources
from memcalc.checks.grammar import formula
from memcalc.lazy import resolve

VERDICTS = {
    "agrees": "equal, or the printed bound holds",
    "agrees_rounding": "equal within the rounding of the printed value",
    "agrees_reading": "equal within the error of reading a figure",
    "paper_slip": "differs from the printed value and equals the corrected one",
    "measured": "measured by the authors; ours, if shown, is what FLOPs or the roofline predict",
    "consistent": "a printed size fits on the GPU, or a bound holds, under the row's assumptions",
    "inconsistent": "a printed size does not fit, or a bound does not hold, under the row's "
    "assumptions",
    "not_derivable": "depends on a quantity that is not printed",
    "unexplained": "equals neither the printed nor the corrected value: an error in memcalc or "
    "in the claim",
}


class OwnFormula(NamedTuple):
    """A formula of memcalc's own, as its values for some values of the letters.

    Attributes:
        witnesses: Values, each with the letters (numbers or symbols) that give it.
        written: The formula as text.
    """

    witnesses: list[tuple[Any, SimpleNamespace]]
    written: str

    def equals(self, text: str) -> bool:
        """Whether a printed formula has the same value for all of these letters."""
        printed = formula(text)
        expand = resolve("sympy:expand")
        return all(expand(value - printed(letters)) == 0 for value, letters in self.witnesses)


Ours: TypeAlias = int | Fraction | str | OwnFormula | None


class Claim(NamedTuple):
    """A row of ``data/paper``: what is printed, where, and the expected verdict.

    Attributes:
        id: The claim's name; its first part is where it is printed.
        model: The catalog model or GPU that the claim is about, or nothing.
        quantity: Its name in ``memcalc.checks.paper.QUANTITIES``, by which memcalc's own value is
            computed, or nothing.
        relation: How memcalc's value must relate to the printed one: ``=``, ``<`` or ``>``.
        printed: The printed value, digit by digit; for a figure, the value read off it.
        unit: The unit of both values.
        tolerance: How far apart the values may be because of rounding or reading, or None.
        page: The page, or None.
        obtained: ``printed``; ``timing`` if the authors measured it; ``figure`` if it was read off
            a figure; ``recomputed`` from two printed numbers; ``summary`` if another text says it
            about the paper; or ``assumed`` if it depends on something that is not printed, which
            the row assumes.
        verdict: The expected verdict, set by hand.
        corrected: The correct value, set by hand, if the printed one is wrong; for a timing, what
            FLOPs alone predict.
        explanation: Why the values differ, or what else to know.
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
        """Where it is printed, in words.

        >>> next(claims()).source
        'abstract'
        """
        first = self.id.split("/")[0]
        word = first.rstrip("0123456789.ABC")
        return f"{word} {first[len(word) :]}".strip()

    @property
    def number(self) -> Fraction | None:
        """The printed value as an exact number; None if it is a formula or a word."""
        return None if self.unit in ("formula", "text") else Fraction(self.printed)


def claims() -> Iterator[Claim]:
    """Every claim of ``data/paper``, in the order of its files and rows."""
    for name in resources.names("paper", ".csv"):
        for row in resources.rows(f"paper/{name}.csv"):
            fields: dict[str, Any] = dict(row)
            fields["tolerance"] = Fraction(row["tolerance"]) if row["tolerance"] else None
            fields["page"] = int(row["page"]) if row["page"] else None
            yield Claim(**fields)


def judge(claim: Claim, ours: Ours) -> str:
    """The verdict on a printed value and memcalc's own."""
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
    if isinstance(ours, OwnFormula):
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
    """Whether ours equals the corrected value, to the corrected value's last digit."""
    if not claim.corrected:
        return False
    if isinstance(ours, OwnFormula):
        return ours.equals(claim.corrected)
    if not isinstance(ours, int | Fraction):
        return ours == claim.corrected
    digits = len(claim.corrected.partition(".")[2])
    return abs(ours - Fraction(claim.corrected)) <= Fraction(1, 2 * 10**digits)
