"""Bytes, FLOPs and seconds for people: GiB is 2^30, GB is 10^9, and every number says which."""

import re
from collections.abc import Sequence
from fractions import Fraction

Scale = tuple[str, float]  # a unit's name, and how much it is

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

BYTE_SCALES = (("B", 1), ("KiB", KIB), ("MiB", MIB), ("GiB", GIB), ("TiB", TIB), ("PiB", 2**50))
FLOP_SCALES = (
    ("FLOP", 1),
    ("kFLOP", 10**3),
    ("MFLOP", 10**6),
    ("GFLOP", 10**9),
    ("TFLOP", 10**12),
    ("PFLOP", 10**15),
    ("EFLOP", 10**18),
)
SECOND_SCALES = (("µs", 1e-6), ("ms", 1e-3), ("s", 1))
SCALES: dict[str, tuple[Scale, ...]] = {
    "bytes": BYTE_SCALES,
    "flops": FLOP_SCALES,
    "seconds": SECOND_SCALES,
}
LEAST = 0.01  # the smallest number that a cell shows


# Powers of 1000 and of 1024, as people write them.
SIZES = {
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgtp", 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgtp", 1)},
}


def parse_bytes(text: str) -> int | None:
    """The bytes of a size as it is written, with its unit; None where it is no size.

    >>> parse_bytes("80GB"), parse_bytes("79.5 GiB"), parse_bytes("80")
    (80000000000, 85362475008, None)
    """
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([A-Za-z]{1,3})", text.strip())
    if match is None or match[2].lower() not in SIZES:
        return None
    return int(Fraction(match[1]) * SIZES[match[2].lower()])


def common_scale(unit: str, values: Sequence[float | None]) -> Scale:
    """The scale in which a column of a unit of ``SCALES`` reads best: its largest under 10,000.

    >>> common_scale("bytes", [7079985152, 100663296])
    ('MiB', 1048576)
    >>> common_scale("flops", [])
    ('FLOP', 1)
    """
    largest = max((abs(v) for v in values if v is not None), default=0)
    scales = SCALES[unit]
    most = 1_000 if unit == "seconds" else 10_000
    for name, scale in scales:
        if largest < most * scale * (100 if name == "GiB" else 1):  # GPUs' memory is in GiB
            return name, scale
    return scales[-1]


def decimals(values: Sequence[float], most: int = 2) -> int:
    """How many decimals a column needs to be exact, at the most ``most``.

    >>> decimals([6752.0, 96.0]), decimals([612.5, 100.0]), decimals([1 / 3])
    (0, 1, 2)
    """
    for places in range(most):
        if all(round(v, places) == v for v in values):
            return places
    return most


def column(values: Sequence[float | None], scale: float) -> list[str | None]:
    """The cells of a column in a scale: with the same decimals, except 0 and what is small.

    >>> column([6752 * MIB, None, 612.5 * MIB, 16], MIB), column([0, MIB // 3], MIB)
    (['6,752.0', None, '612.5', '< 0.01'], ['0', '0.33'])
    """
    scaled = [None if value is None else float(value / scale) for value in values]
    places = decimals([v for v in scaled if v is not None and not _small(v)])

    def cell(value: float) -> str:
        if _small(value):
            return f"< {LEAST}" if value > 0 else f"> -{LEAST}"
        return f"{value:,.{places}f}" if value else "0"

    return [None if value is None else cell(value) for value in scaled]


def _small(value: float) -> bool:
    return 0 < abs(value) < LEAST


def number(value: float, unit: str) -> str:
    """A number of a column without a scale, for people.

    >>> number(61.964, "percent"), number(0.00122, "ratio"), number(12288, "count")
    ('62.0', '0.00122', '12,288')
    >>> number(True, "text")
    'yes'
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if unit == "percent":
        return f"{value:.1f}"
    if isinstance(value, int):
        return f"{value:,}"
    digits = 4 if unit == "text" else 3  # a number beside a printed one needs its decimals
    return f"{value:.{digits}g}" if abs(value) < 1000 else f"{value:,.0f}"


def counted(number: int, what: str) -> str:
    """A number of things, for a sentence.

    >>> counted(1, "row"), counted(3, "row")
    ('1 row', '3 rows')
    """
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def format_bytes(value: float) -> str:
    """Bytes in their own best scale, for a sentence.

    >>> format_bytes(140509184), format_bytes(2**20), format_bytes(2736 * MIB)
    ('134 MiB', '1 MiB', '2,736 MiB')
    """
    return _sentence("bytes", value)


def format_flops(value: float) -> str:
    """FLOPs likewise.

    >>> format_flops(1266637395197952)
    '1,266.64 TFLOP'
    """
    return _sentence("flops", value)


def in_scale(value: float, scale: Scale) -> str:
    """A value in a given scale, for a sentence beside its table; small and large ones in theirs.

    >>> in_scale(3 * MIB, ("GiB", GIB)), in_scale(2109 * MIB, ("GiB", GIB))
    ('3 MiB', '2.06 GiB')
    """
    if 0 < abs(value) < LEAST * scale[1] or abs(value) >= 10_000 * scale[1]:
        unit = next(unit for unit, scales in SCALES.items() if scale in scales)
        scale = _own_scale(unit, value)
    return f"{column([value], scale[1])[0]} {scale[0]}"


def _sentence(unit: str, value: float) -> str:
    return in_scale(value, _own_scale(unit, value))


def _own_scale(unit: str, value: float) -> Scale:
    """A column's scale for one value; the next larger one if two decimals are exact in it."""
    scales = SCALES[unit]
    own = common_scale(unit, [value])
    for scale in scales[scales.index(own) + 1 :][:1]:
        amount = abs(value) / scale[1]
        if amount >= 1 and round(amount, 2) == amount:
            return scale
    return own
