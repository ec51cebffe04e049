"""What README.md and docs/*.md show, and what they would show now.

As a script, from anywhere: writes the present output under every ``$ memcalc ...`` line and names
the commands whose output changed. Exits 1 if a command fails or warns, in its notes or on stderr,
and leaves what is shown under it. Writes docs/cli.md too (``reference.py``), and the table and the
figure of docs/step.md (``step.py``). ``--check`` writes nothing, and exits 1 if something would
change.
"""

import argparse
import contextlib
import io
import os
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CLI = ROOT / "docs" / "cli.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# a command line, and what is shown under it: up to the next command or the end of the block
BLOCK = re.compile(r"^\$ memcalc (.*)\n((?:(?!\$ |```).*\n)*)", re.MULTILINE)


def shown() -> Iterator[tuple[str, str]]:
    """Every command line that the pages show, with the output shown under it."""
    for page in PAGES:
        yield from BLOCK.findall(page.read_text())


def refreshed(text: str, output: Callable[[str], str]) -> tuple[str, list[str], list[str]]:
    """A page with the present output of its commands; the commands that changed; that failed."""
    changed, failed = [], []

    def block(found: re.Match[str]) -> str:
        line, old = found.groups()
        try:
            new = output(line).rstrip()
        except ValueError as error:
            failed.append(f"{line}: {error}")
            return found[0]
        if new == old.rstrip():
            return found[0]
        changed.append(line)
        return f"$ memcalc {line}\n{new}\n" + "\n" * found[0].endswith("\n\n")

    return BLOCK.sub(block, text), changed, failed


def printed(line: str) -> str:
    """What a command line prints on 80 columns.

    Raises:
        ValueError: It fails or warns.
    """
    from memcalc.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(line.split())
    warnings = [line.strip() for line in out.getvalue().splitlines() if "  warning: " in line]
    if status or err.getvalue() or warnings:
        raise ValueError(f"exit status {status}: {err.getvalue().strip() or warnings[0]}")
    return out.getvalue()


def reference() -> str:
    """What docs/cli.md has to be."""
    text: str = runpy.run_path(str(Path(__file__).with_name("reference.py")))["page"]()
    return text


def step() -> dict[str, Any]:
    """What makes the table and the figure of docs/step.md."""
    return runpy.run_path(str(Path(__file__).with_name("step.py")))


def main() -> int:
    """The script; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 on a change")
    check = parser.parse_args().check
    os.environ["COLUMNS"] = "80"
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        os.environ.pop(name, None)
    status = 0
    for path in PAGES:
        old = path.read_text()
        new, changed, failed = refreshed(old, printed)
        for line in changed + failed:
            print(f"{path.relative_to(ROOT)}: {line}")
        if failed or (check and changed):
            status = 1
        if new != old and not check:
            path.write_text(new)
    made = step()
    for path, old, new, write in (
        (made["PAGE"], made["PAGE"].read_text(), made["page"](), lambda: made["page"]().encode()),
        (made["FIGURE"], made["written"](), made["description"](), made["figure"]),
    ):
        if old != new:
            print(f"{path.relative_to(ROOT)}: the events of a step")
            status = int(status or check)
            if not check:
                path.write_bytes(write())
    if CLI.read_text() != (text := reference()):
        print(f"{CLI.relative_to(ROOT)}: the commands or their options")
        status = int(status or check)
        if not check:
            CLI.write_text(text)
    return status


if __name__ == "__main__":
    sys.exit(main())
