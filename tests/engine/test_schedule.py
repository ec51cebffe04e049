"""Schedules: that they can run, how long they take, and what their stages hold, walked."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from shared import is_refused

import memcalc
from memcalc.analysis import activations
from memcalc.analysis.in_flight import holdings, peak
from memcalc.analysis.schedule import (
    BACKWARD,
    BACKWARD_INPUTS,
    BACKWARD_WEIGHTS,
    FORWARD,
    dualpipe,
    gpipe,
    interleaved,
    one_f_one_b,
    order,
    places,
    timeline,
    zb_h1,
    zb_h2,
    zb_v,
)
from memcalc.analysis.stages import chunk_weights, chunks, stage, stages
from memcalc.answers.warnings import warnings
from memcalc.blocks.layer import layer_graph
from memcalc.config import Parallel, load
from memcalc.config.merge import configure
from memcalc.config.pipeline import SCHEDULES, even, layout
from memcalc.config.readers.megatron.model_args import read_yaml
from memcalc.errors import ConfigError

WHOLE = {"zb-h1": zb_h1, "zb-h2": zb_h2, "zb-v": zb_v, "dualpipe": dualpipe, "1f1b": one_f_one_b}
PIPELINES = [(p, n) for p in (2, 4, 6, 8) for n in (2 * p, 2 * p + 2, 3 * p, 5 * p)]


def pipeline(name, p, vpp=2, **settings):
    if name == "interleaved":
        return Parallel(pp=p, vpp=vpp, **settings)
    return Parallel(pp=p, schedule=name, **settings)


def most(steps, whole=2, late=1):
    """The most that a stage holds, a micro-batch weighing so much before and after its B."""
    held = peak(steps, lambda chunk: whole, lambda chunk: late)
    return sum(whole * each.whole + late * each.waiting for each in held.values())


def eager_1f1b(stage, stages, microbatches):
    return one_f_one_b(stage, stages + 1, microbatches)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("p", "n"), PIPELINES)
def test_every_chunk_runs_each_of_its_micro_batches_once(name, p, n):
    parallel = pipeline(name, p)
    for number in range(p):
        steps = list(order(parallel, number, n))
        for chunk in range(parallel.chunks_per_rank):
            mine = [step for step in steps if step.chunk == chunk]
            there = sorted(step.microbatch for step in mine if step.phase == FORWARD)
            for phases in ({BACKWARD, BACKWARD_INPUTS}, {BACKWARD, BACKWARD_WEIGHTS}):
                back = sorted(step.microbatch for step in mine if step.phase in phases)
                assert back == there
            if parallel.copies == 1:
                assert there == list(range(len(there)))
        for held in holdings(steps):
            assert all(min(each) >= 0 for each in held.values())
        assert all(each == (0, 0) for each in held.values())


# The other two refuse fewer micro-batches than stages: see TestBatches.
@pytest.mark.parametrize("name", sorted({*SCHEDULES} - {"dualpipe", "interleaved"}))
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_fewer_micro_batches_than_stages_run_and_are_all_that_is_in_flight(name, n):
    parallel = pipeline(name, 8)
    held = peak(order(parallel, 0, n), lambda chunk: 1)
    assert max(each.whole for each in held.values()) == n
    timeline(parallel, n)


class TestTime:
    """F, B and W of 1 each. Qi et al. 2023 (arXiv 2401.10241), table 2: the bubbles."""

    @pytest.mark.parametrize(("p", "n"), PIPELINES)
    @pytest.mark.parametrize(
        ("name", "bubble"),
        [
            ("gpipe", lambda f, b, w: f + b + w),
            ("1f1b", lambda f, b, w: f + b + w),
            ("zb-h1", lambda f, b, w: f + b - w),
            ("zb-h2", lambda f, b, w: f + b - 2 * w),
            ("zb-v", lambda f, b, w: f + b - 2 * w),
        ],
    )
    def test_the_bubbles_are_the_papers(self, name, bubble, p, n):
        parallel = pipeline(name, p)
        work = 3 * n * parallel.chunks_per_rank
        for number, steps in enumerate(timeline(parallel, min(n, 4 * p))):
            work = 3 * min(n, 4 * p) * parallel.chunks_per_rank
            idle = steps[-1].end - steps[0].start - work
            at_most = (p - 1) * bubble(1, 1, 1)
            assert idle <= at_most
            if number == 0:
                assert idle == at_most

    @pytest.mark.parametrize("p", [2, 4, 8])
    def test_interleaving_divides_the_bubble_by_the_chunks(self, p):
        """Narayanan et al. 2021, section 2.2: (p-1)(t_f + t_b)/m, a chunk taking 1/m."""
        for m in (2, 4):
            first = timeline(pipeline("interleaved", p, m), 3 * p)[0]
            assert first[-1].end - 3 * 3 * p * m == (p - 1) * 3

    @pytest.mark.parametrize("p", [2, 4, 6, 8])
    def test_dualpipe_can_run(self, p):
        for n in (2 * p, 2 * p + 2, 4 * p):
            assert [len(steps) > 0 for steps in timeline(pipeline("dualpipe", p), n)] == [True] * p


def runs(**settings):
    """A model of 48 layers with these settings, or why it is refused."""
    try:
        return load("22b", **settings)
    except ConfigError as error:
        return str(error)


class TestBatches:
    """Which numbers of micro-batches a schedule can run."""

    @pytest.mark.parametrize("name", SCHEDULES)
    @pytest.mark.parametrize("p", [2, 3, 4, 6, 8])
    def test_every_accepted_batch_runs_to_its_end(self, name, p):
        """No stage waits for ever, whatever the chunks, the group and the micro-batches."""
        if name == "dualpipe" and p % 2:
            with pytest.raises(ConfigError, match="needs an even --pp"):
                pipeline(name, p)
            return
        apart = name == "interleaved"
        for v in (2, 3) if apart else (1,):
            for group in (None, p, p + 1, 2 * p - 1, 2 * p + 1) if apart else (None,):
                parallel = Parallel(pp=p, vpp=v, schedule=name, microbatch_group_size=group)
                for n in range(1, 5 * p + 3):
                    if SCHEDULES[name].refuses(p, parallel.group, n) is None:
                        found = timeline(parallel, n)
                        assert all(found)

    @pytest.mark.parametrize("group", [None, 4, 5, 6, 9])
    def test_interleaved_batches_are_those_of_megatron_core(self, group):
        """The group size is in [p, M]; M modulo it is 0 or at least p."""
        given = {} if group is None else {"microbatch_group_size": group}
        g = group or 4
        for m in range(1, 40):
            found = runs(pp=4, vpp=2, micro_batch_size=1, global_batch_size=m * 2, dp=2, **given)
            assert isinstance(found, str) != (g <= m and (m % g == 0 or m % g >= 4)), (g, m)

    @pytest.mark.parametrize(
        ("settings", "nearest"),
        [
            ({"vpp": 3, "global_batch_size": 12}, [8, 16]),
            ({"vpp": 3, "global_batch_size": 4}, [8]),
            ({"vpp": 3, "global_batch_size": 48, "dp": 2, "micro_batch_size": 2}, [32, 64]),
            ({"vpp": 3, "microbatch_group_size": 10, "global_batch_size": 21}, [20, 28]),
            ({"schedule": "dualpipe", "global_batch_size": 10}, [16]),
            ({"schedule": "dualpipe", "global_batch_size": 19}, [18, 20]),
        ],
    )
    def test_a_refused_batch_is_answered_with_the_nearest_valid_ones(self, settings, nearest):
        settings = {"pp": 8, "micro_batch_size": 1, **settings}
        message = runs(**settings)
        assert message.endswith(
            "nearest valid --global-batch-size: " + " or ".join(map(str, nearest))
        )
        for batch in nearest:
            assert runs(**{**settings, "global_batch_size": batch}).sequences == batch

    @pytest.mark.parametrize("name", SCHEDULES)
    @pytest.mark.parametrize("group", [None, 5, 7, 8, 30])
    def test_the_batch_that_fills_the_pipeline_is_valid(self, name, group):
        apart = name == "interleaved"
        given = {"vpp": 3, "microbatch_group_size": group} if apart else {}
        config = load("llama-3-8b", pp=4, schedule=name, **given)
        assert SCHEDULES[name].refuses(4, config.parallel.group, config.microbatches) is None
        assert all(timeline(config.parallel, config.microbatches))

    @pytest.mark.parametrize("command", ["memory", "plot stages", "comm", "flops"])
    @pytest.mark.parametrize("batch", [4, 12])
    def test_every_command_refuses_a_batch_that_would_deadlock(self, memcalc, command, batch):
        more = " -o x.png" if command.startswith("plot") else ""
        result = memcalc(f"{command} 175b --global-batch-size {batch}{more}")
        is_refused(result, "nearest valid --global-batch-size: 8")


class TestClosedForms:
    @pytest.mark.parametrize(("p", "m", "g"), [(4, 2, 4), (4, 2, 6), (4, 3, 8), (8, 2, 12)])
    def test_interleaving_with_groups_of_micro_batches(self, p, m, g):
        """Megatron-core, pipeline_parallel/schedules.py: warm-up 2(p-S-1) + (m-1)g, and one."""
        for n in (1, p, g, 3 * g):
            for number in range(p):
                held = most(interleaved(number, p, n, m, g), 1, 1)
                assert held == min(2 * (p - number - 1) + (m - 1) * g + 1, m * n)

    @pytest.mark.parametrize("p", [2, 4, 8])
    @pytest.mark.parametrize(("m_b", "m_w"), [(114, 32), (34, 32), (2, 1)])
    def test_zb_h1_holds_what_1f1b_does_and_weights_inputs(self, p, m_b, m_w):
        """Stage S: (p-S)M_B + S M_W, with Qi et al.'s M_B of 34 + 5as/h and M_W of 32."""
        for number in range(p):
            held = most(zb_h1(number, p, 3 * p), m_b, m_w)
            assert held == (p - number) * m_b + number * m_w
        worst = max(most(zb_h1(number, p, 3 * p), m_b, m_w) for number in range(p))
        assert worst == p * m_b == most(one_f_one_b(0, p, 3 * p), m_b, m_w)
        last = p - 1
        assert most(zb_h1(last, p, 3 * p), m_b, m_w) > most(one_f_one_b(last, p, 3 * p), m_b)

    @pytest.mark.parametrize("p", [2, 4, 8])
    def test_zb_h2_holds_2p_minus_1(self, p):
        """Table 2 of Qi et al.: (2p-1)M_B; at stage S, (2(p-S)-1)M_B + 2S M_W."""
        for number in range(p):
            held = most(zb_h2(number, p, 3 * p), 114, 32)
            assert held == (2 * (p - number) - 1) * 114 + 2 * number * 32

    @pytest.mark.parametrize("p", [2, 4, 8])
    def test_zb_v_balances_the_stages(self, p):
        """Section 6: as much as 1F1B's first stage, 2p chunks of half its layers, on every rank."""
        for n in (2 * p, 5 * p):
            assert {most(zb_v(number, p, n), 2, 1) for number in range(p)} == {2 * p * 2}

    @pytest.mark.parametrize("p", [2, 4, 6, 8, 16])
    def test_dualpipe_holds_p_plus_1_chunks_on_every_rank(self, p):
        """DeepSeek-V3, table 2: p + 1."""
        for n in (2 * p, 2 * p + 2, 6 * p):
            held = {
                sum(each.whole for each in peak(dualpipe(s, p, n), lambda _: 2).values())
                for s in range(p)
            }
            assert held == {p + 1}

    def test_gpipe_holds_all(self):
        assert most(gpipe(0, 1, 12), 1) == 12
        with pytest.raises(ConfigError, match="forward and backward passes to simulate"):
            order(Parallel(pp=2, schedule="gpipe"), 0, 2**30)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("p", [2, 4, 6])
