"""``comm``: the collectives of a layer and of an iteration, and what a rank sends for them."""

from memcalc import symbols
from memcalc.analysis import communication
from memcalc.answers.notes import batch_note, notes, recomputation, setting
from memcalc.blocks.layer import kinds, layer_graph
from memcalc.config import Config
from memcalc.config.parallel import SHARDERS, ZERO
from memcalc.report import Column, Report

# What a part of an iteration is, where its name does not say it.
PARTS = {
    "table": "table: the embedding's; gradients of copies on other stages are summed with its own",
    "partial": "partial: gradients of what every tensor-parallel rank holds whole and uses for a "
    "part of the tokens or heads, as norms; summed once an iteration",
}
WHOLE = "weights, experts: gradients, summed once over the ranks that hold the same"
SPLIT = (
    "weights, experts: gradients scattered to ranks that split {}, and weights gathered from them "
    "({}; a framework may keep some gathered); step: after the optimizer's"
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
    lines: tuple[str, ...] = (
        "layer: one layer, one micro-batch; iteration: a rank of pipeline stage "
        f"{communication.busiest_stage(config)} of {config.parallel.pp} (from 0), all its layers, "
        f"ends and micro-batches, for {batch_note(config)}",
        "bytes are what a rank sends, by the ring algorithms: (n-1)/n of the tensor for a gather "
        "or a scatter, twice that for an all-reduce",
    )
    parts = {traffic.part for traffic in scopes["iteration"]}
    lines += tuple(said for part, said in PARTS.items() if part in parts)
    if {"weights", "experts"} & parts:
        split = SPLIT.format(ZERO[config.parallel.zero], SHARDERS[config.parallel.sharder])
        lines += (split if config.parallel.zero else WHOLE,)
    if config.parallel.sp and config.parallel.tp > 1:
        lines += (
            "the gathers overlapped with the data gradient are those that sequence parallelism "
            "adds: the paper's count leaves them out",
        )
    if config.model.kv_heads < config.parallel.tp:
        lines += ("the gather of the packed q, k and v of fewer key-value heads is not counted",)
    return Report(
        "comm",
        f"Communication of {setting(config)}, {recomputation(config)}",
        (
            Column("scope", "text"),
            Column("part", "text"),
            Column("collective", "text"),
            Column("phase", "text"),
            Column("count", "count"),
            Column("bytes_per_rank", "bytes"),
            Column("overlapped_with", "text"),
        ),
        tuple(
            (scope, t.part, t.collective, t.phase, t.times, round(t.bytes), t.overlapped_with)
            for scope, traffic in scopes.items()
            for t in traffic
        ),
        symbols.values(config),
        (*notes(config), *lines),
    )
