"""Losses against real ones: the bytes that PyTorch holds, and the dtype that it computes in."""

from dataclasses import replace

import pytest
import torch
import transformers
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from memcalc.analysis import activations, walk
from memcalc.blocks.head import head_graph
from memcalc.config import IMPLEMENTATIONS, Config, Model, Parallel, Run
from memcalc.config.families import FAMILIES
from memcalc.validation.step.tracker import Tracker

TOKENS, VOCABULARY, HIDDEN = 512, 768, 16
SMALL = 8 * TOKENS + 300  # targets, which are views here, and scalars


def upcast(x, weight, targets):
    logits = x @ weight.t()
    return logits, functional.cross_entropy(logits.float().flatten(0, 1), targets)


def upcast_by_transformers(x, weight, targets):
    logits = x @ weight.t()
    labels = targets.unflatten(0, (1, -1))
    loss = transformers.loss.loss_utils.ForCausalLMLoss(logits, labels, VOCABULARY)
    return logits, loss


def as_they_are(x, weight, targets):
    logits = x @ weight.t()
    return logits, functional.cross_entropy(logits.flatten(0, 1), targets)


def returned_fp32(x, weight, targets):
    logits = (x @ weight.t()).float()
    return logits, functional.cross_entropy(logits.flatten(0, 1), targets)


def torchtune(x, weight, targets):
    """CEWithChunkedOutputLoss, with the head of TransformerDecoder.chunked_output."""
    logits = [chunk @ weight.t() for chunk in x.tensor_split(8, dim=1)]
    loss = 0.0
    for chunk, target in zip(logits, targets.tensor_split(8), strict=True):
        loss += functional.cross_entropy(chunk.flatten(0, 1).float(), target, reduction="sum")
    return logits, loss / targets.numel()


def litgpt(x, weight, targets):
    """chunked_cross_entropy of a list of logits."""
    logits = [chunk @ weight.t() for chunk in x.split(128, dim=1)]
    losses = [
        functional.cross_entropy(chunk.flatten(0, 1), target)
        for chunk, target in zip(logits, targets.split(128), strict=True)
    ]
    return logits, torch.stack(losses).mean()


def recomputed(x, weight, targets):
    def chunk_loss(chunk, target):
        return functional.cross_entropy((chunk @ weight.t()).float().flatten(0, 1), target)

    pairs = zip(x.tensor_split(8, dim=1), targets.tensor_split(8), strict=True)
    return None, sum(checkpoint(chunk_loss, *pair, use_reentrant=False) for pair in pairs)


LOSSES = {
    ("torch", True): upcast,
    ("torch", False): upcast_by_transformers,
    ("torch-16bit", True): as_they_are,
    ("torch-16bit", False): as_they_are,
    ("torch-fp32", True): returned_fp32,
    ("torch-fp32", False): returned_fp32,
    ("torchtune-chunked", False): torchtune,
    ("torchtune-chunked", True): torchtune,
    ("litgpt", True): litgpt,
    ("litgpt", False): litgpt,
    ("chunked-recomputed", False): recomputed,
}


def held(loss, holds):
    """Bytes beside the inputs: at most in forward, after it, and at most in backward."""
    x = torch.zeros(1, TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(VOCABULARY, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(TOKENS, dtype=torch.long)
    with Tracker("cpu") as tracker:
        tracker.phase("forward")
        logits, value = loss(x, weight, targets)
        forward = tracker.peak(rounded=False).bytes
        if not holds:
            del logits
        tracker.phase("backward")
        tracker.reset_peaks()
        kept = tracker.peak(rounded=False).bytes
        value.backward()
        return forward, kept, tracker.peak(rounded=False).bytes


@pytest.mark.parametrize(("word", "holds"), LOSSES, ids=lambda each: str(each))
def test_real_tensors_take_what_the_operations_say(word, holds):
    """A byte per logit is 390 KB; targets and scalars are 4 KB."""
    sizes = {"name": "toy", "layers": 1, "hidden_size": HIDDEN, "heads": 1}
    ends = {"final_norm": False, "tied_embeddings": False, "vocab_size": VOCABULARY}
    kernels = replace(IMPLEMENTATIONS["torch"], cross_entropy=word, holds_logits=holds)
    run = Run(seq_length=TOKENS, implementation=kernels)
    graph = head_graph(Config(Model.of(**sizes, **ends), Parallel(), run))
    of_x = 2 * TOKENS * HIDDEN  # which the head saves, and the loop has anyway
    expected = (
        walk.forward(graph).bytes,
        activations.total(activations.kept(graph)),
        walk.backward(graph, own=2).bytes,
    )
    for ours, theirs in zip(expected, held(LOSSES[word, holds], holds), strict=True):
        assert abs(ours - of_x - theirs) <= SMALL


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's own compiler has some
def test_a_compiled_loss_saves_the_logits_and_two_numbers_of_each_token():
    """Of the graph that Inductor gets; its kernels were seen to write no fp32 logits on a CPU."""

    def loss(logits, targets):
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets, reduction="sum")

    compiled = torch.compile(loss, backend="aot_eager_decomp_partition")
    logits = torch.zeros(1, TOKENS, VOCABULARY, dtype=torch.bfloat16, requires_grad=True)
    targets, saved = torch.zeros(TOKENS, dtype=torch.long), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        compiled(logits, targets)
    assert saved[0] is logits
    sizes = sorted(each.nbytes for each in saved[1:])
    assert sizes == [4 * TOKENS, 4 * TOKENS, 8 * TOKENS]


class Dtypes(TorchDispatchMode):
    """Notes the dtypes of what log-softmaxes are computed of."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._log_softmax.default:
            self.seen.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
SIZES |= {"num_hidden_layers": 1, "vocab_size": 32}
GEMMA = {**SIZES, "num_key_value_heads": 1, "head_dim": 8}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2, "num_layers": 1, "vocab_size": 32}
IDS = torch.zeros(1, 4, dtype=torch.long)
CLASSES = {
    "llama": (transformers.LlamaForCausalLM, SIZES, {"input_ids": IDS, "labels": IDS}),
    "gemma2": (transformers.Gemma2ForCausalLM, GEMMA, {"input_ids": IDS, "labels": IDS}),
    "gpt2": (
        transformers.GPT2LMHeadModel,
        {"n_embd": 16, "n_head": 2, "n_layer": 1, "vocab_size": 32},
        {"input_ids": IDS, "labels": IDS},
    ),
    "bert": (
        transformers.BertForPreTraining,
        SIZES,
        {"input_ids": IDS, "labels": IDS, "next_sentence_label": IDS[:, 0]},
    ),
    "t5": (
        transformers.T5ForConditionalGeneration,
        {**T5, "decoder_start_token_id": 0, "pad_token_id": 0},
        {"input_ids": IDS, "labels": IDS},
    ),
    "vit": (
        transformers.ViTForImageClassification,
        {**SIZES, "image_size": 8, "patch_size": 4, "num_labels": 3},
        {
            "pixel_values": torch.zeros(1, 3, 8, 8, dtype=torch.bfloat16),
            "labels": IDS[:, 0],
        },
    ),
}


@pytest.mark.parametrize("family", CLASSES)
def test_a_class_of_transformers_upcasts_as_its_family_says(family):
    kind, sizes, inputs = CLASSES[family]
    model = kind(kind.config_class(**sizes)).to(torch.bfloat16)
    with Dtypes() as dtypes:
        model(**inputs)
    expected = {"torch": {torch.float32}, "torch-16bit": {torch.bfloat16}}
    assert dtypes.seen == expected[FAMILIES[family].cross_entropy]
