"""The bit work: `reference` defines it in torch, `native` does it in compiled code on the CPU, `triton` on a GPU.

`choose` picks one, and the optimizer says which and why once in the log. ONEBIT_KERNELS=reference, =native or =triton
in the environment overrules it; Triton's interpreter (TRITON_INTERPRET=1) runs its kernels on the CPU, for tests.
"""

import importlib.util
import os

import torch

from onebit.errors import ConfigError
from onebit.kernels.reference import pack_bits, pack_signs, unpack_bits, unpack_signs

__all__ = ["choose", "pack_bits", "pack_signs", "unpack_bits", "unpack_signs"]

ACCELERATORS = ("cuda", "xpu")  # ROCm's devices are called cuda too


def choose(device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """The kernels for parameters of this device and dtype: "triton", "native" or "reference", and the reason.

    Raises:
        ConfigError: ONEBIT_KERNELS names others, or asks for some where they cannot be used.
    """
    wanted = os.environ.get("ONEBIT_KERNELS", "")
    if wanted not in ("", "reference", "native", "triton"):
        raise ConfigError(
            f"ONEBIT_KERNELS is {wanted!r}; allowed are 'reference', 'native' and 'triton'; correct or unset it"
        )
    fast = wanted or ("triton" if device.type in ACCELERATORS else "native")
    if fast == "reference":
        return "reference", "asked for by ONEBIT_KERNELS"
    obstacle = _triton_obstacle(device, dtype) if fast == "triton" else _native_obstacle(device, dtype)
    if obstacle and wanted:
        raise ConfigError(f"ONEBIT_KERNELS is {wanted!r}, but {obstacle}; unset it to use the reference ones")
    if obstacle:
        return "reference", obstacle
    if fast == "triton":
        from onebit.kernels import triton

        where = "in the interpreter, slow" if triton.INTERPRETED else f"the parameters are on {device.type}"
        return "triton", f"Triton {triton.version()}, {where}"
    from onebit.kernels import native

    return "native", f"built, {native.isa()} instructions, {torch.get_num_threads()} threads"


def _native_obstacle(device: torch.device, dtype: torch.dtype) -> str:
    """Why the native kernels cannot be used; empty if they can."""
    if importlib.util.find_spec("onebit.kernels._native") is None:
        return "native ones were not built when onebit was installed; they need a C++ compiler then"
    if device.type != "cpu":
        return f"native ones work on the CPU, the parameters are on {device.type}"
    if dtype is not torch.float32:
        return f"native ones work on torch.float32, the parameters are {dtype}"
    return ""


def _triton_obstacle(device: torch.device, dtype: torch.dtype) -> str:
    """Why the Triton kernels cannot be used; empty if they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton ones need the package triton, which is not installed"
    if device.type not in ACCELERATORS and os.environ.get("TRITON_INTERPRET") != "1":
        return f"Triton ones work on {' and '.join(ACCELERATORS)}, the parameters are on {device.type}"
    if dtype is not torch.float32:
        return f"Triton ones work on torch.float32, the parameters are {dtype}"
    return ""
