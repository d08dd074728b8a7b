"""The compressed mean: three phases, two collectives per bucket, error feedback on both sides.

For one bucket, worker i of n, after 1-bit Adam (arXiv 2102.02888, Algorithm 1) and its three-phase all-reduce:

  1. worker:  input = x + worker error; message j = signs and scales of chunk j           -> all_to_all
  2. server:  A = mean over workers of the decoded chunk + server error; signs and scales -> all_gather
  3. everyone: decode. All workers now hold the same bits.

Errors are committed only afterwards, when every scale that came back is known to be finite:
worker error = input - decode(own messages), server error = A - decode(own reply). So a nan or inf on one worker,
which makes its scale non-finite and with it the scale of every server that used it, is seen by all and poisons
nothing (DEV-13, DEV-15). Conservation, for every bucket and any number of steps:

  sum of outputs + mean worker error + server error = sum of mean inputs.

A dead element (see `BucketCodec.set_alive`) sends nothing: its whole input stays in its worker error. Its worker
asks in the header of its messages for the mask to be exchanged; `wake` does that before the next step.

With `feedback=False` nothing is carried over and the sum above does not hold: it shows what the errors are for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor

from onebit.chunk_codec import ChunkCodec
from onebit.clock import Clock
from onebit.codec import BucketCodec, OneBit
from onebit.comm import Comm, Pending
from onebit.kernels import pack_bits, unpack_bits
from onebit.kernels.compact import Int8
from onebit.layout import Bucket, FlatLayout, Run

ROOM = 64.0
"""How far the square of a scale must stay from overflow: the rebuilt gradient is a momentum over 1 - beta1, squared."""


C = TypeVar("C", bound=ChunkCodec)


class Exchange(Generic[C]):
    """Compressed means of the buckets of a layout; owns both errors.

    Attributes:
        errors: this worker's residual, one per bucket: [bucket], or `Int8`.
        server_error: [layout.numel / workers], the residual of the chunks this worker serves, bucket after bucket.
        wake_wanted: whether a worker asked in the last step for its dead elements to wake.
        some_dead: whether there are dead elements.
    """

    def __init__(
        self,
        layout: FlatLayout,
        codec: OneBit | None,
        comm: Comm,
        dtype: torch.dtype,
        device: torch.device,
        codecs: Sequence[C] | None = None,
        compact: bool = False,
        feedback: bool = True,
    ) -> None:
        """`codecs`: one per bucket, where others than the plain ones of `codec` are wanted.

        `compact`: the worker errors are `Int8`; dtype must be float32 then.
        `feedback`: False: errors stay zero, but for the inputs with which dead elements ask to wake.
        """
        self.layout = layout
        self.comm = comm
        self.feedback = feedback
        if codecs is None:
            plain = OneBit() if codec is None else codec
            codecs = cast(Sequence[C], [BucketCodec(bucket, plain, dtype, device) for bucket in layout.buckets])
        self.codecs = codecs
        self._flat_error = None if compact else layout.zeros(dtype, device)
        self.errors: list[Tensor | Int8] = [
            Int8.zeros(bucket, device) if self._flat_error is None else self._flat_error[bucket.slice]
            for bucket in layout.buckets
        ]
        self.server_error = torch.zeros(layout.numel // layout.workers, dtype=dtype, device=device)
        self.wake_wanted = self.some_dead = False

    @property
    def worker_error(self) -> Tensor:
        """[layout.numel], this worker's residual; a copy where it is compact."""
        return torch.cat([read_error(error) for error in self.errors]) if self._flat_error is None else self._flat_error

    @property
    def own_codecs(self) -> Sequence[ChunkCodec]:
        """One for each of `errors`."""
        return self.codecs

    @property
    def served_chunk(self) -> int:
        """The chunk of every bucket that this worker serves."""
        return self.comm.rank

    def own_part(self, full: Tensor) -> Tensor:
        """Of [layout.numel], what lies where this worker's errors do, as `worker_error`; may be a view."""
        return full

    def placed_error(self) -> Tensor:
        """This worker's errors where they lie in the flat order, [layout.numel]; zero where it holds none."""
        return self.worker_error

    def served_part(self, full: Tensor) -> Tensor:
        """Of [layout.numel], what lies where `server_error` does: a new tensor."""
        rows = [full[bucket.slice].view(bucket.workers, -1)[self.served_chunk] for bucket in self.layout.buckets]
        return torch.cat(rows)

    def total_error(self) -> Tensor:
        """What was not sent yet: the mean of the worker errors, plus the server errors; [layout.numel], new.

        Equal on all workers. A collective.
        """
        total = self.worker_error.clone()
        if self.comm.size > 1:
            total /= self.comm.size
        self.comm.all_reduce(total)
        for bucket in self.layout.buckets:
            mine = self.server_error[bucket.served_slice].contiguous().view(torch.uint8)
            total[bucket.slice] += self.comm.all_gather(mine).wait().flatten().view(total.dtype)
        return total

    def fold(self) -> None:
        """Put what was not sent yet on every worker alike. A collective.

        Compact errors are rounded to 8 bits here, as in each of their steps.
        """
        total = self.total_error()
        for bucket, error, codec in zip(self.layout.buckets, self.errors, self.codecs, strict=True):
            write_error(error, total[bucket.slice], None, codec.alive)
        self.server_error.zero_()

    def state(self) -> dict[str, Any]:
        """This worker's errors: worker_error, [layout.numel] or the parts of each bucket's `Int8`; server_error."""
        kept = [(error.data, error.scales) for error in self.errors if isinstance(error, Int8)]
        error = kept if self._flat_error is None else self._flat_error
        return {"worker_error": error, "server_error": self.server_error}

    def load(self, state: dict[str, Any]) -> None:
        """Put back what `state` gave."""
        if self._flat_error is not None:
            self._flat_error.copy_(state["worker_error"])
        else:
            for mine, (data, scales) in zip(self.errors, state["worker_error"], strict=True):
                assert isinstance(mine, Int8)
                mine.data.copy_(data)
                mine.scales.copy_(scales)
        self.server_error.copy_(state["server_error"])

    def set_alive(self, alive: Tensor | None) -> None:
        """Replace the mask of live elements, bool [layout.numel]; all-True is the same as None."""
        self.some_dead = alive is not None and not bool(alive.all())
        for codec in self.codecs:
            codec.set_alive(alive[codec.bucket.slice] if alive is not None and self.some_dead else None)

    @property
    def alive(self) -> Tensor | None:
        """bool [layout.numel] equal on all workers, unpacked anew at each use; None: no dead elements."""
        parts = [codec.alive for codec in self.codecs]
        return torch.cat([part for part in parts if part is not None]) if self.some_dead else None

    def start(
        self,
        bucket: Bucket,
        source: Source | Tensor,
        error_factor: Tensor | None = None,
        comm: Comm | None = None,
    ) -> BucketMean:
        """Begin the mean of a source over the workers.

        Args:
            bucket: which bucket of the layout; all workers start the same ones in the same order.
            source: this worker's input; or its values, [bucket], zero in the padding, used up.
            error_factor: [layers of the bucket], the factor on both errors before they are added; None: 1.
            comm: another group of the same workers (`Comm.beside`) to send it through; None: the exchange's own.
        """
        source = TensorSource(source) if isinstance(source, Tensor) else source
        return self._begin(bucket, source, error_factor, self.comm if comm is None else comm)

    def _begin(self, bucket: Bucket, source: Source, error_factor: Tensor | None, comm: Comm) -> BucketMean:
        return BucketMean(self, bucket, source, error_factor, comm, comm.clock)

    def note_headers(self, headers: list[Tensor]) -> None:
        """Remember whether any worker asked for its dead elements to wake. Only asked for where some are dead."""
        if self.some_dead:
            self.wake_wanted = bool(torch.cat(headers).ne(0).any())

    def wake(self) -> Tensor | None:
        """Let dead elements that hold an error on any worker take part from now on, if a worker asked for it.

        Returns:
            bool [layout.numel], the elements that came alive, equal on all workers; None if nobody asked.
        """
        alive = self.alive if self.wake_wanted else None
        if alive is None:
            return None
        self.wake_wanted = False
        woken = torch.cat([self._any(self._holding(alive, bucket)) for bucket in self.layout.buckets])
        self.set_alive(alive | woken)
        return woken

    def _holding(self, alive: Tensor, bucket: Bucket) -> Tensor:
        """Which dead elements of a bucket have an error here; `alive`: bool [layout.numel]."""
        return ~alive[bucket.slice] & read_error(self.errors[bucket.index]).ne(0)

    def _any(self, flags: Tensor) -> Tensor:
        """Logical or of bool [bucket] over the workers, through the same two phases."""
        packed = pack_bits(flags.view(self.comm.size, -1))
        served = unpack_bits(self.comm.all_to_all(packed).wait()).any(0)
        return unpack_bits(self.comm.all_gather(pack_bits(served)).wait()).flatten()