def test_a_long_pipeline_holds_what_a_shorter_one_holds(name, p):
    """Only some rounds are walked of it: more of them change nothing."""
    parallel = pipeline(name, p)
    for number in range(p):
        for n in range(2 * p, 14 * p, 2):
            if name == "interleaved":
                whole = list(interleaved(number, p, n, 2))
            elif name == "gpipe":
                whole = list(gpipe(number, p, n))
            else:
                whole = list(WHOLE[name](number, p, n))
            for weights in ((2, 1), (5, 9)):
                assert most(order(parallel, number, n), *weights) == most(whole, *weights)


class TestStages:
    """What the stages of the 22B model hold, of 48 alike layers, under each schedule."""

    def held(self, **settings):
        config = load("22b", pp=4, global_batch_size=4 * 16, **settings)
        return config, stages(config)

    def weights(self, config):
        graph = layer_graph(config)
        kept = activations.total(activations.counted(activations.kept(graph), "paper"))
        return kept, activations.waiting(graph)

    def test_zb_h1(self):
        config, held = self.held(schedule="zb-h1")
        m_b, m_w = self.weights(config)
        for number in range(4):
            assert held[number].layers == 12 * ((4 - number) * m_b + number * m_w)
            assert held[number].microbatches == {0: 4 - number}
        plain = self.held()[1]
        assert max(each.layers for each in held) == max(each.layers for each in plain)
        assert held[3].layers - plain[3].layers == 12 * 3 * m_w

    def test_zb_v_has_both_ends_on_its_first_rank(self):
        config, held = self.held(schedule="zb-v")
        m_b, _ = self.weights(config)
        assert [each.layers for each in held] == [8 * 6 * m_b] * 4
        assert [each.embedding > 0 for each in held] == [True, False, False, False]
        assert [each.head > 0 for each in held] == [True, False, False, False]
        assert max(each.layers for each in self.held()[1]) == held[0].layers

    def test_dualpipe_has_both_ends_on_both_end_ranks(self):
        config, held = self.held(schedule="dualpipe")
        m_b, _ = self.weights(config)
        assert [each.layers for each in held] == [5 * 12 * m_b] * 4
        for part in ("embedding", "head"):
            ends = [getattr(each, part) for each in held]
            assert ends[0] == ends[3] > 0
            assert ends[1] == ends[2] == 0
        assert [places(config.parallel, s) for s in (0, 3)] == [[0, 3], [3, 0]]

    def test_gpipe_holds_every_micro_batch(self):
        config, held = self.held(schedule="gpipe")
        assert [each.layers for each in held] == [16 * 12 * self.weights(config)[0]] * 4

    def test_what_waits_for_weights_is_products_inputs_and_gradients(self):
        """Qi et al. 2023, table 1: 32sbh a layer; split over t ranks as the tensors are."""
        s, b, h, t = 2048, 4, 6144, 8
        graph = layer_graph(load("22b", tp=1))
        assert activations.waiting(graph) == 32 * s * b * h
        # qkv: input 2, gradient 6/t; projection: 2/t, 2; h to 4h: 2, 8/t; 4h to h: 8/t, 2
        tensor = layer_graph(load("22b"))
        assert activations.waiting(tensor) == (8 + 24 / t) * s * b * h
        # under sequence parallelism the shards of inputs and gradients
        shards = layer_graph(load("22b", sp=True))
        assert activations.waiting(shards) == 32 / t * s * b * h

    def test_one_record_adds_a_schedule(self, monkeypatch):
        """1F1B that forwards one micro-batch more before its first backward."""
        eager = SCHEDULES["1f1b"]._replace(order=f"{__name__}:eager", filling=2, rounds=2)
        monkeypatch.setitem(sys.modules, __name__, SimpleNamespace(eager=eager_1f1b))
        monkeypatch.setitem(SCHEDULES, "eager-1f1b", eager)
        config = load("22b", pp=4, global_batch_size=64, schedule="eager-1f1b")
        in_flight = memcalc.memory(config).column("in_flight")
        assert in_flight == [4 + 1, 3 + 1, 2 + 1, 1 + 1]

    def test_only_split_backwards_wait(self):
        for name in SCHEDULES:
            settings = {"vpp": 2} if name == "interleaved" else {"schedule": name}
            config = load("22b", pp=4, global_batch_size=64, **settings)
            late = [late for _, late in chunk_weights(config, 1, "paper")]
            assert any(map(any, late)) == SCHEDULES[name].splits_backward


