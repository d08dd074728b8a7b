"""Sign packing in plain torch: the definition that every faster back-end must equal.

Format: 8 signs to a byte, the first element in the most significant bit. A bit is 1 where x >= 0; so -0.0 and 0.0
are both 1 and nan is 0. This is the only place that decides a sign.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

# Multiplying a little-endian word of eight 0/1 bytes b0..b7 by this puts b_i at bit 63 - i; no two products of a byte
# and a bit of the factor meet in one place, so nothing is carried into the top byte.
_GATHER = 0x8040201008040201 - 2**64


def pack_bits(bits: Tensor) -> Tensor:
    """Pack booleans, [..., 8 k] contiguous -> uint8 [..., k]; the first is the most significant bit."""
    words = bits.view(torch.uint8).view(torch.int64)
    return (words * _GATHER).bitwise_right_shift_(56).to(torch.uint8)


def unpack_bits(packed: Tensor) -> Tensor:
    """Invert `pack_bits`: uint8 [..., k] -> bool [..., 8 k]."""
    return unpack_signs(packed, torch.float32) > 0


def pack_signs(x: Tensor) -> Tensor:
    """Pack the signs of x, floating [..., 8 k] -> uint8 [..., k]; 1 where x >= 0."""
    return pack_bits(x >= 0)


def unpack_signs(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 [..., k] -> [..., 8 k] of +1 and -1 in `dtype`."""
    return _sign_table(dtype, packed.device).index_select(0, packed.int().view(-1)).view(*packed.shape[:-1], -1)


@functools.cache
def _sign_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """[256, 8]: the signs in each byte."""
    places = torch.arange(7, -1, -1, device=device)
    bits = (torch.arange(256, device=device).unsqueeze(1) >> places) & 1
    return (2 * bits - 1).to(dtype)
