"""Whole steps, losses and optimizers of a file of known numbers, run again on fake CUDA tensors.

Usage: python tests/step_vectors.py FILE [PATTERN]

FILE is JSON with ``steps``, ``loss`` and ``optimizers``. Each is run with the libraries that are
installed here: transformers 5 or 4, peft, bitsandbytes, Liger, torchtune, litgpt, or torchtitan of
January 2025. What needs another one is counted as not run. The exit status is 1 on a difference.
"""

import argparse
import copy
import functools
import importlib
import json
import re
import sys
import time
import types
import warnings
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from memcalc.validation.step.fake_cuda import FakeCuda
from memcalc.validation.step.ranks import fake_ranks
from memcalc.validation.step.tracker import Tracker

sys.path.insert(0, str(Path(__file__).parent / "helpers"))
for name in ("transformers", "peft", "bitsandbytes", "liger_kernel.transformers"):
    if find_spec(name.partition(".")[0]):  # before a fake device is entered
        importlib.import_module(name)
steps = importlib.import_module("steps")
parts = importlib.import_module("step_parts")


# Steps


def step(known):
    """The tracker of a step, by its configuration."""
    how = dict(known["config"])
    framework = how.pop("framework")
    how.pop("torch", None)
    if framework.startswith("torchtitan"):
        parts.needs("torchtitan")
        return titan(**how)
    if framework.partition(".")[0] != f"transformers {steps.transformers.__version__[0]}":
        raise parts.NotHereError(framework)
    if how.get("lora"):
        parts.needs("peft")
    if how.get("optimizer") == "adamw 8bit":
        parts.needs("bitsandbytes")
    if "loop" in how:  # of a public benchmark: it empties the cache after a warm-up
        how = {
            "name": how["model"],
            "amp": how["amp"],
            "dtype": "fp32" if how["amp"] else "bf16",
            "lora": how["lora"],
            "checkpoint": "non-reentrant" if how["checkpoint"] else None,
            "set_to_none": how["set_to_none"],
            "gpu": how["gpu"],
            "attn": how["attn"],
            "empty_cache": True,
        }
    return steps.step(**how)


def titan(
    world,
    s,
    ac=None,
    layers=None,
    reshard=True,
    root_reshard=True,
    reduce="torch.float32",
    fused=False,
    release=True,
):
    """Two steps of torchtitan's Llama 3 8B under FSDP2, on fake ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    llama = importlib.import_module("torchtitan.models.llama")
    model_of = importlib.import_module("torchtitan.models.llama.model").Transformer
    parallelize = importlib.import_module("torchtitan.parallelisms.parallelize_llama")
    config = copy.deepcopy(llama.llama3_configs["8B"])
    config.vocab_size, config.max_seq_len, config.norm_type = 128256, s, "rmsnorm"
    config.n_layers = layers or config.n_layers
    cuda = FakeCuda("h100")
    tracker = Tracker(cublas=cuda.cublas, workspaces=True)
    with fake_ranks(world), cuda, tracker:
        mesh = init_device_mesh("cuda", (world,))
        with torch.device("meta"):
            model = model_of(config)
        if ac:
            how = ("full", "") if ac == "full" else ("selective", ac)
            of = types.SimpleNamespace(mode=how[0], selective_ac_option=how[1])
            parallelize.apply_ac(model, of)
        dtypes = MixedPrecisionPolicy(torch.bfloat16, getattr(torch, reduce.partition(".")[2]))
        for number, block in model.layers.items():
            again = reshard and int(number) < len(model.layers) - 1
            fully_shard(block, mesh=mesh, mp_policy=dtypes, reshard_after_forward=again)
        root = reshard and root_reshard
        fully_shard(model, mesh=mesh, mp_policy=dtypes, reshard_after_forward=root)
        model.to_empty(device="cuda")
        with torch.no_grad():
            angles = model._precompute_freqs_cis()
            model.freqs_cis = torch.empty_like(angles, device="cuda")
        del angles
        optimizer = torch.optim.AdamW(model.parameters(), foreach=not fused, fused=fused)
        tracker.watch(model, optimizer)
        ids, labels = (torch.randint(0, 128256, (1, s)) for _ in range(2))
        for number in range(2):
            if number:
                tracker.reset_peaks()
            tracker.phase("forward")
            optimizer.zero_grad()
            out = model(ids)
            tracker.phase("forward loss")
            loss = functional.cross_entropy(out.flatten(0, 1).float(), labels.flatten(0, 1))
            if release:
                del out
            tracker.phase("backward")
            loss.backward()
            if not release:
                del out
            tracker.phase("clip")
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            tracker.phase("step")
            optimizer.step()
            loss = loss.detach()
        tracker.phase("end")
    return tracker


def step_differs(known):
    """What differs in a step, or nothing."""
    tracker = step(known)
    peak, replayed = tracker.peak(), tracker.replay()
    found = {
        "peak_bytes": peak.bytes,
        "allocated_by_blocks": replayed.most_allocated,
        "reserved": replayed.most_reserved,
        "phase": peak.phase,
        "op": peak.op,
    }
    wanted = {**known, **known["moment"]}
    return ", ".join(
        f"{name} {value} for {wanted[name]}"
        for name, value in found.items()
        if value != wanted[name]
    )


def loss_differs(name, known):
    """What differs in a loss, or nothing."""
    found, wanted = parts.loss_peak(name), (known["peak"], known["phase"], known["op"])
    return "" if found == wanted else f"{found} for {wanted}"


def optimizer_differs(name, known):
    """What differs in an optimizer, or nothing."""
    found = parts.optimizer_peaks(name)
    wanted = {when: known[when] for when in found if when in known}
    return ", ".join(
        f"{when} {found[when]} for {value}"
        for when, value in wanted.items()
        if found[when] != value
    )


def main():
    """The script; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("pattern", nargs="?", default="")
    given = parser.parse_args()
    known = json.loads(given.file.read_text())
    warnings.simplefilter("ignore")
    groups = {
        "steps": [(x["name"], functools.partial(step_differs, x)) for x in known["steps"]],
        "losses": [
            (name, functools.partial(loss_differs, name, x)) for name, x in known["loss"].items()
        ],
        "optimizers": [
            (name, functools.partial(optimizer_differs, name, x))
            for name, x in known["optimizers"].items()
        ],
    }
    status = 0
    for part, cases in groups.items():
        counts = dict.fromkeys(("equal", "different", "not run"), 0)
        for name, differs in cases:
            if not re.search(given.pattern, f"{part} {name}"):
                continue
            began = time.monotonic()
            try:
                said = differs()
                outcome = "different" if said else "equal"
            except (parts.NotHereError, ImportError) as error:
                said, outcome = f"needs {' '.join(str(error).split())[:99]}", "not run"
            except Exception as error:
                said, outcome = f"{type(error).__name__}: {str(error)[:200]}", "different"
            counts[outcome] += 1
            status |= outcome == "different"
            print(
                f"{part}: {name}: {outcome} ({time.monotonic() - began:.1f} s) {said}", flush=True
            )
        print(f"{part}: {', '.join(f'{number} {word}' for word, number in counts.items())}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
