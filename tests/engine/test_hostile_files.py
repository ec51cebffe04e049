"""Hostile files: one line, no status but 0, 1 or 2, and bounded time and memory."""

import json
from itertools import product

import pytest
from shared import python

from memcalc.answers.warnings import warnings
from memcalc.cli.main import main
from memcalc.config import load
from memcalc.config.readers import MAX_BYTES, place, read_bytes, yaml
from memcalc.config.readers.shell.script import MAX_CHARACTERS
from memcalc.errors import InputError

# What a file repeats, after a beginning that leads to each reader.
UNITS = [
    *("\n", " ", "\t", "{", "}", "[", "]", "(", ")", "<", ">", ";", "&", "|", "'", '"', "\\"),
    *("\\\n", "$", "${", "$(", "$((", "${a}", "$a", "`", "#\n", "-", "- ", "--a ", "--a=", ":"),
    *("a: ", "a: b\n", ",", "? ", "!a ", "&a ", "*a ", "%", "=", "a=1;", "a+=1\n", "a=(b)\n"),
    *("<<E\n", "<<a <<b ", "0", "a\n", "a ", "é", "\r\n", "[[],", '{"a":', '"a",', "1,", "if "),
    *("if a\n", "for ", "fi;", '"\\', "a:\n ", "---\n", "- a\n", "\u2028", "\x85"),
]
BEGINNINGS = {
    "x.json": ["", "[", '{"a": ['],
    "x.sh": ["", "torchrun x.py --num-layers 2 "],
    "x.yaml": ["", "MODEL_ARGS:\n  ", "{a: "],
    "x": [" --num-layers 2", "{"],
}

# In a child: reads files, and prints the most processor time of one and the most memory, in MiB.
CHILD = """
import sys, time
from pathlib import Path
from memcalc.config import readers
from memcalc.errors import MemcalcError
name, beginning, size, *units = sys.argv[1:]
worst, which = 0, ""
for unit in units:
    data = (beginning + unit * (int(size) // len(unit.encode()))).encode()[: int(size)]
    Path(name).write_bytes(data.decode(errors="ignore").encode())
    start = time.process_time()
    try:
        readers.read(Path(name))
    except MemcalcError as error:
        assert len(str(error)) < 2000 and chr(10) not in str(error), unit
    worst, which = max((time.process_time() - start, unit), (worst, which))
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
memory = int(status["VmHWM"].split()[0]) / 1024  # ru_maxrss has that of the parent too
print(worst, memory, repr(which))
"""


