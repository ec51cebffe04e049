"""Losses: logits (s, b, v), or the hidden states that they are made of, -> a loss.

Each is the chain of operations that run, so that the moments of ``memcalc.analysis.walk`` follow
from what these save, write and hold. ``memcalc.config.implementation.CROSS_ENTROPIES`` names them.
"""

from typing import NamedTuple

from memcalc.graph.graph import (
    PASSED_ON,
    VIEW,
    Graph,
    Move,
    Save,
    Scratch,
    Tensor,
    Weight,
    plain,
)
from memcalc.graph.mesh import Axis, Size, elements
from memcalc.graph.ops.elementwise import cast, tanh
from memcalc.graph.ops.products import COLUMN, LINEAR, linear, quantized
from memcalc.graph.ops.sources import (
    CUT_CE,
    DTENSOR_CE,
    INDUCTOR_CE,
    KORTHIKANTI_ENDS,
    LIGER_CE,
    LIGER_LINEAR_CE,
    MEGATRON_CE,
    MEGATRON_FUSED_CE,
    RETURNED,
    TE_CE,
    TORCH_CE,
    TORCH_CHAIN,
)

CROSS_ENTROPY = plain("cross_entropy")
LOG_SOFTMAX = plain("log_softmax")
LOG_SOFTMAX_PARALLEL = plain("log_softmax_parallel", gradient=PASSED_ON)
NLL_LOSS = plain("nll_loss")
NLL_LOSS_PARALLEL = plain("nll_loss_parallel")
GATHER_VOCABULARY = plain("gather_vocabulary")
SPLIT_TOKENS = plain("split_tokens", output=VIEW)

OF_SOFTMAX = "log-probabilities: the gradient is computed from them"

CHUNKS = 8  # torchtune's CEWithChunkedOutputLoss(num_output_chunks=8)
LITGPT_TOKENS = 128  # litgpt finetune/lora.py: lm_head_chunk_size
MOST_CHUNKS = 64  # that are recorded; more are recorded as so many larger ones


class Head(NamedTuple):
    """The linear that makes the logits.

    Attributes:
        vocabulary: v, over all ranks.
        bias: Whether it has a bias.
        shared: Whether its weight belongs to another operation and counts there.
        capped: Whether a soft cap follows: tanh of the scaled logits.
        returns: Whether the caller refers to the logits until backward is over.
    """

    vocabulary: Axis
    bias: bool = False
    shared: bool = False
    capped: bool = False
    returns: bool = False


def unfused(g: Graph, x: Tensor, head: Head) -> Tensor:
    """Megatron's: the fp32 softmax is computed in place on an fp32 copy of the logits.

    Saves the softmax, each token's target among a rank's own rows (int64) and whether the target
    belongs to another rank (one byte). Backward overwrites the softmax with the gradient and casts
    it.
    """
    return megatron_cross_entropy(g, "loss", _logits(g, x, head))


def native(g: Graph, x: Tensor, head: Head) -> Tensor:
    """Megatron-core's fused kernel: ``unfused``, but the compiled exponential is not in place."""
    return megatron_cross_entropy(g, "loss", _logits(g, x, head), fused=True)


def te(g: Graph, x: Tensor, head: Head) -> Tensor:
    """Transformer Engine's kernel: backward overwrites the logits with their gradient.

    Saves the logits, each token's target (int64), and its maximum, sum and target logit (fp32).
    """
    logits = _logits(g, x, head)
    out = Tensor("loss_output", logits.axes[:2], 4)
    sums = Tensor("loss_sums", (*logits.axes[:2], Axis.whole("3", 3)), 4)
    saves = (
        Save(logits, "logits: backward overwrites them with their gradient", TE_CE),
        Save(_target("loss", logits), "target of each token, int64", TE_CE, small=True),
        Save(sums, "maximum, sum and target logit of each token, fp32", TE_CE, small=True),
    )
    g.record("loss", CROSS_ENTROPY, (logits,), (out,), saves=saves, in_place=True)
    return out


