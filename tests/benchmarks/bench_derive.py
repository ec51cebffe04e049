"""How long a derivation takes: ``python tests/benchmarks/bench_derive.py``.

Seconds of each beyond imports (goal: 5 on two cores), and the process's largest memory (goal: 2
GiB): memcalc's own layers, models of Hugging Face, and one that must be interpolated.
"""

import resource
import time

import torch
import transformers

import memcalc
from memcalc.validation.deriving.derive import derive_layer, derive_model

SETTINGS = (
    ("175b", {"sp": True}),
    ("llama-3-70b", {"tp": 8, "sp": True, "recompute": "selective"}),
    ("llama-3.1-405b", None),
    ("deepseek-v3", None),
    ("deepseek-v2-lite", None),
    ("qwen3-235b-a22b", None),
)

for name, own in SETTINGS:
    start = time.perf_counter()
    if own is None:
        report = derive_model(name, seq_length=4096)
    else:
        report = derive_layer(memcalc.load(name, **own), "ledger")
    seconds = time.perf_counter() - start
    print(f"{seconds:10.2f} s  {name}, {report.notes[0].partition(';')[0]}")
mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(f"{mib:10.0f} MiB of memory at the most")
print(f"torch {torch.__version__}, transformers {transformers.__version__}")
