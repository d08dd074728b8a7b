"""The bit work: `reference` defines it in torch, `native` does it in compiled code on the CPU.

`choose` picks one, and the optimizer says which and why once in the log. ONEBIT_KERNELS=reference or =native in the
environment overrules it.
"""

import importlib.util
import os

import torch

from onebit.errors import ConfigError
from onebit.kernels.reference import pack_bits, pack_signs, unpack_bits, unpack_signs

__all__ = ["choose", "pack_bits", "pack_signs", "unpack_bits", "unpack_signs"]


def choose(device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """The kernels for parameters of this device and dtype: "native" or "reference", and the reason.

    Raises:
        ConfigError: ONEBIT_KERNELS names others, or asks for native ones where they cannot be used.
    """
    built = importlib.util.find_spec("onebit.kernels._native") is not None
    if not built:
        obstacle = "native ones were not built when onebit was installed; they need a C++ compiler then"
    elif device.type != "cpu":
        obstacle = f"native ones work on the CPU, the parameters are on {device.type}"
    elif dtype is not torch.float32:
        obstacle = f"native ones work on torch.float32, the parameters are {dtype}"
    else:
        obstacle = ""
    wanted = os.environ.get("ONEBIT_KERNELS", "")
    if wanted not in ("", "reference", "native"):
        raise ConfigError(f"ONEBIT_KERNELS is {wanted!r}; allowed are 'reference' and 'native'; correct or unset it")
    if wanted == "native" and obstacle:
        raise ConfigError(f"ONEBIT_KERNELS is 'native', but {obstacle}; unset it to use the reference ones")
    if wanted == "reference":
        return "reference", "asked for by ONEBIT_KERNELS"
    if obstacle:
        return "reference", obstacle
    from onebit.kernels import native

    return "native", f"built, {native.isa()} instructions, {torch.get_num_threads()} threads"
