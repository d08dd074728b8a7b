"""Sign packing in plain torch: the definition that every faster back-end must equal.

Format: 8 signs to a byte, the first element in the most significant bit. A bit is 1 where x >= 0; so -0.0 and 0.0
are both 1 and nan is 0. This is the only place that decides a sign.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _weights(device: torch.device) -> Tensor:
    return torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8, device=device)


def pack_bits(bits: Tensor) -> Tensor:
    """Pack booleans, [..., 8 k] -> uint8 [..., k]; the first is the most significant bit."""
    octets = bits.view(*bits.shape[:-1], -1, 8)
    return (octets * _weights(bits.device)).sum(-1, dtype=torch.uint8)


def unpack_bits(packed: Tensor) -> Tensor:
    """Invert `pack_bits`: uint8 [..., k] -> bool [..., 8 k]."""
    return (packed.unsqueeze(-1) & _weights(packed.device)).ne(0).flatten(-2)


def pack_signs(x: Tensor) -> Tensor:
    """Pack the signs of x, floating [..., 8 k] -> uint8 [..., k]; 1 where x >= 0."""
    return pack_bits(x >= 0)


def unpack_signs(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 [..., k] -> [..., 8 k] of +1 and -1 in `dtype`."""
    return unpack_bits(packed).to(dtype).mul_(2).sub_(1)
