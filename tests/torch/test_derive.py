"""``derive``: closed forms from PyTorch, against the paper, the ledger and PyTorch itself."""

import json
import math
import sys
import textwrap
import warnings
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import pytest
import sympy
import torch
from alike import one_of_each
from shared import CONFIGS, is_refused, is_valid, python
from torch import nn
from torch.nn import functional

import memcalc as library
from memcalc import paper, symbols
from memcalc.analysis.recurrent import costs
from memcalc.answers.layer import TECHNIQUES
from memcalc.cli import derive as cli
from memcalc.config import IMPLEMENTATIONS, catalog, load
from memcalc.errors import InputError, NoLayerError, UsageError
from memcalc.formulas import Formula, layer_formula
from memcalc.validation.deriving import beside, derivation, whole
from memcalc.validation.deriving import derive as module
from memcalc.validation.deriving.derivation import DeriveError, derive, kept_bytes
from memcalc.validation.deriving.derive import derive_layer, derive_model
from memcalc.validation.deriving.interpolation import interpolated
from memcalc.validation.deriving.symbolic_layer import derived_layer
from memcalc.validation.layers.families import FAMILIES
from memcalc.validation.layers.modules import ACTIVATIONS, lacking
from memcalc.validation.measuring.measure import measure

EAGER, SDPA = "transformers-eager", "transformers-sdpa"
WITHOUT_SDPA = ("bloom", "gemma2", "gpt_oss")
LETTERS = SimpleNamespace(**{x.letter: symbols.symbol(x.letter) for x in symbols.LETTERS})
s, b, t = LETTERS.s, LETTERS.b, LETTERS.t

