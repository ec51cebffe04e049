"""Pipeline schedules, walked, and what every stage holds."""

from fractions import Fraction

import pytest

from memcalc import paper, symbols
from memcalc.analysis import flops
from memcalc.analysis.in_flight import holdings, peak
from memcalc.analysis.layers import layer_bytes
from memcalc.analysis.parameters import owned, parameters
from memcalc.analysis.schedule import BACKWARD, FORWARD, interleaved, one_f_one_b
from memcalc.analysis.stages import stages
from memcalc.analysis.states import RECIPES
from memcalc.answers.warnings import warnings
from memcalc.blocks.layer import layer_graph
from memcalc.config import load
from memcalc.errors import ConfigError
from memcalc.units import GIB

PIPELINES = [(p, m, n) for p in (1, 2, 3, 4, 8) for m in (1, 2, 3) for n in (1, 2, p, 3 * p)]


def steps(stage, p, m, n):
    return list(interleaved(stage, p, n, m) if m > 1 else one_f_one_b(stage, p, n))


@pytest.mark.parametrize(("p", "m", "n"), PIPELINES)
def test_every_micro_batch_goes_forward_and_then_backward_through_every_chunk(p, m, n):
    for stage in range(p):
        walked = steps(stage, p, m, n)
        seen = {
            phase: [(i, c) for ph, i, c in walked if ph == phase] for phase in (FORWARD, BACKWARD)
        }
        every = sorted((i, c) for i in range(n) for c in range(m))
        assert sorted(seen[FORWARD]) == sorted(seen[BACKWARD]) == every
        for held in holdings(walked):
            assert all(count >= 0 for each in held.values() for count in each)
        assert not any(count for each in list(holdings(walked))[-1].values() for count in each)


@pytest.mark.parametrize(("p", "m", "n"), PIPELINES)
def test_what_is_in_flight_is_the_closed_form(p, m, n):
    """1F1B: p - S micro-batches. Interleaved (Megatron-LM): 2(p-S-1) + (m-1)p + 1 chunks."""
    for stage in range(p):
        held = sum(n.whole for n in peak(steps(stage, p, m, n), lambda chunk: 1).values())
        warmup = 2 * (p - stage - 1) + (m - 1) * p if m > 1 else p - stage - 1
        assert held == min(warmup + 1, n * m)


@pytest.mark.parametrize(("p", "m"), [(8, 3), (35, 3), (4, 2)])
def test_the_first_interleaved_stage_holds_the_papers_factor(p, m):
    """Section 4.2.3: L(1 + (p-1)/(pm)) layers, of L/(pm) a chunk."""
    chunks = sum(n.whole for n in peak(interleaved(0, p, 8 * p, m), lambda chunk: 1).values())
    factor = paper.COUNTS["interleave"](paper.exact({"p": p, "m": m}))
    assert Fraction(chunks, p * m) == factor


@pytest.mark.parametrize(("p", "m"), [(8, 3), (35, 3), (4, 2)])
def test_rank_0_holds_2p_micro_batches_of_its_first_chunk_at_some_time(p, m):
    assert max(held[0].whole for held in holdings(interleaved(0, p, 8 * p, m))) == 2 * p


# Table 2 (page 9) times L, with the interleave factor of section 4.2.3, for table 3's models: GiB
# of the first stage's layers for TP, TP+SP, TP+selective, TP+SP+selective and full.
FIRST_STAGE_GIB = {
    "22b": (59.25, 39.5625, 29.25, 9.5625, 4.5),
    "175b": (552 * 124, 342 * 124, 312 * 124, 102 * 124, 48 * 124),  # MiB a layer, 124 layers
    "530b": (840 * 139, 490 * 139, 520 * 139, 170 * 139, 80 * 139),
    "1t": (131.25, 76.5625, 81.25, 26.5625, 12.5),
}


