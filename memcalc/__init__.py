"""memcalc: how much memory training a transformer takes, by layer and by GPU.

Each command is a function here, from a ``Config`` to a ``Report``:

>>> import memcalc
>>> config = memcalc.load("175b", sp=True, recompute="selective")
>>> memcalc.layer_formula(config)
Formula(34*b*h*s/t)
>>> memcalc.layer_bytes(config)
106954752
"""

from typing import TYPE_CHECKING, Any

from memcalc.lazy import resolve

__version__ = "0.6.0"

if TYPE_CHECKING:
    from memcalc.analysis.layers import layer_bytes, layer_entries
    from memcalc.answers.comm import comm
    from memcalc.answers.flops import flops
    from memcalc.answers.formula import formula
    from memcalc.answers.gpus import gpus
    from memcalc.answers.layer import layer
    from memcalc.answers.ledger import ledger
    from memcalc.answers.memory import memory
    from memcalc.answers.models import models
    from memcalc.answers.recompute import recompute
    from memcalc.answers.rnn import rnn
    from memcalc.checks.backtest import backtest
    from memcalc.checks.check import check
    from memcalc.config import (
        IMPLEMENTATIONS,
        Config,
        Experts,
        Implementation,
        Latent,
        Model,
        Parallel,
        Run,
        Vision,
        load,
    )
    from memcalc.config.recurrent import OnChip, Recurrent
    from memcalc.errors import ConfigError, InputError, MemcalcError, OutputError, UsageError
    from memcalc.figures import plot
    from memcalc.formulas import Formula, layer_formula
    from memcalc.report import Report
    from memcalc.validation.deriving.derivation import derive
    from memcalc.validation.deriving.derived import Derived
    from memcalc.validation.trace import trace
    from memcalc.validation.validate import validate

# Public name -> where it is defined; loaded on first use, so that ``import memcalc`` is fast.
_PUBLIC = {
    "Config": "memcalc.config:Config",
    "ConfigError": "memcalc.errors:ConfigError",
    "Derived": "memcalc.validation.deriving.derived:Derived",
    "Experts": "memcalc.config:Experts",
    "Formula": "memcalc.formulas:Formula",
    "IMPLEMENTATIONS": "memcalc.config:IMPLEMENTATIONS",
    "Implementation": "memcalc.config:Implementation",
    "InputError": "memcalc.errors:InputError",
    "Latent": "memcalc.config:Latent",
    "MemcalcError": "memcalc.errors:MemcalcError",
    "Model": "memcalc.config:Model",
    "OnChip": "memcalc.config.recurrent:OnChip",
    "OutputError": "memcalc.errors:OutputError",
    "Parallel": "memcalc.config:Parallel",
    "Recurrent": "memcalc.config.recurrent:Recurrent",
    "Report": "memcalc.report:Report",
    "Run": "memcalc.config:Run",
    "UsageError": "memcalc.errors:UsageError",
    "Vision": "memcalc.config:Vision",
    "backtest": "memcalc.checks.backtest:backtest",
    "check": "memcalc.checks.check:check",
    "comm": "memcalc.answers.comm:comm",
    "derive": "memcalc.validation.deriving.derivation:derive",
    "flops": "memcalc.answers.flops:flops",
    "formula": "memcalc.answers.formula:formula",
    "gpus": "memcalc.answers.gpus:gpus",
    "layer": "memcalc.answers.layer:layer",
    "layer_bytes": "memcalc.analysis.layers:layer_bytes",
    "layer_entries": "memcalc.analysis.layers:layer_entries",
    "layer_formula": "memcalc.formulas:layer_formula",
    "ledger": "memcalc.answers.ledger:ledger",
    "load": "memcalc.config:load",
    "memory": "memcalc.answers.memory:memory",
    "models": "memcalc.answers.models:models",
    "plot": "memcalc.figures:plot",
    "recompute": "memcalc.answers.recompute:recompute",
    "rnn": "memcalc.answers.rnn:rnn",
    "trace": "memcalc.validation.trace:trace",
    "validate": "memcalc.validation.validate:validate",
}

__all__ = [
    "IMPLEMENTATIONS",
    "Config",
    "ConfigError",
    "Derived",
    "Experts",
    "Formula",
    "Implementation",
    "InputError",
    "Latent",
    "MemcalcError",
    "Model",
    "OnChip",
    "OutputError",
    "Parallel",
    "Recurrent",
    "Report",
    "Run",
    "UsageError",
    "Vision",
    "backtest",
    "check",
    "comm",
    "derive",
    "flops",
    "formula",
    "gpus",
    "layer",
    "layer_bytes",
    "layer_entries",
    "layer_formula",
    "ledger",
    "load",
    "memory",
    "models",
    "plot",
    "recompute",
    "rnn",
    "trace",
    "validate",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'memcalc' has no attribute {name!r}")
    found = resolve(_PUBLIC[name])
    if callable(found) and not isinstance(found, type):
        found = resolve("memcalc.checked:checked")(found)
    globals()[name] = found  # the same object each time
    return found


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
