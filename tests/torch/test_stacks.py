"""Stacks of other kinds: encoder-decoders (T5), and encoders of images (ViT) and of text (BERT).

What PyTorch keeps is that of transformers' own layers, on meta, at the sizes of the catalog.
"""

from dataclasses import replace

import pytest
import torch
from shared import is_valid
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import memcalc as library
from memcalc import symbols
from memcalc.analysis import activations, flops
from memcalc.analysis.layers import layer_bytes, layer_entries
from memcalc.analysis.parameters import owned, parameters
from memcalc.analysis.stages import chunks, stage, stages
from memcalc.answers.warnings import warnings
from memcalc.blocks.embedding import embedding_graph
from memcalc.blocks.head import head_graph
from memcalc.blocks.layer import DECODER, DENSE, ENCODER, kinds, layer_graph
from memcalc.config import Config, Model, Parallel, Run, load
from memcalc.config.readers import huggingface
from memcalc.errors import ConfigError, InputError, UsageError
from memcalc.formulas import layer_formula
from memcalc.validation.measuring import kernels
from memcalc.validation.measuring.kernels import CudaKernels
from memcalc.validation.measuring.measure import measure

S, B = 64, 2

# Each kind of layer: the catalog's model, its kind, transformers' class, and the tokens.
LAYERS = {
    "t5 encoder": ("t5-11b", ENCODER, "t5.modeling_t5.T5Block", S),
    "t5 decoder": ("t5-11b", DECODER, "t5.modeling_t5.T5Block", S),
    "t5 v1.1 encoder": ("v1.1", ENCODER, "t5.modeling_t5.T5Block", S),
    "t5 v1.1 decoder": ("v1.1", DECODER, "t5.modeling_t5.T5Block", S),
    "vit": ("vit-large", DENSE, "vit.modeling_vit.ViTLayer", 197),
    "bert": ("bert-large", DENSE, "bert.modeling_bert.BertLayer", S),
}


def config_of(layer, attention="eager", **settings):
    """The catalog's model as transformers' layer runs it."""
    name, _, _, s = LAYERS[layer]
    implementation = f"transformers-{attention}"
    sizes = {"seq_length": s, "micro_batch_size": B, "implementation": implementation, **settings}
    if name != "v1.1":
        return load(name, **sizes)
    config = load("t5-11b", **sizes)
    return replace(config, model=replace(config.model, activation="geglu_new"))


def described(config):
    """A model in the words of transformers' configs."""
    m = config.model
    if m.encoder_layers is not None:
        return {
            "d_model": m.hidden_size,
            "num_heads": m.heads,
            "d_kv": m.head_size,
            "d_ff": m.ffn_size,
            "vocab_size": m.vocab_size,
            "num_layers": m.encoder_layers,
            "num_decoder_layers": m.layers,
            "dropout_rate": m.hidden_dropout,
            "feed_forward_proj": "gated-gelu" if m.gated else "relu",
        }
    return {
        "hidden_size": m.hidden_size,
        "num_attention_heads": m.heads,
        "intermediate_size": m.ffn_size,
        "hidden_dropout_prob": m.hidden_dropout,
        "attention_probs_dropout_prob": m.attention_dropout,
    }


class Layer(nn.Module):
    """One of transformers' layers, not the first of its stack; what all layers share are buffers.

    The bias of the scores is a view of a table's rows, as the first layer makes it.
    """

    def __init__(self, layer, config, attention):
        super().__init__()
        from importlib import import_module

        from transformers import AutoConfig

        _, self.kind, path, s = LAYERS[layer]
        module, _, name = path.rpartition(".")
        theirs = AutoConfig.for_model(path.partition(".")[0], **described(config))
        theirs._attn_implementation = attention
        theirs.is_decoder = self.kind == DECODER
        arguments = () if self.kind == DENSE else (False, 1)
        made = getattr(import_module(f"transformers.models.{module}"), name)(theirs, *arguments)
        self.layer = made.to(torch.bfloat16).train()
        heads = config.model.heads
        self.bias = torch.zeros(s, s, heads, dtype=torch.bfloat16, requires_grad=True)
        self.register_buffer("none", torch.zeros(1, heads, s, s, dtype=torch.bfloat16))
        mask = torch.zeros(1, 1, s, s, dtype=torch.bfloat16) if attention == "eager" else None
        self.register_buffer("later", mask)

    def forward(self, x, *source):
        bias = self.bias.permute(2, 0, 1).unsqueeze(0)
        given = {
            ENCODER: (self.later, bias),
            DECODER: (self.later, bias, *source, None, self.none),
            DENSE: (),
        }[self.kind]
        with CudaKernels():
            out = self.layer(x, *given)
        return out[0] if isinstance(out, tuple) else out


