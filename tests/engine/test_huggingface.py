"""config.json files as people bring them: their traps, and any of them broken at random."""

import json
import os
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shared import CONFIGS
from words import assumed

from memcalc.config import load
from memcalc.config.families import FAMILIES
from memcalc.config.families.content import ALIASES
from memcalc.config.readers import hub, huggingface
from memcalc.config.readers.huggingface import REFUSED
from memcalc.errors import ConfigError, InputError, MemcalcError, UsageError


def read(name, /, **change):
    return huggingface.read(CONFIGS[name] | change, name)


def model(name, /, **change):
    return read(name, **change).model


def without(name, *keys):
    content = {key: value for key, value in CONFIGS[name].items() if key not in keys}
    return huggingface.read(content, name)


def test_no_family_is_both_read_and_refused_and_no_architecture_is_of_two():
    assert not FAMILIES.keys() & REFUSED.keys()
    architectures = [name for family in FAMILIES.values() for name in family.architectures]
    assert len(architectures) == len(set(architectures))


def test_a_model_remembers_its_family_which_changes_neither_equality_nor_print():
    found = model("mistral-7b")
    assert found.family == "mistral"
    unknown = replace(found, family=None)
    assert (found, hash(found), repr(found)) == (unknown, hash(unknown), repr(unknown))


class TestNames:
    @pytest.mark.parametrize(
        ("fact", "name"),
        [(fact, name) for fact, names in ALIASES.items() for name in names],
        ids=lambda value: value,
    )
    def test_one_fact_has_many_names(self, fact, name):
        config = {
            "model_type": "glm4_moe",
            "num_hidden_layers": 6,
            "hidden_size": 64,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "intermediate_size": 96,
            "vocab_size": 100,
            "max_position_embeddings": 50,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "first_k_dense_replace": 2,
            "num_nextn_predict_layers": 1,
            "moe_intermediate_size": 32,
        }
        if fact == "sliding_window":
            config |= {"model_type": "mixtral", "sliding_window": 9}
        (old,) = config.keys() & set(ALIASES[fact])
        renamed = {name if key == old else key: value for key, value in config.items()}
        assert huggingface.read(renamed, "x").model == huggingface.read(config, "x").model

    def test_two_names_that_disagree_are_refused(self):
        assert model("falcon-40b").heads == 128
        with pytest.raises(ConfigError, match="num_attention_heads 128 and n_head 64 contradict"):
            read("falcon-40b", n_head=64)
        with pytest.raises(ConfigError, match="sliding_window 4096 and sliding_window_size 2048"):
            read("gemma-2-27b", sliding_window_size=2048)

    def test_two_activations_may_be_one_and_may_not_be_two(self):
        assert model("gemma-2-27b", hidden_act="gelu").activation == "geglu"
        with pytest.raises(ConfigError, match="gelu_pytorch_tanh and hidden_act silu contradict"):
            read("gemma-2-27b", hidden_act="silu")

    def test_beside_dim_hidden_dim_is_the_mlps_width(self):
        native = {"model_type": "mistral", "dim": 4096, "hidden_dim": 14336, "n_heads": 32}
        found = huggingface.read(native | {"n_layers": 32, "n_kv_heads": 8}, "x").model
        assert (found.hidden_size, found.ffn_size) == (4096, 14336)
        alone = {"model_type": "gpt2", "hidden_dim": 768, "n_head": 12, "n_layer": 12}
        assert huggingface.read(alone, "x").model.hidden_size == 768


