"""``check``: every printed number and formula of the papers, compared with memcalc's own."""

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

from memcalc.checks.claims import VERDICTS, Claim, Ours, OwnFormula, claims, judge
from memcalc.checks.paper import ours
from memcalc.checks.patterns import chosen, listed
from memcalc.errors import UsageError, nearest
from memcalc.progress import progress
from memcalc.report import Column, Report

AGREE = ("agrees", "agrees_rounding", "agrees_reading")
Judged = tuple[Claim, Ours, str]

CLAIM_UNITS = (
    *("formula", "text", "count", "ratio", "percent", "seconds", "milliseconds", "GiB"),
    *("billions", "TFLOP/s"),
)
COLUMNS = (
    Column("id", "text"),
    Column("source", "text", detail=2),
    Column("page", "count", detail=2, optional=True),
    Column("printed", "text"),
    Column("unit", "text", detail=True, choices=CLAIM_UNITS),
    Column("ours", "text", optional=True, definition="number_or_text"),
    Column("difference", "ratio", detail=2, optional=True),
    Column("tolerance", "ratio", detail=2, optional=True),
    Column("verdict", "text", choices=tuple(VERDICTS)),
    Column("explanation", "text", detail=2),
)


def check(patterns: str | Sequence[str] = (), verdict: str | None = None) -> Report:
    """One row per claim: the printed value, memcalc's own, and the verdict on both.

    The verdict is computed from the printed value, its tolerance and memcalc's value. If it is not
    the one that the claim's row expects, the report has a failure.

    Args:
        patterns: Compare only claims whose id contains one of these, or matches it as a shell
            pattern (``table5/*/mfu``); all claims if there are none.
        verdict: Show only claims with this verdict; all if it is None. The answer and the failures
            are those of all compared claims, shown or not.

    Raises:
        UsageError: No claim matches, or there is no such verdict.

    >>> check().failures
    ()
    >>> check("table5/22b/mfu").column("verdict")
    ['agrees_rounding']
    """
    if verdict is not None and verdict not in VERDICTS:
        raise UsageError(f"no verdict {verdict[:40]!r}; {nearest(verdict, VERDICTS)}")
    every = list(claims())
    ids = chosen((claim.id for claim in every), patterns)
    judged = []
    with progress("checking claims", len(ids)) as step:
        for claim in every:
            if claim.id in ids:
                found = ours(claim)
                judged.append((claim, found, judge(claim, found)))
                step()
    shown = [each for each in judged if verdict in (None, each[2])]
    if not shown:
        raise UsageError(_nothing(patterns, verdict))
    unexpected = [each for each in judged if each[2] != each[0].verdict]
    return Report(
        "check",
        "Printed claims of papers, and memcalc's values",
        COLUMNS,
        tuple(_row(*each) for each in shown),
        {},
        (
            *_meanings(shown),
            *_reasons(shown),
        ),
        tuple(f"{claim.id} is {said}, expected {claim.verdict}" for claim, _, said in unexpected),
        answer=_summary(judged, unexpected),
        good=not unexpected,
    )


def _nothing(patterns: str | Sequence[str], verdict: str | None) -> str:
    """Why nothing is shown, and what there is to choose from."""
    words = [f"has an id like {listed(patterns)}"] if patterns else []
    words += [f"has the verdict {verdict}"] if verdict else []
    sources = dict.fromkeys(claim.source.split()[0] for claim in claims())
    return f"no claim {' and '.join(words)}; ids begin with {', '.join(sources)}"


def _row(claim: Claim, found: Ours, said: str) -> tuple[object, ...]:
    number = found if isinstance(found, int | Fraction) else None
    difference = None if number is None or claim.number is None else number - claim.number
    return (
        claim.id,
        claim.source,
        claim.page,
        claim.printed if claim.relation == "=" else f"{claim.relation} {claim.printed}",
        claim.unit,
        found.written if isinstance(found, OwnFormula) else _plain(found),
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


def _meanings(judged: list[Judged]) -> tuple[str, ...]:
    """What each verdict that is shown means."""
    shown = {said for _, _, said in judged}
    return tuple(f"{name}: {what}" for name, what in VERDICTS.items() if name in shown)


def _reasons(judged: list[Judged]) -> tuple[str, ...]:
    """Why a claim does not agree."""
    odd = ("paper_slip", "inconsistent", "not_derivable", "unexplained")
    return tuple(
        f"{claim.id}{f' (page {claim.page})' if claim.page else ''}, {said}: {claim.explanation}"
        for claim, _, said in judged
        if said in odd
    )


def _summary(judged: list[Judged], unexpected: list[Judged]) -> str:
    """The answer in one line: how many claims have each verdict, and how many an unexpected one."""
    counts = Counter(said for _, _, said in judged)
    parts = {
        "agree": sum(counts[name] for name in AGREE),
        "measured": counts["measured"],
        "consistent with stated assumptions": counts["consistent"],
        "inconsistent": counts["inconsistent"],
        "errors in papers (paper_slip)": counts["paper_slip"],
        "not derivable": counts["not_derivable"],
        "unexplained": counts["unexplained"],
    }
    said = ", ".join(f"{number} {what}" for what, number in parts.items() if number)
    amiss = f"unexpected verdicts: {len(unexpected)}" if unexpected else "no unexpected verdict"
    return f"{amiss} in {len(judged)} claims: {said}"