def run(layer, attention, config):
    """The layer and its inputs; a decoder's are two."""
    with torch.device("meta"):
        made = Layer(layer, config, attention)
        shape = (B, config.run.seq_length, config.model.hidden_size)
        number = 2 if made.kind == DECODER else 1
        inputs = [torch.empty(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
    return made, inputs[:number]


class TestLayers:
    @pytest.mark.parametrize("dropout", [0.0, 0.1])
    @pytest.mark.parametrize("attention", ["eager", "sdpa"])
    @pytest.mark.parametrize("layer", LAYERS)
    def test_pytorch_keeps_what_the_ledger_says(self, layer, attention, dropout):
        """And an encoder's output, an input of every decoder layer, which is in none of them."""
        config = config_of(layer, attention, dropout=dropout)
        made, inputs = run(layer, attention, config)
        measured = measure(made, *inputs)
        assert measured.agrees
        own = [each.bytes for each in measured.stored if each.made_by not in ("none", "later")]
        source = inputs[1].untyped_storage().nbytes() if made.kind == DECODER else 0
        assert sum(own) == layer_bytes(config, "exact", made.kind) + source

    @pytest.mark.parametrize("layer", LAYERS)
    def test_a_layers_parameters_are_transformers(self, layer):
        config = config_of(layer)
        made, _ = run(layer, "eager", config)
        theirs = sum(each.numel() for each in made.parameters())
        assert owned(layer_graph(config, kind=made.kind)) == theirs

    @pytest.mark.parametrize("layer", LAYERS)
    def test_an_unfused_layers_flops_are_pytorchs(self, layer):
        config = config_of(layer)
        made, inputs = run(layer, "eager", config)
        with FlopCounterMode(display=False) as counter:
            made(*inputs)
        assert flops.forward(layer_graph(config, kind=made.kind)) == counter.get_total_flops()

    @pytest.mark.parametrize("accounting", ["paper", "exact"])
    @pytest.mark.parametrize("layer", LAYERS)
    def test_a_formula_is_the_bytes(self, layer, accounting):
        kind = LAYERS[layer][1]
        for attention in ("eager", "sdpa"):
            config = config_of(layer, attention)
            formula = layer_formula(config, accounting, kind=kind)
            assert formula.value(symbols.values(config)) == layer_bytes(config, accounting, kind)

    def test_a_decoder_layer_by_hand(self):
        """A flash decoder layer of T5: 16 heads' widths of h, three norms, and a wide ReLU.

        Self-attention and cross-attention keep 3 inner widths in, one out, a dropout mask and
        the norm's input and output; the MLP its norm's, the ReLU's output, the dropout's mask and
        output, and a mask.
        """
        s, h, inner, f = 512, 1024, 16384, 65536
        attention = s * (2 * h + 2 * h + 4 * 2 * inner + h)
        mlp = s * (2 * h + 2 * h + 2 * f + f + 2 * f + h)
        assert layer_bytes(load("t5-11b"), kind=DECODER) == 2 * attention + mlp
        assert layer_bytes(load("t5-11b"), kind=ENCODER) == attention + mlp


class Whole(nn.Module):
    """T5Model, whose decoder's output is not read by a head."""

    def __init__(self, config):
        super().__init__()
        from transformers import AutoConfig, AutoModel

        theirs = AutoConfig.for_model("t5", use_cache=False, **described(config))
        theirs._attn_implementation = "eager"
        self.model = AutoModel.from_config(theirs).to(torch.bfloat16).train()

    def forward(self, source, target):
        with CudaKernels(0):
            return self.model(input_ids=source, decoder_input_ids=target).last_hidden_state


class TestWholeT5:
    """All of a small T5: its layers, and the encoder's output once for all of the decoder's."""

    def config(self, encoder_layers, layers):
        sizes = {"hidden_size": 256, "heads": 8, "kv_heads": 8, "head_size": 64, "ffn_size": 512}
        depth = {"encoder_layers": encoder_layers, "layers": layers, "vocab_size": 1000}
        model = replace(load("t5-11b").model, **sizes, **depth)
        run_ = Run(seq_length=S, micro_batch_size=B, implementation="transformers-eager")
        return Config(model, Parallel(), run_)

    def kept(self, config):
        with torch.device("meta"):
            tokens = [torch.zeros(B, S, dtype=torch.long) for _ in range(2)]
            measured = measure(Whole(config), *tokens)
        assert measured.agrees
        return measured.bytes

    def test_layers_and_ends_are_all_that_is_kept(self):
        config = self.config(3, 2)
        ends = activations.kept(embedding_graph(config))
        ends += activations.kept(head_graph(config))
        of_loss = ("final_dropout_output", "logits", "loss_")  # which is not computed here
        expected = sum(e.tensor.bytes for e in ends if not e.tensor.name.startswith(of_loss))
        expected += sum(n * layer_bytes(config, "exact", k) for k, n in kinds(config).items())
        assert self.kept(config) == expected

    def test_the_stage_is_its_layers_and_its_ends(self):
        config = self.config(3, 2)
        assert chunks(config, 0) == [[*[ENCODER] * 3, *[DECODER] * 2]]
        held = stage(config, 0, "exact")
        assert held.layers == 3 * layer_bytes(config, "exact", ENCODER) + 2 * layer_bytes(
            config, "exact", DECODER
        )
        (output,) = (
            entry
            for entry in activations.kept(embedding_graph(config))
            if entry.ops == ("encoder_output",)
        )
        assert output.tensor.bytes == 2 * S * B * 256

    @pytest.mark.parametrize("policy", ["none", "selective", "full", "cross_attention"])
    @pytest.mark.parametrize("sp", [False, True])
    def test_no_policy_and_no_split_counts_it_in_a_layer(self, policy, sp):
        config = load("t5-11b", tp=8, sp=sp, recompute=policy)
        graph = layer_graph(config, kind=DECODER)
        (source,) = graph.shared
        entries = activations.kept(graph, config.run.policy)
        assert source not in [entry.tensor for entry in entries]

    def test_a_region_in_one_attention_is_not_in_the_other(self):
        """Core attention stands in both: recomputing one of these leaves the other's to it."""

        def kept(name, words):
            config = load(name, recompute=words, attention="unfused")
            return {entry.tensor.name for entry in layer_entries(config, "exact", kind=last[name])}

        last = {"t5-11b": DECODER, "22b": DENSE}
        both = kept("t5-11b", "attention,selective")
        assert both == kept("t5-11b", "attention") & kept("t5-11b", "selective")
        assert "cross_softmax_output" in kept("t5-11b", "attention") - both
        assert kept("22b", "cross_attention,selective") == kept("22b", "selective")

    def test_gathered_copies_of_it_are_each_layers_own(self):
        """Where the gathered input of a linear is kept, each layer gathers the source again."""
        entries = library.ledger(load("t5-11b", tp=8, sp=True, implementation="torch"))
        assert "encoder_output_gathered" in entries.column("tensor")


T5 = {"model_type": "t5", "d_model": 64, "num_heads": 4, "d_ff": 256, "num_layers": 6}
VIT = {
    "model_type": "vit",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 256,
}


class TestConfigs:
    def read(self, config, **change):
        return huggingface.read(config | change, "x").model

    def test_a_decoder_is_as_deep_as_the_encoder_unless_it_says_otherwise(self):
        same = self.read(T5)
        assert (same.encoder_layers, same.layers) == (6, 6)
        fewer = self.read(T5, num_decoder_layers=2)
        assert (fewer.encoder_layers, fewer.layers) == (6, 2)
        assert kinds(Config(fewer, Parallel(), Run(seq_length=S))) == {ENCODER: 6, DECODER: 2}

    def test_the_mlp_is_as_the_family_or_the_config_says(self):
        assert self.read(T5).activation == "relu"
        assert self.read(T5, feed_forward_proj="gated-gelu").activation == "geglu_new"
        assert self.read(T5, model_type="mt5").activation == "geglu_new"
        with pytest.raises(InputError, match="activation 'gated-relu6' is not modeled"):
            self.read(T5, feed_forward_proj="gated-relu6")

    def test_a_head_has_its_own_size(self):
        assert self.read(T5).head_size == 64
        assert self.read(T5, d_kv=128).head_size == 128

    def test_an_image_has_as_many_tokens_as_patches_and_one_more(self):
        assert self.read(VIT).max_seq_length == (224 // 16) ** 2 + 1
        assert self.read(VIT, image_size=384, patch_size=[32, 32]).max_seq_length == 145
        with pytest.raises(InputError, match="image_size must be square"):
            self.read(VIT, image_size=[224, 384])

    def test_classes_are_counted_or_listed(self):
        assert self.read(VIT).classes == 2
        assert self.read(VIT, id2label={"0": "a", "1": "b", "2": "c"}).classes == 3
        assert self.read(VIT, num_labels=10).classes == 10

    def test_vit_b_32_is_as_large_as_torchvisions(self):
        """88224232: torchvision, ViT_B_32_Weights."""
        changed = {"patch_size": 32, "max_seq_length": None}
        model = Model.of(**load("vit-base").model.facts() | changed)
        assert model.max_seq_length == 50
        assert parameters(Config(model, Parallel(), Run(seq_length=50))) == 88224232

    @pytest.mark.parametrize(
        ("change", "line"),
        [
            ({"position": "learned", "relative_buckets": None}, "cannot have learned positions"),
            ({"block": "post_norm"}, "cannot have block post_norm"),
            ({"experts": 4}, "cannot have experts"),
            ({"causal": False}, "cannot have a bidirectional decoder"),
            ({"position": "none"}, "relative_buckets needs relative positions"),
            ({"encoder_layers": 0}, "encoder_layers must be a whole number from 1"),
        ],
    )
    def test_what_is_no_t5_is_refused(self, change, line):
        with pytest.raises(ConfigError, match=line):
            Model.of(**load("t5-11b").model.facts() | change)

    def test_patches_and_images_need_one_another_and_fit(self):
        sizes = {"name": "x", "layers": 1, "hidden_size": 64, "heads": 4}
        for change, line in (
            ({"patch_size": 16}, "patch_size needs image_size"),
            ({"image_size": 8}, "image_size needs patch_size"),
            ({"image_size": 8, "patch_size": 16}, "patch_size must be a whole number from 1 to 8"),
        ):
            with pytest.raises(ConfigError, match=line):
                Model.of(**sizes, **change)

    def test_pipeline_stages_of_an_encoder_decoder_are_refused(self):
        with pytest.raises(ConfigError, match="pipeline stages of encoder-decoders are not mod"):
            load("t5-11b", pp=2)

    def test_no_layer_here_is_validated_against_it(self):
        with pytest.raises(
            UsageError, match="does not support cross-attention, and no known Hugging"
        ):
            library.validate(load("t5-11b"), "meta")

    def test_a_bias_that_no_flash_kernel_takes_is_named(self):
        def warned(**settings):
            return [
                w for w in warnings(load("t5-11b", **settings)) if w.startswith("flash attention")
            ]

        assert warned() == [
            "flash attention kernels do not support a relative position bias: counted as if they "
            "did"
        ]
        (line,) = warned(implementation="transformers-sdpa")
        assert line.endswith("PyTorch's memory-efficient kernel, with a bias kept by every layer")
        assert warned(attention="unfused") == []


class TestCommandLine:
    @pytest.mark.parametrize(
        "question",
        [
            f"{command} {model} -s 512"
            for model in ("t5-11b", "vit-large")
            for command in (
                *("layer", "ledger", "recompute", "formula", "flops", "comm --tp 8 --sp"),
                *("flops --scope layer", "recompute --implementation transformers-sdpa"),
            )
        ],
    )
    def test_every_question_has_an_answer_to_the_schema(self, memcalc, question):
        command, *rest = question.split()
        outcome = memcalc(f"{command} {' '.join(rest)} --format json")
        assert outcome.status == 0
        is_valid(outcome.document)
        assert outcome.document["rows"]

    def test_both_kinds_of_layer_are_rows(self, memcalc):
        document = memcalc("layer t5-11b -s 512 --format json").document
        assert {row["layer_kind"] for row in document["rows"]} == {ENCODER, DECODER}
        notes = document["notes"]
        assert any("source and target have 512 tokens each" in note for note in notes)
        assert any("outside the layers: the encoder's output, 1 MiB per" in note for note in notes)

    def test_an_image_gives_the_sequence_length(self, memcalc):
        document = memcalc("layer vit-large --format json").document
        assert document["symbols"]["s"] == 197
        assert "v" not in document["symbols"]

    def test_an_iteration_of_images_has_the_patches_and_the_classes(self):
        s, h, layers = 197, 1024, 24
        layer = 24 * s * h**2 + 4 * s**2 * h
        patches, classes = 2 * (s - 1) * 3 * 16**2 * h, 2 * h * 1000
        row = library.flops(load("vit-large")).records()[0]
        assert row["forward_flops"] == layers * layer + patches + classes


class TestFurtherTokens:
    """Multi-token prediction: a layer of experts behind what joins its two inputs."""

    def test_it_keeps_what_pytorch_keeps_of_the_join_and_of_the_last_norm(self):
        s, b, h = 64, 2, 128

        class Join(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.norms = torch.nn.ParameterList(
                    torch.empty(h, dtype=torch.bfloat16, device="meta") for _ in range(3)
                )
                self.proj = torch.empty(h, 2 * h, dtype=torch.bfloat16, device="meta")
                self.proj = torch.nn.Parameter(self.proj)

            def forward(self, embedded, x):
                normed = [
                    kernels.rms_norm(y, w) for y, w in zip((embedded, x), self.norms, strict=False)
                ]
                return kernels.rms_norm(torch.cat(normed, -1) @ self.proj.t(), self.norms[2])

        given = [
            torch.empty(s, b, h, dtype=torch.bfloat16, device="meta", requires_grad=True)
            for _ in range(2)
        ]
        measured = measure(Join(), *given)
        model = replace(load("deepseek-v3").model, hidden_size=h, layers=1, moe_layers=None)
        config = Config(model, Parallel(), Run(seq_length=s, micro_batch_size=b))
        of = {
            kind: sum(e.tensor.bytes for e in layer_entries(config, "exact", kind=kind))
            for kind in ("mtp", "moe")
        }
        # the projection's output is the layer's input, and its output that of the last norm
        assert of["mtp"] - of["moe"] == measured.bytes

    def test_its_weights_are_a_layers_and_those_of_the_join_and_three_norms(self):
        config = load("deepseek-v3")
        h = config.model.hidden_size
        further, layer = (owned(layer_graph(config, kind=kind)) for kind in ("mtp", "moe"))
        assert further - layer == 2 * h**2 + 3 * h

    def test_it_stands_on_the_last_stage_with_a_head_of_its_own(self):
        settings = {"seq_length": 4096, "tp": 8, "sp": True, "ep": 8}
        with_ = load("deepseek-v3", **settings)
        without = replace(with_, model=replace(with_.model, mtp_layers=0))
        assert kinds(with_) == {"dense": 3, "moe": 58, "mtp": 1}
        more, less = stages(with_)[0], stages(without)[0]
        assert more.layers - less.layers == layer_bytes(with_, kind="mtp")
        assert more.head == 2 * less.head
        extra = flops.iteration(with_).forward - flops.iteration(without).forward
        head = flops.forward(head_graph(with_))
        assert extra == flops.layer(with_, kind="mtp").forward + head
