"""The largest models and pipelines: how much is walked of them, and what is refused in one line."""

import json
import resource
import subprocess
import sys

import pytest

from memcalc.analysis import schedule
from memcalc.analysis.rank import Rank
from memcalc.analysis.schedule import MOST_DRAWN, MOST_PASSES, order, passes, timeline
from memcalc.analysis.states import MOST_WEIGHTS, unsplit_states
from memcalc.config import Config, Model, Parallel, Run
from memcalc.config.pipeline import MOST, MOST_STAGES
from memcalc.errors import ConfigError


def config(layers=1000, parallel=None, **model):
    sizes = {"name": "big", "layers": layers, "hidden_size": 512, "heads": 8, "vocab_size": 51200}
    return Config(Model.of(**sizes | model), Parallel(**parallel or {}), Run(seq_length=128))


LARGEST = [
    # stages of one chunk: the last to be admitted
    (Parallel(pp=MOST_STAGES), 2**31),
    # 128 stages of 16 chunks, and a last group that is nearly whole
    (Parallel(pp=128, vpp=16), 511),
    (Parallel(pp=64, vpp=32), 2**31),
    (Parallel(pp=128, schedule="zb-h1"), 2**31),
    (Parallel(pp=128, schedule="zb-v"), 1),
    (Parallel(pp=128, schedule="dualpipe"), 2**30),
    (Parallel(pp=8, schedule="gpipe"), 100_000),
]


@pytest.mark.parametrize(("parallel", "microbatches"), LARGEST)
def test_the_largest_pipelines_are_walked_in_few_passes(parallel, microbatches):
    stages = {0, parallel.pp // 2, parallel.pp - 1}
    walked = max(sum(1 for _ in order(parallel, stage, microbatches)) for stage in stages)
    assert parallel.pp * walked <= MOST_PASSES


@pytest.mark.parametrize(
    ("parallel", "microbatches"),
    [
        (Parallel(pp=100, vpp=1000), 2**20),
        (Parallel(pp=2, vpp=2, microbatch_group_size=2**20), 2**21),
        (Parallel(pp=MOST_STAGES, schedule="zb-v"), 1),
        (Parallel(pp=64, schedule="gpipe"), 2**20),
    ],
)
def test_longer_ones_are_refused_before_they_are_walked(parallel, microbatches):
    with pytest.raises(ConfigError, match=r"passes to simulate, more than \d+: use a smaller --pp"):
        order(parallel, 0, microbatches)


def test_a_timeline_has_fewer_rounds_of_a_long_pipeline():
    for parallel in (Parallel(pp=35, vpp=3), Parallel(pp=64, vpp=8)):
        drawn = sum(map(len, timeline(parallel, 2**10 * parallel.pp)))
        assert drawn <= MOST_DRAWN
        assert drawn >= passes(parallel, parallel.pp)
    with pytest.raises(ConfigError, match="more than 262144"):
        timeline(Parallel(pp=1000), 1000)


def test_orders_that_wait_for_one_another_are_one_line(monkeypatch):
    """Config refuses such batches; an order that deadlocks all the same is no assertion."""
    backwards_first = (schedule.Step(schedule.BACKWARD, 0), schedule.Step(schedule.FORWARD, 0))
    monkeypatch.setattr(schedule, "one_f_one_b", lambda *_: iter(backwards_first))
    with pytest.raises(ConfigError, match="schedule 1f1b deadlocks with 4 micro-batches"):
        timeline(Parallel(pp=2), 4)


def test_sizes_beyond_any_model_are_refused():
    with pytest.raises(ConfigError, match="layers must be a whole number from 1 to 4096"):
        config(MOST + 1)
    with pytest.raises(ConfigError, match="pp must be a whole number from 1 to 1024"):
        Parallel(pp=MOST_STAGES + 1)
    experts = {"experts": 512, "experts_per_token": 2, "expert_ffn_size": 64}
    with pytest.raises(ConfigError, match=f"more than the {MOST_WEIGHTS} that memcalc can"):
        list(unsplit_states(Rank(config(1000, **experts), 0)))


@pytest.mark.parametrize(
    ("layers", "stages", "options"),
    [
        (1000, 1000, []),
        (MOST, 1, []),
        (MOST, 2, ["--schedule", "gpipe", "--global-batch-size", "200000"]),
    ],
)
def test_the_largest_answers_need_little_memory(tmp_path, layers, stages, options):
    """A child process may have 300 MiB in all, of which Python and its libraries are 150."""
    sizes = {"name": "big", "layers": layers, "hidden_size": 512, "heads": 8, "vocab_size": 51200}
    file = tmp_path / "big.json"
    file.write_text(json.dumps({"memcalc": 1, "model": sizes, "run": {"seq_length": 128}}))
    command = [sys.executable, "-m", "memcalc", "memory", str(file), "--pp", str(stages)]
    command += [*options, "--format", "json"]

    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (300 * 2**20, 300 * 2**20))

    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit, check=False)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["rows"]) == stages