@pytest.mark.parametrize("model", FIRST_STAGE_GIB)
def test_first_stage_totals(model):
    scale = GIB if model in ("22b", "1t") else GIB // 1024
    settings = (
        {},
        {"sp": True},
        {"recompute": "selective"},
        {"sp": True, "recompute": "selective"},
        {"recompute": "full"},
    )
    for total, setting in zip(FIRST_STAGE_GIB[model], settings, strict=True):
        assert stages(load(model, **setting))[0].layers == total * scale


@pytest.mark.parametrize("model", ["22b", "175b", "530b", "1t"])
def test_equation_5_without_interleaving(model):
    config = load(model, sp=True, vpp=1)
    letters = paper.exact(symbols.values(config))
    assert stages(config)[0].layers == paper.EQUATIONS[5](letters)


def test_the_ends_of_section_4_3():
    """Embedding mask sbhp/t; final norm and projection 2sbh/t each; fp32 logits 4sbv/t."""
    one = load("22b", sp=True)
    letters = paper.exact(symbols.values(one))
    (held,) = stages(one)
    assert held.embedding == paper.COUNTS["embedding"](letters)
    ends = sum(paper.COUNTS[name](letters) for name in ("final_norm", "projection", "logits"))
    assert held.head == ends
    plain = stages(load("175b", sp=True, vpp=1))
    letters = paper.exact(symbols.values(load("175b", sp=True, vpp=1)))
    assert plain[0].embedding == paper.COUNTS["embedding"](letters)
    assert [held.head > 0 for held in plain] == [False] * 7 + [True]
    assert [held.embedding > 0 for held in plain] == [True] + [False] * 7


def test_freeing_outputs_saves_2sbh_a_micro_batch_in_flight():
    """Appendix B: 2.73 GB (GiB) on the first rank of the 530B model, none on the last."""
    config = load("530b", vpp=1, recompute="full")
    kept, freed = (stages(config, frees_outputs=frees) for frees in (False, True))
    saved = [a.total - b.total for a, b in zip(kept, freed, strict=True)]
    assert saved[0] == paper.COUNTS["freed_outputs"](paper.exact(symbols.values(config)))
    assert round(saved[0] / GIB, 2) == 2.73
    sbh = 2048 * 20480
    assert saved == [2 * sbh * (35 - stage) for stage in range(34)] + [0]


def test_full_recomputation_keeps_2sbh_a_layer_or_its_shard():
    for sp, name in ((False, "full"), (True, "full_sharded")):
        config = load("1t", recompute="full", sp=sp)
        letters = paper.exact(symbols.values(config))
        assert stages(config)[0].layers == paper.COUNTS[name](letters)


def test_windowed_layers_hold_their_masks_where_they_lie():
    """Gemma-3-27B's 62 layers on two stages: of each first five of six, 26 on either."""
    run = {"implementation": "transformers-sdpa", "pp": 2, "global_batch_size": 2}
    config = load("gemma-3-27b", seq_length=2048, **run)
    windowed, dense = (layer_bytes(config, kind=kind) for kind in ("windowed", "dense"))
    first, last = stages(config)
    assert first.layers == 2 * (26 * windowed + 5 * dense)
    assert last.layers == 26 * windowed + 5 * dense
    mask, heads = 2 * 2048**2, 4 * 2048 * (32 - 16) * 128
    assert windowed - dense == mask + heads


def test_the_head_is_on_the_last_chunk_and_sends_no_output():
    """Interleaved, 175B on 8 stages of 3 chunks: the last stage's last chunk alone has a head."""
    config = load("175b", sp=True)
    kept = stages(config, frees_outputs=False)
    last, first = kept[-1], kept[0]
    x = paper.exact(symbols.values(config))
    one_head = 2 * sum(paper.COUNTS[n](x) for n in ("final_norm", "projection")) / 2
    one_head += paper.COUNTS["logits"](x)
    assert last.head == last.microbatches[2] * one_head
    shard = 2 * 2048 * 12288 // 8
    assert last.outputs == shard * (last.microbatches[0] + last.microbatches[1])
    assert first.outputs == shard * sum(first.microbatches.values())


