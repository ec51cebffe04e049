"""The notes without which a table's numbers would mislead."""

from memcalc.analysis.activations import ACCOUNTINGS
from memcalc.config import Config


def notes(config: Config, accounting: str | None = None) -> tuple[str, ...]:
    """Implementation and accounting, what was assumed, and every warning."""
    kernels = config.run.implementation
    lines = [f"implementation: {kernels.name} ({kernels.attention} attention; {kernels.source})"]
    if accounting is not None:
        lines.append(f"accounting: {accounting} ({ACCOUNTINGS[accounting]})")
    if config.assumed:
        lines.append(f"assumed: {', '.join(config.assumed)}")
    return (*lines, *(f"warning: {warning}" for warning in config.warnings))


def setting(config: Config) -> str:
    """The model and its sizes, for a title.

    >>> from memcalc.config import load
    >>> setting(load("22b"))
    '22b (s 2048, b 4, t 8, fp16)'
    """
    run, parallel = config.run, config.parallel
    sizes = f"s {run.seq_length}, b {run.micro_batch_size}, t {parallel.tp}"
    sequence = ", sequence parallel" if parallel.sp else ""
    name = config.model.name
    short = name if len(name) <= 60 else f"{name[:57]}..."
    return f"{short} ({sizes}{sequence}, {run.precision})"


def recomputation(config: Config) -> str:
    """What is recomputed, for a title."""
    words = [word for word in config.run.recompute if word != "none"]
    return f"recomputing {', '.join(words)}" if words else "nothing recomputed"


def flash_note(config: Config) -> tuple[str, ...]:
    """Why selective recomputation saves next to nothing under a flash kernel."""
    if config.run.implementation.attention != "flash":
        return ()
    return (
        "selective recomputation saves next to nothing here: a flash kernel keeps nothing of "
        "s x s, and the output projection keeps the attention's output all the same",
    )


def batch_note(config: Config) -> str:
    """The global batch of an iteration, and whether anybody said it."""
    said = "" if config.run.global_batch_size else " (assumed: as many micro-batches as chunks)"
    return f"a global batch of {config.sequences}{said}"
