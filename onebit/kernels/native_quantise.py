"""Native kernels of the quantised warm-up: blocks of elements to integers with a scale each, and back."""

from __future__ import annotations

import torch
from torch import Tensor

from onebit.errors import LayoutError
from onebit.kernels import _native
from onebit.kernels.operands import checked, thread_count


def quantise(
    x: Tensor, starts: Tensor, levels: int, integers: Tensor, scales: Tensor, *, threads: int | None = None
) -> None:
    """Fill integers and scales: scale = largest magnitude of a block / levels, rounded up; integer = x / scale.

    A block that is not finite gets a scale that is not, one below 1e-36 the scale 0, and both zeros.

    Args:
        x: float32 [k].
        starts: int64 [blocks + 1], rising: where each block begins and the last one ends; at most k.
        levels: the largest integer, at most 127.
        integers: int8 [k]; what lies in no block is left alone.
        scales: bfloat16 [blocks].

    Raises:
        LayoutError: an operand of another shape, dtype, device or stride.
    """
    blocks = _blocks(starts, x)
    _native.quantise(
        checked("starts", starts, (blocks + 1,), (torch.int64,)),
        blocks,
        levels,
        checked("x", x, (x.numel(),), (torch.float32,)),
        checked("integers", integers, (x.numel(),), (torch.int8,)),
        checked("scales", scales, (blocks,), (torch.bfloat16,)),
        thread_count(threads),
    )


def dequantise(
    out: Tensor, starts: Tensor, integers: Tensor, scales: Tensor, *, subtract: bool, threads: int | None = None
) -> None:
    """out += integers * scales, or -=, in place; operands and errors as in `quantise`, out being its x."""
    blocks = _blocks(starts, out)
    _native.dequantise(
        checked("starts", starts, (blocks + 1,), (torch.int64,)),
        blocks,
        checked("integers", integers, (out.numel(),), (torch.int8,)),
        checked("scales", scales, (blocks,), (torch.bfloat16,)),
        subtract,
        checked("out", out, (out.numel(),), (torch.float32,)),
        thread_count(threads),
    )


def _blocks(starts: Tensor, x: Tensor) -> int:
    if starts.numel() and int(starts[-1]) > x.numel():
        raise LayoutError(f"the blocks end at {int(starts[-1])}; there are {x.numel()} elements")
    return starts.numel() - 1