# Small models of four layers, with a window; the kinds of their layers from its size on.
SMALL = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PLAIN = {"windowed": "dense", "windowed_moe": "moe", "dense": "dense"}
QWEN = {"use_sliding_window": True, "max_window_layers": 1}
WINDOWED = {
    "mistral": ({"windowed"}, {"num_key_value_heads": 1}),
    "phi3": ({"windowed"}, {"num_key_value_heads": 4}),
    "starcoder2": ({"windowed"}, {}),
    "qwen2": ({"windowed", "dense"}, QWEN),
    "qwen3": ({"windowed", "dense"}, QWEN),
    "gemma3_text": ({"windowed", "dense"}, {"sliding_window_pattern": 2}),
    "mixtral": ({"windowed_moe"}, {"num_local_experts": 4}),
    "qwen3_moe": (
        {"windowed", "windowed_moe"},
        QWEN | {"num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [0]},
    ),
}

OWN = one_of_each((name for name in catalog.names() if not lacking(load(name))), ranks=(2,))

# What transformers' layers keep beyond the ledger's, by family, attention and kind, and why.
DIFFERENCES = {
    # the two int64 indices by which each layer takes key and value off one product
    ("falcon", "dense"): 16,
    # each first layer of a stack keeps the places in the table of relative positions
    ("t5", "encoder 0"): 8 * s**2,
    ("t5", "decoder 0"): 8 * s**2,
}


# Families whose name and file differ outside the layers: rotary tables, the embedding's dropout.
OTHERWISE_OUTSIDE = ("phi", "starcoder2")


def name_and_file(family, folder):
    """A catalogue name of a family and the config.json of that model, each with its settings."""
    name = next(x for x in CONFIGS if whole.content_of(CONFIGS[x])["model_type"] == family)
    path = folder / "config.json"
    path.write_text(json.dumps(CONFIGS[name]))
    settings = {} if family == "vit" else {"seq_length": 64}
    return [(x, settings | {"implementation": usual(family)}) for x in (name, str(path))]


def usual(family):
    return EAGER if family in WITHOUT_SDPA else SDPA


def expected(family, implementation, kind, model):
    """The difference of a layer from the ledger."""
    # under sdpa the first cross-attention makes a bias of zeros, for all of them
    zeros = 2 * model.heads * s**2 if (implementation, kind) == (SDPA, "decoder 0") else 0
    return DIFFERENCES.get((family, kind), 0) + zeros


class TestThePaper:
    @pytest.mark.parametrize("model", ["22b", "175b", "530b", "1t"])
    @pytest.mark.parametrize("technique", TECHNIQUES, ids=lambda technique: technique.name)
    def test_table_2_is_derived_from_pytorch(self, model, technique):
        """And beside it the norms' fp32 statistics, which the paper leaves out by name."""
        config = technique.of(load(model, tp=8 if technique.tensor_parallel else 1))
        derived = derived_layer(config)
        assert derived.method == "symbolic"
        printed = paper.TABLE_2[technique.name](LETTERS)
        statistics = 16 * s * b / (t if config.parallel.sp else 1)
        rest = 0 if technique.name == "full" else statistics
        assert sympy.simplify(derived.formula.expression - printed - rest) == 0

    @pytest.mark.parametrize(
        ("number", "settings", "layers"),
        [
            (1, {"tp": 1}, 1),
            (2, {}, 1),
            (4, {"sp": True}, 1),
            (6, {"sp": True, "recompute": "selective"}, LETTERS.L),
        ],
    )
    def test_the_equations_are_derived_from_pytorch(self, number, settings, layers):
        config = load("175b", **settings)
        derived = derived_layer(config).formula.expression * layers
        statistics = 16 * s * b * layers / (t if config.parallel.sp else 1)
        assert sympy.simplify(derived - paper.EQUATIONS[number](LETTERS) - statistics) == 0

    def test_the_mask_is_there_anyway(self):
        masks = [x for x in derived_layer(load("175b")).tensors if x.kind == "buffer"]
        assert [(x.name, x.formula) for x in masks] == [("later", Formula(s**2))]

    def test_its_items_are_derived_one_by_one(self):
        x = LETTERS
        kept = [x.formula for x in derived_layer(load("175b", tp=1)).tensors]
        items = {name: Formula(printed(x)) for name, printed in paper.ITEMS.items()}
        query_and_key = Formula(items.pop("query_and_key").expression / 2)
        for item in (*items.values(), query_and_key):
            assert item in kept


class TestOwnLayers:
    @pytest.mark.parametrize("name", OWN)
    def test_every_kind_of_layer_of_the_catalogue_is_the_ledgers(self, name):
        """Each tensor and their sum, in all sizes, under tensor and sequence parallelism."""
        heads = load(name).model.heads
        tp = next(n for n in (2, 3, 5, 71) if heads % n == 0)
        sharded = {"tp": tp, "sp": True, "recompute": "selective", "seq_length": 60 * tp}
        for settings in ({"tp": 1}, {"tp": tp}, sharded):
            report = derive_layer(load(name, **settings), "ledger")
            assert report.failures == ()
            assert {str(each) for each in report.column("difference")} == {"0"}
            assert report.notes[0].startswith("method: symbolic")

    @pytest.mark.parametrize("recompute", ["none", "full", "save_linear", "mlp", "norm,mlp"])
    @pytest.mark.parametrize("sp", [False, True])
    @pytest.mark.parametrize("name", ["175b", "llama-3-70b"])
    def test_under_every_policy(self, name, sp, recompute):
        if recompute == "save_linear":
            sp = False
        config = load(name, tp=2 if recompute != "save_linear" else 1, sp=sp, recompute=recompute)
        assert derive_layer(config, "ledger").failures == ()

    @pytest.mark.parametrize("implementation", ["megatron", "megatron-local", "torch"])
    @pytest.mark.parametrize("tp", [1, 4, 16])
    def test_under_every_implementation(self, implementation, tp):
        """Also where 8 key and value heads are copied to 16 ranks."""
        config = load("llama-3-70b", tp=tp, implementation=implementation)
        report = derive_layer(config, "ledger")
        assert report.failures == ()
        held = {
            1: "symbolic",
            4: "symbolic; the formula holds for k >= t",
            16: "symbolic; the formula holds for k <= t",
        }
        assert report.notes[0] == f"method: {held[tp]}"

    def test_a_number_is_the_formula_at_the_models_sizes(self):
        config = load("llama-3-70b", tp=8, sp=True)
        report = derive_layer(config)
        assert report.column("bytes")[-1] == library.layer_bytes(config, "exact")
        assert sum(report.column("bytes")[:-1]) == report.column("bytes")[-1]

    def test_a_wrong_ledger_is_caught(self, monkeypatch):
        """One that forgets the MLP's dropout: its mask is what PyTorch keeps beyond."""
        config = load("175b")
        forgets = replace(config, model=replace(config.model, hidden_dropout=0.0))
        rows = beside.beside_layer(forgets, derived_layer(config).tensors)
        wrong = {row.tensor: str(row.difference) for row in rows if str(row.difference) != "0"}
        assert wrong == {"s b h bool": "b*h*s", "total": "2*b*h*s"}

    @pytest.mark.parametrize(
        ("name", "settings", "message"),
        [
            ("deepseek-v3", {}, "PyTorch layer does not support experts"),
            ("llama-3-8b", {"implementation": EAGER}, "needs --from transformers"),
            ("llama-3-8b", {"precision": "fp8"}, "fp8"),
            ("llama-3-8b", {"implementation": "paper"}, "runs GQA with unfused attention"),
        ],
    )
    def test_what_no_module_has_is_refused(self, name, settings, message):
        with pytest.raises(UsageError, match=message):
            derive_layer(load(name, **settings))

    def test_activations_that_are_derived_are_all_there_are(self):
        for activation in ACTIVATIONS:
            config = load("llama-3-8b" if activation.endswith("glu") else "gpt2")
            config = replace(config, model=replace(config.model, activation=activation))
            assert derive_layer(config, "ledger").failures == ()


def content_and_run(name, implementation, sequences=2):
    length = 197 if name.startswith("vit") else 64
    settings = {"seq_length": length, "micro_batch_size": sequences}
    config = load(name, **settings, implementation=implementation)
    return whole.content_of(CONFIGS[name]), config


class TestHuggingFace:
    @pytest.mark.parametrize("implementation", [EAGER, SDPA])
    @pytest.mark.parametrize("name", one_of_each(CONFIGS))
    def test_every_kind_of_model_is_derived_and_is_the_ledgers(self, name, implementation):
        """And its numbers are PyTorch's at two sizes that were not used to derive them.

        With the family's usual attention the formula must hold for one sequence too.
        """
        kind = whole.content_of(CONFIGS[name])["model_type"]
        sequences = 1 if implementation == usual(kind) else 2
        if implementation == SDPA and kind in WITHOUT_SDPA:
            with pytest.raises(NoLayerError, match="choose --implementation transformers-eager"):
                content_and_run(name, implementation, sequences)
            content, config = content_and_run(name, EAGER, sequences)
            run = replace(config.run, implementation=IMPLEMENTATIONS[SDPA])
            with pytest.raises(NoLayerError, match=f"{kind} has no sdpa attention in transformers"):
                whole.derived_model(content, run)
            return
        content, config = content_and_run(name, implementation, sequences)
        found = whole.derived_model(content, config.run)
        derived, model, _ = found
        for length, number in ((40, 2), (200, 5)):
            sizes = {"s": length, "b": number}
            sizes = {letter: sizes[letter] for letter in derived.sizes}
            measured = kept_bytes(model.build, sizes, "cuda", "meta")
            assert derived.value(**sizes) == measured
        parts = whole.parts(found, config)
        known = dict.fromkeys(("dense", "moe"), config.model.layers)
        assert sum(part.layers for part in parts[:-1]) in (*known.values(), 2 * config.model.layers)
        for part in parts[:-1]:
            ledger_kind = part.name.partition(" ")[0]
            rows = beside.beside_hugging_face(
                config, ledger_kind, model.family, part.tensors, derived.sizes
            )
            beyond = rows[-1].difference.expression
            due = expected(kind, implementation, part.name, config.model)
            assert sympy.simplify(beyond - due) == 0, part.name
            if due == 0:
                assert {str(row.difference) for row in rows} == {"0"}

    @pytest.mark.parametrize("name", ["llama-2-70b"])
    def test_the_forms_that_were_found_by_hand(self, name):
        """Tried by hand with PyTorch 2.13 and transformers 5.24, under flash attention."""
        content, config = content_and_run(name, SDPA)
        found = whole.derived_model(content, config.run)
        layer, outside = whole.parts(found, config)
        assert Formula(397576 * b * s + 24) == whole.total(layer.tensors)
        assert Formula(65548 * b * s + 512 * s) == whole.total(outside.tensors)

    def test_what_does_not_run_on_symbols_is_interpolated(self):
        content, config = content_and_run("deepseek-v2-lite", EAGER)
        derived, *_ = whole.derived_model(content, config.run)
        assert derived.method == (
            "interpolated (degree 2 in s, 1 in b; confirmed at 4 further sizes)"
        )
        assert derived.notes[0].startswith("not symbolic: PyTorch fixes s at 64")
        assert derived.guards == ("multiples of s = 64, b = 3",)

    def test_a_form_says_where_it_holds(self):
        facts = {"model_type": "gemma3_text", "sliding_window": 32, "sliding_window_pattern": 2}
        for length, guards in ((16, ("s < 32",)), (40, ("s >= 32", "s % 8 == 0"))):
            run = load("gemma-3-27b", seq_length=length, implementation=SDPA).run
            derived, *_ = whole.derived_model(whole.content_of(SMALL | facts), run)
            assert derived.guards == guards

    @pytest.mark.parametrize(
        ("name", "implementation", "length", "number"),
        [
            ("gemma-3-27b", SDPA, 131072, 1),  # beyond the window of most layers
            ("phi-3-mini", SDPA, 4096, 2),
            ("phi-3-mini", EAGER, 4096, 1),  # heads of one sequence lie otherwise
            ("deepseek-v2-lite", EAGER, 4096, 1),
            ("llama-3-8b", SDPA, 1, 1),
        ],
    )
    def test_the_form_is_what_is_kept_at_the_sizes_that_are_asked_for(
        self, name, implementation, length, number
    ):
        report = derive_model(
            name, seq_length=length, micro_batch_size=number, implementation=implementation
        )
        (layers,) = (x.removeprefix("layers: ") for x in report.notes if x.startswith("layers: "))
        number_of = {kind: int(n) for n, _, kind in (x.partition(" ") for x in layers.split(", "))}
        number_of["outside"] = 1
        sums = [row for row in report.records() if row["tensor"] == "total"]
        config = load(
            name, seq_length=length, micro_batch_size=number, implementation=implementation
        )
        as_deep = whole.Whole(whole.content_of(CONFIGS[name]), config.run)
        built = kept_bytes(as_deep.build, as_deep.sizes(), "cuda", "meta")
        assert sum(number_of[row["layer_kind"]] * row["bytes"] for row in sums) == built

    @pytest.mark.parametrize(("length", "masked"), [(2046, False), (2047, True), (2048, True)])
    def test_a_ledger_has_a_windows_mask_and_says_so(self, length, masked, memcalc):
        """phi-3-mini's window is of 2047 tokens; from there on sdpa keeps a mask, 2 bytes each."""
        line = f"phi-3-mini -s {length} --implementation transformers-sdpa --format json"
        document = memcalc(f"ledger {line} --accounting exact").document
        assert (
            any("makes a mask for sequences of 2047 tokens" in x for x in document["notes"])
            == masked
        )
        sizes = {row["tensor"]: row["bytes"] for row in document["rows"]}
        assert sizes.get("mask_bias") == (2 * length * 2048 if masked else None)
        kind = "windowed" if masked else "dense"
        assert {row["layer_kind"] for row in document["rows"]} == {kind}
        assert derive_model("phi-3-mini", "ledger", seq_length=length).failures == ()

    @pytest.mark.parametrize(
        ("family", "length", "number"),
        [("mistral", 31, 2), ("gemma3_text", 31, 1), ("mistral", 40, 2), ("qwen3_moe", 40, 1)]
        + [(family, 32, 1) for family in WINDOWED]
        + [("mistral", 42, 1), ("gemma3_text", 42, 2)],
    )
    def test_windowed_layers_are_the_ledgers(self, family, length, number, tmp_path):
        """Of a window of 32 tokens, from as many on; 42 tokens are padded to 48."""
        kinds, facts = WINDOWED[family]
        path = tmp_path / "config.json"
        path.write_text(json.dumps(SMALL | facts | {"model_type": family, "sliding_window": 32}))
        report = derive_model(str(path), "ledger", seq_length=length, micro_batch_size=number)
        assert report.failures == ()
        found = {row["layer_kind"] for row in report.records()}
        assert found == (kinds if length >= 32 else {PLAIN[k] for k in kinds})

    @pytest.mark.parametrize(("length", "number"), [(64, 1), (42, 2)])
    @pytest.mark.parametrize(
        ("facts", "indices"),
        [
            ({"new_decoder_architecture": True, "num_kv_heads": 2}, 16),
            ({"multi_query": True}, 16),  # no fused kernel runs
            ({"multi_query": False}, 0),
            ({"multi_query": False, "alibi": True}, 0),  # its mask is one for all layers
        ],
    )
    def test_falcons_layers_are_the_ledgers(self, facts, indices, length, number, tmp_path):
        """But for the indices by which they take key and value off one product."""
        path = tmp_path / "config.json"
        sizes = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 320}
        content = {"model_type": "falcon", "num_hidden_layers": 2, **sizes, **facts}
        path.write_text(json.dumps(content))
        report = derive_model(str(path), "ledger", seq_length=length, micro_batch_size=number)
        beyond = {row["tensor"]: row["difference"].expression for row in report.records()}
        assert beyond["total"] == indices
        assert len(report.failures) == (3 if indices else 0)

    def test_one_sequence_is_held_against_the_ledger_of_one(self):
        report = derive_model(
            "phi-3-mini", "ledger", seq_length=64, micro_batch_size=1, implementation=EAGER
        )
        assert report.failures == ()
        assert report.symbols == {"s": 64}

    def test_fewer_positions_than_the_usual_example_are_enough(self, tmp_path):
        path = tmp_path / "config.json"
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
        content = {"model_type": "bert", "num_hidden_layers": 2, "vocab_size": 320, **sizes}
        path.write_text(json.dumps({**content, "max_position_embeddings": 16}))
        notes = derive_model(str(path), seq_length=8).notes
        assert "method: symbolic; the formula holds for s <= 16" in notes

    @pytest.mark.parametrize("family", [x for x in FAMILIES if x not in OTHERWISE_OUTSIDE])
    def test_a_catalogues_name_is_built_as_its_file(self, family, tmp_path):
        """The same kinds of layers, and the same bytes with every kind of them and the rest."""
        found = []
        for target, settings in name_and_file(family, tmp_path):
            theirs = module._Theirs.of(target, settings)
            kinds = [x.kinds for x in whole.Whole(theirs.content, theirs.run).stacks()]
            model = whole.Whole(theirs.content, theirs.run, max(map(max, kinds)) + 1)
            found.append((kinds, kept_bytes(model.build, model.sizes(), "cuda", "meta")))
        assert found[0] == found[1]

    @pytest.mark.parametrize("family", ["falcon", "vit", "bloom", *OTHERWISE_OUTSIDE])
    def test_a_catalogues_name_is_derived_as_its_file(self, family, tmp_path):
        of_name, of_file = (
            derive_model(target, "ledger", **settings)
            for target, settings in name_and_file(family, tmp_path)
        )
        assert of_name.records() == of_file.records()
        assert of_name.failures == () or family == "falcon"  # see DIFFERENCES

    def test_a_family_that_memcalc_does_not_know_is_derived_without_a_ledger(self, tmp_path):
        path = tmp_path / "config.json"
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
        content = {"model_type": "olmo2", "num_hidden_layers": 3, "vocab_size": 320, **sizes}
        path.write_text(json.dumps({**content, "num_key_value_heads": 2}))
        report = derive_model(str(path), seq_length=32)
        # the last layer's output is kept by the norm after it alone, which copies it to fp32
        assert report.column("layer_kind")[0] == "layer 0"
        assert "layers: 2 layer 0, 1 layer" in report.notes
        assert any(note.startswith("no ledger:") for note in report.notes)
        with pytest.raises(UsageError, match="memcalc has no ledger of"):
            derive_model(str(path), "ledger", seq_length=32)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ('{"model_type": "lama"}', "transformers has no family 'lama'; did you mean 'llama'"),
            ('{"memcalc": 1}', "not a Hugging Face config.json"),
            (
                '{"model_type": "llama", "hidden_size": "wide"}',
                "transformers refuses this config of llama",
            ),
            ('{"model_type": "llama", "hidden_act": "no"}', "cannot build this llama model: Key"),
            (
                '{"model_type": "llama", "hidden_size": -64}',
                "cannot build this llama model: Runtime",
            ),
            ('{"model_type": "llama", "num_hidden_layers": 1000000000}', "must be 1000 or less"),
        ],
    )
    def test_a_file_that_transformers_does_not_build_is_one_line(self, content, message, tmp_path):
        path = tmp_path / "config.json"
        path.write_text(content)
        with pytest.raises(InputError, match=message):
            derive_model(str(path))


