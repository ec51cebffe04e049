"""Hostile command lines: whatever is asked, one line answers it, in bounded time and memory."""

import os
import resource
import stat
import subprocess
import sys
import time
from importlib import import_module

import pytest

from memcalc.cli.main import COMMANDS, main

LLAMA = "memory llama-3-8b -s 4096"

SIZES = [
    *(f"layer 22b -s {size}" for size in ("0", "-1", "-0", "1e3", "0x10", "1_0", "NaN", "inf")),
    *(f"layer 22b -b {size}" for size in ("٨", "½", "8.0", "+8", "1" * 5000, str(2**63))),
    *(f"memory 22b --tp {size}" for size in ("0", "-8", "7", "1048577", "1" + "0" * 400)),
    *(f"{LLAMA} --pp {size}" for size in ("0", "33", "1000000")),
    *(f"{LLAMA} --dp {size}" for size in ("0", str(2**20), str(2**70))),
    *(
        f"{LLAMA} --budget {size}"
        for size in ("0", "-1GB", "NaN", "infGB", "1e400GB", "80 parsecs")
    ),
    *(f"{LLAMA} --budget {size}" for size in ("80", "GB", "1EB", "99999999999999999999999GB")),
    f"{LLAMA} --gpu h100 --margin -1GB",
    f"{LLAMA} --gpu h100 --margin NaN",
    f"{LLAMA} --gpu h100 --margin 1e99GB",
    *(f"flops 22b --iteration-time {seconds} --gpus 8" for seconds in ("0", "-1", "nan", "1e999")),
    "flops 22b --iteration-time 1e-300 --gpu h100 --gpus 1",
    *(f"{LLAMA} --imbalance {share}" for share in ("0", "-1", "inf", "nan", "1e308")),
    *(f"rnn --sync {seconds}" for seconds in ("-1", "nan", "1e999")),
    *(f"rnn --density {share}" for share in ("0", "101", "-3", "nan")),
    "rnn --hidden-size 0",
    "rnn -s 99999999999",
    "rnn --scope training -s 100 --checkpoint-every 101",
]

CONTRADICTIONS = [
    "memory 175b --global-batch-size 12",
    "memory 175b --global-batch-size 4",
    "memory 530b --global-batch-size 71",
    "plot stages 175b --global-batch-size 12 -o x.png",
    "memory 175b --pp 2 --vpp 2 --microbatch-group-size 1",
    f"{LLAMA} --vpp 2",
    f"{LLAMA} --pp 2 --vpp 17",
    f"{LLAMA} --pp 3",
    f"{LLAMA} --pp 4 --schedule interleaved",
    f"{LLAMA} --pp 4 --schedule dualpipe --global-batch-size 3",
    f"{LLAMA} --pp 4 --schedule zb-v --vpp 4",
    f"{LLAMA} --schedule gpipe --pp 1",
    f"{LLAMA} --first-stage-layers 5",
    f"{LLAMA} --pp 2 --first-stage-layers 32",
    f"{LLAMA} --fill",
    f"{LLAMA} --recompute full --fill",
    f"{LLAMA} --recompute full --recompute-method block --recompute-layers 49",
    f"{LLAMA} --recompute nothing,full,none",
    f"{LLAMA} --recompute ,",
    f"{LLAMA} --zero 2 --sharder megatron",
    f"{LLAMA} --zero 4",
    f"{LLAMA} --zero 3 --shard-copies 3 --dp 4",
    f"{LLAMA} --distributed-optimizer --zero 3",
    f"{LLAMA} --ep 8",
    f"{LLAMA} --sp --tp 1",
    f"{LLAMA} --cp 3",
    f"{LLAMA} --tp 16 --cp 16 --pp 16 --dp 16 --ep 16",
    f"{LLAMA} --precision fp8 --implementation transformers-sdpa",
    f"{LLAMA} --cross-entropy te --implementation paper",
    f"{LLAMA} --attention flash --implementation transformers-eager",
    f"{LLAMA} --optimizer sgd --moments fp8 --main-params bf16",
    f"{LLAMA} --global-batch-size 3 --dp 2",
    f"{LLAMA} --tp 2 --tp 4 --tp 3",
    f"{LLAMA} --format json --format csv",
    f"{LLAMA} --gpu h100 --gpu a100",
    f"{LLAMA} --gpu",
    f"{LLAMA} --tp",
    f"{LLAMA} --tp=",
    f"{LLAMA} --tp= --pp=",
    f"{LLAMA} --format -",
    f"{LLAMA} -o -",
    f"{LLAMA} -",
    f"{LLAMA} -- --tp 2",
    f"{LLAMA} 22b",
    "layer 22b --sp",
    "layer llama-3-8b --recompute-layers 3",
    "formula 22b --latex --python",
    "formula 22b --latex --format json",
    "models 22b --show 175b",
    "gpus --gpu nothing",
    "check nothing",
    "check table5 --verdict nothing",
    "plot nothing 22b -o x.png",
    "plot techniques",
    "plot paper-7 22b -o x.png",
    "plot techniques 22b -o x.exe",
    "plot techniques 22b -o .png",
    "backtest nothing.jsonl",
    "175b",
    "help",
    "help help",
    "--",
    "--version layer",
    "-h -h",
    "layer --help --version",
]

