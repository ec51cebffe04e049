"""Versions of libraries that a run names."""

import pytest

from memcalc import load
from memcalc.analysis.device import device
from memcalc.errors import ConfigError

BF16 = {"main_grads": "bf16", "main_params": "none", "moments": "bf16"}
RUN = {"seq_length": 2048, "implementation": "transformers-sdpa", "gpu": "a6000", **BF16}


def test_a_version_is_of_two_numbers_and_torch_is_pytorch():
    config = load("gpt2", versions="transformers=4.57.6,torch=2.9")
    assert config.run.environment.transformers == (4, 57)
    assert config.run.environment.pytorch == (2, 9)


def test_it_stands_beside_what_a_file_says_of_the_environment():
    config = load("gpt2", versions="torch=2.9", environment={"loader_mask": True})
    assert config.run.environment.loader_mask
    assert config.run.environment.pytorch == (2, 9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("transfomers=4.57", "did you mean 'transformers'"),
        ("torch=new", "pytorch must be a version, such as 2.12"),
        ("torch", "pytorch must be a version"),
        ("torch=2.9" * 100, "must be library=version pairs"),
        (["torch=2.9"], "must be library=version pairs"),
    ],
)
def test_what_is_no_version_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        load("gpt2", versions=text)


@pytest.mark.parametrize(
    ("version", "masked"), [("4.52", False), ("4.53", True), ("4.57.6", True), ("5.24", False)]
)
def test_some_versions_of_transformers_make_a_mask_for_every_causal_model(version, masked):
    config = load("llama-3.2-1b", **RUN, versions=f"transformers={version}")
    assert (config.masked_layers == "all") == masked


@pytest.mark.parametrize(
    ("name", "settings", "measured"),
    [
        ("llama-3.2-1b", {}, 17.51e9),
        ("llama-3.2-3b", {"recompute": "full"}, 32.15e9),
    ],
)
def test_measured_runs_of_that_version_are_met(name, settings, measured):
    """Two runs of vramcalc 0.1.2 (README, table): max_memory_allocated, rounded to 0.01 GB."""
    versions = "transformers=4.57.6,torch=2.14"
    config = load(name, **RUN, keep_gradients=True, versions=versions, **settings).padded
    peak = device(config)[0].peak.bytes
    assert peak == pytest.approx(measured, rel=5e-4)
    assert f"{100 * abs(peak / measured - 1):.2f}" <= config.framework.accuracy.worst
