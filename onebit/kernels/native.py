"""The native CPU kernels: typed, checked functions over one bucket. Layer counts never show in the number of calls.

Shared arguments:
  plan          `Plan` of the bucket; [numel] below is its number of elements, padding included, [layers] its layers
  hyper         float64 [layers, 5], contiguous: lr, beta1, beta2, eps, weight_decay of each layer's group
  momentum      `Signs`, or float32 [numel] where it is not yet signs
  layer_scale   float32 [layers], the momentum scale s by which sent values were multiplied, or None
  error_factor  float32 [layers], the factor on the errors before they are added, or None
  threads       None: torch.get_num_threads()

Results do not depend on the number of threads or the instruction set, to the bit. Every function raises LayoutError
for an operand of the wrong shape, dtype, device or stride, and releases the interpreter's lock while it works.
The environment variable ONEBIT_ISA forces one of `isas()`; another value raises ConfigError when this is imported.
"""

from __future__ import annotations

import os

from onebit.errors import ConfigError
from onebit.kernels import _native
from onebit.kernels.compact import Int8
from onebit.kernels.native_exchange import (
    decode,
    gather,
    server_commit,
    server_encode,
    sum_squares,
    worker_commit,
    worker_encode,
)
from onebit.kernels.native_quantise import dequantise, quantise
from onebit.kernels.native_update import (
    apply,
    lamb_measure,
    warmup_apply,
    warmup_measure,
)
from onebit.kernels.operands import Plan, Signs, TensorList

__all__ = [
    "Int8",
    "Plan",
    "Signs",
    "TensorList",
    "apply",
    "decode",
    "dequantise",
    "gather",
    "isa",
    "isas",
    "lamb_measure",
    "quantise",
    "server_commit",
    "server_encode",
    "sum_squares",
    "use_isa",
    "warmup_apply",
    "warmup_measure",
    "worker_commit",
    "worker_encode",
]


def isa() -> str:
    """The instruction set in use: "portable", "avx2" or "avx512"."""
    return _native.isa()


def isas() -> list[str]:
    """Those this processor can run, lowest first. The last is used unless told otherwise."""
    return _native.isas()


def use_isa(name: str) -> None:
    """Use another of `isas()` from now on, in the whole process.

    Raises:
        ConfigError: it is none of them.
    """
    try:
        _native.use_isa(name)
    except ValueError as error:
        raise ConfigError(f"{error}; unset ONEBIT_ISA or set it to one of them") from None


if os.environ.get("ONEBIT_ISA"):
    use_isa(os.environ["ONEBIT_ISA"])
