"""Blockwise integers: a flat buffer as 8- or 4-bit integers and a bfloat16 scale per block of 128 elements.

What the quantised warm-up sends. A block never crosses a layer or a chunk. Its scale is the largest magnitude over 127
(or 7), rounded up to bfloat16, so no element leaves the range; the integer is the element over the scale, to nearest.
A scale of 16 bits has the range of float32 (float16 would lose gradients below 1e-7, and overflow); its precision does
not matter, since the integers are made with the rounded one.

A message, one per chunk: [scales | integers | fill], uint8. 4-bit integers lie two to a byte, the first in the low
half. Zero stays zero, nan and inf make a scale non-finite, and so do float64 values beyond float32's range.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from onebit.chunk_codec import ChunkCodec
from onebit.layout import Bucket

BLOCK = 128
SMALLEST = 1e-36
"""Blocks whose largest magnitude is not above it have the scale 0; what they hold stays in the error."""

Bits = Literal[8, 4]


class QuantisedCodec(ChunkCodec):
    """Encode and decode the chunks of one bucket as integers and scales.

    Args:
        bits: 8 or 4.
        dtype: of what is encoded, float32 or float64.
    """

    def __init__(self, bucket: Bucket, bits: Bits, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(bucket, dtype, device)
        self.quantum_bits = bits
        self.levels = 127 if bits == 8 else 7
        self.starts = [_starts(bucket, chunk).to(device) for chunk in range(bucket.workers)]
        """The first element of each block of a chunk and the end of the last one, int64 [blocks + 1], per chunk."""
        most = max(len(starts) - 1 for starts in self.starts)
        self._scale_bytes = 2 * most
        self.message_bytes = -(-(self._scale_bytes + bucket.chunk * bits // 8) // 4) * 4

    def set_alive(self, alive: Tensor | None) -> None:
        if alive is not None:
            raise AssertionError("blocks of integers have no dead elements: zero stays zero")

    def encode_chunks(self, x: Tensor, chunks: range) -> Tensor:
        messages = torch.zeros(len(chunks), self.message_bytes, dtype=torch.uint8, device=x.device)
        for message, chunk, row in zip(messages, chunks, x.view(len(chunks), -1), strict=True):
            self._fill(message, row, chunk)
        return messages

    def encode_chunk(self, x: Tensor, chunk: int) -> Tensor:
        message = torch.zeros(self.message_bytes, dtype=torch.uint8, device=x.device)
        self._fill(message, x, chunk)
        return message

    def decode(self, messages: Tensor) -> Tensor:
        return self.decode_into(messages, torch.empty(self.bucket.numel, dtype=self.dtype, device=messages.device))

    def decode_into(self, messages: Tensor, out: Tensor) -> Tensor:
        for chunk, row in enumerate(out.zero_().view(self.bucket.workers, -1)):
            self._add(row, messages[chunk], chunk, 1)
        return out

    def decode_chunk(self, message: Tensor, chunk: int) -> Tensor:
        out = torch.zeros(self.bucket.chunk, dtype=self.dtype, device=message.device)
        return self._add(out, message, chunk, 1)

    def scales(self, message: Tensor, chunk: int) -> Tensor:
        return self._raw_scales(message, chunk).to(self.dtype)

    def header(self, messages: Tensor) -> Tensor:
        """There is none: zeros."""
        return torch.zeros(messages.shape[:-1], dtype=self.dtype, device=messages.device)

    def subtract_chunks(self, x: Tensor, messages: Tensor, chunks: range) -> Tensor:
        for message, chunk, row in zip(messages, chunks, x.view(len(chunks), -1), strict=True):
            self._add(row, message, chunk, -1)
        return x

    def _served(self, received: Tensor, chunk: int, error: Tensor, error_factor: Tensor | None) -> Tensor:
        assert error_factor is None
        total = self.decode_chunk(received[0], chunk)
        for message in received[1:]:
            self._add(total, message, chunk, 1)
        return total.div_(len(received)).add_(error)

    def _raw_scales(self, message: Tensor, chunk: int) -> Tensor:
        """bfloat16 [blocks of the chunk], a view that can be written."""
        return message[: self._scale_bytes].view(torch.bfloat16)[: len(self.starts[chunk]) - 1]

    def _integers(self, message: Tensor) -> Tensor:
        """The bytes of the integers, int8, a view that can be written."""
        return message[self._scale_bytes : self._scale_bytes + self.bucket.chunk * self.quantum_bits // 8].view(
            torch.int8
        )

    def _fill(self, message: Tensor, x: Tensor, chunk: int) -> None:
        integers = self._integers(message)
        if self.quantum_bits == 8:
            self._quantise(x, chunk, integers, self._raw_scales(message, chunk))
            return
        wide = torch.zeros(self.bucket.chunk, dtype=torch.int8, device=x.device)
        self._quantise(x, chunk, wide, self._raw_scales(message, chunk))
        pairs = wide.view(torch.int16)  # the first of two integers is the low byte
        integers.copy_((pairs & 15).bitwise_or_((pairs >> 4).bitwise_and_(240)))

    def _add(self, out: Tensor, message: Tensor, chunk: int, sign: Literal[1, -1]) -> Tensor:
        """out += sign * what the message says, in place, [chunk]."""
        integers = self._integers(message)
        if self.quantum_bits == 4:
            pairs = integers.to(torch.int16)
            low = (pairs << 12).bitwise_right_shift_(12).bitwise_and_(255)
            integers = pairs.bitwise_right_shift_(4).bitwise_left_shift_(8).bitwise_or_(low).view(torch.int8)
        self._dequantise(out, chunk, integers, self._raw_scales(message, chunk), sign)
        return out

    def _quantise(self, x: Tensor, chunk: int, integers: Tensor, scales: Tensor) -> None:
        """Fill int8 [chunk], zero before, and bfloat16 [blocks] from x [chunk]."""
        starts = self.starts[chunk]
        if len(starts) < 2:
            return
        lengths, end = starts.diff(), int(starts[-1])
        largest = torch.segment_reduce(x[:end].abs(), "max", lengths=lengths)
        rounded = round_up_bf16(torch.where(largest <= SMALLEST, 0.0, largest / self.levels).float())
        scales.copy_(rounded)
        inverse = torch.where(rounded == 0, 0.0, 1 / rounded.to(self.dtype))
        spread = torch.repeat_interleave(inverse, lengths, output_size=end)
        integers[:end] = torch.nan_to_num((x[:end] * spread).round()).to(torch.int8)

    def _dequantise(self, out: Tensor, chunk: int, integers: Tensor, scales: Tensor, sign: Literal[1, -1]) -> None:
        """out += sign * integers * scales, in place."""
        starts = self.starts[chunk]
        if len(starts) < 2:
            return
        end = int(starts[-1])
        spread = torch.repeat_interleave(scales.to(self.dtype), starts.diff(), output_size=end)
        values = integers[:end].to(self.dtype) * spread
        out[:end] += values if sign == 1 else -values


def round_up_bf16(x: Tensor) -> Tensor:
    """The smallest bfloat16 that is at least x, for float32 x >= 0; inf and nan stay."""
    bits = x.view(torch.int32)
    special = (bits & 0x7F800000) == 0x7F800000
    quiet = torch.where(torch.isnan(x), 0x40, 0)
    upper = torch.where(special, bits >> 16 | quiet, bits + 0xFFFF >> 16)
    return upper.to(torch.int16).view(torch.bfloat16)


def _starts(bucket: Bucket, chunk: int) -> Tensor:
    """Where the blocks of a chunk begin, and where the last one ends; int64 [blocks + 1], or [0] without any."""
    pieces = bucket.pieces(chunk)
    if not pieces:
        return torch.zeros(1, dtype=torch.int64)
    return torch.cat([*(torch.arange(start, stop, BLOCK) for start, stop in pieces), torch.tensor([pieces[-1][1]])])