class TestSplits:
    def layers(self, model="22b", **settings):
        config = load(model, global_batch_size=64, **settings)
        return [
            [len(names) for names in chunks(config, number)] for number in range(config.parallel.pp)
        ]

    def test_an_uneven_split_is_per_stage(self):
        """[1, 2, 2, 3] of eight layers: each stage holds its own, p - S micro-batches of each."""
        base = load("22b")
        config = replace(
            base,
            model=replace(base.model, layers=8),
            parallel=replace(base.parallel, pp=4, layout="1,2,2,3"),
            run=replace(base.run, global_batch_size=32),
        )
        one = activations.total(activations.counted(activations.kept(layer_graph(config)), "paper"))
        held = [each.layers for each in stages(config)]
        assert held == [4 * 1 * one, 3 * 2 * one, 2 * 2 * one, 1 * 3 * one]
        first_and_last = replace(
            config,
            parallel=replace(base.parallel, pp=4, first_stage_layers=1, last_stage_layers=3),
        )
        assert [each.layers for each in stages(first_and_last)] == held

    def test_first_and_last_stages_of_virtual_ones(self):
        settings = {"pp": 4, "vpp": 2, "first_stage_layers": 6, "last_stage_layers": 10}
        assert self.layers(**settings) == [[3, 3], [8, 8], [8, 8], [5, 5]]

    def test_embedding_and_loss_count_as_layers(self):
        """Megatron-core, transformer_block.py: 46 layers and two ends over 4 x 2 chunks of 6."""
        settings = {"pp": 4, "vpp": 2, "embedding_as_layer": True, "loss_as_layer": True}
        settings["global_batch_size"] = 4 * 4  # 22b runs 4 sequences per micro-batch
        base = load("22b", **settings)
        config = replace(base, model=replace(base.model, layers=46))
        found = [[len(names) for names in chunks(config, number)] for number in range(4)]
        assert found == [[5, 6], [6, 6], [6, 6], [6, 5]]

    def test_megatrons_layout(self):
        """The example of Megatron-core's pipeline_parallel_layer_layout.py, over 16 x 2 chunks."""
        found = layout("Et*3|(tt|)*29,m|L")
        assert [chunk.layers for chunk in found] == [3, *[2] * 29, 0, 0]
        assert [chunk.further for chunk in found] == [*[0] * 30, 1, 0]

    def test_layers_that_predict_further_tokens_stand_where_the_layout_says(self):
        config = load("deepseek-v3", pp=16, vpp=2, layout="Et*3|(tt|)*29,m|L", seq_length=4096)
        assert chunks(config, 14) == [["moe", "moe"], ["mtp"]]
        assert chunks(config, 15) == [["moe", "moe"], []]

    def test_deepseek_v3_over_16_stages(self):
        """61 layers, and one that predicts a further token on the last stage."""
        found = self.layers("deepseek-v3", pp=16)
        assert found == [[4]] * 13 + [[3], [3], [3 + 1]]
        assert even(61, 16) == [4] * 13 + [3] * 3

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"pp": 4, "layout": "1,2,3"}, "layout has 6 layers in 3 chunks"),
            ({"pp": 4, "layout": "12,12,12,11"}, "the model has 48"),
            ({"pp": 4, "layout": "tE|t|t|L"}, "or letters: E"),
            ({"pp": 4, "layout": "Et|t|tL|"}, "L in its last"),
            ({"pp": 4, "layout": "E|tmt|L"}, "before multi-token prediction"),
            ({"pp": 4, "layout": "(t*99999|)*99999L"}, "at most 4096"),
            ({"pp": 2, "layout": [1, -1]}, "must be layers per chunk"),
            ({"pp": 2, "layout": "Et*48mL|L"}, "or letters: E"),
            ({"pp": 4, "first_stage_layers": 7}, "cannot be split evenly over the other 3 stages"),
            (
                {"pp": 2, "first_stage_layers": 7, "last_stage_layers": 8},
                "do not fit the model's 48 layers",
            ),
            ({"pp": 4, "vpp": 2, "first_stage_layers": 9}, "--vpp 2 must divide layers per stage"),
            ({"pp": 1, "first_stage_layers": 9}, "needs --pp of at least 2, and a schedule"),
            (
                {"pp": 4, "layout": "12,12,12,12", "loss_as_layer": True},
                "cannot be combined with --layout",
            ),
            ({"pp": 4, "schedule": "interleaved"}, "interleaved needs --vpp of at least 2"),
            (
                {"pp": 4, "vpp": 2, "schedule": "zb-h1"},
                "--vpp 2 needs --schedule interleaved, not zb-h1",
            ),
            ({"pp": 3, "schedule": "dualpipe"}, "even --pp"),
            ({"pp": 4, "schedule": "zbh1"}, "did you mean 'zb-h1'"),
            ({"pp": 4, "microbatch_group_size": 4}, "needs --vpp of at least 2"),
            ({"pp": 4, "vpp": 2, "microbatch_group_size": 2}, "must be at least --pp 4"),
        ],
    )
    def test_contradictions_are_refused(self, settings, message):
        with pytest.raises(ConfigError, match=message):
            load("22b", **settings)

    def test_another_schedule_forgets_the_files_virtual_stages(self):
        assert load("175b", schedule="zb-v").parallel.vpp == 1
        assert load("175b", schedule="interleaved").parallel.vpp == 3

    def test_a_schedule_of_one_stage_has_no_effect_and_that_is_said(self):
        config = load("22b", schedule="dualpipe")
        assert stages(config) == stages(load("22b"))
        assert warnings(config) == ("--schedule dualpipe has no effect with --pp 1",)

    def test_a_stage_may_have_no_layer(self):
        config = load("22b", pp=3, layout="E|t*48|L")
        held = [stage(config, number) for number in range(3)]
        assert [each.layers > 0 for each in held] == [False, True, False]
        assert held[0].embedding
        assert held[2].head