OneBitExchange = Exchange[BucketCodec]


def read_error(error: Tensor | Int8) -> Tensor:
    return error.read() if isinstance(error, Int8) else error


def write_error(error: Tensor | Int8, values: Tensor, keep: Tensor | None, alive: Tensor | None) -> None:
    """Replace the values of an error, where `keep`, bool [], is true; None: it is. `alive`: as in `Int8.write`."""
    if isinstance(error, Int8):
        error.write(values, keep, alive)
    else:
        error.copy_(values if keep is None else torch.where(keep, values, error))


class Source(Protocol):
    """One worker's input to a compressed mean. Used once: encode, then commit or nothing.

    Errors are [bucket], or `Int8`. `keep`, bool [], says on the device whether the step counts; None: it does.
    """

    def encode(self, codec: ChunkCodec, error: Tensor | Int8, error_factor: Tensor | None) -> Tensor:
        """The messages of input = own value + error * error_factor: uint8 [workers, message_bytes]. Changes no state.

        The header says how many dead elements have an input.
        """

    def commit(
        self, codec: ChunkCodec, error: Tensor | Int8, error_factor: Tensor | None, sent: Tensor, keep: Tensor | None
    ) -> None:
        """error = input - decode(sent), in place, where `keep` is true."""

    def values(self, codec: ChunkCodec) -> Tensor:
        """This worker's own value, [bucket], zero in the padding; what `encode` adds the error to. Used up."""


