"""Whole steps of Hugging Face's families against memory's timeline: ``memcalc validate --step``.

    python tests/step_families.py            # all families, in some minutes: a Markdown table
    python tests/step_families.py gpt2 phi-2

Each model of tests/configs.json keeps its widths and has two layers. It runs with both attentions,
with and without checkpoints, with foreach and fused AdamW, in bf16 and fp32.
"""

import itertools
import json
import sys
import tempfile
import warnings
from pathlib import Path

import memcalc.validation.step  # noqa: F401 - before the first backward of the process
from memcalc import MemcalcError, load
from memcalc.validation.step.compare import step

CONFIGS = json.loads(Path(__file__).with_name("configs.json").read_text())
MODELS = (
    *("llama-3-8b", "gpt2", "qwen2.5-7b", "qwen3-8b", "qwen3-30b-a3b", "mistral-7b"),
    *("mixtral-8x7b", "phi-2", "phi-3-mini", "gemma-2-9b", "opt-66b", "gpt-neox-20b"),
    *("starcoder2-7b", "bloom-176b", "falcon-7b", "command-r", "gpt-oss-20b"),
)
DEPTHS = ("num_hidden_layers", "n_layer", "num_layers")
BF16 = {"main_grads": "bf16", "main_params": "none", "moments": "bf16"}
FP32 = {"precision": "fp32", "main_grads": "fp32", "moments": "fp32"}
CASES = list(
    itertools.product(
        ("transformers-sdpa", "transformers-eager"),
        ("none", "full"),
        ("foreach", "fused"),
        (BF16, FP32),
    )
)


def shallow(name):
    """A model's config.json with two layers."""
    content = {key: 2 if key in DEPTHS else value for key, value in CONFIGS[name].items()}
    content.pop("quantization_config", None)
    return {
        key: value[:2] if key in ("layer_types", "mlp_layer_types") else value
        for key, value in content.items()
    }


def outcomes(file):
    """For each case the difference of the peaks in bytes, or why there is none."""
    for kernels, recompute, form, dtypes in CASES:
        settings = {"implementation": kernels, "recompute": recompute, "optimizer_step": form}
        try:
            config = load(file, seq_length=128, micro_batch_size=2, **settings, **dtypes)
            rows = step(config).records()
        except MemcalcError as error:
            yield str(error)
        except NotImplementedError:
            yield "an operation that fake CUDA tensors lack"
        else:
            yield sum(row["difference_bytes"] for row in rows if row["phase"] == "peak")


def main():
    """Print a row per model."""
    warnings.simplefilter("ignore")
    print("| model, with two layers | equal to the byte | largest difference | not run |")
    print("|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[1:] or MODELS:
            file = Path(folder) / f"{name}.json"
            file.write_text(json.dumps(shallow(name)))
            found = list(outcomes(file))
            there = [each for each in found if isinstance(each, int)]
            most = max((abs(each) for each in there), default=0)
            why = "; ".join(sorted({each[:70] for each in found if isinstance(each, str)}))
            equal = sum(each == 0 for each in there)
            print(f"| {name} | {equal} of {len(there)} | {most:,} B | {why} |", flush=True)


if __name__ == "__main__":
    main()