def test_accounting_reaches_the_ends():
    """Exact accounting adds 9 bytes a token for the loss's targets, and the norm's statistics."""
    paper_, exact = (stages(load("22b"), accounting)[0] for accounting in ("paper", "exact"))
    tokens = 2048 * 4
    assert exact.head - paper_.head == (8 + 1 + 4 + 4) * tokens
    assert exact.embedding - paper_.embedding == (8 + 1) * tokens


class TestParameters:
    @pytest.mark.parametrize("model", ["22b", "175b", "530b", "1t"])
    def test_the_papers_layer_has_12h2_and_13h(self, model):
        """Narayanan et al. 2021: 12Lh^2(1 + 13/(12h) + (v+s)/(12hL)); the last norm adds 2h."""
        config = load(model)
        x = symbols.values(config)
        h, layers = x["h"], x["L"]
        assert owned(layer_graph(config)) == 12 * h**2 + 13 * h
        expected = layers * (12 * h**2 + 13 * h) + (x["v"] + x["s"]) * h + 2 * h
        assert parameters(config) == expected

    @pytest.mark.parametrize(
        ("model", "published"),
        [  # public parameter counts (the rotary tables that some files store are not parameters)
            ("gpt2", 124439808),
            ("llama-2-7b", 6738415616),
            ("llama-2-13b", 13015864320),
            ("llama-2-70b", 68976648192),
            ("llama-3-8b", 8030261248),
            ("llama-3-70b", 70553706496),
            ("llama-3.1-405b", 405853388800),
            ("mistral-7b", 7248023552),
            ("qwen2.5-7b", 7615616512),
            ("qwen2.5-72b", 72706203648),
        ],
    )
    def test_published_totals(self, model, published):
        assert parameters(load(model)) == published

    def test_they_do_not_depend_on_the_ranks(self):
        assert parameters(load("llama-3-70b", tp=8, sp=True)) == parameters(load("llama-3-70b"))

    def test_the_papers_recipe_is_18_bytes(self):
        """Section 6, figure 1: 16-bit weights, fp32 gradients, and Adam's three fp32 copies."""
        assert RECIPES["paper"].total == 18


class TestMethods:
    """Full recomputation of some layers: 175b has 4 layers in each of a stage's 3 chunks."""

    def at(self, **settings):
        return stages(load("175b", recompute="full", **settings))[7].layers

    def alone(self, policy):
        return stages(load("175b", recompute=policy))[7].layers

    def test_uniform_keeps_one_input_for_every_few_layers(self):
        assert self.at(recompute_method="uniform", recompute_layers=1) == self.alone("full")
        assert 2 * self.at(recompute_method="uniform", recompute_layers=2) == self.alone("full")
        assert 4 * self.at(recompute_method="uniform", recompute_layers=4) == self.alone("full")
        assert 2 * self.at(recompute_method="uniform", recompute_layers=3) == self.alone("full")

    def test_block_recomputes_the_first_layers_of_each_chunk(self):
        some = self.at(recompute_method="block", recompute_layers=1)
        assert 4 * some == self.alone("full") + 3 * self.alone("none")
        assert self.at(recompute_method="block", recompute_layers=4) == self.alone("full")
        assert self.at(recompute_method="block") == self.alone("full")

    def test_no_layers_are_none_and_that_is_said(self):
        config = load("175b", recompute="full", recompute_layers=0)
        assert stages(config)[7].layers == self.alone("none")
        assert warnings(config) == ("--recompute-layers 0 recomputes nothing",)

    def test_the_flops_are_those_of_the_layers(self):
        config = load("175b", recompute="full", recompute_method="block", recompute_layers=1)
        assert 4 * flops.iteration(config).recomputed == (
            flops.iteration(load("175b", recompute="full")).recomputed
        )

    def test_a_number_without_full_recomputation_is_refused(self):
        with pytest.raises(ConfigError, match="needs --recompute full"):
            load("175b", recompute="selective", recompute_layers=2)

    def test_another_policy_forgets_the_files_number(self):
        own = load("175b", recompute="full", recompute_layers=2).run
        assert own.recomputing("selective").recompute_layers is None
