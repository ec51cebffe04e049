"""``recompute``: what each policy keeps of one layer, and what it costs."""

from memcalc import symbols
from memcalc.analysis import activations
from memcalc.analysis import flops as count
from memcalc.answers.notes import flash_note, notes, setting
from memcalc.blocks.layer import KIND, layer_graph
from memcalc.config import Config
from memcalc.config.recompute import POLICIES, REGIONS
from memcalc.report import Column, Report


def recompute(config: Config, accounting: str = "paper") -> Report:
    """Each policy for one layer: bytes kept and saved on one rank, FLOPs over all ranks.

    A row is added for the run's own set of regions where it is not among the policies.

    Args:
        config: The model, its parallelism and its run.
        accounting: ``paper`` or ``exact``.

    Raises:
        UsageError: There is no such accounting.

    >>> from memcalc.config import load
    >>> report = recompute(load("175b"))
    >>> s, b, h = 2048, 1, 12288
    >>> report.records()[1]["extra_flops"] == 4 * b * s**2 * h
    True
    """
    graph = layer_graph(config)
    single = {name: frozenset({name}) for name in REGIONS}
    policies = POLICIES | {n: one for n, one in single.items() if one not in POLICIES.values()}
    own = config.run.regions
    if own not in policies.values():
        policies[",".join(config.run.recompute)] = own
    whole = activations.total(activations.counted(activations.kept(graph), accounting))
    rows = []
    for policy, recomputed in policies.items():
        entries = activations.counted(activations.kept(graph, recomputed), accounting)
        size = activations.total(entries)
        extra = count.recomputed(graph, recomputed)
        saved = whole - size
        rows.append((KIND, policy, size, saved, extra, saved / extra if extra else None))
    return Report(
        "recompute",
        f"Recomputation in one layer of {setting(config)}",
        (
            Column("layer_kind", "text", detail=True),
            Column("policy", "text"),
            Column("kept_bytes", "bytes"),
            Column("saved_bytes", "bytes"),
            Column("extra_flops", "flops"),
            Column("saved_bytes_per_extra_flop", "ratio"),
        ),
        tuple(rows),
        symbols.values(config),
        (
            *notes(config, accounting),
            *flash_note(config),
            "bytes are one rank's; FLOPs are one micro-batch's over all ranks",
        ),
    )
