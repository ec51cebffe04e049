"""The notes of ``memory``: its schedule, its bytes per parameter, what is known of its accuracy."""

from collections.abc import Iterator, Sequence

from memcalc.analysis import optimizer_step
from memcalc.analysis.buffers import unknown
from memcalc.analysis.rank import Rank
from memcalc.analysis.states import moments, recipe
from memcalc.answers.notes import batch_note
from memcalc.config import Config
from memcalc.config.gpus import gpu
from memcalc.config.optimizers import ALL, FORMS, Moments
from memcalc.config.parallel import ZERO


def setting_notes(config: Config, explain: bool) -> Iterator[str]:
    """The schedule and the bytes per parameter, in words."""
    parallel, run = config.parallel, config.run
    if not explain:
        own = "" if parallel.sharding.own_master else "master weights and "
        yield (
            f"peak: weights + gradients + optimizer ({own}moments) + activations + logits + buffers"
        )
    yield _accuracy(config)
    if parallel.pp > 1:
        what = parallel.scheduling.summary
        yield f"schedule: {parallel.order} ({what}), for {batch_note(config)}"
        if not explain:  # whose table has no such column
            yield (
                "in flight: micro-batches whose forward has run and whose backward has not, summed "
                "over the rank's model chunks"
            )
    if parallel.scheduling.splits_backward:
        yield (
            "split backward: until its weight gradient is computed, each GEMM keeps its input "
            "(of an all-gathered input the shard) and its output gradient; not compared with "
            "measurements"
        )
    yield f"{_of_a_parameter(config)}; {_split(config)}"
    form = optimizer_step.form(config)
    if form != "fused":
        yield f"optimizer step: {form}, {FORMS[form]}; --optimizer-step sets another"
    for step in optimizer_step.steps(config):
        if step.not_counted:
            yield f"not counted: {step.not_counted}"
    if left_out := unknown(config):
        names = " and ".join(left_out)
        why = (
            "depend on the GPU model: pass --gpu"
            if run.gpu is None
            else "are known for NVIDIA GPUs only"
        )
        yield f"not counted: workspaces of {names}, which {why}"
    if run.gpu is not None and gpu(run.gpu).capability is None:
        yield f"{gpu(run.gpu).name}: CUDA context and NCCL are estimated as on NVIDIA GPUs"
    tied = [stage for stage in range(parallel.pp) if Rank(config, stage).copies]
    if tied:
        yield f"embedding table: a copy is on {ranges(tied)}"


def _accuracy(config: Config) -> str:
    """How far peaks were off measured runs of the framework that runs the step."""
    known, title = config.framework.accuracy, config.framework.title
    if known is None:
        return f"accuracy: not compared with measured runs of {title}"
    return (
        f"accuracy: peaks of {known.runs} measured runs of {title} were off by {known.median} % in "
        f"the median and {known.worst} % at worst ({known.source})"
    )


def _of_a_parameter(config: Config) -> str:
    """Bytes per parameter, before anything is sharded."""
    run, each = config.run, recipe(config.run)
    weight = each.weight
    own_master = config.parallel.sharding.own_master
    if own_master:
        weight = each.master or each.weight
    linears = ""
    if run.precision == "fp8":
        own, copies_ = (1, 1) if run.fp8_params else (2, 2)
        own = weight if own_master else own
        linears = f" (linear layers: {own} B, and {copies_} B of fp8 copies)"
    states = [f"master weight {each.master} B"] if each.master and not own_master else []
    kept = moments(config)
    joint = ", " if all(m.weights == ALL for m in kept) else " or "
    if terms := [m.summary or f"{each.moment * m.number} B of {_of(m)}" for m in kept]:
        states.append(joint.join(terms))
    if not states:
        states.append("no optimizer states")
    return (
        f"per parameter: weight {weight} B{linears}, gradient {each.gradient} B, "
        f"{', '.join(states)}"
    )


def _of(moments: Moments) -> str:
    """Moments, and of which weights they are if not of all."""
    return moments.name if moments.weights == ALL else f"{moments.name} ({moments.weights})"


def _split(config: Config) -> str:
    """What is sharded over data-parallel ranks, and by which implementation."""
    parallel, experts = config.parallel, config.model.experts
    what = ZERO[parallel.zero]
    if parallel.zero == parallel.sharding.gathered_at:
        what += ", and weights, which stay gathered after forward (in buffers)"
    if parallel.zero == 0:
        return "nothing is sharded over data-parallel ranks"
    who = parallel.sharding.summary
    if parallel.replicas == 1 and not (experts and parallel.expert_replicas > 1):
        return (
            f"nothing is sharded: there is one data-parallel rank (--dp); more ranks would shard "
            f"{what} ({who})"
        )
    copies_ = f", {parallel.shard_copies} replicas per shard" if parallel.shard_copies > 1 else ""
    return f"sharded over data-parallel ranks: {what} ({who}){copies_}"


def ranges(numbers: Sequence[int]) -> str:
    """Stages in words.

    >>> ranges([0, 1, 2, 5]), ranges([3])
    ('stages 0-2, 5', 'stage 3')
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f"stage{'s' if len(numbers) > 1 else ''} {words}"
