"""``models``: the catalogue."""

from memcalc.config import catalog
from memcalc.report import Column, Report


def models() -> Report:
    """The catalogue's models with their sizes, each with where it was seen.

    >>> [name for name in models().column("name") if name.startswith("llama-2")]
    ['llama-2-13b', 'llama-2-70b', 'llama-2-7b']
    """
    found = [source.model for source in catalog.entries()]
    return Report(
        "models",
        f"{len(found)} models",
        (
            Column("name", "text"),
            Column("layers", "count"),
            Column("hidden_size", "count"),
            Column("heads", "count"),
            Column("kv_heads", "count"),
            Column("head_size", "count"),
            Column("ffn_size", "count"),
            Column("vocab_size", "count"),
            Column("max_seq_length", "count"),
            Column("norm", "text", detail=True),
            Column("activation", "text", detail=True),
            Column("position", "text", detail=True),
            Column("source", "text", detail=True),
        ),
        tuple(
            (
                model.name,
                model.layers,
                model.hidden_size,
                model.heads,
                model.kv_heads,
                model.head_size,
                model.ffn_size,
                model.vocab_size,
                model.max_seq_length,
                model.norm,
                model.activation,
                model.position,
                model.source,
            )
            for model in found
        ),
    )