class TestNumbers:
    def test_digits_in_quotes_are_a_number_and_listed(self):
        found = read("llama-3-8b", num_hidden_layers="32")
        assert found.model.layers == 32
        assert "num_hidden_layers 32 (in quotes in the config)" in assumed(found)

    @pytest.mark.parametrize("value", ["32.0", "-32", "1e3", "auto", "0x20", "", "9" * 13, "٣"])
    def test_no_other_text_is(self, value):
        with pytest.raises(ConfigError, match="layers must be a whole number"):
            read("llama-3-8b", num_hidden_layers=value)

    def test_a_null_window_is_none_and_a_missing_one_is_the_familys(self):
        assert model("mistral-7b").sliding_window is None
        missing = without("mistral-7b", "sliding_window")
        assert missing.model.sliding_window == 4096
        assert "sliding_window 4096 (the family's default)" in assumed(missing)

    def test_a_null_query_rank_is_none_and_a_missing_one_is_the_familys(self):
        assert model("deepseek-v2-lite").latent.q_lora_rank is None
        assert without("deepseek-v2-lite", "q_lora_rank").model.latent.q_lora_rank == 1536

    def test_soft_caps_may_be_null(self):
        assert model("gemma-2-9b", attn_logit_softcapping=None).attention_softcap is None
        assert without("gemma-2-9b", "attn_logit_softcapping").model.attention_softcap == 50.0


class TestSizes:
    def test_a_missing_width_is_four_times_the_hidden_size_in_some_families_only(self):
        for name in ("gpt2", "bloom-176b", "falcon-7b"):
            assert model(name).ffn_size == 4 * model(name).hidden_size
        for name in ("llama-2-7b", "gpt-neox-20b", "qwen3-8b", "deepseek-v3"):
            with pytest.raises(InputError, match="the config needs intermediate_size: "):
                without(name, "intermediate_size")
        with pytest.raises(InputError, match="mlp_ratio alone does not give the width"):
            read("llama-2-7b", intermediate_size=None, mlp_ratio=8)

    def test_without_dense_layers_no_dense_width_is_asked_for(self):
        assert without("qwen3-235b-a22b", "intermediate_size").model.experts.ffn_size == 1536

    def test_the_family_says_what_is_gated_and_no_ratio_does(self):
        assert model("llama-2-7b").gated
        assert model("llama-2-7b", intermediate_size=4 * 4096).gated
        assert not model("gpt2", n_inner=2688).gated
        assert not model("starcoder2-7b", intermediate_size=int(3.5 * 4608)).gated
        assert model("gemma-2-27b").activation == "geglu"
        assert model("starcoder2-7b").activation == "gelu"

    def test_the_head_size_is_not_h_over_a(self):
        assert model("gemma-2-27b").head_size == 128 != 4608 // 32
        assert without("gemma-2-9b", "head_dim").model.head_size == 256
        assert model("qwen3-235b-a22b").head_size * 64 == 2 * 4096
        assert without("qwen3-8b", "head_dim").model.head_size == 128
        assert model("glm-4.5-air").heads * model("glm-4.5-air").head_size == 3 * 4096
        found = model("deepseek-v3", head_dim=64)  # as transformers writes it: the rotated part
        assert found.head_size == 192
        assert (found.latent.rope_head_size, found.latent.v_head_size) == (64, 128)

    def test_falcons_flags_say_how_many_key_and_value_heads(self):
        assert model("falcon-7b").kv_heads == 1
        assert model("falcon-7b", num_kv_heads=71).kv_heads == 1
        assert model("falcon-7b", multi_query=False).kv_heads == 71
        assert model("falcon-40b").kv_heads == 8
        assert model("falcon-40b", multi_query=False).kv_heads == 8
        assert model("falcon-40b").block == "parallel_two_norms"
        assert model("falcon-40b", num_ln_in_parallel_attn=1).block == "parallel"
        assert model("falcon-7b").block == "parallel"
        assert model("falcon-7b", parallel_attn=False).block == "pre_norm"
        assert model("falcon-7b", alibi=True).position == "alibi"

    def test_one_key_and_value_head_by_a_flag(self):
        config = CONFIGS["gpt2"] | {"model_type": "gpt_bigcode"}
        assert huggingface.read(config, "x").model.kv_heads == 1
        assert huggingface.read(config | {"multi_query": False}, "x").model.kv_heads == 12

    @pytest.mark.parametrize("family", REFUSED)
    def test_what_no_model_can_say_is_refused_with_the_reason(self, family):
        with pytest.raises(InputError, match=f"model_type '{family}' is not modeled: "):
            huggingface.read({"model_type": family, "d_model": 64, "attn_config": {}}, "x")


