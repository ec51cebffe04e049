"""Ranks that are forked from one process, and CUDA's guard before the first backward pass."""

import multiprocessing

import pytest

import memcalc.validation.step.link  # noqa: F401
from memcalc.validation import ranks


@pytest.fixture
def forked_ranks(monkeypatch):
    """For tests of what ranks compute: a spawned rank imports PyTorch for seconds first.

    PyTorch's hooks for saved tensors import torch._dynamo, for a second and more.
    """
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["memcalc.validation.validate", "torch._dynamo"])
    monkeypatch.setattr(ranks, "STARTED", server)
