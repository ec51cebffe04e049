"""Files: what is read from them, and how a bad one is refused."""

import json
import os

import pytest
from words import assumed

import memcalc
from memcalc.answers.warnings import warnings
from memcalc.config import load
from memcalc.errors import ConfigError, InputError, MemcalcError

LLAMA_2_70B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vocab_size": 32000,
}
GPT2 = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_inner": None,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "vocab_size": 50257,
}
NATIVE = {
    "memcalc": 1,
    "model": {"layers": 96, "hidden_size": 12288, "heads": 96},
    "parallel": {"tp": 8, "sp": True},
    "run": {"seq_length": 2048, "implementation": "paper", "dropout": 0.1},
}


@pytest.fixture
def write(tmp_path):
    def write(content, name="config.json"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        return str(path)

    return write


class TestHuggingFace:
    def test_llama_2_70b_is_the_catalogues(self, write):
        config = load(write(LLAMA_2_70B), tp=8, sp=True, seq_length=4096, micro_batch_size=1)
        assert memcalc.layer_bytes(config) == 134 * 2**20
        ours = load("llama-2-70b", tp=8, sp=True)
        assert memcalc.ledger(config, "exact").rows == memcalc.ledger(ours, "exact").rows

    def test_gpt2_is_the_catalogues(self, write):
        config = load(write(GPT2))
        assert config.model.ffn_size == 4 * 768
        assert "ffn_size 3072 (4 x hidden_size, missing in the config)" in assumed(config)
        assert memcalc.ledger(config, "exact").rows == memcalc.ledger(load("gpt2"), "exact").rows

    def test_a_folder_stands_for_its_config(self, write, tmp_path):
        write(LLAMA_2_70B)
        config = load(str(tmp_path))
        assert config.model.name == tmp_path.name
        assert config.model.hidden_size == 8192

    def test_one_fact_has_many_names(self, write):
        renamed = {
            "model_type": "llama",
            "n_layers": 2,
            "dim": 64,
            "n_heads": 4,
            "n_kv_heads": 2,
            "ffn_dim": 128,
            "max_seq_len": 256,
        }
        model = load(write(renamed)).model
        assert (model.layers, model.hidden_size, model.heads) == (2, 64, 4)
        assert (model.kv_heads, model.ffn_size, model.max_seq_length) == (2, 128, 256)

    def test_two_names_that_agree_are_one_and_that_disagree_are_refused(self, write):
        assert load(write(LLAMA_2_70B | {"n_head": 64})).model.heads == 64
        with pytest.raises(ConfigError, match="num_attention_heads 64 and n_head 32 contradict"):
            load(write(LLAMA_2_70B | {"n_head": 32}))

    def test_a_null_says_nothing(self, write):
        nulls = {"num_key_value_heads": None, "head_dim": None, "hidden_act": None}
        model = load(write(LLAMA_2_70B | nulls)).model
        assert (model.kv_heads, model.head_size, model.activation) == (64, 128, "swiglu")

    def test_the_head_size_may_be_free_of_h_over_a(self, write):
        assert load(write(LLAMA_2_70B | {"head_dim": 256})).model.head_size == 256

    def test_families_have_their_biases(self, write):
        def biases(config):
            model = load(write(config)).model
            return model.qkv_bias, model.proj_bias, model.mlp_bias

        assert biases(LLAMA_2_70B) == (False, False, False)
        assert biases(LLAMA_2_70B | {"attention_bias": True, "mlp_bias": True}) == (True,) * 3
        assert biases(LLAMA_2_70B | {"model_type": "qwen2"}) == (True, False, False)
        assert biases(GPT2) == (True, True, True)

    def test_the_activation_says_how_the_gate_is_activated(self, write):
        def activation(config, key, name):
            return load(write(config | {key: name})).model.activation

        assert activation(LLAMA_2_70B, "hidden_act", "gelu_pytorch_tanh") == "geglu"
        assert activation(GPT2, "activation_function", "gelu") == "gelu"
        assert activation(GPT2, "activation_function", "swish") == "silu"
        assert activation(GPT2, "activation_function", "gelu_python_tanh") == "gelu_new"
        for config, key, name in [
            (GPT2, "activation_function", "relu6"),
            (LLAMA_2_70B, "hidden_act", "gelu_new"),
        ]:
            with pytest.raises(InputError, match=f"activation '{name}' is not modeled"):
                activation(config, key, name)

    def test_dropout_is_what_the_file_says(self, write):
        assert load(write(LLAMA_2_70B)).model.attention_dropout == 0.0
        assert load(write(GPT2 | {"resid_pdrop": 0.0})).model.hidden_dropout == 0.0
        assert load(write(GPT2)).model.attention_dropout == 0.1

    def test_the_family_may_be_told_by_the_architecture_alone(self, write):
        config = {key: value for key, value in LLAMA_2_70B.items() if key != "model_type"}
        assert load(write(config)).model.norm == "rmsnorm"

    def test_another_family_is_refused_by_name(self, write):
        with pytest.raises(InputError, match="model_type 'lama' is not modeled; did you mean"):
            load(write(LLAMA_2_70B | {"model_type": "lama"}))

    def test_what_a_config_leaves_out_is_the_familys_and_listed(self, write):
        silent = {k: v for k, v in GPT2.items() if not k.endswith("pdrop")}
        config = load(write(silent))
        assert (config.model.attention_dropout, config.model.hidden_dropout) == (0.1, 0.1)
        assert "resid_pdrop 0.1 (the family's default)" in assumed(config)
        mistral = LLAMA_2_70B | {"model_type": "mistral", "num_key_value_heads": None}
        config = load(write(mistral))
        assert config.model.kv_heads == 8
        assert "kv_heads 8 (the family's default)" in assumed(config)
        assert (config.model.qkv_bias, config.model.proj_bias) == (False, False)

    def test_keys_that_nobody_knows_are_named(self, write):
        odd = {"use_qk_norm": True, "foo_bar": 3, "gradient_checkpointing": True, "off": False}
        lines = warnings(load(write(LLAMA_2_70B | odd)))
        assert lines == (
            "gradient_checkpointing is not modeled: set --recompute full",
            "unknown to memcalc, ignored: foo_bar, use_qk_norm",
        )
        assert not warnings(load(write(LLAMA_2_70B)))
        assert not warnings(load(write(GPT2)))

    def test_what_is_not_modelled_is_warned_about_by_name(self, write):
        config = load(write(LLAMA_2_70B | {"quantization_config": {"bits": 4}}))
        assert warnings(config)[0].startswith("quantization_config is not modeled")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"hidden_size": None}, "the config needs hidden_size"),
            ({"hidden_size": "8k"}, "hidden_size must be a whole number"),
            ({"hidden_size": -1}, "hidden_size must be a whole number"),
            ({"hidden_size": 8192.5}, "hidden_size must be a whole number"),
            ({"num_attention_heads": [64]}, "heads must be a whole number"),
            ({"attention_bias": "yes"}, "qkv_bias must be true or false"),
            ({"attention_dropout": "high"}, "attention_dropout must be a number"),
            ({"model_type": None, "architectures": []}, "names no model family"),
            ({"model_type": ["llama"]}, "names no model family"),
            ({"hidden_act": {"a": 1}}, "activation \"{'a': 1}\" is not modeled"),
        ],
    )
    def test_bad_values_are_refused_with_the_file(self, write, change, message):
        path = write(LLAMA_2_70B | change)
        with pytest.raises(MemcalcError, match=message) as caught:
            load(path)
        assert str(caught.value).startswith(f"{path}: ")
        assert "\n" not in str(caught.value)

    def test_no_context_length_asks_for_one(self, write):
        config = {k: v for k, v in LLAMA_2_70B.items() if k != "max_position_embeddings"}
        with pytest.raises(ConfigError, match="has no context length: set --seq-length"):
            load(write(config))
        assert load(write(config), seq_length=16).run.seq_length == 16


