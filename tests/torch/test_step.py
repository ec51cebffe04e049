"""Whole steps of Hugging Face models on fake CUDA tensors, against memory's timeline."""

import json

import pytest

from memcalc import load
from memcalc.errors import UsageError
from memcalc.validation.step import compare
from memcalc.validation.step.compare import step

LLAMA = {
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024,
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
# so few tokens of the vocabulary that the layers are the peak, not the loss
NARROW = {"vocab_size": 64, "tie_word_embeddings": False, "num_hidden_layers": 3}
QWEN = {"model_type": "qwen2"}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 500,
    "n_embd": 128,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 1024,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
}
BF16 = {"main_grads": "bf16", "main_params": "none", "moments": "bf16"}
FP32 = {"precision": "fp32", "main_grads": "fp32", "moments": "fp32"}
EAGER = {"implementation": "transformers-eager"}
FULL = {"recompute": "full"}
SHORT = {"seq_length": 16}
CASES = {
    "the loss": (LLAMA, {}),
    "eager attention": (LLAMA, EAGER),
    "recomputed layers": (LLAMA, FULL),
    "recomputed eager layers": (LLAMA, EAGER | FULL),
    "logits that are dropped": (LLAMA, {"holds_logits": False}),
    "the step": (LLAMA, SHORT),
    "a tied table": (LLAMA, SHORT | {"optimizer_step": "fused"}),
    "fp32": (LLAMA, FP32 | EAGER),
    "narrow": (LLAMA | NARROW, {"optimizer_step": "fused"}),
    "narrow and eager": (LLAMA | NARROW, {"optimizer_step": "fused"} | EAGER),
    "narrow and recomputed": (LLAMA | NARROW, {"optimizer_step": "fused"} | FULL),
    "accumulation": (LLAMA | NARROW, {"optimizer": "sgd", "momentum": 0.9, "global_batch_size": 4}),
    "gradients that are kept": (LLAMA | NARROW, {"keep_gradients": True}),
    "a loop": (LLAMA | NARROW, SHORT | {"optimizer_step": "loop"}),
    "qwen2": (LLAMA | QWEN, {}),
    "gpt2": (GPT2, {}),
}


@pytest.mark.parametrize(("content", "settings"), CASES.values(), ids=CASES)
def test_the_peak_of_a_real_step_is_the_timelines_to_the_byte(tmp_path, content, settings):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(content))
    given = {"seq_length": 256, "micro_batch_size": 2, "implementation": "transformers-sdpa"}
    dtypes = {} if settings.get("precision") else BF16
    report = step(load(file, **given | dtypes | settings))
    assert report.answer.startswith("matches"), (report.answer, report.notes)
    assert not report.failures
    peak = {
        row["kind"]: row["difference_bytes"] for row in report.records() if row["phase"] == "peak"
    }
    assert set(peak.values()) == {0}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"implementation": "megatron"}, "pass --implementation transformers-sdpa"),
        ({"main_grads": "fp32"}, "pass --main-grads in the dtype of the weights"),
        ({"recompute": "selective"}, "pass --recompute none or full"),
        ({"dp": 2}, "--step runs one GPU"),
        ({"optimizer": "muon"}, "runs --optimizer adam or sgd, not muon"),
        ({"cross_entropy": "liger"}, "own code: --cross-entropy torch"),
    ],
)
def test_a_step_that_is_not_run_is_refused_with_the_way_out(settings, message):
    given = {"seq_length": 64, "implementation": "transformers-sdpa", **BF16}
    with pytest.raises(UsageError, match=message):
        step(load("gpt2", **given | settings))


def test_a_difference_is_named_and_fails(monkeypatch):
    config = load("gpt2", seq_length=64, implementation="transformers-sdpa", **BF16)
    true = compare.expected(config.padded)
    monkeypatch.setattr(compare, "expected", lambda _: true._replace(bytes=true.bytes - 512))
    report = step(config)
    assert report.answer.startswith("differs")
    assert report.answer.endswith("-512")