class TestParts:
    def test_the_language_model_is_read_where_it_stands(self):
        found = read("gemma-3-27b")
        assert (found.model.hidden_size, found.model.layers) == (5376, 62)
        (line,) = found.unmodelled
        assert line.startswith("vision_config is not modeled: only the language model")

    def test_the_outer_level_has_another_hidden_size(self):
        found = read("gemma-3-27b", hidden_size=1152, num_hidden_layers=27)
        assert found.model == model("gemma-3-27b")
        assert "hidden_size is ignored: text_config has the language model's value" in (
            found.unmodelled
        )

    def test_parts_may_stand_in_parts(self):
        outer = {"model_type": "omni", "thinker_config": CONFIGS["gemma-3-27b"]}
        assert huggingface.read(outer, "gemma-3-27b").model == model("gemma-3-27b")

    def test_a_part_that_is_no_object_is_refused(self):
        with pytest.raises(InputError, match="text_config must be an object"):
            read("gemma-3-27b", text_config=[5376])


class TestLayers:
    def test_layer_types_are_the_windows(self):
        assert model("gpt-oss-20b").window_layers == (1, 0) * 12
        assert without("gpt-oss-20b", "layer_types").model == model("gpt-oss-20b")
        assert model("gemma-2-27b").window_layers == (1, 0) * 23
        assert model("gemma-3-27b").window_layers == ((1,) * 5 + (0,)) * 10 + (1, 1)
        with pytest.raises(ConfigError, match="window_layers has 2 entries for 24 layers"):
            read("gpt-oss-20b", layer_types=["sliding_attention", "full_attention"])
        with pytest.raises(InputError, match="layer_types 'linear_attention' is not modeled"):
            read("gpt-oss-20b", layer_types=["linear_attention"] * 24)
        with pytest.raises(ConfigError, match="sliding_attention but sliding_window is missing"):
            read("gpt-oss-20b", sliding_window=None)

    def test_qwens_window_needs_its_flag(self):
        assert model("qwen2.5-7b").sliding_window is None
        on = model("qwen2.5-7b", use_sliding_window=True, max_window_layers=20)
        assert on.sliding_window == 131072
        assert on.window_layers == (0,) * 20 + (1,) * 8
        assert model("qwen2.5-7b", use_sliding_window=True).sliding_window is None
        mixed = model("qwen2-57b-a14b", use_sliding_window=True, max_window_layers=4)
        assert mixed.window_layers == (1, 0, 1, 0) + (0,) * 24
        every = model("qwen3-30b-a3b", use_sliding_window=True, sliding_window=8)
        assert all(every.window_layers)

    def test_layers_of_experts_follow_all_rules_at_once(self):
        first = model("deepseek-v3", num_hidden_layers=6)
        assert first.moe_layers == (0, 0, 0, 1, 1, 1)
        assert model("deepseek-v3", num_hidden_layers=6, moe_layer_freq=2).moe_layers == (
            (0, 0, 0, 0, 1, 0)
        )
        for said in ("[0]*3+[1]*3", [0, 0, 0, 1, 1, 1]):
            assert model("deepseek-v3", num_hidden_layers=6, moe_layer_freq=said) == first
        small = {"num_hidden_layers": 4}
        assert model("qwen3-30b-a3b", **small).moe_layers is None
        assert model("qwen3-30b-a3b", **small, mlp_only_layers=[1]).moe_layers == (1, 0, 1, 1)
        assert model("qwen3-30b-a3b", **small, decoder_sparse_step=2).moe_layers == (0, 1, 0, 1)
        types = ["dense", "sparse", "sparse", "dense"]
        assert model("glm-4.5", **small, mlp_layer_types=types).moe_layers == (0, 1, 1, 0)

    def test_no_experts_are_a_dense_model(self):
        dense = model("qwen2-57b-a14b", num_experts=0)
        assert dense.experts is None
        assert dense.ffn_size == 18944
        assert model("deepseek-v3", n_routed_experts=None).experts is None

    def test_gpt_neos_local_layers_are_listed_in_groups(self):
        config = CONFIGS["gpt2"] | {"model_type": "gpt_neo", "window_size": 256}
        groups = [[["global", "local"], 5], [["global"], 2]]
        found = huggingface.read(config | {"attention_types": groups}, "x").model
        assert found.window_layers == (0, 1) * 5 + (0, 0)
        assert huggingface.read(config, "x").model.window_layers == (0, 1) * 6
        with pytest.raises(InputError, match="attention_types"):
            huggingface.read(config | {"attention_types": [[["global"], 10**9]]}, "x")