class TensorSource:
    """A source whose values are all there: `x`, [bucket], zero in the padding; used up."""

    def __init__(self, x: Tensor) -> None:
        self._input = x
        self._complete = False

    def encode(self, codec: ChunkCodec, error: Tensor | Int8, error_factor: Tensor | None) -> Tensor:
        self._add(codec, error, error_factor)
        sent = codec.encode(self._input)
        alive = codec.alive
        if alive is not None:
            codec.header(sent)[:] = (self._input.ne(0) & ~alive).sum()
        return sent

    def commit(
        self, codec: ChunkCodec, error: Tensor | Int8, error_factor: Tensor | None, sent: Tensor, keep: Tensor | None
    ) -> None:
        self._add(codec, error, error_factor)
        write_error(error, codec.subtract(self._input, sent), keep, codec.alive)

    def values(self, codec: ChunkCodec) -> Tensor:
        return self._input

    def _add(self, codec: ChunkCodec, error: Tensor | Int8, error_factor: Tensor | None) -> None:
        if not self._complete:
            old = read_error(error)
            self._input += old if error_factor is None else old * codec.spread_layers(error_factor, 1.0)
        self._complete = True


class GradientSource:
    """Gradients that stay where they are and are gathered where they are needed, so that nothing is kept in between.

    Args:
        bucket, grads: one gradient per layer, None for zero; they must not change before `commit`.
        gather: fills a flat buffer, [bucket], with them.
        spare: [bucket], free until the mean is decoded.
    """

    def __init__(
        self, bucket: Bucket, grads: Sequence[Tensor | None], gather: Callable[[Tensor], None], spare: Tensor
    ) -> None:
        self._bucket, self._grads, self._gather, self._spare = bucket, grads, gather, spare

    def encode(self, codec: ChunkCodec, error: Tensor | Int8, error_factor: Tensor | None) -> Tensor:
        self._gather(self._spare)
        return TensorSource(self._spare).encode(codec, error, error_factor)

    def commit(
        self, codec: ChunkCodec, error: Tensor | Int8, error_factor: Tensor | None, sent: Tensor, keep: Tensor | None
    ) -> None:
        if keep is not None or error_factor is not None or not isinstance(error, Tensor) or codec.alive is not None:
            TensorSource(self.values(codec)).commit(codec, error, error_factor, sent, keep)
            return
        views = Run(self._bucket.layers).views(error)
        given = [(v, g.to(v.dtype)) for v, g in zip(views, self._grads, strict=True) if g is not None]
        if given:
            torch._foreach_add_([v for v, _ in given], [g for _, g in given])
        codec.subtract(error, sent)

    def values(self, codec: ChunkCodec) -> Tensor:
        flat = torch.empty_like(self._spare)
        self._gather(flat)
        return flat


