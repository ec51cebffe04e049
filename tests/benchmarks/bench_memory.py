"""How fast a whole GPU is counted: ``python tests/benchmarks/bench_memory.py``.

The median time of a whole process that answers ``memory`` for deepseek-v3 on 16 stages with 64
micro-batches, in units of one that only imports click, measured in turns (goal: 5).
"""

import argparse
import statistics
import subprocess
import sys
import time

QUESTION = "memory deepseek-v3 --pp 16 --global-batch-size 64 -s 4096 --format json"


def seconds(*arguments):
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def ratio(repeats):
    """The medians of both, and the first over the second."""
    asked, imported = [], []
    for _ in range(repeats):
        asked.append(seconds("-m", "memcalc", *QUESTION.split()))
        imported.append(seconds("-c", "import click"))
    answer, click = statistics.median(asked), statistics.median(imported)
    return answer, click, answer / click


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--at-most", type=float, help="fail where the ratio is above this")
    arguments = parser.parse_args()
    seconds("-m", "memcalc", *QUESTION.split())  # bytecode is written the first time
    answer, click, times = ratio(arguments.repeats)
    print(f"{answer:.3f} s for memcalc {QUESTION}")
    print(f"{click:.3f} s for import click")
    print(f"{times:.2f} times as long")
    if arguments.at_most is not None and times > arguments.at_most:
        sys.exit(f"more than {arguments.at_most:g} times")


if __name__ == "__main__":
    main()
