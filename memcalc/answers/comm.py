"""``comm``: the collectives of a layer and of an iteration, and what a rank sends in them."""

from collections.abc import Sequence

from memcalc import symbols
from memcalc.analysis import communication
from memcalc.answers.notes import batch_note, notes, recomputation, whole_setting
from memcalc.blocks.layer import KINDS, kinds, layer_graph
from memcalc.config import Config
from memcalc.config.parallel import ZERO
from memcalc.report import Column, Report
from memcalc.units import format_bytes

# What a part of an iteration is, where its name does not say it.
PARTS = {
    "table": "table: the embedding table; stages that share it (tied embeddings) all-reduce its "
    "gradient",
    "partial": "partial: gradients of parameters replicated over tensor-parallel ranks (such as "
    "norms), all-reduced once per iteration",
}
WHOLE = (
    "weights, experts: their gradients, all-reduced once per iteration over the ranks that hold "
    "the same parameters"
)
SHARDED = (
    "weights, experts: gradients are reduce-scattered, and weights all-gathered, over the ranks "
    "that shard {} ({}); count: passes over all layers, in which frameworks send layer by layer or "
    "bucket by bucket; phase step: after the optimizer step"
)

COLUMNS = (
    Column("scope", "text", choices=("layer", *(f"{kind} layer" for kind in KINDS), "iteration")),
    Column("part", "text", choices=("", "layers", *KINDS, *communication.PARTS)),
    Column("collective", "text"),
    Column("phase", "text", choices=communication.PHASES),
    Column("count", "count"),
    Column("bytes_per_rank", "bytes"),
    Column("overlapped_with", "text"),
)


def comm(config: Config) -> Report:
    """Collectives by scope, kind and phase, with the bytes that one rank sends.

    Args:
        config: The model, its parallelism and its run.

    >>> from memcalc.config import load
    >>> rows = comm(load("175b", sp=True)).records()
    >>> [(row["collective"], row["phase"], row["count"]) for row in rows if row["scope"] == "layer"]
    ... # doctest: +NORMALIZE_WHITESPACE
    [('all_gather', 'forward', 2), ('reduce_scatter', 'backward', 2), ('all_gather', 'backward', 2),
     ('reduce_scatter', 'forward', 2), ('all_gather', 'backward', 2)]
    """
    config = config.padded
    of = kinds(config)
    scopes = {
        "layer" if len(of) == 1 else f"{kind} layer": communication.of_graph(
            layer_graph(config, kind=kind), config.run.policy
        )
        for kind in of
    }
    scopes["iteration"] = communication.of_iteration(config)
    rank, p = "one rank", config.parallel.pp
    if p > 1:
        rank += f" of stage {communication.busiest_stage(config)}, the stage that sends most"
    lines: tuple[str, ...] = (
        f"scope layer: one layer, one micro-batch; scope iteration: all layers and micro-batches "
        f"of {rank}, with its embedding and head if it has them, for {batch_note(config)}",
        "bytes per rank: what one of n ranks sends under ring algorithms, (n-1)/n of the tensor "
        "for an all-gather, reduce-scatter or all-to-all, twice that for an all-reduce, and the "
        "whole tensor for a send",
    )
    parts = {traffic.part for traffic in scopes["iteration"]}
    lines += tuple(said for part, said in PARTS.items() if part in parts)
    if {"weights", "experts"} & parts:
        sharded = SHARDED.format(ZERO[config.parallel.zero], config.parallel.sharding.summary)
        lines += (sharded if config.parallel.zero else WHOLE,)
    if config.parallel.sp and config.parallel.tp > 1:
        lines += (
            "sequence parallelism adds the all-gathers that overlap with the data gradient (of a "
            "linear's input); Korthikanti et al. 2022 do not count them",
        )
    if config.model.kv_heads < config.parallel.tp:
        lines += (
            "not counted: the all-gather of the packed query, key and value, needed "
            "because there are fewer key-value heads than tensor-parallel ranks",
        )
    return Report(
        "comm",
        f"Collectives per layer and per iteration: {whole_setting(config)}, "
        f"{recomputation(config)}",
        COLUMNS,
        tuple(
            (scope, t.part, t.collective, t.phase, t.times, round(t.bytes), t.overlapped_with)
            for scope, traffic in scopes.items()
            for t in traffic
        ),
        symbols.values(config),
        (*notes(config), *lines),
        answer=_answer(scopes["iteration"]),
    )


def _answer(traffic: Sequence[communication.Traffic]) -> str:
    """What a rank sends in an iteration, and what of that is most."""
    if not traffic:
        return "a GPU sends nothing"
    most = max(traffic, key=lambda each: each.bytes)
    total = sum(each.bytes for each in traffic)
    where = f"{most.part} ({most.collective}, {most.phase})"
    return (
        f"one GPU sends {format_bytes(round(total))} per iteration, "
        f"{float(100 * most.bytes / total):.0f} % of it for {where}"
    )
