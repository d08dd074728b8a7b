"""1-bit LAMB and relatives: optimizers whose workers exchange one bit per parameter."""

from importlib import import_module as _import_module
from typing import Any as _Any

from onebit.checked import Checked
from onebit.codec import OneBit
from onebit.errors import CommError, ConfigError, LayoutError, MismatchError, OnebitError
from onebit.flat import Stage
from onebit.freeze import AutoFreeze
from onebit.guard import SwitchGuard
from onebit.integrations.ddp import attach
from onebit.layerwise_rate import Lamb
from onebit.local_adam import LocalVarianceAdam
from onebit.local_lamb import LocalVarianceLamb
from onebit.local_variance import Schedule
from onebit.onebit_adam import OneBitAdam
from onebit.onebit_lamb import OneBitLamb
from onebit.presets import PAPER, TENFOLD
from onebit.two_level import two_level
from onebit.version import __version__ as __version__
from onebit.virtual import run_workers
from onebit.zero_one_adam import ZeroOneAdam

__all__ = [
    "PAPER",
    "TENFOLD",
    "AutoFreeze",
    "Checked",
    "CommError",
    "ConfigError",
    "Lamb",
    "LayoutError",
    "LocalVarianceAdam",
    "LocalVarianceLamb",
    "MismatchError",
    "OneBit",
    "OneBitAdam",
    "OneBitLamb",
    "OnebitError",
    "Schedule",
    "Stage",
    "SwitchGuard",
    "ZeroOneAdam",
    "attach",
    "run_workers",
    "two_level",
]


def __getattr__(name: str) -> _Any:
    """`onebit.checkpoint`, which is imported when it is first used."""
    if name == "checkpoint":
        return _import_module("onebit.checkpoint")
    raise AttributeError(f"module 'onebit' has no attribute {name!r}")
