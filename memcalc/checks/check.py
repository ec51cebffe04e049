"""``check``: every printed number and formula of the papers, held against the engine."""

from collections import Counter
from fractions import Fraction

from memcalc.checks.claims import VERDICTS, Claim, Derived, Ours, claims, verdict
from memcalc.checks.paper import ours
from memcalc.report import Column, Report


def check() -> Report:
    """A row a claim: what is printed, what the engine says, and the verdict on both.

    The verdict is computed from printed value, tolerance and ours. Where it is not the one that the
    claim's row expects, the report has a failure.

    >>> report = check()
    >>> report.failures
    ()
    """
    judged = [
        (claim, found, verdict(claim, found)) for claim in claims() for found in [ours(claim)]
    ]
    counts = Counter(found for _, _, found in judged)
    return Report(
        "check",
        f"{len(judged)} claims, of Korthikanti et al. 2022, Li et al. 2021 and on persistent RNNs, "
        "against the engine",
        (
            Column("id", "text"),
            Column("source", "text", detail=True),
            Column("page", "count", detail=True),
            Column("printed", "text"),
            Column("unit", "text", detail=True),
            Column("ours", "text"),
            Column("difference", "ratio", detail=True),
            Column("tolerance", "ratio", detail=True),
            Column("verdict", "text"),
            Column("explanation", "text", detail=True),
        ),
        tuple(_row(claim, found, said) for claim, found, said in judged),
        {},
        (
            *(f"{name}: {what}" for name, what in VERDICTS.items()),
            "difference and tolerance are in the row's own unit",
            *_reasons(judged),
            _summary(judged, counts),
        ),
        tuple(
            f"{claim.id} is {said}, where {claim.verdict} is expected"
            for claim, _, said in judged
            if said != claim.verdict
        ),
    )


def _row(claim: Claim, found: Ours, said: str) -> tuple[object, ...]:
    number = found if isinstance(found, int | Fraction) else None
    difference = None if number is None or claim.number is None else number - claim.number
    return (
        claim.id,
        claim.source,
        claim.page,
        claim.printed if claim.relation == "=" else f"{claim.relation} {claim.printed}",
        claim.unit,
        found.written if isinstance(found, Derived) else _plain(found),
        _plain(difference),
        _plain(claim.tolerance),
        said,
        claim.explanation,
    )


def _plain(value: int | Fraction | str | None) -> int | float | str | None:
    """A number as JSON has it: whole, or a float."""
    if isinstance(value, Fraction):
        return value.numerator if value.denominator == 1 else float(value)
    return value


def _reasons(judged: list[tuple[Claim, Ours, str]]) -> tuple[str, ...]:
    """Why what is not as printed is not."""
    odd = ("paper_slip", "inconsistent", "not_derivable", "unexplained")
    return tuple(
        f"{claim.id}{f' (page {claim.page})' if claim.page else ''}, {said}: {claim.explanation}"
        for claim, _, said in judged
        if said in odd
    )


def _summary(judged: list[tuple[Claim, Ours, str]], counts: Counter[str]) -> str:
    agree = sum(counts[name] for name in ("agrees", "agrees_rounding", "agrees_reading"))
    slips = sum(said == "paper_slip" and c.obtained != "summary" for c, _, said in judged)
    others = counts["paper_slip"] - slips
    return (
        f"{agree} of {len(judged)} claims agree; {slips} are the paper's own slips, {others} of a "
        f"summary of it; {counts['measured']} are measured, {counts['not_derivable']} not "
        "derivable; "
        f"under stated assumptions {counts['consistent']} are consistent, "
        f"{counts['inconsistent']} are not"
    )
