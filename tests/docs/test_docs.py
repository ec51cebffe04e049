"""README, the pages of docs, changelog and guide: what they show and claim is so."""

import ast
import re
import runpy
from datetime import date
from pathlib import Path

import pytest

import memcalc as library
from memcalc.checks.backtest import MORE_FLAGS
from memcalc.checks.claims import claims
from memcalc.cli.main import COMMANDS
from memcalc.cli.names import ALIASES
from memcalc.config import catalog, gpus
from memcalc.config.families import FAMILIES
from memcalc.config.readers.megatron.names import UNMODELLED, UNMODELLED_VALUES, is_read
from memcalc.graph import ops
from memcalc.lazy import resolve

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()

FLAGS = {*UNMODELLED, *MORE_FLAGS, *(name for name, _ in UNMODELLED_VALUES)}
REFRESH = runpy.run_path(str(Path(__file__).with_name("refresh.py")))
PAGES = REFRESH["PAGES"]
SHOWN = list(REFRESH["shown"]())


def marked(line: str, shown: str):
    """A command of a page and its output, as a parameter: some commands run torch."""
    runs_torch = line.startswith(("derive ", "validate "))
    return pytest.param(line, shown, id=line, marks=[pytest.mark.torch] * runs_torch)


@pytest.mark.parametrize(("line", "shown"), [marked(*each) for each in SHOWN])
def test_pages_show_real_output(memcalc, line, shown):
    outcome = memcalc(line)
    assert (outcome.status, outcome.err) == (0, "")
    assert "  warning: " not in shown
    assert shown.rstrip() == outcome.out.rstrip(), "tests/docs/refresh.py writes what is new"


def test_refreshing_a_page_writes_new_output_once_and_leaves_the_rest():
    page = "Text\n\n```console\n$ memcalc a\nold\n\n$ memcalc b\nsame\n```\nmore\n"
    now = {"a": "new\n", "b": "same\n"}
    text, changed, failed = REFRESH["refreshed"](page, now.__getitem__)
    assert (text, changed, failed) == (page.replace("old", "new"), ["a"], [])
    assert REFRESH["refreshed"](text, now.__getitem__) == (text, [], [])


def test_refreshing_a_page_leaves_what_a_failing_command_shows():
    page = "```console\n$ memcalc nope\nold\n```\n"
    text, changed, (failed,) = REFRESH["refreshed"](page, REFRESH["printed"])
    assert (text, changed) == (page, [])
    assert failed.startswith("nope: exit status 2: memcalc: no command 'nope'")


def test_refreshing_a_page_leaves_what_a_warning_command_shows():
    page = "```console\n$ memcalc flops 175b --sp\nold\n```\n"
    text, changed, (failed,) = REFRESH["refreshed"](page, REFRESH["printed"])
    assert (text, changed) == (page, [])
    assert failed.endswith("warning: --sp has no effect on this answer")


def test_the_table_and_the_figure_of_a_step_are_current():
    """A figure has its numbers as its description."""
    step = REFRESH["step"]()
    assert step["page"]() == step["PAGE"].read_text(), "tests/docs/refresh.py writes it"
    assert step["description"]() == step["written"](), "tests/docs/refresh.py draws it"
    assert step["FIGURE"].stat().st_size < 200_000


def test_the_reference_of_the_command_line_is_current():
    assert REFRESH["CLI"].read_text() == REFRESH["reference"](), "tests/docs/refresh.py writes it"


def test_the_reference_has_every_option_of_every_command():
    sections = re.split(r"^## memcalc (\w+)$", REFRESH["CLI"].read_text(), flags=re.MULTILINE)
    said = dict(zip(sections[1::2], sections[2::2], strict=True))
    for name, options in OPTIONS.items():
        rows = " ".join(re.findall(r"^\| `(-.*?)` \|", said[name], re.MULTILINE))
        found = set(re.findall(r"(?<!\S)--?[a-z][\w-]*", rows))
        assert {word for word in options if word.startswith("-")} <= found, name


def test_the_first_command_answers_what_stands_beside_it():
    first, second = re.findall(r"^python3 -m venv .*$", README, re.MULTILINE)
    assert first.endswith("&& .venv/bin/memcalc layer 175b")
    assert "layer 175b" in [line for line, _ in SHOWN]
    assert "pytest" in second


def test_models_families_claims_and_gpus_are_as_many_as_is_said():
    """In README and in the newest release; older entries of the changelog are history."""
    newest = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1]
    text = README + newest
    for pattern, count in (
        (r"one of (\d+) models of the catalog", len(catalog.names())),
        (r"one of (\d+) families", len(FAMILIES)),
        (r"(\d+) claims of papers", len(list(claims()))),
        (r"catalog has (\d+) GPUs", len(gpus.gpus())),
    ):
        assert re.findall(pattern, text) == [str(count)], pattern


def test_every_page_is_linked_and_every_link_leads_somewhere():
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")}
    links = set(re.findall(r"\]\((?!https?:)([^)#]+)\)", README))
    assert pages <= links
    assert all((ROOT / link).exists() for link in links)


