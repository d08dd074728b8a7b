"""State in fewer bytes, in plain torch: the definition that the faster kernels must equal to the bit.

`Int8` holds errors: 8-bit integers with a scale per 128 elements of a chunk. `round_bf16_random` rounds what is updated
in small steps to bfloat16: to nearest it would never fall at beta2 = 0.999, since a step is less than half a unit in
the last place; at random, with the right expectation, it follows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onebit.layout import Bucket

ERROR_GROUP = 128
"""Elements that share one scale of an int8 error, counted from the start of each chunk."""


@dataclass(frozen=True)
class Int8:
    """Values as 8-bit integers and a scale per 128 elements of a chunk; what rounding drops is at most half a scale,
    1/254 of the largest magnitude of the 128 (all of it where that is below 1e-36). A dead element's value that would
    become zero becomes one scale instead, so up to 1/127 is added there.

    Attributes:
        data: int8 [numel].
        scales: float32 [workers, ceil(chunk / 128)].
    """

    data: Tensor
    scales: Tensor

    @staticmethod
    def zeros(bucket: Bucket, device: torch.device | None = None) -> Int8:
        groups = -(-bucket.chunk // ERROR_GROUP)
        return Int8(
            torch.zeros(bucket.numel, dtype=torch.int8, device=device),
            torch.zeros(bucket.workers, groups, device=device),
        )

    def read(self) -> Tensor:
        """The values, float32 [numel]."""
        return (self._grouped(self.data.float()) * self.scales.unsqueeze(-1)).flatten(1)[:, : self._chunk].flatten()

    def write(self, x: Tensor, keep: Tensor | None = None, alive: Tensor | None = None) -> None:
        """Round finite values, float32 [numel], to nearest; not where `keep`, bool [] or None, is False.

        alive: bool [numel], or None: all are. What a dead element holds is not rounded to zero but to the next number:
        that it holds something is what wakes it.
        """
        grouped = self._grouped(x)
        largest = grouped.abs().amax(-1)
        inverse = torch.where(largest > 1e-36, 127 / largest, 0.0)
        data, scales = (grouped * inverse.unsqueeze(-1)).round().flatten(1)[:, : self._chunk].flatten(), largest / 127
        if alive is not None:
            data = torch.where(~alive & (data == 0), x.sign(), data)
        self.data.copy_(data if keep is None else torch.where(keep, data, self.data))
        self.scales.copy_(scales if keep is None else torch.where(keep, scales, self.scales))

    @property
    def _chunk(self) -> int:
        return self.data.numel() // len(self.scales)

    def _grouped(self, x: Tensor) -> Tensor:
        """[numel] -> [workers, groups, 128], zero after each chunk's end."""
        rows = x.view(len(self.scales), -1)
        padding = self.scales.shape[1] * ERROR_GROUP - rows.shape[1]
        return torch.nn.functional.pad(rows, (0, padding)).view(*self.scales.shape, ERROR_GROUP)


def round_bf16_random(x: Tensor, seed: int, step: int, index: int) -> Tensor:
    """Round float32 [k] to bfloat16, up with the probability that makes the expectation exact; inf and nan stay.

    The random bits are a function of seed, step and the element's place in the flat order, `index` for the first one,
    so that all workers draw the same.
    """
    key = _mix(torch.tensor(seed & 0xFFFFFFFF ^ 0x9E3779B9, device=x.device))
    for part in (seed >> 32, step & 0xFFFFFFFF, step >> 32):
        key = _mix(key ^ part)
    at = index + torch.arange(x.numel(), device=x.device)
    noise = _mix((at & 0xFFFFFFFF) ^ _mix(key ^ (at >> 32))) & 0xFFFF
    bits = x.view(torch.int32).long() & 0xFFFFFFFF
    special = (bits & 0x7F800000) == 0x7F800000
    quiet = torch.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x40, 0)
    rounded = torch.where(special, bits >> 16 | quiet, bits + noise >> 16)
    return rounded.to(torch.int32).to(torch.int16).view(torch.bfloat16)


def _mix(h: Tensor) -> Tensor:
    """A hash of 32 bits held in int64 (C. Wellons, "lowbias32", public domain)."""
    h = ((h ^ h >> 16) * 0x7FEB352D) & 0xFFFFFFFF
    h = ((h ^ h >> 15) * 0x846CA68B) & 0xFFFFFFFF
    return h ^ h >> 16
