"""Renderers: a Report in an output format. They do not import one another."""

from memcalc.errors import UsageError, nearest
from memcalc.lazy import resolve
from memcalc.report import Report

# Format -> the function that renders it.
RENDERERS = {
    "text": "memcalc.render.text:render",
    "json": "memcalc.render.json:render",
    "csv": "memcalc.render.csv:render",
    "markdown": "memcalc.render.markdown:render",
    "latex": "memcalc.render.latex:render",
    "html": "memcalc.render.html:render",
}

# File suffix -> its format.
SUFFIXES = {
    ".txt": "text",
    ".json": "json",
    ".csv": "csv",
    ".md": "markdown",
    ".tex": "latex",
    ".html": "html",
}


def render(report: Report, format: str, wide: bool = False) -> str:  # noqa: A002 - the command line's own word
    """The report in a format, ending in a newline; ``wide`` is for text and HTML.

    Raises:
        UsageError: There is no such format.
    """
    if not isinstance(format, str) or format not in RENDERERS:
        raise UsageError(f"format {format!r} is unknown; {nearest(str(format), RENDERERS)}")
    options = {"wide": wide} if format in ("text", "html") else {}
    rendered: str = resolve(RENDERERS[format])(report, **options)
    return rendered