class TestExperts:
    def test_the_width_of_an_expert_has_a_key_of_its_own_or_not(self):
        mixtral, qwen = model("mixtral-8x7b"), model("qwen3-235b-a22b")
        assert (mixtral.ffn_size, mixtral.experts.ffn_size) == (14336, 14336)
        assert (qwen.ffn_size, qwen.experts.ffn_size) == (12288, 1536)

    def test_shared_experts_are_counted_or_have_a_width(self):
        assert model("deepseek-v2-lite").experts.shared_ffn_size == 2 * 1408
        assert model("deepseek-v3", n_shared_experts=None).experts.shared_ffn_size is None
        qwen = model("qwen2-57b-a14b").experts
        assert (qwen.shared_ffn_size, qwen.shared_gate) == (20480, True)

    def test_the_router_is_the_familys_or_as_is_said(self):
        assert model("deepseek-v2-lite").experts.router == "softmax"
        assert without("deepseek-v3", "scoring_func").model.experts.router == "sigmoid"
        assert without("glm-4.5", "scoring_func").model.experts.router == "sigmoid"
        assert model("deepseek-v3", scoring_func="softmax").experts.router == "softmax"
        assert model("gpt-oss-20b").experts.router_bias

    def test_layers_for_further_tokens_are_read(self):
        assert model("deepseek-v3").mtp_layers == model("glm-4.5").mtp_layers == 1
        assert model("kimi-k2").mtp_layers == 0


class TestFamilies:
    def test_biases_are_the_familys(self):
        def biases(name, /, **change):
            found = model(name, **change)
            return found.qkv_bias, found.proj_bias, found.mlp_bias

        assert biases("gpt-oss-20b") == (True, True, True)
        assert biases("glm-4.5") == (True, False, False)
        assert biases("qwen2-57b-a14b") == (True, False, False)
        assert biases("phi-2") == biases("opt-66b") == biases("bert-large") == (True,) * 3
        assert biases("falcon-7b") == (False,) * 3
        assert biases("falcon-7b", bias=True) == (True,) * 3
        assert biases("gpt-neox-20b", attention_bias=False) == (False, False, True)

    def test_embeddings_are_tied_as_the_familys_class_does_it(self):
        def tied(name):
            return without(name, "tie_word_embeddings").model.tied_embeddings

        assert not any(tied(name) for name in ("llama-3-8b", "gpt-neox-20b", "phi-2", "phi-4"))
        assert all(tied(name) for name in ("gemma-2-9b", "command-r", "opt-66b", "falcon-7b"))

    def test_heads_are_normed_where_the_family_does_it(self):
        assert model("qwen3-8b").qk_norm
        assert model("gemma-3-27b").qk_norm
        assert model("glm-4.5").qk_norm
        assert not model("glm-4.5-air").qk_norm
        assert not model("qwen2.5-7b").qk_norm
        assert model("command-r", use_qk_norm=True).qk_norm

    def test_a_bert_attends_both_ways_unless_it_decodes(self):
        assert (model("bert-large").block, model("bert-large").causal) == ("post_norm", False)
        assert model("bert-large", is_decoder=True).causal
        assert model("opt-66b", do_layer_norm_before=False).block == "post_norm"

    @pytest.mark.parametrize(
        ("name", "change", "line"),
        [
            ("opt-66b", {"word_embed_proj_dim": 512}, "word_embed_proj_dim is not modeled"),
            ("mixtral-8x7b", {"router_jitter_noise": 0.1}, "router_jitter_noise is not modeled"),
            ("llama-3-8b", {"clip_qkv": 8.0}, "clip_qkv is not modeled"),
            ("bert-large", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ],
    )
    def test_what_changes_memory_and_is_not_modelled_is_named(self, name, change, line):
        assert any(said.startswith(line) for said in read(name, **change).unmodelled)


VALUES = st.one_of(
    *(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=9)),
    st.sampled_from([0, 1, 2, "64", "silu", "[0]*3", [], {}, [0, 1], ["full_attention"], [[1], 2]]),
    st.lists(st.integers(0, 3), max_size=4),
    st.just([[[["global"], 10**7]]]),
)
KEYS = sorted(
    {key for config in CONFIGS.values() for key in config}
    | {name for names in ALIASES.values() for name in names}
    | {"text_config", "attention_types", "attention_layers", "mlp_layer_types"}
)


