"""``flops``: the FLOPs of one layer, forward, backward and recomputed."""

from memcalc import symbols
from memcalc.analysis import flops as count
from memcalc.answers.notes import notes, recomputation, setting
from memcalc.blocks.layer import layer_graph
from memcalc.config import Config
from memcalc.report import Column, Report


def flops(config: Config) -> Report:
    """FLOPs of one layer for one micro-batch, over all tensor-parallel ranks.

    Model FLOPs are those of forward and backward; hardware FLOPs are those and what is recomputed.
    The columns of utilisation are unknown (None): they need the time of an iteration.

    >>> from memcalc.config import load
    >>> row, = flops(load("22b", recompute="full")).records()
    >>> row["hardware_flops"] - row["model_flops"] == row["forward_flops"]
    True
    """
    graph = layer_graph(config)
    forward, backward = count.forward(graph), count.backward(graph)
    extra = count.recomputed(graph, config.run.regions)
    lines = (
        *notes(config),
        "one layer, one micro-batch, all tensor-parallel ranks together; matrix products only, a "
        "multiply-add is two FLOPs, a causal mask saves none",
    )
    if config.run.implementation.attention == "flash":
        lines += (
            "what the flash kernel's own backward computes again (QK^T) is not counted as "
            "recomputed",
        )
    return Report(
        "flops",
        f"FLOPs of one layer of {setting(config)}, {recomputation(config)}",
        (
            Column("forward_flops", "flops"),
            Column("backward_flops", "flops"),
            Column("recompute_flops", "flops"),
            Column("model_flops", "flops"),
            Column("hardware_flops", "flops"),
            Column("mfu_percent", "percent", detail=True),
            Column("hfu_percent", "percent", detail=True),
            Column("hfu_printed_percent", "percent", detail=True),
        ),
        ((forward, backward, extra, forward + backward, forward + backward + extra) + (None,) * 3,),
        symbols.values(config),
        lines,
    )
