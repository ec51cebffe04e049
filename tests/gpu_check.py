"""The whole check on a GPU: ``python tests/gpu_check.py -o data/measured/NAME.json``.

On one GPU, a layer of the 22B model and one of Llama-3-70B under each policy: what autograd keeps
against the ledger, what the allocator counts against its rules, the growth of the peak, and times.
Then PyTorch's recurrent cells, two steps of each, against the ledger.
The file holds every report with device, versions and date; exit status 1 says that one failed.
``--device cpu`` tries the command itself, on small layers.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

import memcalc
from memcalc import files
from memcalc.analysis import recurrent
from memcalc.report import Report
from memcalc.validation.measuring import cuda
from memcalc.validation.measuring.measure import measure

MODELS = {"22b": {"tp": 1}, "llama-3-70b": {"tp": 1, "seq_length": 8192}}
POLICIES = ("none", "selective", "full", "save_linear")


def reports(device: str, failures: list[str]) -> Iterator[Report]:
    """Every report of the check; what cannot run is a failure, and does not stop the rest."""
    for name, settings in MODELS.items():
        configs = [memcalc.load(name, recompute=policy, **settings) for policy in POLICIES]
        for config, timed in [*((config, False) for config in configs), (configs[0], True)]:
            try:
                yield memcalc.validate(config, device, time=timed)
            except memcalc.MemcalcError as error:
                what = "times" if timed else ",".join(config.run.recompute)
                failures.append(f"{name}, {what}: {error}")


class Steps(nn.Module):
    """A recurrent cell of PyTorch's over two time steps, from states that it is given."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: torch.Tensor, state: torch.Tensor, *memory: torch.Tensor) -> torch.Tensor:
        """x (2, b, i), a state (b, h) and, of an LSTM, a memory -> the last state."""
        held = (state, *memory) if memory else state
        for step in x:
            held = self.cell(step, held)
        return held[0] if memory else held


def cells(device: str) -> Iterator[str]:
    """The recurrent cells that keep something else than the ledger says, a line each."""
    kernels, b, h = f"torch-{device}", 8, 256
    for cell, made in {"vanilla": nn.RNNCell, "gru": nn.GRUCell, "lstm": nn.LSTMCell}.items():
        config = memcalc.Recurrent(cell=cell, hidden_size=h, batch_size=b, kernels=kernels)
        x = torch.randn(2, b, h, device=device)
        states = [x.new_zeros(b, h) for _ in range(2 if cell == "lstm" else 1)]
        measured = measure(Steps(made(h, h, device=device)), x, *states)
        ledger = recurrent.costs(config).whole(2)
        line = f"{cell} cell, {kernels}: ledger {ledger} bytes, measured {measured.bytes}"
        print(line)
        if measured.bytes != ledger or not measured.agrees:
            yield line


def main(arguments: list[str]) -> int:
    """Run the check, print what it finds, and write it to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not cuda.available():
        print("gpu_check: PyTorch finds no GPU here", file=sys.stderr)
        return 2
    failures: list[str] = []
    found = []
    for report in reports(options.device, failures):
        print(report)
        found.append(report)
        failures += report.failures
    failures += cells(options.device)
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    if options.output:
        document = {
            "source": f"tests/gpu_check.py of memcalc {memcalc.__version__}",
            "device": cuda.hardware() if options.device == "cuda" else platform.machine(),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "date": time.strftime("%Y-%m-%d"),
            "reports": [json.loads(report.render("json")) for report in found],
            "failures": failures,
        }
        files.write(options.output, json.dumps(document, indent=1).encode() + b"\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