@st.composite
def broken(draw):
    """A public config with a few of its keys dropped, renamed, or given other values."""
    config = dict(CONFIGS[draw(st.sampled_from(sorted(CONFIGS)))])
    for _ in range(draw(st.integers(1, 4))):
        key = draw(st.sampled_from(sorted(config) or KEYS))
        match draw(st.sampled_from(["drop", "rename", "set", "add", "odd", "nest", "family"])):
            case "drop":
                config.pop(key, None)
            case "rename":
                config[draw(st.sampled_from(KEYS))] = config.pop(key, None)
            case "set":
                config[key] = draw(VALUES)
            case "add":
                config[draw(st.sampled_from(KEYS))] = draw(VALUES)
            case "odd":
                config[draw(st.text(max_size=60))] = draw(VALUES)
            case "nest":
                config = {"text_config": config, key: config.get(key)}
            case "family":
                config["model_type"] = draw(st.sampled_from(sorted(FAMILIES)))
    return config


@settings(
    max_examples=int(os.environ.get("MEMCALC_FUZZ", "500")),
    derandomize="MEMCALC_FUZZ" not in os.environ,
    deadline=None,
    database=None,
)
@given(broken())
def test_a_broken_config_is_a_source_or_one_clear_line(config):
    try:
        found = huggingface.read(config, "x")
        lines = [*assumed(found), *found.unmodelled]
        assert found.model is not None
    except (ConfigError, InputError) as error:
        lines = [str(error)]
    for line in lines:
        assert line.isprintable()
        assert 0 < len(line) < 1000


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """A cache of the Hub with one repository in it, and no way out."""
    folder = tmp_path / "models--meta-llama--Llama-3-8B"
    for name, content in {
        "refs/main": COMMIT,
        f"snapshots/{COMMIT}/config.json": json.dumps(CONFIGS["llama-3-8b"]),
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    from huggingface_hub import constants, file_download

    for module in (constants, file_download.constants):
        monkeypatch.setattr(module, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", True)
    return folder


def asks(monkeypatch, error):
    """The URLs that the Hub is asked for, which answers with an error, or not."""
    asked = []

    def metadata(url):
        asked.append(url)
        if error is not None:
            raise error

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", metadata)
    return asked


class TestHub:
    @pytest.mark.parametrize("revision", ["", "@main", f"@{COMMIT}"])
    def test_a_cached_config_is_read_without_the_network(self, cached, revision):
        config = load(f"hf:meta-llama/Llama-3-8B{revision}")
        assert config.model.name == "meta-llama/Llama-3-8B"
        assert config.model.ffn_size == load("llama-3-8b").model.ffn_size

    def test_what_is_not_there_is_said_in_one_line(self, cached):
        with pytest.raises(InputError, match=r"^hf:org/other: .*cache.*") as caught:
            load("hf:org/other")
        assert "\n" not in str(caught.value)
        with pytest.raises(InputError, match=r"^hf:meta-llama/Llama-3-8B@v2: "):
            load("hf:meta-llama/Llama-3-8B@v2")

    def test_a_config_that_cannot_be_names_its_repository(self, cached):
        path = cached / "snapshots" / COMMIT / "config.json"
        path.write_text('{"model_type": "mamba"}')
        with pytest.raises(InputError, match=r"^hf:meta-llama/Llama-3-8B: model_type 'mamba'"):
            load("hf:meta-llama/Llama-3-8B")
        path.write_text("{")
        with pytest.raises(InputError, match=r"^hf:meta-llama/Llama-3-8B: not JSON"):
            load("hf:meta-llama/Llama-3-8B")

    @pytest.mark.parametrize("problem", hub.PROBLEMS)
    def test_every_error_of_the_hub_is_one_line(self, monkeypatch, problem):
        from huggingface_hub import errors

        kind = getattr(errors, problem)
        error = kind.__new__(kind)

        asks(monkeypatch, error)
        with pytest.raises(InputError) as caught:
            load("hf:org/name")
        assert str(caught.value) == f"hf:org/name: {hub.PROBLEMS[problem]}"

    def test_any_other_error_is_one_line_too(self, monkeypatch):
        def download(*args, **kwargs):
            raise OSError("no space\nleft")

        asks(monkeypatch, None)
        monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
        with pytest.raises(
            InputError, match=r"^hf:org/name: cannot be downloaded: OSError no space$"
        ):
            load("hf:org/name")

    def test_a_hub_out_of_reach_is_asked_once_and_said_in_one_line(
        self, tmp_path, monkeypatch, memcalc
    ):
        from huggingface_hub import constants, file_download, hf_hub_url

        monkeypatch.setattr(file_download.constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        asked = asks(monkeypatch, RuntimeError("Name or service not known"))
        outcome = memcalc("ledger hf:org/name")
        assert (outcome.status, outcome.out) == (2, "")
        said = "not in the local cache, and the Hub cannot be reached"
        assert outcome.err == f"memcalc: hf:org/name: {said}\n"
        assert asked == [hf_hub_url("org/name", "config.json")]

    def test_a_hub_that_does_not_answer_leaves_the_cache(self, cached, monkeypatch):
        asks(monkeypatch, RuntimeError("Name or service not known"))
        assert load("hf:meta-llama/Llama-3-8B").model.name == "meta-llama/Llama-3-8B"

    def test_the_hubs_own_lines_are_silent_only_meanwhile(self, monkeypatch):
        from huggingface_hub import logging

        logging.set_verbosity_warning()
        during = []

        def download(*args, **kwargs):
            during.append(logging.get_verbosity())
            raise OSError

        asks(monkeypatch, None)
        monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
        with pytest.raises(InputError):
            load("hf:org/name")
        assert (during, logging.get_verbosity()) == ([logging.ERROR], logging.WARNING)

    def test_without_huggingface_hub_the_extra_is_named(self, monkeypatch):
        monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
        with pytest.raises(UsageError, match=r"pip install '\.\[hub\]'"):
            load("hf:org/name")

    @pytest.mark.parametrize(
        "target",
        [
            "hf:",
            "hf:a/b/c",
            "hf:../x",
            "hf:/etc/passwd",
            "hf:a/b@",
            "hf:a b",
            "hf:a/b@x y",
            "hf:a/",
        ],
    )
    def test_what_is_no_repository_is_refused_before_anything_is_asked(self, target):
        with pytest.raises(ConfigError, match="must have the form hf:org/name"):
            load(target)

    def test_the_command_line_takes_it(self, cached, memcalc):
        assert memcalc("layer hf:meta-llama/Llama-3-8B").status == 0
        outcome = memcalc("layer hf:org/other")
        assert outcome.status == 2
        assert isinstance(outcome.err, str)
        assert outcome.err.count("\n") == 1
        assert issubclass(InputError, MemcalcError)
