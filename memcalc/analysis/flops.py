"""FLOPs of GEMMs, two per multiply-add, over all ranks and each GEMM once.

Conventions: a causal mask saves no FLOPs unless asked for. Backward has two GEMMs per forward GEMM,
or one where a frozen weight needs no gradient. The scores that a flash kernel recomputes in its own
backward are not counted.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from fractions import Fraction
from typing import NamedTuple

from memcalc import paper, symbols
from memcalc.analysis.activations import NOTHING, cached_tensors, outermost
from memcalc.analysis.stages import recomputed_layers
from memcalc.blocks.embedding import embedding_graph
from memcalc.blocks.head import head_graph
from memcalc.blocks.layer import kind_of, kinds, layer_graph
from memcalc.config import Config
from memcalc.config.gpus import gpu
from memcalc.config.recompute import Policy
from memcalc.errors import UsageError
from memcalc.graph.graph import OF_ATTENTION, OF_WEIGHT, Graph, Op, Region
from memcalc.graph.mesh import Size, elements

BACKWARD_PER_FORWARD = 2  # the gradients of a GEMM's two factors are GEMMs of its size


class Flops(NamedTuple):
    """FLOPs of a part of training.

    Attributes:
        forward: Of the forward pass.
        recomputed: Of what backward recomputes.
        frozen: Of forward GEMMs with weights that are not trained.
    """

    forward: Size
    recomputed: Size
    frozen: Size = 0

    @property
    def backward(self) -> Size:
        """Of the backward pass, without recomputation."""
        return BACKWARD_PER_FORWARD * self.forward - self.frozen

    @property
    def model(self) -> Size:
        """Of forward and backward, as the model needs them."""
        return self.forward + self.backward

    @property
    def hardware(self) -> Size:
        """Of all that runs, recomputation included."""
        return self.model + self.recomputed


def forward(graph: Graph, causal: bool = False) -> Size:
    """FLOPs of the forward pass; ``causal`` halves those of attention scores.

    >>> s, b, h = 2048, 4, 6144
    >>> from memcalc.config import load
    >>> forward(layer_graph(load("22b"))) == 24 * b * s * h**2 + 4 * b * s**2 * h
    True
    """
    return sum(_flops(op, causal) for op in graph.ops)


def recomputed(
    graph: Graph, policy: Policy, causal: bool = False, early_stop: bool = False
) -> Size:
    """FLOPs that recomputation adds to the backward pass.

    Args:
        graph: The forward pass.
        policy: What is recomputed.
        causal: Whether attention-score FLOPs count half.
        early_stop: Whether a region's recomputation ends once the last tensor that it saves is
            there, as ``torch.utils.checkpoint`` does unless told otherwise.

    >>> from memcalc.config import load
    >>> config = load("175b", recompute="selective")
    >>> once, core = (recomputed(layer_graph(config), config.run.policy, early_stop=stop)
    ...     for stop in (True, False))
    >>> 2 * once == core
    True
    """
    again: dict[Region, list[Op]] = {}
    for op in graph.ops:
        region = outermost(op, policy)
        if region is not None:
            again.setdefault(region, []).append(op)
    return sum(
        _recomputed(_until_the_last_save(ops) if early_stop else ops, policy, causal)
        for ops in again.values()
    )


def flash_backward(graph: Graph) -> Size:
    """FLOPs of the scores that flash kernels recompute in their own backward, under any policy.

    >>> from memcalc.config import load
    >>> s, h = 8192, 4096
    >>> flash_backward(layer_graph(load("llama-3-8b"))) == 2 * s**2 * h
    True
    """
    queries = (op.inputs[0].axes for op in graph.ops if op.kind.gemm == OF_ATTENTION)
    return sum(2 * elements(axes) * axes[0].size for axes in queries)


def _recomputed(ops: Sequence[Op], policy: Policy, causal: bool) -> Size:
    """FLOPs of the operations of a recomputed region whose outputs are not cached."""
    total: Size = 0
    products = 0
    for op in ops:
        cached, products = cached_tensors(op, policy, products)
        if op.kind.gemm == OF_WEIGHT and cached:  # some of its outputs, each a GEMM of its width
            widths = {tensor: elements(tensor.axes[2:]) for tensor in op.outputs}
            kept = sum(widths[tensor] for tensor in cached)
            whole = sum(widths.values())
            total += _flops(op, causal) // whole * (whole - kept)
        elif not cached:
            total += _flops(op, causal)
    return total


def _until_the_last_save(ops: list[Op]) -> list[Op]:
    """The operations that run before all that they save has been saved.

    An operation saves its inputs before it runs, and its outputs after.
    """
    last = max((i for i, op in enumerate(ops) if op.saves), default=-1)
    if last < 0:
        return []
    its_own = any(save.tensor not in ops[last].inputs for save in ops[last].saves)
    return ops[: last + its_own]


def layer(
    config: Config, causal: bool = False, kind: str | None = None, early_stop: bool = False
) -> Flops:
    """FLOPs of one layer for one micro-batch; by default of the kind that there is most of."""
    graph, run = layer_graph(config, kind=kind), config.run
    again = recomputed(graph, run.policy, causal, early_stop)
    return Flops(forward(graph, causal), again, _of_frozen(graph, run.frozen))


def iteration(config: Config, causal: bool = False, early_stop: bool = False) -> Flops:
    """FLOPs of an iteration: all layers and the ends, for all micro-batches of all ranks.

    A token embedding has no GEMM, a patch embedding has one. Every multi-token prediction layer
    has a head. The arguments are those of ``forward`` and ``recomputed``.

    >>> from memcalc.config import load
    >>> f"{iteration(load('530b')).model:.4e}"
    '1.8522e+18'
    """
    times = config.microbatches * config.parallel.dp
    layers = {kind: layer(config, causal, kind, early_stop) for kind in kinds(config)}
    again = sum(n * layers[kind].recomputed for kind, n in recomputed_layers(config).items())
    parts = [(n, layers[kind]) for kind, n in kinds(config).items()]
    heads = 1 + config.model.mtp_layers
    for n, graph in ((1, embedding_graph(config)), (heads, head_graph(config))):
        again += n * recomputed(graph, NOTHING)  # what a loss itself checkpoints
        parts.append((n, Flops(forward(graph, causal), 0, _of_frozen(graph, config.run.frozen))))
    return Flops(
        times * sum(n * part.forward for n, part in parts),
        times * again,
        times * sum(n * part.frozen for n, part in parts),
    )


def beyond_windows(config: Config, causal: bool = False) -> Size:
    """FLOPs of an iteration's forward pass for scores outside sliding windows.

    A full causal layer counts all s x s scores, twice those that it needs. In this convention a
    window of w tokens needs 2sw - w^2 of them.

    >>> from memcalc.config import load
    >>> config = load("gemma-3-27b", seq_length=32768)
    >>> round(float(beyond_windows(config) / iteration(config).forward), 2)
    0.3
    """
    model, s = config.model, config.run.seq_length
    w = model.sliding_window
    if w is None or w >= s:
        return 0
    pattern = model.window_layers or (1,) * model.layers
    windowed = Counter(kind_of(config, i) for i, there in enumerate(pattern) if there)
    core = {
        kind: sum(_flops(op, causal) for op in layer_graph(config, kind=kind).ops if op.causal)
        for kind in windowed
    }
    hidden = sum(n * core[kind] for kind, n in windowed.items()) * Fraction((s - w) ** 2, s**2)
    return config.microbatches * config.parallel.dp * hidden


def percent_of_peak(
    done: int | Fraction, config: Config, seconds: int | float | Fraction, gpus: int | None = None
) -> Fraction:
    """The percent of the FLOPs that the GPUs can do in some seconds, at the peak of the precision.

    Args:
        done: FLOPs.
        config: The run; its GPU is known.
        seconds: The time.
        gpus: How many; by default, the config's ranks.

    Raises:
        UsageError: The GPU is not named, or has no known peak for the precision; or the ranks are
            fewer than the experts need.

    >>> from memcalc.config import load
    >>> config = load("530b")
    >>> round(float(percent_of_peak(iteration(config).model, config, 37.83)), 1)
    56.0
    """
    if config.run.gpu is None:
        raise UsageError("utilization needs a GPU: pass --gpu")
    parallel = config.parallel
    if gpus is None and config.model.experts is not None:
        of_experts, there = parallel.ep * parallel.expert_tp, parallel.ranks // parallel.pp
        if there % of_experts:
            raise UsageError(
                f"--ep {parallel.ep} x --etp {parallel.expert_tp} must divide the {there} ranks of "
                "a stage: change --dp, or pass --gpus"
            )
    found = gpu(config.run.gpu)
    peak = found.peaks.get(config.run.precision)
    if peak is None:
        raise UsageError(
            f"{found.name} has no known peak for {config.run.precision}: "
            "choose another --gpu or --precision"
        )
    return 100 * Fraction(done) / (Fraction(seconds) * (gpus or config.parallel.ranks) * peak)


def printed_hardware(config: Config) -> Fraction:
    """Hardware FLOPs of an iteration by the paper's equation 8, as printed."""
    letters = paper.exact({**symbols.values(config), "B": config.sequences})
    found: Fraction = paper.EQUATIONS[8](letters)
    return found


def _of_frozen(graph: Graph, frozen: Collection[str]) -> Size:
    """FLOPs of GEMMs with frozen weights: backward has one GEMM for each, not two."""
    return sum(op.flops for op in graph.ops if op.weights and op.is_in(frozen))


def _flops(op: Op, causal: bool) -> Size:
    return op.flops // 2 if causal and op.causal else op.flops