class Doubling(nn.Module):
    """A module that keeps its product with itself."""

    def forward(self, x):
        return x * x


class Sliced(nn.Module):
    """Keeps eight rows more where it has more than eight."""

    def forward(self, x):
        return x * x if x.shape[0] <= 8 else functional.gelu(x * x)


class Sorting(nn.Module):
    def forward(self, x):
        return x[x > 0]


class Talking(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        print("shape", tuple(x.shape[1:]))
        return self.inner(x)


class Deciding(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Talking()

    def forward(self, x):
        y = self.inner(x)
        return y if y.sum().item() > 0 else -y


class Leaving(nn.Module):
    def forward(self, x):
        sys.exit(3)


class Yielding(nn.Module):
    def forward(self, x):
        yield x * x


class Complaining(nn.Module):
    def forward(self, x):
        warnings.warn("not so fast", stacklevel=1)
        return x * x


class Halved(nn.Module):
    """Keeps a half where it can be halved, else two wholes."""

    def forward(self, x):
        if x.shape[0] % 2 == 0:
            return x[: x.shape[0] // 2].exp() + 1
        return x.exp().exp() + 1


class Holding(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.calls = torch.ones(4), 0

    def forward(self, x):
        self.calls += 1
        return (x * self.scale).exp()


class Flat(nn.Module):
    def forward(self, x):
        return x.reshape(-1) ** 2


class Looping(nn.Module):
    """A cell over time."""

    def __init__(self, width, hidden, cell=nn.LSTMCell):
        super().__init__()
        self.cell = cell(width, hidden)

    def forward(self, x):
        state = None
        for step in x:
            state = self.cell(step, state)
        return state


class Exponential(nn.Module):
    def forward(self, x):
        return x.sum().expand(2 ** x.shape[0]).exp()


class Rooted(nn.Module):
    def forward(self, x):
        return x.sum().expand(math.isqrt(x.shape[0])).exp()


class TestModules:
    def test_a_square_is_kept_once(self):
        derived = library.derive(Doubling(), torch.randn(3, 5, requires_grad=True), {"s": 3})
        assert derived.formula == Formula(20 * s)
        assert [each.op for each in derived.tensors] == ["input"]

    def test_a_form_that_holds_from_some_size_on_says_so(self):
        derived = derive(Sliced(), torch.randn(16, 4, requires_grad=True), {"s": 16})
        assert derived.guards == ("s > 8",)
        assert derived.formula == Formula(32 * s)
        with pytest.raises(UsageError, match="does not hold at s = 8; it holds for s > 8"):
            derived.value(s=8)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_a_transformer_layer_of_pytorchs_own(self, dtype):
        """On symbols as on numbers, with CUDA's kernels inside of its attention."""
        layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True).to(dtype)
        x = torch.randn(3, 96, 64, dtype=dtype, requires_grad=True)
        derived = derive(layer, x, {"b": 3, "s": 96})
        assert derived.method == "symbolic"
        assert all(each.formula.expression.coeff(s, 2) == 0 for each in derived.tensors)
        assert derived.value() == derive(layer, x, {"b": 3}).value()

    def test_a_form_need_not_be_a_polynomial(self):
        x = torch.randn(6, 4, requires_grad=True)
        assert derive(Exponential(), x, {"s": 6}).formula == Formula(4 * 2**s)

    def test_a_convolution(self):
        """By hand: input and output of two convolutions, a norm's input and statistics, a pool's.

        The norm keeps 8 means and 8 deviations in fp32; the pool its output's places in int64.
        """
        block = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.MaxPool2d(2))
        derived = derive(block, torch.randn(4, 3, 32, 48), {"n": 4, "y": (0, 2), "w": (0, 3)})
        n, y, w = (symbols.symbol(letter) for letter in "nyw")
        half = sympy.floor(y / 2) * sympy.floor(w / 2)
        by_hand = 4 * n * (3 + 8 + 8) * y * w + 2 * 8 * 4 + 8 * n * 8 * half
        assert sympy.simplify(derived.formula.expression - by_hand) == 0
        assert {each.name for each in derived.tensors if each.kind == "buffer"} == {
            "running_mean",
            "running_var",
        }

    def test_a_loop_over_time_is_interpolated_over_its_steps(self):
        derived = derive(Looping(16, 32), torch.randn(6, 2, 16), {"T": 6, "b": 2}, "cpu")
        assert derived.method.startswith("interpolated (degree 1 in T, 1 in b;")
        with torch.device("cpu"):
            direct = measure(Looping(16, 32), torch.randn(9, 5, 16))
        assert derived.value(T=9, b=5) == direct.bytes

    def test_its_parameters_and_buffers_are_left_as_they_were(self):
        block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        before = {name: each.clone() for name, each in block.state_dict().items()}
        derive(block, torch.randn(8, 4), {"n": 8})
        after = block.state_dict()
        assert all(torch.equal(each, after[name]) for name, each in before.items())
        assert {each.device.type for each in after.values()} == {"cpu"}

    def test_tied_weights_are_kept_by_nobody(self):
        block = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
        block[1].weight = block[0].weight
        derived = derive(block, torch.randn(5, 8), {"s": 5})
        assert derived.formula == Formula(2 * 4 * 8 * s)

    def test_arguments_may_have_names(self):
        class Named(nn.Module):
            def forward(self, left, right):
                return left * right

        inputs = {name: torch.randn(6, 4, requires_grad=True) for name in ("left", "right")}
        derived = derive(Named(), inputs, {"s": 6})
        assert derived.formula == Formula(32 * s)

    def test_a_form_is_latex_a_function_and_a_number(self):
        derived = derive(Doubling(), torch.randn(3, 5, requires_grad=True), {"s": 3})
        assert derived.latex() == "20s"
        made = {}
        exec(derived.python(), made)  # memcalc's own text
        assert made["kept_bytes"](7) == derived.value(s=7) == 140
        with pytest.raises(UsageError, match="no symbol h; choose from s"):
            derived.value(h=3)

    def test_what_a_module_prints_is_told_with_its_place(self, capsys):
        derived = derive(Talking(), torch.randn(6, 4), {"s": 6})
        assert derived.notes == ("printed in module .: shape (4,)",)
        assert capsys.readouterr().out == ""

    @pytest.mark.parametrize(
        ("module", "message"),
        [
            (Sorting(), "in module ., at or after index"),
            (Deciding(), "in module ., at or after _local_scalar_dense"),
            (Rooted(), "interpolated polynomial at s = "),
            (Leaving(), "in module .: SystemExit: 3"),
            (Yielding(), "an iterator, which has not run yet"),
        ],
    )
    def test_what_cannot_be_derived_says_where_it_stopped(self, module, message):
        with pytest.raises(DeriveError, match=message):
            derive(module, torch.randn(6, 4, requires_grad=True), {"s": 6})

    @pytest.mark.parametrize(
        ("letters", "message"),
        [
            ({"s": 7}, "no axis of the inputs has size s = 7"),
            ({"s": 6, "b": 6}, "axis 0 of input 0 is both s and b"),
            ({"s": (0, 5)}, "s: input 0 does not exist or has no axis 5"),
            ({"s": "x"}, "a symbol must be a size or axes"),
            ({"s": [(0, 0), (0, 1)]}, "s is both 6 and 4 in the inputs"),
            ({"2s": 6}, "a symbol must be a Python name"),
            ({"lambda": 6}, "a symbol must be a Python name"),
            ({}, "name 1 to 8 sizes of the inputs"),
            ({"o": 1}, "o is 1 in the inputs, and must be at least 2"),
        ],
    )
    def test_letters_that_stand_for_nothing_are_refused(self, letters, message):
        with pytest.raises(UsageError, match=message):
            derive(Doubling(), torch.randn(6, 4, 1), letters)

    def test_a_device_is_one_of_two(self):
        with pytest.raises(UsageError, match="device 'tpu' is unknown; choose from cuda, cpu"):
            derive(Doubling(), torch.randn(6, 4), {"s": 6}, "tpu")

    def test_a_form_is_held_against_what_is_measured_where_it_is_asked_for(self):
        x = torch.randn(6, 4, requires_grad=True)
        assert derive(Halved(), x, {"s": 6}, at={"s": 12}).formula == Formula(8 * s)
        message = "at s = 7 the module saves 224 bytes, .* multiples of s = 6, gives 56 bytes"
        with pytest.raises(DeriveError, match=message):
            derive(Halved(), x, {"s": 6}, at={"s": 7})

    @pytest.mark.parametrize("cell", ["gru", "lstm"])
    @pytest.mark.parametrize(("device", "kernels"), [("cpu", "torch-cpu"), ("cuda", "torch-cuda")])
    def test_a_recurrent_cell_is_that_of_its_devices_kernels(self, cell, device, kernels):
        config = library.Recurrent(
            cell=cell, hidden_size=32, input_size=16, batch_size=2, kernels=kernels
        )
        unrolled = Looping(16, 32, nn.GRUCell if cell == "gru" else nn.LSTMCell)
        derived = derive(unrolled, torch.randn(6, 2, 16), {"T": 6}, device)
        further = costs(config).whole(50) - costs(config).whole(49)
        assert derived.value(T=50) - derived.value(T=49) == further

    def test_a_whole_sequence_on_cuda_is_said_to_be_cudnns(self):
        told = derive(nn.GRU(4, 4), torch.randn(6, 2, 4), {"b": 2}).notes
        assert any(note.startswith("gru: the RNN runs op by op here; on CUDA") for note in told)

    def test_what_a_module_holds_without_registering_it_is_there_anyway(self):
        block = Holding()
        derived = derive(block, torch.randn(6, 4, requires_grad=True), {"s": 6})
        assert derived.formula == Formula(16 * s)
        assert [each.name for each in derived.tensors if each.kind == "buffer"] == ["scale"]
        assert (block.calls, block.scale.device.type) == (0, "cpu")

    def test_an_input_lies_in_memory_as_its_example(self):
        """A reshape of what lies otherwise is a copy, which its square then keeps."""
        x = torch.randn(6, 4, requires_grad=True)
        flat = Flat()
        assert [each.op for each in derive(flat, x, {"s": 6}).tensors] == ["input"]
        other = torch.randn(4, 6).t().requires_grad_()
        assert [each.op for each in derive(flat, other, {"s": 6}).tensors] == ["clone"]

    def test_a_compiled_module_is_derived_as_it_runs_eagerly(self):
        compiled = torch.compile(nn.Linear(8, 16), backend="eager")
        derived = derive(compiled, torch.randn(5, 8), {"s": 5})
        assert derived.formula == Formula(32 * s)
        assert "partitioner" in derived.notes[-1]

    def test_a_warning_is_told(self):
        derived = derive(Complaining(), torch.randn(6, 4), {"s": 6})
        assert derived.notes == ("warned: not so fast",)

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    def test_a_scripted_module_is_refused(self):
        with pytest.raises(UsageError, match="scripted or traced"):
            derive(torch.jit.script(nn.Linear(4, 4)), torch.randn(6, 4), {"s": 6})

    @pytest.mark.parametrize(
        ("module", "inputs", "message"),
        [
            (torch.tanh, torch.randn(6, 4), "needs a torch.nn.Module, not builtin"),
            (nn.LazyLinear(4), torch.randn(6, 4), "run it once, then"),
            (nn.Linear(4, 4), None, "not NoneType"),
            (nn.Linear(4, 4), "six", "not str"),
            (nn.Linear(6, 6), torch.eye(6).to_sparse(), "torch.sparse_coo"),
        ],
    )
    def test_what_no_module_runs_on_is_refused(self, module, inputs, message):
        with pytest.raises(UsageError, match=message):
            derive(module, inputs, {"s": 6})


class TestInterpolation:
    def test_polynomials_are_exact(self):
        found = interpolated(lambda at: [at["s"] ** 3 // 4 + at["b"], 7], {"s": 4, "b": 3})
        assert found.expressions == (s**3 / 4 + b, 7)
        assert "degree 3 in s, 1 in b" in found.method

    def test_what_is_no_polynomial_is_refused(self):
        with pytest.raises(ValueError, match="not a polynomial of degree 4 or less in s"):
            interpolated(lambda at: [2 ** at["s"]], {"s": 2})

    def test_a_term_that_the_example_hides_is_not_believed(self):
        """At b = 3 it has no s; at other b it does."""
        with pytest.raises(ValueError, match="do not follow the interpolated polynomial"):
            interpolated(lambda at: [(at["b"] - 3) * at["s"] ** 2], {"s": 4, "b": 3})


@pytest.fixture
def factory(tmp_path, monkeypatch):
    """A user's own module in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        textwrap.dedent(
            """
            import warnings

            import torch

            def block():
                return torch.nn.Linear(8, 8), torch.randn(5, 8), {"s": 5}

            def bare():
                return torch.nn.Linear(8, 8), torch.randn(5, 8)

            def wrong():
                return 3

            def broken():
                raise KeyError("no such thing")

            def leaving():
                raise SystemExit(3)

            class Anger(BaseException):
                pass

            def angry():
                raise Anger("no")

            class Mute(Exception):
                def __str__(self):
                    raise RuntimeError

            def mute():
                raise Mute

            def deep():
                return deep()

            def nothing():
                return None

            def text():
                return "a module"

            def without_inputs():
                return torch.nn.Linear(8, 8), None

            def endless():
                return torch.nn.Linear(8, 8), iter(int, 1), {"s": 5}

            def yielding():
                yield torch.nn.Linear(8, 8)

            def uncalled():
                return torch.nn.Linear, torch.randn(5, 8)

            def misnamed():
                return torch.nn.Linear(8, 8), {1: torch.randn(5, 8)}, {"s": 5}

            def angry_inside():
                module = torch.nn.Linear(8, 8)
                module.register_forward_pre_hook(lambda *inputs: angry())
                return module, torch.randn(5, 8), {"s": 5}

            def interrupted():
                raise KeyboardInterrupt

            number = 3

            def on_meta():
                with torch.device("meta"):
                    return block()

            def warning():
                warnings.warn("careful")
                return block()

            def lettered():
                return torch.nn.Linear(8, 8), torch.randn(5, 8), ["s"]

            def talking():
                print("good morning")
                return block()
            """
        )
    )
    yield "mine"
    sys.modules.pop("mine", None)


class TestCommand:
    def test_a_factory_is_run_and_derived(self, memcalc, factory):
        outcome = memcalc(f"derive {factory}:block --format json --at s=100")
        is_valid(outcome.document)
        assert outcome.document["rows"][-1]["bytes"] == 3200
        assert outcome.document["symbols"] == {"s": 100}
        bare = memcalc(f"derive {factory}:bare --symbols s=5 --python")
        assert bare.out == "def kept_bytes(s: int) -> int:\n    return 32*s\n"

    @pytest.mark.parametrize(
        ("rest", "message"),
        [
            ("wrong", "must return (module, inputs) or"),
            ("broken", "failed: KeyError: 'no such thing'"),
            ("none", "failed: AttributeError"),
            ("leaving", "failed: SystemExit: 3"),
            ("angry", "failed: Anger: no"),
            ("mute", "failed: Mute"),
            ("deep", "failed: RecursionError"),
            ("number", "failed: TypeError"),
            ("nothing", "it returned NoneType"),
            ("text", "it returned str"),
            ("yielding", "it returned generator"),
            ("uncalled", "it returned type, Tensor"),
            ("without_inputs", "inputs must be a tensor, a sequence of arguments or a mapping"),
            ("endless", "keyword arguments, not callable_iterator"),
            ("misnamed", "TypeError: keywords must be strings"),
            ("angry_inside", "it stopped in module .: Anger: no"),
            ("lettered", "a mapping; it returned Linear, Tensor, list"),
            ("bare", "name 1 to 8 sizes of the inputs (--symbols s=64,b=2), not 0"),
            ("block --sp", "takes only --symbols, --at and --device"),
            ("block --at h=4", "no symbol h"),
            ("block --symbols s:4", "is not of the form s=64,b=2"),
        ],
    )
    def test_a_factory_that_cannot_be_is_one_line(self, memcalc, factory, rest, message):
        outcome = memcalc(f"derive {factory}:{rest}")
        is_refused(outcome, message)

    def test_a_factory_that_raises_an_interrupt_ends_the_command_in_one_line(self, factory):
        done = python("-m", "memcalc", "derive", f"{factory}:interrupted", timeout=120)
        assert (done.returncode, done.stdout) == (130, "")
        assert done.stderr == "memcalc: interrupted\n"

    def test_tensors_without_values_are_inputs_too(self, memcalc, factory):
        outcome = memcalc(f"derive {factory}:on_meta --format json")
        assert outcome.document["rows"][-1]["bytes"] == 160

    def test_what_a_factory_warns_of_is_a_note(self, memcalc, factory):
        outcome = memcalc(f"derive {factory}:warning --format json")
        assert "warned: careful" in outcome.document["notes"]
        assert outcome.err == ""

    def test_what_a_factory_prints_is_no_part_of_the_answer(self, memcalc, factory):
        outcome = memcalc(f"derive {factory}:talking --format json")
        assert outcome.document["rows"][-1]["bytes"] == 160
        assert outcome.err == "good morning\n"

    @pytest.mark.parametrize(
        "line",
        [
            "derive 175b --sp",
            "derive llama-3-70b --tp 8 --sp --against ledger",
            "derive llama-3-8b --from transformers -s 64",
            "derive llama-3-8b --from transformers -s 64 --against ledger",
        ],
    )
    def test_json_is_to_the_schema(self, memcalc, evaluate, line):
        outcome = memcalc(f"{line} --format json")
        assert outcome.status == 0
        is_valid(outcome.document)
        values = outcome.document["symbols"]
        for row in outcome.document["rows"]:
            if "bytes" in row:
                assert evaluate(row["formula"], values) == Fraction(row["bytes"])

    def test_the_first_line_is_the_formula_or_the_comparison(self, memcalc):
        """175B's layer under sequence parallelism: table 2, and 4 fp32 statistics of 2 norms."""
        alone = memcalc("derive 175b --sp --recompute selective").out
        assert alone.startswith("bytes saved for backward: b*h*s*(34 + 16/h)/t = ")
        beside = memcalc("derive 175b --sp --recompute selective --against ledger").out
        assert beside.startswith("equal to the ledger: b*h*s*(34 + 16/h)/t bytes\n")

    def test_a_difference_is_a_failure(self, memcalc):
        outcome = memcalc(
            "derive falcon-7b --from transformers --attention unfused --against ledger"
        )
        assert outcome.status == 1
        assert outcome.out.startswith("differs from the ledger: dense by 16 bytes\n")
        assert "dense: total differs: PyTorch minus ledger is 16 bytes" in outcome.err

    def test_the_sums_alone(self, memcalc):
        assert memcalc("derive 175b --sp --recompute selective --latex").out == (
            "\\frac{sbh}{t}\\left(34 + \\frac{16}{h}\\right)\n"
        )
        both = memcalc("derive deepseek-v3 --from transformers -s 64 --python").out
        assert [line for line in both.splitlines() if line.startswith("def ")] == [
            "def dense_bytes(b: int, s: int) -> int:",
            "def moe_bytes(b: int, s: int) -> int:",
            "def outside_bytes(b: int, s: int) -> int:",
        ]

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("derive 175b --latex --format json", "choose one of --latex"),
            ("derive 175b --symbols s=4", "need a factory TARGET"),
            ("derive llama-3-8b --from transformers --tp 2", "without recomputation; drop --tp"),
            ("derive llama-3-8b --from transformers --recompute full", "drop --recompute"),
            ("derive llama-3-9b", "did you mean 'llama-3-8b'"),
            (
                "derive gemma-2-9b --from transformers --attention flash",
                "choose --implementation transformers-eager",
            ),
            (
                "derive llama-3-8b --from transformers --implementation megatron",
                "--from transformers needs --implementation",
            ),
        ],
    )
    def test_a_question_that_cannot_be_is_one_line(self, memcalc, line, message):
        outcome = memcalc(line)
        assert (outcome.status, outcome.out) == (2, "")
        assert message in outcome.err

    def test_attention_that_nobody_asked_for_is_what_the_family_has(self, memcalc):
        outcome = memcalc("derive gemma-2-9b --from transformers -s 64")
        assert outcome.status == 0
        assert "assumed: eager attention, as the family has no sdpa" in outcome.out

    def test_the_ledgers_exact_formula_is_what_is_derived(self):
        config = load("175b", sp=True)
        assert derived_layer(config).formula == layer_formula(config, "exact")


def test_the_command_offers_what_there_is():
    assert cli.AGAINST == module.AGAINST
    assert cli.DEVICES == derivation.DEVICES


def test_a_comparison_with_what_there_is_not_is_refused():
    with pytest.raises(UsageError, match="against 'paper' is unknown; choose from 'ledger'"):
        derive_layer(load("175b"), "paper")


def test_the_words_of_implementations_are_those_that_derive_takes():
    assert {EAGER, SDPA} == {name for name in IMPLEMENTATIONS if name.startswith("transformers-")}
