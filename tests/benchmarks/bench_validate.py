"""How long a validation takes: ``python tests/benchmarks/bench_validate.py``.

A layer of the 1T model on meta, in one process: seconds beyond importing torch (goal: 2), and the
process's largest memory (goal: 1 GiB).
"""

import resource
import time

import torch

start = time.perf_counter()

import memcalc  # noqa: E402 - what is timed begins after torch

for settings in ({}, {"sp": True}, {"tp": 1, "recompute": "selective"}):
    report = memcalc.validate(memcalc.load("1t", **settings), "meta")
    assert not report.failures
seconds = time.perf_counter() - start
mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(
    f"{seconds:10.2f} s for three validations of a layer of the 1T model, torch {torch.__version__}"
)
print(f"{mib:10.0f} MiB of memory at the most")
