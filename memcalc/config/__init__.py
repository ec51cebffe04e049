"""What the user said: frozen, validated descriptions of a model, its parallelism and its run."""

from memcalc.config.catalog import load
from memcalc.config.config import Config
from memcalc.config.implementation import IMPLEMENTATIONS, Implementation
from memcalc.config.model import Experts, Latent, Model, Vision
from memcalc.config.parallel import Parallel
from memcalc.config.run import PRECISION_BYTES, Run

__all__ = [
    "IMPLEMENTATIONS",
    "PRECISION_BYTES",
    "Config",
    "Experts",
    "Implementation",
    "Latent",
    "Model",
    "Parallel",
    "Run",
    "Vision",
    "load",
]
