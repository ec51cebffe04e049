"""Ranks that are forked from one process, which has imported what each of them needs."""

import multiprocessing

import pytest

from memcalc.validation import ranks


@pytest.fixture
def forked_ranks(monkeypatch):
    """For tests of what ranks compute: a spawned rank imports PyTorch for seconds first."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["memcalc.validation.validate"])
    monkeypatch.setattr(ranks, "STARTED", server)