def megatron_cross_entropy(g: Graph, name: str, logits: Tensor, fused: bool = False) -> Tensor:
    """Logits (s, b, v) -> losses (s, b), over a vocabulary that is sharded over the ranks.

    What it saves, ``unfused`` says; ``fused`` is ``native``.
    """
    source = MEGATRON_FUSED_CE if fused else MEGATRON_CE
    out = Tensor(f"{name}_output", logits.axes[:2], 4)
    probabilities = Tensor(f"{name}_softmax", logits.axes, 4)
    target = _target(name, logits)
    foreign = Tensor(f"{name}_foreign", logits.axes[:2], 1)
    saves = (
        Save(probabilities, "softmax, fp32: its gradient is computed from it", KORTHIKANTI_ENDS),
        Save(target, "target of each token, int64", source, small=True),
        Save(
            foreign, "which targets belong to another rank, one byte per token", source, small=True
        ),
    )
    scratch = Scratch(forward=probabilities.bytes if fused else 0)
    g.record(name, CROSS_ENTROPY, (logits,), (out,), saves=saves, scratch=scratch)
    return out


def upcast(g: Graph, x: Tensor, head: Head) -> Tensor:
    """PyTorch's cross entropy of an fp32 copy of the logits.

    Callers refer to the logits until the loss is computed, whether or not they return them.
    """
    logits = _logits(g, x, head, whole=True)
    return cross_entropy(g, "loss", cast(g, "loss_input", logits, 4), (logits,))


def as_they_are(g: Graph, x: Tensor, head: Head) -> Tensor:
    """PyTorch's cross entropy of the logits in their own dtype."""
    return cross_entropy(g, "loss", _logits(g, x, head, whole=True))


def returned_fp32(g: Graph, x: Tensor, head: Head) -> Tensor:
    """PyTorch's cross entropy of logits that the model returns in fp32: no others are left."""
    logits = _logits(g, x, head._replace(returns=False), whole=True)
    logits = cast(g, "logits_fp32", logits, 4)
    if head.returns:
        _return(g, logits)
    return cross_entropy(g, "loss", logits)


def cross_entropy(g: Graph, name: str, logits: Tensor, holds: tuple[Tensor, ...] = ()) -> Tensor:
    """Logits (s, b, v) -> their mean loss: PyTorch's log_softmax, then nll_loss.

    Saves what these save. The function refers to its logits until the loss is computed; ``holds``
    are tensors that its callers refer to.
    """
    log_probabilities = log_softmax(g, f"{name}_log_softmax", logits)
    return nll_loss(g, name, log_probabilities, (*holds, logits))


def log_softmax(g: Graph, name: str, logits: Tensor) -> Tensor:
    """Logits (s, b, v) -> log-probabilities (s, b, v). Saves its output."""
    out = Tensor(f"{name}_output", logits.axes, logits.dtype_bytes)
    g.record(name, LOG_SOFTMAX, (logits,), (out,), saves=(Save(out, OF_SOFTMAX, TORCH_CE),))
    return out


def nll_loss(g: Graph, name: str, log_probabilities: Tensor, holds: tuple[Tensor, ...]) -> Tensor:
    """Log-probabilities (s, b, v) -> their mean loss.

    Saves them, each token's target (int64) and the weight of all targets.
    """
    out = Tensor(f"{name}_output", (), 4)
    saves = _saved_by_nll(name, log_probabilities, TORCH_CE)
    g.record(name, NLL_LOSS, (log_probabilities,), (out,), saves=saves, holds=holds)
    return out


def _saved_by_nll(name: str, log_probabilities: Tensor, source: str) -> tuple[Save, ...]:
    target, weight = _target(name, log_probabilities), Tensor(f"{name}_weight", (), 4)
    return (
        Save(log_probabilities, OF_SOFTMAX, source),
        Save(target, "target of each token, int64", source, small=True),
        Save(weight, "weight of all targets", source, small=True),
    )


