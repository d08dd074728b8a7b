"""1-bit LAMB and relatives: optimizers whose workers exchange one bit per parameter."""

from onebit.codec import OneBit
from onebit.compressed import PAPER, OneBitLamb
from onebit.errors import CommError, ConfigError, LayoutError, MismatchError, OnebitError
from onebit.optim import Lamb, Stage
from onebit.version import __version__ as __version__
from onebit.virtual import run_workers

__all__ = [
    "PAPER",
    "CommError",
    "ConfigError",
    "Lamb",
    "LayoutError",
    "MismatchError",
    "OneBit",
    "OneBitLamb",
    "OnebitError",
    "Stage",
    "run_workers",
]
