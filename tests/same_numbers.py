"""What five commands answer for many configurations, written to a file and compared with it.

For changes that must leave every number as it is::

    python tests/same_numbers.py write /tmp/before.jsonl.gz     # before the change
    python tests/same_numbers.py compare /tmp/before.jsonl.gz   # after it; status 1 if one differs

It compares the rows, columns, units and symbols of ``memory --explain``, ``ledger``,
``recompute``, ``flops`` and ``comm``; not words: titles, answers and notes. The configurations are
the same on every run, drawn from the catalog, parallelism, recomputation, implementations,
schedules and sharders. A question that is refused must be refused again.
"""

import argparse
import gzip
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import memcalc
from memcalc.config import catalog
from memcalc.render import json as as_json

QUESTIONS = {
    "memory": lambda config: memcalc.memory(config, explain=True),
    "ledger": lambda config: memcalc.ledger(config, "exact"),
    "recompute": memcalc.recompute,
    "flops": memcalc.flops,
    "comm": memcalc.comm,
}
COMPARED = ("rows", "columns", "symbols")
ANSWERED = 500  # configurations, at least, of which one question or more is answered

IMPLEMENTATIONS = ("paper", "megatron", "megatron-local", "torch", "transformers-eager")
IMPLEMENTATIONS += ("transformers-sdpa",)
SHARDING = (
    {},
    {"zero": 1},
    {"zero": 1, "sharder": "nanotron"},
    *({"zero": zero, "sharder": "deepspeed"} for zero in (1, 2, 3)),
    *({"zero": zero, "sharder": "fsdp2"} for zero in (2, 3)),
    *({"zero": zero, "sharder": "megatron-fsdp"} for zero in (1, 2, 3)),
)
PIPELINES = (
    *({"pp": pp} for pp in (1, 2, 4)),
    *({"pp": 4, "schedule": name} for name in ("gpipe", "zb-h1", "zb-h2", "zb-v", "dualpipe")),
    {"pp": 2, "vpp": 2},
    {"pp": 4, "vpp": 2, "microbatch_group_size": 6},
)
RECOMPUTATION = (
    *({"recompute": word} for word in ("none", "selective", "full", "save_linear", "mlp,norm")),
    {"recompute": "selective_op"},
    {"recompute": "full", "recompute_method": "block", "recompute_layers": 3},
    {"recompute": "full", "recompute_method": "uniform", "recompute_layers": 2},
)
FURTHER = (
    {},
    {"precision": "fp8"},
    {"precision": "fp8", "fp8_params": True},
    {"precision": "fp32"},
    {"optimizer": "muon"},
    {"optimizer": "sgd", "moments": "bf16"},
    {"main_grads": "bf16", "main_params": "remainder"},
    {"frozen": ("embedding", "attention")},
    {"cross_entropy": "te"},
    {"attention": "unfused", "dropout": 0.1},
    {"environment": {"expandable_segments": True}},
    {"environment": {"fused_gradients": False}},
)


def configurations(number: int) -> Iterator[dict[str, Any]]:
    """Settings for ``memcalc.load``, with the model's name as ``source``."""
    draw = random.Random(2205)
    names = catalog.names()
    for index in range(number):
        tp = draw.choice((1, 1, 2, 4, 8))
        yield {
            "source": names[index % len(names)],
            "seq_length": 197 if names[index % len(names)].startswith("vit") else 2048,
            "micro_batch_size": draw.choice((1, 2)),
            "global_batch_size": 64,
            "tp": tp,
            "sp": tp > 1 and draw.random() < 0.6,
            "cp": draw.choice((1, 1, 1, 2)),
            "dp": draw.choice((1, 2, 4)),
            "ep": draw.choice((1, 1, 2)),
            "gpu": draw.choice((None, "h100", "a100", "b200", "mi300x")),
            "implementation": draw.choice(IMPLEMENTATIONS),
            **draw.choice(SHARDING),
            **draw.choice(PIPELINES),
            **draw.choice(RECOMPUTATION),
            **draw.choice(FURTHER),
        }


def answers(settings: dict[str, Any]) -> dict[str, Any]:
    """What each question gives, or that it is refused."""
    source = settings.pop("source")
    found: dict[str, Any] = {}
    for name, ask in QUESTIONS.items():
        try:
            document = json.loads(as_json.render(ask(memcalc.load(source, **settings))))
            found[name] = {key: document[key] for key in COMPARED}
        except memcalc.MemcalcError:
            found[name] = "refused"
    return found


def differences(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """What differs between two answers to one configuration, in a line per question."""
    for name in before:
        old, new = before[name], after[name]
        if old == new:
            continue
        if "refused" in (old, new):
            yield f"{name}: {'answered' if old == 'refused' else 'refused'} now"
            continue
        key = next(key for key in COMPARED if old[key] != new[key])
        lines = zip(old[key], new[key], strict=False) if key == "rows" else [(old[key], new[key])]
        pair = next((pair for pair in lines if pair[0] != pair[1]), None)
        yield f"{name}: {key}: {pair or (len(old[key]), len(new[key]))}"


def main() -> int:
    """Write or compare; 1 if an answer differs."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("do", choices=("write", "compare"))
    parser.add_argument("file", type=Path, help="compressed JSON lines, outside the repository")
    parser.add_argument("-n", "--number", type=int, default=1500, help="configurations to draw")
    given = parser.parse_args()
    settings = list(configurations(given.number))
    with ProcessPoolExecutor() as pool:
        found = [json.loads(json.dumps(each)) for each in pool.map(answers, settings, chunksize=8)]
    counted = Counter(name for each in found for name in each if each[name] != "refused")
    answered = sum(any(value != "refused" for value in each.values()) for each in found)
    print(f"{answered} of {len(found)} configurations answered: {dict(counted)}")
    if given.do == "write":
        with gzip.open(given.file, "wt") as file:
            file.writelines(json.dumps(each) + "\n" for each in found)
        return int(answered < ANSWERED)
    with gzip.open(given.file, "rt") as file:
        before = [json.loads(line) for line in file]
    different = 0
    for chosen, old, new in zip(settings, before, found, strict=True):
        for line in differences(old, new):
            different += 1
            if different <= 20:
                print(f"{chosen}\n  {line[:600]}")
    print(f"{different} answers differ")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