def test_files_that_the_pages_show_are_read(memcalc, tmp_path):
    model, run = (
        re.search(r"```json\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)[1]
        for page in ("layers.md", "runs.md")
    )
    path = tmp_path / "mine.json"
    path.write_text(model)
    assert memcalc(f"layer {path}").status == 0
    path.write_text(" ".join(run.split()))
    (row,) = memcalc(f"backtest {path} --format json").document["rows"]
    assert (row["id"], row["unmodelled"]) == ("gpt.mine@A100", "")
    assert row["predicted_peak_bytes"] > 0


def test_every_command_is_documented():
    for name in COMMANDS:
        assert re.search(rf"`memcalc {name}\b", README), name


def test_every_public_name_is_documented():
    for name in library.__all__:
        assert re.search(rf"(`|memcalc[. ]){name}\b", README), name


def test_the_changelog_has_releases_with_dates_and_entries_the_newest_being_this_version():
    _, *releases = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    heads = [
        re.fullmatch(r"(\d+)\.(\d+)\.(\d+) \((\d{4}-\d\d-\d\d)\)", release.partition("\n")[0])
        for release in releases
    ]
    assert all(heads)
    versions = [tuple(map(int, head.groups()[:3])) for head in heads]
    assert versions == sorted(set(versions), reverse=True)
    dates = [date.fromisoformat(head[4]) for head in heads]
    assert dates == sorted(dates, reverse=True)
    assert all(re.search(r"^- \S", release, re.MULTILINE) for release in releases)
    assert ".".join(map(str, versions[0])) == library.__version__


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_every_file_that_a_page_names_is_there(page):
    for path in re.findall(r"`((?:memcalc|data|docs|tests|notebooks)/[\w./-]+)`", page.read_text()):
        assert (ROOT / path).exists(), path


def test_every_operation_says_what_it_saves():
    choosing = {"enter_tensor_parallel", "leave_tensor_parallel"}  # between f and g, and their bars
    for name, function in vars(ops).items():
        is_operation = getattr(function, "__module__", "").startswith(f"{ops.__name__}.")
        if is_operation and name not in choosing:
            assert name.startswith("_") or re.search(r"[Ss]aves", function.__doc__), name


def words(command):
    """The options of a command, and those of its own commands."""
    own = {word for option in command.params for word in option.opts + option.secondary_opts}
    return own.union(*map(words, getattr(command, "commands", {}).values()))


OPTIONS = {name: words(resolve(where)) for name, (where, _) in COMMANDS.items()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_option_in_the_docs_exists(page):
    """An option beside its command is that command's; another is memcalc's or Megatron-LM's."""
    text = page.read_text()
    for name, rest in re.findall(r"memcalc ([a-z]+)((?: [^`\n|&]*)?)", text):
        for option in re.findall(r"(?<!\S)--?[a-z][\w-]*", rest):
            assert option in OPTIONS.get(name, ()) or option in ("-h", "--help"), (name, option)
    text = re.sub(r"```sh\n.*?```", "", text, flags=re.DOTALL)  # other tools' options
    ours = {"--help", *ALIASES}.union(*OPTIONS.values())
    for option in set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text)):
        argument = option.removeprefix("--")
        assert option in ours or is_read(argument) or argument in FLAGS, option


# Phrases that readers stumble over, and "a" instead of "per" (CONTRIBUTING, Words).
RATE = (
    "bytes|chunks|elements|flops|gigabytes|layers|micro-batches|passes|ranks|rows|sequences|tokens"
)
OF = "chunk|element|gpu|iteration|layer|micro-batch|parameter|rank|second|stage|step|token|weight"
RIDDLES = re.compile(
    rf"\b(?:{RATE}) an? (?:{OF})\b"
    r"|\bhangs? on\b|\bwho splits\b|\bno place here\b|\blies on your\b|\bcontradicts itself\b"
    r"|micro-batches kept whole|\bnarrow weights\b|\beven share\b|\bwhose kernels run\b"
    r"|\bmade again\b|\bmakes? again\b|\bneeds no more\b|\bnobody (?:says|said|stated|named)\b"
    r"|\bstands? (?:on|twice|apart)\b|\bis of sharder\b|\bhave a meaning only\b"
)


def texts():
    """Every text that a user may read, with where it is: strings of the code, pages and tables."""
    for path in [*PAGES, *(ROOT / "data").rglob("*.csv"), ROOT / "CHANGELOG.md"]:
        yield path, " ".join(path.read_text().split())
    for path in (ROOT / "memcalc").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield path, " ".join(node.value.split())
            elif isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "0" for p in node.values)
                yield path, " ".join("".join(map(str, parts)).split())


def test_no_text_is_a_riddle():
    found = [
        f"{path.relative_to(ROOT)}: {text[max(0, hit.start() - 40) : hit.end() + 40]}"
        for path, text in texts()
        for hit in RIDDLES.finditer(text.lower())
    ]
    assert not found, "\n".join(found)
