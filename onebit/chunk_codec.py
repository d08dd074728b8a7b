"""What every codec of the exchange shares: a bucket is one message per chunk, and a server averages messages."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from onebit.kernels import unpack_bits
from onebit.layout import Bucket, spread


class ChunkCodec(ABC):
    """A bucket as one message per chunk, whatever is in it. A subclass says how a chunk becomes a message and back.

    Attributes:
        message_bytes: bytes of one message; the same for every chunk.
        packed_alive: uint8 [bucket / 8], a bit per element, or None: all take part.
    """

    message_bytes: int
    packed_alive: Tensor | None = None

    def __init__(self, bucket: Bucket, dtype: torch.dtype, device: torch.device) -> None:
        self.bucket = bucket
        self.dtype = dtype
        self.device = device

    @abstractmethod
    def set_alive(self, alive: Tensor | None) -> None:
        """Elements whose `alive`, bool [bucket], is False take no part; None: all do."""

    def encode(self, x: Tensor) -> Tensor:
        """The worker side, all chunks: x [bucket], zero in the padding -> uint8 [workers, message_bytes]."""
        return self.encode_chunks(x, range(self.bucket.workers))

    @abstractmethod
    def encode_chunks(self, x: Tensor, chunks: range) -> Tensor:
        """`encode` for some chunks in a row: x [chunks x chunk] -> uint8 [chunks, message_bytes]."""

    @abstractmethod
    def encode_chunk(self, x: Tensor, chunk: int) -> Tensor:
        """The server side: x [chunk] -> uint8 [message_bytes], with scales of its own."""

    @abstractmethod
    def decode_chunk(self, message: Tensor, chunk: int) -> Tensor:
        """uint8 [message_bytes] -> [chunk], a new tensor; zero in the padding."""

    @abstractmethod
    def scales(self, message: Tensor, chunk: int) -> Tensor:
        """The scales of a message, [blocks of that chunk]."""

    @abstractmethod
    def header(self, messages: Tensor) -> Tensor:
        """The header of each message: [..., message_bytes] -> [...]."""

    def subtract(self, x: Tensor, messages: Tensor) -> Tensor:
        """x - decode(messages), in the memory of x, [bucket]."""
        return self.subtract_chunks(x, messages, range(self.bucket.workers))

    def subtract_chunks(self, x: Tensor, messages: Tensor, chunks: range) -> Tensor:
        """`subtract` for some chunks in a row: x [chunks x chunk], messages [chunks, message_bytes]."""
        for message, chunk, row in zip(messages, chunks, x.view(len(chunks), -1), strict=True):
            row -= self.decode_chunk(message, chunk)
        return x

    @property
    def alive(self) -> Tensor | None:
        """bool [bucket], unpacked anew at each use; None: all are alive."""
        return None if self.packed_alive is None else unpack_bits(self.packed_alive)

    def decode(self, messages: Tensor) -> Tensor:
        """uint8 [workers, message_bytes], one message per chunk in order -> [bucket]."""
        return torch.cat([self.decode_chunk(message, chunk) for chunk, message in enumerate(messages)])

    def decode_into(self, messages: Tensor, out: Tensor) -> Tensor:
        """`decode` into `out`, [bucket], which is returned: a large new tensor costs as much as filling it."""
        return out.copy_(self.decode(messages))

    def all_scales(self, messages: Tensor) -> Tensor:
        """The scales of one message per chunk, in order: [blocks of the bucket]."""
        return torch.cat([self.scales(message, chunk) for chunk, message in enumerate(messages)])

    def serve(self, received: Tensor, chunk: int, error: Tensor, error_factor: Tensor | None) -> Tensor:
        """The server's part: the mean of the chunk it serves, plus its error, as a message. Changes no state.

        Args:
            received: uint8 [workers, message_bytes], this chunk from every worker.
            error: the server error, [chunk].
            error_factor: [layers of the bucket], or None for 1.
        """
        reply = self.encode_chunk(self._served(received, chunk, error, error_factor), chunk)
        if self.packed_alive is not None:
            self.header(reply)[...] = self.header(received).sum()
        return reply

    def commit_served(
        self,
        received: Tensor,
        chunk: int,
        error: Tensor,
        error_factor: Tensor | None,
        reply: Tensor,
        keep: Tensor | None = None,
    ) -> None:
        """error = what `serve` compressed - decode(reply), in place, where `keep`, bool [] or None, is not False."""
        left = self._served(received, chunk, error, error_factor).sub_(self.decode_chunk(reply, chunk))
        error.copy_(left if keep is None else torch.where(keep, left, error))

    def _served(self, received: Tensor, chunk: int, error: Tensor, error_factor: Tensor | None) -> Tensor:
        total = self.decode_chunk(received[0], chunk)
        for message in received[1:]:
            total += self.decode_chunk(message, chunk)
        total /= len(received)
        if error_factor is not None:
            error = error * self.spread_layers(error_factor, 1.0).view(self.bucket.workers, -1)[chunk]
        return total.add_(error)

    def spread_layers(self, values: Tensor, padding: float) -> Tensor:
        """Repeat each layer's value over its elements: [layers of the bucket] -> [bucket]."""
        lengths = [layer.numel for layer in self.bucket.layers]
        fill = values.new_full((1,), padding)
        return spread(torch.cat([values, fill]), [*lengths, self.bucket.numel - sum(lengths)]).to(self.dtype)
