"""A small layer of the same shape as a large one, for real tensors on a small machine."""

from dataclasses import replace

from memcalc.config import Config
from memcalc.config.assumption import Assumption


def reduced(config: Config, copies: bool = True) -> Config:
    """A config of the same shape that runs in a second on a CPU.

    Args:
        config: The model's own.
        copies: Whether ranks may hold replicated key-value heads.

    >>> from memcalc.config import load
    >>> small = reduced(load("llama-3-70b", tp=8))
    >>> small.model.heads, small.model.kv_heads, small.model.hidden_size
    (8, 1, 256)
    """
    model, run, t = config.model, config.run, config.parallel.tp
    group = model.heads // model.kv_heads
    # the fewest key-value heads that t divides or that divide t, if t divides the query heads
    fewest = 1 if copies else t
    kv_heads = next(
        k
        for k in range(fewest, 2 * t + 1)
        if group * k % t == 0 and group * k > 1 and 0 in (k % t, t % k)
    )
    heads = group * kv_heads
    head_size = 32
    hidden = heads * head_size if model.heads * model.head_size == model.hidden_size else 192
    ffn = 4 * hidden if model.ffn_size == 4 * model.hidden_size else t * (hidden * 11 // (4 * t))
    small = replace(
        model,
        name=f"{model.name}, reduced",
        layers=config.parallel.pp * config.parallel.vpp,
        hidden_size=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        ffn_size=ffn,
        window_layers=None,
        moe_layers=None,
    )
    length = 16 * t if 16 * t >= 64 else 64
    return replace(
        config,
        model=small,
        run=replace(run, seq_length=length, micro_batch_size=2, global_batch_size=None),
        assumed=(Assumption("model", None, f"a small layer of the same shape as {model.name}'s"),),
    )


def fewer_ranks(config: Config) -> Config:
    """The config with the fewest tensor-parallel ranks above 1 that divide its own number.

    >>> from memcalc.config import load
    >>> fewer_ranks(load("22b", tp=8)).parallel.tp
    2
    """
    t = config.parallel.tp
    factor = next((n for n in range(2, t + 1) if t % n == 0), 1)
    return config.with_parallel(tp=factor)
