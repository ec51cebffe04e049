"""The letters of every formula, and what each stands for. This table is the only one.

The letters are those of Korthikanti et al. 2022, table 1. Beside them stand k, d and f, for models
whose key-value heads, head size or MLP width do not follow from a and h; m, for the model chunks of
the interleaved schedule (section 4.2.3); and the letters of latent attention and of experts.
"""

from collections.abc import Collection
from typing import Any, NamedTuple

from memcalc.config import Config
from memcalc.lazy import resolve


class Letter(NamedTuple):
    """A letter, what it means, and the field of a Config that it stands for."""

    letter: str
    meaning: str
    unit: str
    field: str


LETTERS = (
    Letter("s", "sequence length", "tokens", "run.seq_length"),
    Letter("b", "micro-batch size", "sequences", "run.micro_batch_size"),
    Letter("h", "hidden size", "elements", "model.hidden_size"),
    Letter("a", "attention heads", "heads", "model.heads"),
    Letter("k", "key and value heads", "heads", "model.kv_heads"),
    Letter("d", "head size", "elements", "model.head_size"),
    Letter("f", "MLP width", "elements", "model.ffn_size"),
    Letter("L", "layers", "layers", "model.layers"),
    Letter("v", "vocabulary size", "tokens", "model.vocab_size"),
    Letter("q", "width of the compressed query", "elements", "model.latent.q_lora_rank"),
    Letter("l", "width of the compressed key and value", "elements", "model.latent.kv_lora_rank"),
    Letter("o", "rotary part of a head", "elements", "model.latent.rope_head_size"),
    Letter("u", "value head size", "elements", "model.latent.v_head_size"),
    Letter("n", "experts", "experts", "model.experts.number"),
    Letter("r", "experts per token", "experts", "model.experts.top_k"),
    Letter("g", "width of an expert", "elements", "model.experts.ffn_size"),
    Letter("y", "width of the shared experts", "elements", "model.experts.shared_ffn_size"),
    Letter("t", "tensor-parallel size", "ranks", "parallel.tp"),
    Letter("p", "pipeline-parallel size", "ranks", "parallel.pp"),
    Letter("m", "model chunks per pipeline rank", "chunks", "parallel.vpp"),
    Letter("c", "context-parallel size", "ranks", "parallel.cp"),
    Letter("e", "expert-parallel size", "ranks", "parallel.ep"),
    Letter("x", "tensor-parallel size of the experts", "ranks", "parallel.expert_tp"),
)
OF_EXPERTS = ("e", "x")  # letters that a model without experts does not have


def in_words(letter: str) -> str:
    """A letter after its meaning, for a message.

    >>> in_words("v"), in_words("rsb")
    ('vocabulary size v', 'rsb')
    """
    return next((f"{x.meaning} {letter}" for x in LETTERS if x.letter == letter), letter)


def legend(used: Collection[str]) -> tuple[str, ...]:
    """A note that explains the letters, or nothing if no letter is used.

    >>> legend("sb")
    ('letters: s sequence length, b micro-batch size',)
    """
    known = [f"{x.letter} {x.meaning}" for x in LETTERS if x.letter in used]
    return (f"letters: {', '.join(known)}",) if known else ()


def values(config: Config) -> dict[str, int]:
    """The letters with their values in a config. A letter without a value is left out.

    >>> from memcalc.config import load
    >>> values(load("22b"))["h"]
    6144
    """
    experts = config.model.experts is not None
    found = {each.letter: _value(config, each.field) for each in LETTERS}
    without = () if experts else OF_EXPERTS
    return {x: value for x, value in found.items() if value is not None and x not in without}


def _value(config: Config, field: str) -> Any:
    """A field of a config, or None where a record on the way to it is None."""
    found: Any = config
    for name in field.split("."):
        found = getattr(found, name, None)
    return found


def symbol(letter: str) -> Any:
    """The sympy symbol of a letter; every size is positive.

    >>> symbol("s").is_positive
    True
    """
    return resolve("sympy:Symbol")(letter, positive=True)


def symbolic(config: Config, tensor_parallel: bool | None = None) -> dict[str, Any]:
    """The letters as sympy symbols, with the model's own relations substituted.

    Where a model's head size is h/a, its MLP width 4h or its key-value heads a, that relation
    replaces the letter. So a formula has no more letters than the model has free sizes.

    Args:
        config: The model and its parallelism.
        tensor_parallel: Whether t is a letter, or 1; by default, whether the config's is above 1.

    >>> from memcalc.config import load
    >>> [str(symbolic(load("22b"))[letter]) for letter in "kdft"]
    ['a', 'h/a', '4*h', 't']
    """
    model = config.model
    letters = {letter: symbol(letter) for letter in values(config)}
    if model.kv_heads == model.heads:
        letters["k"] = letters["a"]
    if model.head_size * model.heads == model.hidden_size:
        letters["d"] = letters["h"] / letters["a"]
    if model.ffn_size == 4 * model.hidden_size:
        letters["f"] = 4 * letters["h"]
    if not (config.parallel.tp > 1 if tensor_parallel is None else tensor_parallel):
        letters["t"] = 1
    for letter, degree in (("c", config.parallel.cp), ("e", config.parallel.ep)):
        if degree == 1 and letter in letters:
            letters[letter] = 1
    if "x" in letters and config.parallel.etp in (None, 1):
        letters["x"] = letters["t"] if config.parallel.etp is None else 1
    return letters
