"""Orders and splits of pipelines against those of the frameworks' own code."""

from importlib import import_module
from types import SimpleNamespace

import pytest

from memcalc.analysis.schedule import BACKWARD, FORWARD, interleaved, places, zb_v
from memcalc.config import Parallel
from memcalc.config.pipeline import layout


@pytest.mark.filterwarnings("ignore")  # what they warn of when imported is their own
class TestFrameworks:
    @pytest.mark.parametrize("p", [2, 3, 4, 8])
    def test_zb_v_is_pytorchs(self, p):
        schedules = import_module("torch.distributed.pipelining.schedules")
        phases = {"FORWARD": "f", "BACKWARD_INPUT": "i", "BACKWARD_WEIGHT": "w"}
        for n in (1, p, 2 * p - 1, 2 * p, 5 * p):
            theirs = SimpleNamespace(pp_group_size=p, num_stages=2 * p, _n_microbatches=n)
            for rank in range(p):
                steps = schedules.ScheduleZBVZeroBubble._calculate_single_rank_operations(
                    theirs, rank
                )
                expected = [
                    (phases[step.computation_type.name], step.microbatch_index, step.stage_index)
                    for step in steps
                    if step is not None
                ]
                at = places(Parallel(pp=p, schedule="zb-v"), rank)
                ours = [(phase[0], i, at[chunk]) for phase, i, chunk in zb_v(rank, p, n)]
                assert ours == expected

    @pytest.mark.parametrize(("p", "m", "g"), [(2, 2, 2), (4, 2, 4), (4, 3, 6), (8, 2, 8)])
    def test_interleaving_is_megatrons(self, p, m, g):
        theirs = import_module("megatron.core.pipeline_parallel.schedules")
        for n in (g, 2 * g, 3 * g + p):
            table = theirs.get_schedule_table(n, m, g)
            for rank in range(p):
                group = SimpleNamespace(size=lambda: p, rank=lambda rank=rank: rank)
                ranks = SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=m)
                _, _, warmup, _ = theirs.get_pp_rank_microbatches(n, m, g, p2p_communicator=ranks)
                steps = list(interleaved(rank, p, n, m, g))
                forwards = [step[1:] for step in steps if step.phase == FORWARD]
                backwards = [step[1:] for step in steps if step.phase == BACKWARD]
                assert forwards == table
                assert backwards == [(i, m - 1 - chunk) for i, chunk in table]
                first = [step.phase for step in steps].index(BACKWARD)
                assert first == min(warmup + 1, m * n)

    @pytest.mark.parametrize(
        ("text", "p"),
        [
            ("Et*3|(tt|)*29,m|L", 16),
            ("Et*2|(tt|)*5t|tmL", 4),
            ("Et|(tt|)*6mL", 2),
            ("E|(t|)*3,m|m||L", 2),
            ("E,t*3|tt|(t|t)*2|L", 5),
        ],
    )
    def test_layouts_are_megatrons(self, text, p):
        theirs = import_module("megatron.core.transformer.pipeline_parallel_layer_layout")
        rows = theirs.PipelineParallelLayerLayout.parse_str_to_list(text)
        names = [[kind.name for kind in row] for row in rows]
        assert layout(text) == tuple((row.count("decoder"), row.count("mtp")) for row in names)

    @pytest.mark.parametrize(
        "settings",
        [
            {"first_stage_layers": 6, "last_stage_layers": 10, "vpp": 2},
            {"first_stage_layers": 3},
            {"last_stage_layers": 9},
            {"embedding_as_layer": True, "loss_as_layer": True},
            {"embedding_as_layer": True, "loss_as_layer": True, "vpp": 2},
        ],
    )
    def test_splits_are_megatrons(self, settings):
        theirs = import_module("megatron.core.transformer.transformer_block")
        counted = settings.get("embedding_as_layer", False)
        layers = 46 if counted else 48
        virtual = settings.get("vpp")
        config = SimpleNamespace(
            num_layers=layers,
            pipeline_model_parallel_size=4,
            virtual_pipeline_model_parallel_size=virtual,
            pipeline_model_parallel_layout=None,
            num_layers_in_first_pipeline_stage=settings.get("first_stage_layers"),
            num_layers_in_last_pipeline_stage=settings.get("last_stage_layers"),
            account_for_embedding_in_pipeline_split=counted,
            account_for_loss_in_pipeline_split=counted,
        )
        parallel = Parallel(pp=4, **settings)
        ours = [chunk.layers for chunk in parallel.spread(layers)]
        expected = [
            theirs.get_num_layers_to_build(
                config, vp_stage=chunk if virtual else None, pp_rank=rank
            )
            for chunk in range(virtual or 1)
            for rank in range(4)
        ]
        assert ours == expected
