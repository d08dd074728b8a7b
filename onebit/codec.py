"""OneBit: a flat buffer as one sign bit per element and one scale per block.

A block is a run of elements that shares one scale. `scale="layer"`: one block per layer in each chunk;
`"block"`: the same, cut after `block_elements`; `"bucket"`: one scale for a whole buffer, the paper's way, on the
worker side the bucket and on the server side the chunk. Padding belongs to no block and decodes to
zero (DEV-9, DEV-14).

A message, one per chunk, is what travels: [header | scales | bits | fill], uint8.
  header  one number in the scales' dtype: how many dead elements ask to wake (see `exchange`)
  scales  one number per block, padded to the largest number of blocks of any chunk of the bucket
  bits    chunk / 8 bytes, see `kernels.reference`
  fill    up to the next multiple of the scales' item size

Source: 1-bit Adam (arXiv 2102.02888), C_w; scale = ||x||_2 / sqrt(d), docs/paper_map.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from onebit.chunk_codec import ChunkCodec
from onebit.errors import ConfigError
from onebit.kernels import pack_bits, pack_signs, unpack_bits, unpack_signs
from onebit.layout import Bucket, spread

MAX_MULTIPLIER = 1.6  # 1.7 diverged on heavy tails in our measurements; the residual is no longer contracted


@dataclass(frozen=True)
class OneBit:
    """The settings of the codec.

    Args:
        scale: which elements share a scale, "layer" (default), "block" or "bucket".
        block_elements: with scale="block", the largest block; at least 8. Otherwise it must be left alone.
        kind: "rms" (the paper's) or "mean" (of absolute values).
        multiplier: factor on every scale, in (0, 1.6).

    Raises:
        ConfigError: a value outside what is listed above.
    """

    scale: Literal["layer", "block", "bucket"] = "layer"
    block_elements: int | None = None
    kind: Literal["rms", "mean"] = "rms"
    multiplier: float = 1.0

    def __post_init__(self) -> None:
        if self.scale not in ("layer", "block", "bucket"):
            raise ConfigError(f"OneBit scale is {self.scale!r}; allowed are 'layer', 'block' and 'bucket'")
        if self.kind not in ("rms", "mean"):
            raise ConfigError(f"OneBit kind is {self.kind!r}; allowed are 'rms' and 'mean'")
        if not 0 < self.multiplier < MAX_MULTIPLIER:
            raise ConfigError(
                f"OneBit multiplier is {self.multiplier}; it must lie in (0, {MAX_MULTIPLIER}): larger ones let the "
                "error grow without bound; use 1.0"
            )
        if (self.block_elements is not None) != (self.scale == "block"):
            raise ConfigError(
                f"OneBit block_elements is {self.block_elements} with scale={self.scale!r}; "
                "give it with scale='block' and only there"
            )
        if self.block_elements is not None and self.block_elements < 8:
            raise ConfigError(f"OneBit block_elements is {self.block_elements}; it must be at least 8")


class BucketCodec(ChunkCodec):
    """Signs and scales. Pure but for the live counts that `set_alive` replaces.

    Attributes:
        blocks: number of blocks of each chunk.
        spans: the blocks of each chunk in order, as (start, stop) in the chunk.
        live: the number of elements of each block that are alive, float64 [blocks] for each chunk.
        head_bytes: bytes of a message before its bits.
    """

    def __init__(self, bucket: Bucket, codec: OneBit, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(bucket, dtype, device)
        self.codec = codec
        chunks = [_cut(bucket, codec, chunk) for chunk in range(bucket.workers)]
        self.blocks = [len(cuts) for cuts in chunks]
        self.spans = [[(start, start + length) for start, length in cuts] for cuts in chunks]
        self._lengths = [
            [length for _, length in cuts] + [bucket.chunk - sum(length for _, length in cuts)] for cuts in chunks
        ]  # the padding comes last
        self._pieces = _pieces(bucket, self.spans)
        self.set_alive(None)
        item = torch.empty((), dtype=dtype).element_size()
        self.head_bytes = item * (1 + max(self.blocks))
        self.message_bytes = -(-(self.head_bytes + bucket.chunk // 8) // item) * item

    def set_alive(self, alive: Tensor | None) -> None:
        """Elements whose `alive` is False are dead: they take no part in a scale and decode to zero.

        Args:
            alive: bool [bucket], kept as bits; or None: all are alive.
        """
        self.packed_alive = None if alive is None else pack_bits(alive.contiguous())
        self._counted: tuple[Tensor | None, Tensor] | None = None
        if alive is None:
            counts = [lengths[:-1] for lengths in self._lengths]
            self.live = [torch.tensor(count, dtype=torch.float64, device=self.device) for count in counts]
            return
        rows = alive.view(self.bucket.workers, -1)
        self.live = [
            torch.stack([row[a:b].sum(dtype=torch.float64) for a, b in spans]) if spans else self.live[0][:0]
            for row, spans in zip(rows, self.spans, strict=True)
        ]

    def encode_chunks(self, x: Tensor, chunks: range) -> Tensor:
        """The worker side. A dead element of x must be zero, or its bit is wasted; nan and inf anywhere, dead elements
        included, make a scale non-finite. With scale="bucket" these chunks share one."""
        if self.packed_alive is not None:
            mask = self.packed_alive.view(self.bucket.workers, -1)[chunks.start : chunks.stop]
            x = x * unpack_bits(mask.flatten())
        rows = x.view(len(chunks), -1)
        if self.codec.scale == "bucket":
            live = torch.cat([self.live[chunk] for chunk in chunks]).sum()
            scale = self.scale_of(self._norm(x), live)
            scales = [scale.expand(self.blocks[chunk]) for chunk in chunks]
        else:
            scales = [self._chunk_scales(row, chunk) for row, chunk in zip(rows, chunks, strict=True)]
        return torch.stack([self._message(row, scale) for row, scale in zip(rows, scales, strict=True)])

    def encode_chunk(self, x: Tensor, chunk: int) -> Tensor:
        """The server side: x [chunk] -> uint8 [message_bytes], with scales of its own."""
        alive = self._alive_in(chunk)
        if alive is not None:
            x = x * alive
        return self._message(x, self._chunk_scales(x, chunk))

    def decode_chunk(self, message: Tensor, chunk: int) -> Tensor:
        """uint8 [message_bytes] -> [chunk]: sign * scale, zero in padding and where dead."""
        scales = torch.cat([self.scales(message, chunk), torch.zeros(1, dtype=self.dtype, device=message.device)])
        out = unpack_signs(self.bits(message), self.dtype)
        out *= spread(scales, self._lengths[chunk])
        alive = self._alive_in(chunk)
        if alive is not None:
            out *= alive
        return out

    def layer_norms(self, messages: Tensor, packed_mask: Tensor | None) -> Tensor:
        """The 2-norm of each layer of what one message per chunk decodes to, from the scales alone.

        Args:
            messages: uint8 [workers, message_bytes].
            packed_mask: uint8 [bucket / 8], a bit per element, 0 where the value counts as zero; or None.

        Returns:
            float64 [layers of the bucket].
        """
        if self._counted is None or self._counted[0] is not packed_mask:
            self._counted = (packed_mask, self._pieces_alive(packed_mask))
        squares = self.all_scales(messages).double().square()
        blocks, layers = (self._pieces[:, i].to(self.device) for i in (0, 1))
        sums = squares.new_zeros(len(self.bucket.layers))
        return sums.index_add_(0, layers, squares[blocks] * self._counted[1]).sqrt()

    def _pieces_alive(self, packed_mask: Tensor | None) -> Tensor:
        """How many elements of each piece count: float64 [pieces]."""
        starts, stops = (self._pieces[:, i].to(self.device) for i in (2, 3))
        if packed_mask is None:
            return (stops - starts).double()
        before = torch.cat([starts.new_zeros(1), unpack_bits(packed_mask).cumsum(0)])
        return (before[stops] - before[starts]).double()

    def scales(self, message: Tensor, chunk: int) -> Tensor:
        """The scales of a message, [blocks of that chunk]."""
        return message[: self.head_bytes].view(self.dtype)[1 : 1 + self.blocks[chunk]]

    def bits(self, messages: Tensor) -> Tensor:
        """The bits of each message, a view that can be written: [..., message_bytes] -> [..., chunk / 8]."""
        return messages[..., self.head_bytes : self.head_bytes + self.bucket.chunk // 8]

    def header(self, messages: Tensor) -> Tensor:
        """The header of each message, a view that can be written: [..., message_bytes] -> [...]."""
        return messages[..., : self.head_bytes].view(self.dtype)[..., 0]

    def _message(self, x: Tensor, scales: Tensor) -> Tensor:
        message = torch.zeros(self.message_bytes, dtype=torch.uint8, device=x.device)
        message[: self.head_bytes].view(self.dtype)[1 : 1 + len(scales)] = scales
        self.bits(message).copy_(pack_signs(x))
        return message

    def _alive_in(self, chunk: int) -> Tensor | None:
        """bool [chunk], or None: all are alive."""
        if self.packed_alive is None:
            return None
        return unpack_bits(self.packed_alive.view(self.bucket.workers, -1)[chunk])

    def _chunk_scales(self, row: Tensor, chunk: int) -> Tensor:
        if not self.spans[chunk]:  # nothing but padding
            return row.new_zeros(0)
        norms = torch.stack([self._norm(row[a:b]) for a, b in self.spans[chunk]])
        return self.scale_of(norms, self.live[chunk])

    def _norm(self, x: Tensor) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(x, 2 if self.codec.kind == "rms" else 1, dtype=torch.float64)
        return norm

    def scale_from(self, sums: Tensor, live: Tensor) -> Tensor:
        """`scale_of`, from sums of squares (RMS) or of magnitudes (mean)."""
        return self.scale_of(sums.sqrt() if self.codec.kind == "rms" else sums, live)

    def scale_of(self, norm: Tensor, live: Tensor) -> Tensor:
        """RMS or mean over the live elements. Without any, norm is 0, or nan if a dead element was not finite."""
        count = live.clamp(min=1)
        size = count.sqrt() if self.codec.kind == "rms" else count
        return (norm / size * self.codec.multiplier).to(self.dtype)


def _pieces(bucket: Bucket, spans: list[list[tuple[int, int]]]) -> Tensor:
    """Where blocks and layers overlap, int64 [pieces, 4]: block, layer, and the elements of the bucket from, to."""
    blocks = [(j * bucket.chunk + a, j * bucket.chunk + b) for j, cuts in enumerate(spans) for a, b in cuts]
    found, first = [], 0
    layers = [(layer.start - bucket.start, layer.stop - bucket.start) for layer in bucket.layers]
    for number, (start, stop) in enumerate(blocks):
        while layers[first][1] <= start:
            first += 1
        at = first
        while at < len(layers) and layers[at][0] < stop:
            a, b = max(start, layers[at][0]), min(stop, layers[at][1])
            if a < b:
                found.append((number, at, a, b))
            at += 1
    return torch.tensor(found, dtype=torch.int64).view(-1, 4)


def _cut(bucket: Bucket, codec: OneBit, chunk: int) -> list[tuple[int, int]]:
    """The blocks of one chunk as (start in the chunk, length), in order, none empty."""
    pieces = bucket.pieces(chunk)
    if codec.scale == "bucket":
        return [(pieces[0][0], pieces[-1][1] - pieces[0][0])] if pieces else []
    step = codec.block_elements or bucket.chunk
    return [(at, min(at + step, stop) - at) for start, stop in pieces for at in range(start, stop, step)]