def compiled(g: Graph, x: Tensor, head: Head) -> Tensor:
    """``upcast``, compiled: no fp32 tensor of the logits' size is written.

    Saves the logits, each token's maximum and sum (fp32) and its target (int64).
    """
    logits = _logits(g, x, head, whole=True)
    out = Tensor("loss_output", (), 4)
    sums = Tensor("loss_sums", (*logits.axes[:2], Axis.whole("2", 2)), 4)
    saves = (
        Save(logits, "logits: the gradient is computed from them", INDUCTOR_CE),
        Save(sums, "maximum and sum of each token, fp32", INDUCTOR_CE, small=True),
        Save(_target("loss", logits), "target of each token, int64", INDUCTOR_CE, small=True),
    )
    g.record("loss", CROSS_ENTROPY, (logits,), (out,), saves=saves)
    return out


def loss_parallel(g: Graph, x: Tensor, head: Head) -> Tensor:
    """DTensor's cross entropy of an fp32 copy of the logits, whose vocabulary stays sharded."""
    if g.mesh.t == 1:
        return upcast(g, x, head)
    logits = _logits(g, x, head)
    copy = cast(g, "loss_input", logits, 4)
    log_probabilities = log_softmax_parallel(g, "loss_log_softmax", copy, (logits, copy))
    return nll_loss_parallel(g, "loss", log_probabilities, (logits, copy))


def log_softmax_parallel(g: Graph, name: str, logits: Tensor, holds: tuple[Tensor, ...]) -> Tensor:
    """``log_softmax`` of a sharded vocabulary. Saves its output.

    The shifted logits stand beside their exponential, then beside the output.
    """
    out = Tensor(f"{name}_output", logits.axes, logits.dtype_bytes)
    save = Save(out, OF_SOFTMAX, DTENSOR_CE)
    scratch, kind = Scratch(forward=logits.bytes), LOG_SOFTMAX_PARALLEL
    g.record(name, kind, (logits,), (out,), saves=(save,), scratch=scratch, holds=holds)
    return out


def nll_loss_parallel(
    g: Graph, name: str, log_probabilities: Tensor, holds: tuple[Tensor, ...]
) -> Tensor:
    """``nll_loss`` of a sharded vocabulary. Saves what that saves, of a rank's own part.

    Its backward is also that of log_softmax: zeros with -1 at the targets stand beside the
    exponential and the sum of both, then beside the sum and the gradient.
    """
    out = Tensor(f"{name}_output", (), 4)
    saves = _saved_by_nll(name, log_probabilities, DTENSOR_CE)
    scratch, kind = Scratch(backward=2 * log_probabilities.bytes), NLL_LOSS_PARALLEL
    inputs = (log_probabilities,)
    g.record(name, kind, inputs, (out,), saves=saves, scratch=scratch, holds=holds)
    return out


def upcast_in_chunks(g: Graph, x: Tensor, head: Head) -> Tensor:
    """torchtune's: the head makes ``CHUNKS`` chunks of logits, and the loss upcasts each alone."""
    chunks = split_tokens(g, "tokens", x, CHUNKS)
    logits = [_logits_of_chunk(g, chunk, head, number) for number, chunk in enumerate(chunks)]
    for number, chunk in enumerate(logits):
        copy = cast(g, f"loss_input_{number}", chunk, 4)
        out = cross_entropy(g, f"loss_{number}", copy, tuple(logits))
    return out


