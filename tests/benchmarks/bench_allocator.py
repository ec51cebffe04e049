"""How fast the allocator replays a step: ``python tests/benchmarks/bench_allocator.py``.

The least time of several for 20,000 requests and frees, as two steps of a model with 32 layers
make them: weights, activations that are kept or not, logits, gradients (goal: 60 ms).
"""

import argparse
import random
import time

from memcalc.analysis.allocator import Allocator, AllocatorConf
from memcalc.units import KIB, MIB

LAYERS, OPS = 32, 92
WEIGHTS = (32 * MIB, 8 * MIB, 8 * MIB, 32 * MIB, 112 * MIB, 112 * MIB, 112 * MIB, 8 * KIB, 8 * KIB)
SIZES = (32 * MIB, 8 * MIB, 112 * MIB, 35 * MIB, 64 * MIB, 512 * KIB, 16 * KIB, 4)
LOGITS = 1002 * MIB


def trace(steps=2):
    """Events of a made-up training step: a number and its bytes, or 0 bytes where it is freed."""
    draw, events, number = random.Random(8), [], 0

    def make(size):
        nonlocal number
        events.append((number, size))
        number += 1
        return number - 1

    def free(each):
        events.append((each, 0))

    for size in WEIGHTS * LAYERS + (LOGITS,) * 2:
        make(size)
    for _ in range(steps):
        layers = []
        for _ in range(LAYERS):
            kept, last = [], []
            for index in range(OPS):
                (kept if index % 3 == 0 else last).append(make(draw.choice(SIZES)))
                if len(last) > 2:
                    free(last.pop(0))
            for each in last:
                free(each)
            layers.append(kept)
        for each in [make(size * LOGITS) for size in (1, 2, 2)]:
            free(each)
        for kept in reversed(layers):
            for each in reversed(kept):
                parts = [make(draw.choice(SIZES)) for _ in range(2)]
                for part in (each, *parts):
                    free(part)
    return events


def seconds(events, conf):
    """How long a new allocator takes."""
    allocator, blocks = Allocator(conf), {}
    start = time.perf_counter()
    for number, size in events:
        if size:
            blocks[number] = allocator.malloc(size)
        else:
            allocator.free(blocks.pop(number))
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    repeats = parser.parse_args().repeats
    events = trace()
    for conf in (AllocatorConf(), AllocatorConf(expandable_segments=True)):
        best = min(seconds(events, conf) for _ in range(repeats))
        kind = "expandable" if conf.expandable_segments else "usual"
        print(f"{best * 1e3:10.1f} ms for {len(events):,} events with {kind} segments")


if __name__ == "__main__":
    main()
