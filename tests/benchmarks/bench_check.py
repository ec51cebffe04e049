"""How long ``memcalc check`` takes: ``python tests/benchmarks/bench_check.py``.

Whole processes, each the median of several: the check's time in units of importing sympy (goal: 8).
"""

import argparse
import statistics
import subprocess
import sys
import time


def seconds(arguments, repeats):
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    bare = seconds(["-c", "pass"], repeats)
    sympy = seconds(["-c", "import sympy"], repeats) - bare
    check = seconds(["-m", "memcalc", "check"], repeats) - bare
    print(f"{check / sympy:10.2f} imports of sympy for memcalc check ({check:.2f} s)")


if __name__ == "__main__":
    main()
