"""How fast one layer is counted: ``python tests/benchmarks/bench_layer.py``.

Three figures, each the median of several repeats:

- ledgers a second: one layer's ledger and its total for one technique, from ints, of sizes that
  were not asked for before (goal: 3,000), and of the same ones again, whose graph is kept;
- passes: the compiled formula of a layer over ten million configurations, in units of one pass
  over its inputs in the same chunks, measured in the same run (goal: 3).
"""

import argparse
import statistics
import time

import numpy as np

import memcalc
from memcalc.analysis.activations import total
from memcalc.analysis.layers import layer_entries
from memcalc.formulas import CHUNK


def seconds(function, repeats):
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def ledgers_a_second(name, repeats, lengths, **settings):
    configs = [memcalc.load(name, seq_length=64 * n, **settings) for n in lengths]

    def many():
        for config in configs:
            total(layer_entries(config))

    return len(configs) / seconds(many, repeats)


def passes(repeats, size):
    """The time of the formula over that of reading its inputs once, and configurations a second."""
    formula = memcalc.layer_formula(memcalc.load("175b"))
    random = np.random.default_rng(0)
    inputs = {
        letter: random.choice(choices, size).astype(np.float64)
        for letter, choices in {
            "s": [2048, 4096, 8192],
            "b": [1, 2, 4],
            "h": [6144, 12288, 25600],
            "a": [64, 96, 160],
            "t": [1, 2, 4, 8],
        }.items()
    }

    def read():
        for start in range(0, size, CHUNK):
            for values in inputs.values():
                values[start : start + CHUNK].sum()

    one_pass = seconds(read, repeats)
    evaluated = seconds(lambda: formula.evaluate(**inputs), repeats)
    return evaluated / one_pass, size / evaluated


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--size", type=int, default=10_000_000)
    arguments = parser.parse_args()
    for name, settings in [
        ("22b", {}),
        ("22b", {"sp": True, "recompute": "selective"}),
        ("llama-3-70b", {"tp": 8, "sp": True}),
    ]:
        new, again = (
            ledgers_a_second(name, arguments.repeats, lengths, **settings)
            for lengths in (range(1, 501), [32] * 500)  # the graphs of 64 configs are kept
        )
        print(f"{new:10,.0f} ledgers a second, again {again:,.0f}  {name} {settings}")
    ratio, rate = passes(arguments.repeats, arguments.size)
    print(f"{ratio:10.2f} passes over its inputs for the formula of a layer ({rate:,.0f} a second)")


if __name__ == "__main__":
    main()