# Lines above that are answered, and why. All others are refused.
ANSWERED = {
    f"{LLAMA} --dp {2**20}": "the bound itself",
    f"{LLAMA} --pp 3": "layers need not divide: the first stages have one more",
    f"{LLAMA} --pp 2 --first-stage-layers 32": "a last stage may have the head alone",
    f"{LLAMA} --schedule gpipe --pp 1": "a warning says that it has no effect",
    f"{LLAMA} --sp --tp 1": "a warning says that it has no effect",
    f"{LLAMA} --recompute full --recompute-method block --recompute-layers 49": (
        "as full recomputation of all 32 layers; a warning says that the number has no effect"
    ),
    f"{LLAMA} --precision fp8 --implementation transformers-sdpa": "a warning: not measured",
    f"{LLAMA} --cross-entropy te --implementation paper": "any loss follows any layers",
    f"{LLAMA} -o -": "- is stdout",
    "help": "as --help",
    "-h -h": "as -h",
    "--version layer": "--version stops the parser",
}

# what a word of a command line may be made of
WORDS = [
    "",
    " ",
    "-",
    "--",
    "---",
    "-" * 500,
    "=",
    "%s%n{}{0.__class__}",
    "$(touch owned)",
    "`touch owned`",
    "a/../" * 200 + "etc/passwd",
    "x" * 5000,
    "./" + "d/" * 1500 + "x.json",
    "\x1b]0;owned\x07\x1b[31m",
    "\u202efdp.nosj",
    "模型",
    "\udcff\udcfe",
    "a\nb\nc",
    "a\rb",
    "a\tb",
    "[red]markup[/red]",
    "[/nothing]",
    "$x_{2}$",
    "hf:../../etc",
    "hf:",
    "hf:a/b/c",
    "http://127.0.0.1:9/x",
    "file:///etc/passwd",
    "con",
    "~",
    "~root",
    "*",
    "{",
    "null",
    "None",
    "__class__",
    "os.system:owned",
]

SPECIAL = ["/dev/null", "/dev/zero", "/dev/full", "/proc/self/mem", "/proc/self/environ", ".", "/"]


@pytest.fixture(scope="module")
def _loaded():
    """Import what commands import when they first need it, for no command line's time has that."""
    for name in ("matplotlib.pyplot", "pandas", "sympy"):
        import_module(name)