@pytest.mark.parametrize(
    ("name", "beginning", "size", "units"),
    [
        # scripts and YAML of this size are refused before a character is looked at
        *((name, "", MAX_BYTES, ["\n", "a: b\n", "é"]) for name in ("x.sh", "x.yaml")),
        *(("x.json", begin, MAX_BYTES, UNITS) for begin in BEGINNINGS["x.json"]),
        *(("x", begin, MAX_BYTES, UNITS) for begin in BEGINNINGS["x"]),
        ("x.sh", BEGINNINGS["x.sh"][1], MAX_CHARACTERS, UNITS),
        *(("x.yaml", begin, yaml.MAX_CHARACTERS, UNITS) for begin in BEGINNINGS["x.yaml"][1:]),
    ],
)
def test_no_reader_takes_2_seconds_or_300_mib(tmp_path, name, beginning, size, units):
    """Processor time, not the clock's: a loaded machine changes it little. Half of it is spare."""
    done = python("-c", CHILD, name, beginning, str(size), *units, cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stderr
    seconds, memory, unit = done.stdout.split(maxsplit=2)
    assert float(seconds) < 2, unit
    assert float(memory) < 300


class TestLong:
    """Names, keys and values of thousands of characters are shortened, many are counted."""

    def test_unknown_keys_are_32_and_a_count(self, memcalc, tmp_path):
        content = {f"key_{n:06}": 1 for n in range(100_000)}
        content |= {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64}
        content |= {"num_attention_heads": 2, "intermediate_size": 128}
        path = tmp_path / "config.json"
        path.write_text(json.dumps(content))
        outcome = memcalc(f"ledger {path} -s 8 --format json")
        assert outcome.status == 0
        assert "key_000031 and 99968 more" in outcome.err
        assert len(outcome.err) < 1000

    def test_unknown_modules_are_32_and_a_count(self, tmp_path):
        words = " ".join(f"m{n}" for n in range(10_000))
        sizes = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 8"
        path = tmp_path / "x.sh"
        path.write_text(
            f"torchrun x.py {sizes} --recompute-granularity selective --recompute-modules {words}"
        )
        (line,) = [line for line in warnings(load(path)) if "recompute-modules" in line]
        assert "m31 and 9968 more" in line
        assert len(line) < 500

    @pytest.mark.parametrize("suffix", [".json", ".sh", "", "/config.json"])
    def test_a_path_is_shortened(self, memcalc, suffix):
        outcome = memcalc(f"layer ./{'a' * 5000}{suffix}")
        assert outcome.status == 2
        assert len(outcome.err) < 400
        assert suffix in outcome.err

    @pytest.mark.parametrize("digits", [19, 4000, 5000])
    @pytest.mark.parametrize("key", ["train_batch_size", "gradient_accumulation_steps"])
    def test_a_number_is_shortened(self, memcalc, tmp_path, key, digits):
        path = tmp_path / "ds.json"
        path.write_text(f'{{"train_micro_batch_size_per_gpu": 3, "{key}": {"9" * digits}}}')
        outcome = memcalc(f"layer 22b --run {path}")
        assert outcome.status == 2
        assert len(outcome.err) < 300 + len(str(path))

    def test_place_is_one_line(self):
        assert place("a\x1b]0;x\x07b\n.json") == "a?]0;x?b?.json"


class TestSpecialFiles:
    @pytest.mark.parametrize(
        "path", ["/proc/kmsg", "/proc/self/environ", "/proc/self/mem", "/dev/null", "/dev/zero"]
    )
    def test_no_file_of_the_kernel_is_read(self, path):
        with pytest.raises(InputError, match=r"empty|not a regular file|no such file|denied"):
            read_bytes(path)


MODEL = {"layers": 2, "hidden_size": 64, "heads": 4}
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
}
SCRIPT = "torchrun x.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 8 "
VALUES = [
    *(0, -1, 1.5, 10**30, -(10**18), True, False, "", "64", "\x1b[31m", "auto", [], [[]], [1, 2]),
    *({}, {"a": {}}, [None], "9" * 5000, "a" * 5000, "\u202e", "../../x", "{0.__class__}"),
]
PLACES = [
    *(("x.json", key) for key in ("layers", "hidden_size", "kv_heads", "moe_layers", "name")),
    *(("config.json", key) for key in ("num_hidden_layers", "hidden_act", "sliding_window")),
    *(("config.json", key) for key in ("text_config", "num_experts", "layer_types")),
]
SHELL = [
    "a=(1 2); ${a[1@]} ${a[@1]} ${a[0000000000000000000001]} ${a[99]} " + SCRIPT,
    "X=${X:-${X:-${X}}} " + SCRIPT + "--ffn-hidden-size $X",
    SCRIPT + "--moe-layer-freq ([0]*1+[1]*1)*1 --num-experts 2",
    SCRIPT + "--window-size (99999999999999999999,0)",
    SCRIPT + "--pipeline-model-parallel-layout Et|(tt|)*99999999tL",
    SCRIPT + "--pipeline-model-parallel-size 0",
    SCRIPT + "--micro-batch-size 0 --global-batch-size 3",
    SCRIPT + "--tensor-model-parallel-size 3",
    SCRIPT + "--num-virtual-stages-per-pipeline-rank 3 --pipeline-model-parallel-size 2",
    SCRIPT + "--fp8-format hybrid --bf16 --fp16",
    SCRIPT + "--hidden-dropout 1e99 --attention-dropout .",
    SCRIPT + "--vocab-size 1 --make-vocab-size-divisible-by -5",
    SCRIPT + "--num-experts 2 --moe-router-topk 3",
    SCRIPT + "--recompute-granularity full --recompute-num-layers -1",
    SCRIPT + "<<A <<B <<A\nA\nB\n" * 50,
    "if [ ${Y} = 1 ]; then " + SCRIPT + "; fi; fi; fi",
    "case x in\n" + SCRIPT + "\nesac\n",
    "eval '" + SCRIPT + "' $(rm -rf x) `touch y`",
]


def hostile():
    """A file's name and text, for each hostile value in each place, and the scripts."""
    for (name, key), value in product(PLACES, VALUES):
        if name == "x.json":
            content = {"memcalc": 1, "model": {**MODEL, key: value}, "run": {"seq_length": 8}}
        else:
            content = {**CONFIG, key: value}
        yield name, json.dumps(content)
    for text in SHELL:
        yield "x.sh", text


CASES = list(hostile())


def test_there_are_more_than_200_hostile_files():
    assert len(CASES) > 200


@pytest.mark.parametrize(("name", "text"), CASES, ids=range(len(CASES)))
def test_a_hostile_file_is_answered_or_one_line(tmp_path, capsys, name, text):
    path = tmp_path / name
    path.write_text(text)
    status = main(["ledger", str(path), "--format", "csv"])
    printed = capsys.readouterr()
    assert status in (0, 2)
    assert "Traceback" not in printed.err
    assert printed.err.isascii() or printed.err.replace("\n", "").isprintable()
    assert "\x1b" not in printed.err
    if status == 2:
        assert printed.err.count("\n") == 1
        assert len(printed.err) < 1000
