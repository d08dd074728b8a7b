"""Variances as 8-bit logarithms: quarter octaves below the largest of a message, so 9 % off at most, or zero.

What is more than 63 octaves (1e-19) below the largest is sent as if it were just that.

Every worker's message is averaged by the server of its chunk and the mean sent to all, as in `exchange.py`, but without
error feedback: a variance is exchanged seldom, and what rounding drops does not add up.

A message, one per chunk: [top | codes | fill], uint8. `top` is a float32: the largest value in quarter octaves, rounded
up; nan if a value is not finite. Code 0 is zero, code k in 1..255 is 2 ** ((top + k - 255) / 4).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from onebit.comm import Comm
from onebit.layout import FlatLayout

STEPS = 4
"""Codes per octave."""
PIECE = 2**18
"""Elements at once: large new tensors cost more than what is done with them."""


def mean_variance(own: Tensor, layout: FlatLayout, comm: Comm) -> Tensor | None:
    """The mean over the workers, up to rounding, with equal bits on all of them. A collective.

    Args:
        own: [layout.numel], not negative, zero in the padding; this worker's.

    Returns:
        A new tensor of that shape; None if a value is not finite on some worker, on all of them alike.
    """
    mean = torch.empty_like(own)
    for bucket in layout.buckets:
        rows, out = (flat[bucket.slice].view(bucket.workers, -1) for flat in (own, mean))
        received = comm.all_to_all(torch.stack([encode(row) for row in rows])).wait()
        total = decode(received[0], torch.empty_like(rows[0]))
        for message in received[1:]:
            total += decode(message, out[0])  # which is written only below
        gathered = comm.all_gather(encode(total.div_(comm.size))).wait()
        for message, row in zip(gathered, out, strict=True):
            decode(message, row)
    return mean if bool(torch.isfinite(mean.max())) else None


def encode(x: Tensor) -> Tensor:
    """[chunk], not negative -> uint8 [message_bytes]."""
    largest = x.max()  # nan if there is one
    top = torch.where(torch.isfinite(largest), torch.ceil(torch.log2(largest) * STEPS), math.nan)
    message = torch.zeros(message_bytes(x.numel()), dtype=torch.uint8, device=x.device)
    message[:4].view(torch.float32)[0] = top
    for part, said in zip(torch.split(x, PIECE), torch.split(message[4 : 4 + x.numel()], PIECE), strict=True):
        codes = torch.round(torch.log2(part) * STEPS) - top + 255
        said.copy_(torch.where(part > 0, codes.clamp(1, 255), 0.0).nan_to_num(0))
    return message


def decode(message: Tensor, out: Tensor) -> Tensor:
    """uint8 [message_bytes] -> `out`, [chunk], by a table of exact powers, so that every machine gets the same bits."""
    top = float(message[:4].view(torch.float32)[0])
    if not math.isfinite(top):
        values = [0.0 if top < 0 else math.nan] * 256  # all zero, or not finite
    else:
        values = [0.0, *(_power(int(top) + code - 255) for code in range(1, 256))]
    table = torch.tensor(values, dtype=torch.float64).to(out.dtype).to(message.device)
    for part, said in zip(torch.split(out, PIECE), torch.split(message[4 : 4 + out.numel()], PIECE), strict=True):
        part.copy_(table[said.int()])
    return out


def message_bytes(chunk: int) -> int:
    """Bytes of the message of a chunk of so many elements."""
    return 4 + -(-chunk // 4) * 4


def _power(quarters: int) -> float:
    """2 ** (quarters / 4), correctly rounded but for its last bits, and the same everywhere."""
    fraction = (1.0, 1.189207115002721, 1.4142135623730951, 1.681792830507429)[quarters % STEPS]
    return math.ldexp(fraction, quarters // STEPS)