@pytest.fixture
def hostile(_loaded, capsys, tmp_path, monkeypatch):
    """Run a command line in an empty folder, and hold what must hold of every one."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        before = time.process_time()
        status = main(list(words))
        seconds = time.process_time() - before
        out, err = capsys.readouterr()
        held(status, out, err)
        assert seconds < 2
        assert not (tmp_path / "owned").exists()
        return status, out, err

    return run


def held(status, out, err):
    """No traceback, a known exit status, and of what is refused one line."""
    assert status in (0, 1, 2, 130)
    assert "Traceback" not in out + err
    assert "\x1b" not in out + err
    said = [line for line in err.splitlines() if not line.startswith("memcalc: warning: ")]
    if status == 2:
        assert out == ""
        assert len(said) == 1 or "Usage:" in err, said
    assert all(len(line) < 1000 for line in said), said


@pytest.mark.parametrize("line", SIZES, ids=lambda line: ascii(line[:70]))
def test_absurd_sizes(hostile, line):
    assert hostile(*line.split(" "))[0] == (0 if line in ANSWERED else 2)


@pytest.mark.parametrize("line", CONTRADICTIONS)
def test_contradictions(hostile, line):
    assert hostile(*line.split())[0] == (0 if line in ANSWERED else 2)


def test_every_line_that_is_answered_is_tried():
    assert set(ANSWERED) <= {*SIZES, *CONTRADICTIONS}


@pytest.mark.parametrize("word", WORDS, ids=lambda word: repr(word)[:40])
def test_any_word_in_any_place(hostile, word):
    """As a command, a model, a value of an option, an option, and a file to write."""
    hostile(word)
    assert hostile("layer", word)[0] == 2
    assert hostile("memory", "22b", "--gpu", word)[0] == 2
    assert hostile("memory", "22b", "--recompute", word)[0] == 2
    assert hostile("memory", "22b", f"--{word}x")[0] == 2
    hostile("models", word)
    hostile("layer", "22b", "-o", f"{word}.csv"[-4000:])


@pytest.mark.parametrize("path", SPECIAL)
def test_special_files_are_no_models(hostile, path):
    for words in (("layer", path), ("backtest", path), ("memory", "22b", "--run", path)):
        assert hostile(*words)[0] == 2


def test_a_pipe_that_nobody_writes_is_no_model(hostile, tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    assert stat.S_ISFIFO((tmp_path / "pipe.json").stat().st_mode)
    assert hostile("layer", "pipe.json")[0] == 2
    assert hostile("backtest", "pipe.json")[0] == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_alone_and_one_with_too_much(hostile, command):
    if command not in ("check", "gpus", "models", "rnn"):
        assert hostile(command)[0] == 2
    if command != "check":  # it takes any number of claims
        assert hostile(command, *["22b"] * 50)[0] == 2


CONTENTS = [
    b"",
    b"\x00",
    b"\xff\xfe\x00",
    b"{",
    b"[]",
    b"null",
    b"1e999",
    b"NaN",
    b'{"model_type": "llama"',
    b'{"model_type": ["llama"]}',
    b'{"model_type": "llama", "num_hidden_layers": -1}',
    b'{"model_type": "llama", "num_hidden_layers": 1e400}',
    b'{"model_type": "llama", "hidden_size": NaN}',
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b" --num-layers 2" + b"\n" * 50_000,
    b"\n" * 200_000,
    b" " * 200_000,
    b"{" * 200_000,
    b";" * 100_000,
    b"a: &a [*a]",
    b"a: !!python/object/apply:os.system ['touch owned']",
    b"#!/bin/bash\ntouch owned\n$(touch owned)\n",
]


@pytest.mark.parametrize("suffix", ["json", "yaml", "sh", "txt", "jsonl"])
@pytest.mark.parametrize("content", CONTENTS, ids=lambda content: repr(content[:30]))
def test_files_of_any_content(hostile, tmp_path, content, suffix):
    (tmp_path / f"x.{suffix}").write_bytes(content)
    assert hostile("layer", f"x.{suffix}")[0] == 2
    hostile("backtest", f"x.{suffix}")


ENVIRONMENTS = [
    {"COLUMNS": "9" * 20},
    {"COLUMNS": "-1", "LINES": "nan"},
    {"COLUMNS": "1", "TERM": "\x1b["},
    {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"},
    {"PYTHONIOENCODING": "utf-16"},
    {"HOME": "/nonexistent", "MPLCONFIGDIR": "/dev/null/x"},
    {"MPLBACKEND": "bogus", "DISPLAY": ":99"},
    {"FORCE_COLOR": "1", "NO_COLOR": "1"},
]


def limited():
    """A process of 300 MiB and 10 s."""
    resource.setrlimit(resource.RLIMIT_AS, (300 * 2**20, 300 * 2**20))
    resource.setrlimit(resource.RLIMIT_CPU, (10, 10))


def child(words, folder, environment):
    return subprocess.run(
        [sys.executable, "-m", "memcalc", *words],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        timeout=60,
        preexec_fn=limited,
    )


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=str)
def test_any_environment(tmp_path, environment):
    done = child(["ledger", "22b"], tmp_path, environment)
    assert done.returncode == 0
    assert b"Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["memory", "big.json", "-s", "4096", "--pp", "1000"],
        ["backtest", "line.jsonl"],
        ["layer", "unknown.json"],
    ],
    ids=lambda words: words[0],
)
def test_large_inputs_within_300_mib(tmp_path, words):
    sizes = b'"hidden_size": 1024, "num_attention_heads": 8, "vocab_size": 1000'
    if words[1] == "big.json":
        content = b'{"model_type": "llama", "num_hidden_layers": 1000, ' + sizes + b"}"
    elif words[1] == "line.jsonl":
        content = b"[" + b"[]," * 10_000_000 + b"[]]"
    else:
        unknown = b"".join(b', "k%d": 1' % number for number in range(100_000))
        content = b'{"model_type": "llama", "num_hidden_layers": 2, ' + sizes + unknown + b"}"
    (tmp_path / words[1]).write_bytes(content)
    done = child(words, tmp_path, {})
    assert done.returncode in (0, 2)
    assert b"Traceback" not in done.stdout + done.stderr
    assert len(done.stderr) < 10_000
