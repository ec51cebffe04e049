"""The head: (s, b, h) -> a loss."""

from collections.abc import Callable, Mapping

from memcalc.blocks.build import build
from memcalc.blocks.norm import norm
from memcalc.blocks.spec import Spec
from memcalc.config import Config
from memcalc.graph import ops
from memcalc.graph.graph import Graph, Tensor
from memcalc.graph.mesh import Axis, Size
from memcalc.graph.ops.losses import Head
from memcalc.lazy import resolve

PER_TOKEN = ("unfused", "native", "te")  # Megatron's losses, of which one serves classes


def head(g: Graph, x: Tensor, m: Spec) -> Tensor:
    """x (s, b, h) -> losses (s, b): the last norm, logits over the vocabulary, cross entropy.

    Korthikanti et al. 2022, section 4.3. For a vision encoder, a loss (1, b) over its classes.
    """
    with g.region("head"):
        if m.model.final_norm:
            with g.region("norm"):
                x = norm(g, "final_norm", x, m)
        if m.model.encoder_layers is not None:
            x = ops.dropout(g, "final_dropout", x, m.model.hidden_dropout)
        if m.model.classes is not None:
            classes = Axis.whole("classes", m.model.classes)
            logits = ops.class_logits(g, "output", x, classes)
            if m.kernels.cross_entropy in PER_TOKEN:
                return ops.megatron_cross_entropy(g, "loss", logits)
            return ops.cross_entropy(g, "loss", logits)
        if m.model.pooled:
            first = ops.pooler(g, "pooler", x)
            ops.class_logits(g, "next_sentence", first, Axis.whole("2", 2))
        if m.model.head_transform:
            (x,) = ops.linear(
                g, "transform", x, {"transform_output": (m.h,)}, ops.REPLICATED, bias=True
            )
            x = norm(g, "transform_norm", ops.gelu(g, "transform_gelu", x), m)
        x = ops.enter_tensor_parallel(g, "head_enter", x, m.kernels.keeps_gathered)
        output = Head(
            m.vocabulary(),
            bias=m.model.head_bias,
            shared=m.model.tied_embeddings,
            capped=m.model.final_softcap is not None,
            returns=m.kernels.holds_logits,
        )
        loss: Callable[[Graph, Tensor, Head], Tensor] = resolve(m.kernels.loss)
        return loss(g, x, output)


def head_graph(config: Config, sizes: Mapping[str, Size] | None = None) -> Graph:
    """The graph of the head: one rank's forward pass of one micro-batch.

    Arguments and errors are those of ``memcalc.blocks.layer.layer_graph``.
    """
    return build(_head, config, sizes)


def _head(g: Graph, m: Spec) -> None:
    head(g, m.hidden_state(g, "head_input"), m)