class TestLaunchFiles:
    """Megatron-LM's arguments of a pipeline."""

    def read(self, **arguments):
        base = {"--num-layers": 14, "--hidden-size": 64, "--num-attention-heads": 4}
        base |= {"--micro-batch-size": 1, "--seq-length": 64, "--vocab-size": 128}
        base |= {"--pipeline-model-parallel-size": 4}
        given = {"--" + name.replace("_", "-"): value for name, value in arguments.items()}
        config = configure(read_yaml({"MODEL_ARGS": base | given}, "x"), {})
        return [[len(names) for names in chunks(config, s)] for s in range(config.parallel.pp)]

    def test_first_and_last_stages(self):
        found = self.read(decoder_first_pipeline_num_layers=3, decoder_last_pipeline_num_layers=1)
        assert found == [[3], [5], [5], [1]]

    def test_a_layout_says_how_many_virtual_stages_there_are(self):
        found = self.read(pipeline_model_parallel_layout="Et*2|(tt|)*5t|tL")
        assert found == [[2, 2], [2, 2], [2, 1], [2, 1]]

    def test_ends_that_count_as_layers(self):
        """14 layers and two ends over 4 stages of 2 chunks, of 2 each."""
        ends = {
            "account_for_embedding_in_pipeline_split": True,
            "account_for_loss_in_pipeline_split": True,
        }
        expected = [[1, 2], [2, 2], [2, 2], [2, 1]]
        assert self.read(num_virtual_stages_per_pipeline_rank=2, **ends) == expected
        assert self.read(num_layers_per_virtual_pipeline_stage=2, **ends) == expected

    def test_groups_of_micro_batches(self):
        grouped = {"microbatch_group_size_per_virtual_pipeline_stage": 6}
        arguments = {"--num-layers": 16, "--hidden-size": 64, "--num-attention-heads": 4}
        arguments |= {"--micro-batch-size": 1, "--pipeline-model-parallel-size": 4}
        arguments |= {"--" + name.replace("_", "-"): value for name, value in grouped.items()}
        plain = read_yaml({"MODEL_ARGS": arguments}, "x").settings
        assert "microbatch_group_size" not in plain  # of no interleaved schedule
        arguments["--num-virtual-stages-per-pipeline-rank"] = 2
        settings = read_yaml({"MODEL_ARGS": arguments}, "x").settings
        assert (settings["vpp"], settings["microbatch_group_size"]) == (2, 6)

    def test_a_layout_of_other_stages_is_refused(self):
        with pytest.raises(ConfigError, match="must divide chunks of the layout = 3"):
            self.read(pipeline_model_parallel_layout="Et*7|t*5|t*2L")