class TestNative:
    def test_it_says_everything(self, write):
        config = load(write(NATIVE, "gpt3.json"))
        assert config.model.name == "gpt3"
        assert config.parallel.sp
        assert config.model.attention_dropout == 0.1
        assert memcalc.layer_bytes(config) == 342 * 2**20

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"memcalc": 2}, '"memcalc" must be 1'),
            ({"memcalc": True}, '"memcalc" must be 1'),
            ({"modle": {}}, "unknown key 'modle'; did you mean 'model'"),
            ({"model": {"hiden_size": 1}}, "unknown key 'hiden_size'; did you mean 'hidden_size'"),
            ({"model": []}, "'model' must be an object"),
            ({"model": {"layers": 1}}, "model needs 'hidden_size'"),
            ({"model": None}, "'model' must be an object"),
            ({"run": {"seqlength": 1}}, "unknown key 'seqlength'"),
            ({"model": {"foo": 1}}, r"^.{1,200}unknown key 'foo'; the nearest of \d+ are .{1,60}$"),
            ({"parallel": {"tp": "8"}}, "tp must be a whole number"),
            ({"run": {"seq_length": 8, "recompute": 7}}, "recompute must be a policy"),
            ({"run": {"seq_length": 8, "implementation": ["paper"]}}, "implementation"),
        ],
    )
    def test_what_it_may_not_say_is_refused(self, write, change, message):
        with pytest.raises(MemcalcError, match=message):
            load(write(NATIVE | change))

    def test_what_its_fields_cannot_say_is_warned_about(self, write):
        lines = ["its embedding is not modeled", "nor is its head"]
        assert warnings(load(write(NATIVE | {"unmodelled": lines}))) == tuple(lines)
        for bad in ("one line", [1], ["two\nlines"], [[]], ["x"] * 101):
            with pytest.raises(MemcalcError, match=r"unmodelled'? must be"):
                load(write(NATIVE | {"unmodelled": bad}))

    def test_the_catalogue_and_the_same_file_agree(self, write):
        run = {"seq_length": 2048, "implementation": "paper", "dropout": 0.1, "precision": "fp16"}
        config = load(write(NATIVE | {"run": run, "parallel": {"tp": 8}}))
        assert memcalc.layer(config).column("bytes") == memcalc.layer(load("175b")).column("bytes")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"  \n ", "the file is empty"),
        (b"{", "not JSON: "),
        (b'{"memcalc": 1,}', "not JSON: "),
        (b"[1, 2]", "must be a JSON object, not a list"),
        (b"7", "must be a JSON object, not a int"),
        (b"\xff\xfe\x00", "not UTF-8 text"),
        (b"{}", "unknown format; known formats"),
        (b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}", "nested more than 32 levels deep"),
        (b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested more than 32 levels deep"),
        (b'{"memcalc": ' + b"9" * 10_000 + b"}", "digits"),
        (b'{"memcalc": 1, "memcalc": 2}', "'memcalc' is given twice"),
        (b'{"memcalc": "' + b"x" * 50 * 10**6 + b'"}', "larger than 4 MiB"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else len(value),
)
def test_a_bad_file_is_one_clear_line(write, content, message):
    path = write(content)
    with pytest.raises(MemcalcError, match=message) as caught:
        load(path)
    assert path in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_byte_order_mark_is_no_mistake(write):
    assert load(write(b"\xef\xbb\xbf" + json.dumps(NATIVE).encode())).model.heads == 96


def test_what_is_no_file_is_said_to_be_none(tmp_path):
    with pytest.raises(InputError) as caught:
        load(tmp_path / "nothing.json")
    assert str(caught.value) == f"{tmp_path / 'nothing.json'}: no such file"
    with pytest.raises(InputError, match="the folder has no config"):
        load(str(tmp_path))
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(InputError, match="not a regular file"):
        load(str(tmp_path / "pipe.json"))
    with pytest.raises(InputError, match="not a regular file"):
        load("/dev/zero")
    with pytest.raises(InputError, match="no such file"):
        load("x" * 10_000 + ".json")
    with pytest.raises(InputError, match="no such file"):
        load("a\0b.json")
    with pytest.raises(ConfigError, match="neither a model of the catalog nor a file"):
        load("x" * 5000)
