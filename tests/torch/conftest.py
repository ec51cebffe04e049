"""Ranks that are forked from one process, which has imported what each of them needs."""

import multiprocessing

import pytest

from memcalc.validation import ranks


@pytest.fixture(scope="session")
def _rank_server():
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        ["memcalc.validation.validate"]
    )


@pytest.fixture
def forked_ranks(_rank_server, monkeypatch):
    """For tests of what ranks compute: a spawned rank imports PyTorch for seconds first."""
    monkeypatch.setattr(ranks, "START_METHOD", "forkserver")