def in_chunks(g: Graph, x: Tensor, head: Head) -> Tensor:
    """litgpt's: the head makes logits of ``LITGPT_TOKENS`` tokens at a time, and the loss follows.

    More than ``MOST_CHUNKS`` chunks count as so many larger ones.
    """
    s = x.axes[0].local
    number = min(-(-s // LITGPT_TOKENS), MOST_CHUNKS) if isinstance(s, int) else 1
    chunks = split_tokens(g, "tokens", x, number)
    logits = [_logits_of_chunk(g, chunk, head, number) for number, chunk in enumerate(chunks)]
    for number, chunk in enumerate(logits):
        out = cross_entropy(g, f"loss_{number}", chunk, tuple(logits))
    return out


def recomputed_in_chunks(g: Graph, x: Tensor, head: Head) -> Tensor:
    """``CHUNKS`` chunks of tokens, each checkpointed from its hidden states to its fp32 loss."""
    head = head._replace(returns=False)
    for number, chunk in enumerate(split_tokens(g, "tokens", x, CHUNKS)):
        with g.region("loss_chunk", always=True):
            logits = _logits_of_chunk(g, chunk, head, number)
            copy = cast(g, f"loss_input_{number}", logits, 4)
            out = cross_entropy(g, f"loss_{number}", copy)
    return out


def liger(g: Graph, x: Tensor, head: Head) -> Tensor:
    """Liger's kernel: forward overwrites the logits with their gradient, which it saves."""
    logits = _logits(g, x, head, whole=True)
    out = Tensor("loss_output", (), 4)
    losses = Tensor("loss_of_tokens", logits.axes[:2], logits.dtype_bytes)
    counted = Tensor("loss_targets_counted", logits.axes[:2], 1)
    save = Save(logits, "logits, overwritten with their gradient", LIGER_CE)
    g.record(
        "loss",
        CROSS_ENTROPY,
        (logits,),
        (out,),
        saves=(save,),
        scratch=Scratch(forward=losses.bytes + counted.bytes),
        in_place=True,
    )
    return out


def liger_linear(g: Graph, x: Tensor, head: Head) -> Tensor:
    """Liger's head and loss in one function, in chunks of tokens.

    Only the logits of one chunk are alive, which a kernel overwrites with their gradient. A chunk
    has so many tokens that its logits take about the memory of all hidden states; the number is
    rounded up to a power of 2. Saves the gradients of x and of the weight, which the forward pass
    computes.
    """
    s, b, hidden = x.axes
    tokens = s.local * b.local
    weights = _weights(g, head, hidden)
    local = weights[0].axes[0].local
    reason = "computed in the forward pass"
    gradients = [Tensor("output_input_gradient", x.axes, x.dtype_bytes)] + [
        Tensor(f"{weight.name}_gradient", weight.axes, x.dtype_bytes) for weight in weights
    ]
    losses = Tensor("loss_of_tokens", (s, b), 4)
    counted = Tensor("loss_targets_counted", (s, b), 1)
    chunk = x.dtype_bytes * _liger_tokens(tokens, local, hidden.local) * local
    out = Tensor("loss_output", (), 4)
    g.record(
        "output",
        LINEAR,
        (x,),
        (out,),
        saves=[Save(gradient, reason, LIGER_LINEAR_CE) for gradient in gradients],
        flops=2 * elements(x.axes) * head.vocabulary.size,
        weights=weights,
        scratch=Scratch(forward=chunk + losses.bytes + counted.bytes),
        in_place=True,
    )
    return out


def cut(g: Graph, x: Tensor, head: Head) -> Tensor:
    """Cut cross entropy: one kernel computes logits block by block, and none is in memory.

    Saves x, each token's log-sum-exp (fp32) and target (int64), and the average of each logit
    (fp32), by which backward orders the vocabulary. Backward computes the logits again.
    """
    s, b, hidden = x.axes
    weights = _weights(g, head, hidden)
    local = weights[0].axes[:1]
    out = Tensor("loss_output", (), 4)
    losses = Tensor("loss_of_tokens", (s, b), 4)
    sums, target = Tensor("loss_log_sum_exp", (s, b), 4), Tensor("loss_target", (s, b), 8)
    average, order = (Tensor(f"loss_{name}", local, 4) for name in ("logit_average", "order"))
    saves = (
        Save(x, "input: the logits are computed from it again", CUT_CE, for_weights=True),
        Save(sums, "log-sum-exp of each token, fp32", CUT_CE, small=True),
        Save(target, "target of each token, int64", CUT_CE, small=True),
        Save(average, "average of each logit, fp32", CUT_CE, small=True),
    )
    g.record(
        "output",
        LINEAR,
        (x,),
        (out,),
        saves=saves,
        flops=2 * elements(x.axes) * head.vocabulary.size,
        weights=weights,
        scratch=Scratch(forward=losses.bytes, backward=order.bytes),
    )
    return out


def split_tokens(g: Graph, name: str, x: Tensor, number: int) -> list[Tensor]:
    """x (s, b, h) -> chunks of tokens, views of x; backward concatenates. Saves nothing.

    Of s that is no whole number there is one chunk.
    """
    s, *others = x.axes
    if not isinstance(s.local, int) or number == 1:
        return [x]
    number = min(number, s.local)
    least, rest = divmod(s.local, number)
    sizes = [least + 1] * rest + [least] * (number - rest)
    chunks = []
    for place, size in enumerate(sizes):
        part = s._replace(letter=f"{s.letter}/{number}", size=size * s.size // s.local, local=size)
        axes = (part, *others)
        chunks.append(Tensor(f"{x.name}_{place}", axes, x.dtype_bytes, x.kept_as or x))
    g.record(name, SPLIT_TOKENS, (x,), chunks)
    return chunks


def gather_vocabulary(g: Graph, logits: Tensor, vocabulary: Axis) -> Tensor:
    """Logits (s, b, v/t) -> (s, b, v); backward takes a rank's own part. Saves nothing."""
    if g.mesh.t == 1:
        return logits
    out = Tensor("logits_gathered", (*logits.axes[:-1], vocabulary), logits.dtype_bytes)
    moves = (Move("all_gather", "forward", out.bytes, g.mesh.t),)
    g.record("logits_gather", GATHER_VOCABULARY, (logits,), (out,), moves=moves)
    return out


def _logits(g: Graph, x: Tensor, head: Head, whole: bool = False) -> Tensor:
    """The logits (s, b, v); ``whole`` gathers a sharded vocabulary."""
    outputs = {"logits": (head.vocabulary,)}
    (logits,) = linear(g, "output", x, outputs, COLUMN, bias=head.bias, shared=head.shared)
    if whole:
        logits = gather_vocabulary(g, logits, head.vocabulary)
    if head.capped:
        logits = tanh(g, "logit_cap", logits)
    if head.returns:
        _return(g, logits)
    return logits


def _return(g: Graph, logits: Tensor) -> None:
    g.returns(Save(logits, "the caller refers to it until backward is over", RETURNED))


def _target(name: str, logits: Tensor) -> Tensor:
    return Tensor(f"{name}_target", logits.axes[:2], 8)


def _logits_of_chunk(g: Graph, chunk: Tensor, head: Head, number: int) -> Tensor:
    """The same of a chunk of tokens, counted from 0; all chunks have one weight."""
    weights = _weights(g, head, chunk.axes[2])
    if number > 0:
        weights = [weight._replace(shared=True) for weight in weights]
    axes = (*chunk.axes[:2], g.mesh.tensor(head.vocabulary))
    logits = Tensor(f"logits_{number}", axes, chunk.dtype_bytes)
    reason = "input: needed for the weight gradient"
    save = Save(quantized(g, chunk), reason, TORCH_CHAIN, for_weights=True)
    flops = 2 * elements(chunk.axes) * head.vocabulary.size
    g.record("output", LINEAR, (chunk,), (logits,), (save,), flops, weights=weights)
    logits = gather_vocabulary(g, logits, head.vocabulary)
    if head.capped:
        logits = tanh(g, f"logit_cap_{number}", logits)
    if head.returns:
        _return(g, logits)
    return logits


def _weights(g: Graph, head: Head, hidden: Axis) -> list[Weight]:
    """The head's weight and bias."""
    local = g.mesh.tensor(head.vocabulary)
    weights = [Weight("output.weight", (local, hidden), head.shared)]
    return weights + [Weight("output.bias", (local,))] * head.bias


def _liger_tokens(tokens: Size, vocabulary: Size, hidden: Size) -> Size:
    """Tokens of a chunk: tokens / ceil(v / h), rounded up to a power of 2."""
    if not all(type(size) is int for size in (tokens, vocabulary, hidden)):
        return tokens * hidden / vocabulary
    share = -(-tokens // -(-vocabulary // hidden))
    return min(tokens, 1 << (share - 1).bit_length())