class BucketMean:
    """One bucket's mean under way: `serve()` after `start`, then `gather()` or `wait()`, then `commit()` or nothing."""

    _messages: Tensor | None = None  # gathered, where that was waited for before `gather`

    def __init__(
        self,
        exchange: Exchange[C],
        bucket: Bucket,
        source: Source,
        error_factor: Tensor | None,
        comm: Comm,
        clock: Clock,
    ) -> None:
        self._exchange, self._comm = exchange, comm
        self._codec = exchange.codecs[bucket.index]
        self.bucket = bucket
        self._source, self._factor = source, error_factor
        self._clock = clock
        with self._clock("encode"):
            self._sent = source.encode(self._codec, exchange.errors[bucket.index], error_factor)
        with self._clock("wire"):
            self._pending: Pending = comm.all_to_all(self._sent)

    def serve(self) -> None:
        """Phase 2: average the chunk this worker serves, compress the mean, send it to everyone."""
        with self._clock("wire"):
            self._received = self._pending.wait()
        with self._clock("server"):
            self._reply = self._codec.serve(self._received, self._comm.rank, self._server_error, self._factor)
        with self._clock("wire"):
            self._pending = self._comm.all_gather(self._reply)

    def gather(self) -> Tensor:
        """Phase 3: the messages of all chunks, uint8 [workers, message_bytes], equal to the bit on all workers.

        Sets the bool tensors `finite`, whether all scales are, and `usable`, whether their squares are too with `ROOM`;
        and `headers`.
        """
        self.arrive()
        gathered, self._messages = self._messages, None
        assert gathered is not None
        scales = self._codec.all_scales(gathered)
        self.finite = torch.isfinite(scales).all()
        self.usable = torch.isfinite((scales * ROOM).square()).all()
        self.headers = self._codec.header(gathered)
        return gathered

    def arrive(self) -> None:
        """Wait for what `gather` gives, unless it is there; it may be called before, on another thread."""
        if self._messages is None:
            self._messages = self._all_messages()

    def _all_messages(self) -> Tensor:
        with self._clock("wire"):
            return self._pending.wait()

    def wait(self, out: Tensor | None = None) -> Tensor:
        """`gather`, decoded: the mean, [bucket], written to `out` if that is given."""
        gathered = self.gather()
        return self._codec.decode(gathered) if out is None else self._codec.decode_into(gathered, out)

    def commit(self, keep: Tensor | None = None) -> None:
        """Keep what was not sent as the new errors. Call it when all buckets of the step were finite.

        `keep`: bool [], whether they were, where only the device knows; nothing is changed where it is False.
        """
        if not self._exchange.feedback:
            self._commit_asleep(keep)
            return
        error = self._exchange.errors[self.bucket.index]
        self._source.commit(self._codec, error, self._factor, self._sent, keep)
        self._codec.commit_served(self._received, self._comm.rank, self._server_error, self._factor, self._reply, keep)

    def _commit_asleep(self, keep: Tensor | None) -> None:
        """Keep the inputs of dead elements, which were not compressed but not sent at all, and nothing else."""
        error, alive = self._exchange.errors[self.bucket.index], self._codec.alive
        held = torch.zeros_like(read_error(error))
        if alive is not None:
            self._source.commit(self._codec, error, self._factor, self._sent, keep)
            held = torch.where(alive, held, read_error(error))
        write_error(error, held, keep, alive)

    @property
    def _server_error(self) -> Tensor:
        return self._exchange.server_error[self.bucket.served_slice]
