"""Two levels: workers of one machine average in full precision among themselves, one bit travels between machines.

With h machines of g workers each, worker j of a machine averages the j-th g-th of every bucket over its machine
(a reduce-scatter: all_to_all, then a sum in the order of workers), exchanges that part as bits with worker j of the
other machines, and gathers what the others of its machine have got. So a machine sends and receives what one worker
would, whatever g is, and a worker holds errors for its part only: 4 / g bytes per element, and 4 / n for the server's.

All workers end with the same n messages of a bucket as in the flat exchange: chunk j h + i is served by worker j of
machine i. Conservation is that of the flat exchange with machines in the place of workers:

  sum of outputs + mean over the machines of the worker errors + server error = sum of mean inputs.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onebit.checks import check_whole
from onebit.chunk_codec import ChunkCodec
from onebit.comm import Comm, Distributed, Pending, check_same, default_comm
from onebit.errors import ConfigError
from onebit.exchange import BucketMean, C, Exchange, Source, TensorSource, read_error
from onebit.kernels.compact import Int8
from onebit.layout import Bucket, FlatLayout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger("onebit")


class TwoLevel(Comm):
    """All workers, and their groups: made by `two_level`. Collectives on it itself are those of all workers.

    Attributes:
        whole: all workers; worker j of machine i has the rank i * inside.size + j.
        inside: those of this machine, in order.
        across: those with this place on all machines, in order of machines.
    """

    def __init__(self, whole: Comm, inside: Comm, across: Comm) -> None:
        self.whole, self.inside, self.across = whole, inside, across
        self._own_bytes = 0

    def __reduce__(self) -> tuple[Any, ...]:
        raise ConfigError(
            "an optimizer with two levels cannot be pickled, since its groups exist in this process only; save its "
            "state_dict(), build the optimizer anew and load that"
        )

    @property
    def inner(self) -> Comm:
        """What moves the bytes of all workers."""
        found: Comm = getattr(self.whole, "inner", self.whole)
        return found

    @property
    def ranks(self) -> list[int]:
        """As of the comm of all workers; empty if it has none."""
        return getattr(self.whole, "ranks", [])

    @property
    def rank(self) -> int:
        return self.whole.rank

    @property
    def size(self) -> int:
        return self.whole.size

    @property
    def payload_bytes(self) -> int:
        """Of collectives of all workers, and across machines; what stays in the machine is `inside.payload_bytes`."""
        return self._own_bytes + self.across.payload_bytes

    @payload_bytes.setter
    def payload_bytes(self, value: int) -> None:
        self._own_bytes = value - self.across.payload_bytes

    def beside(self) -> TwoLevel:
        return TwoLevel(self.whole.beside(), self.inside.beside(), self.across.beside())

    def control(self) -> Comm:
        return self.whole.control()

    def split(self, groups: Sequence[Sequence[int]]) -> Comm:
        return self.whole.split(groups)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return self.whole.all_gather_bytes(data)

    def _all_to_all(self, messages: Tensor) -> Pending:
        return self.whole._all_to_all(messages)

    def _all_gather(self, message: Tensor) -> Pending:
        return self.whole._all_gather(message)

    def _all_reduce(self, tensor: Tensor) -> None:
        self.whole._all_reduce(tensor)


def two_level(
    local_size: int | None = None,
    process_group: ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    comm: Comm | None = None,
) -> Comm:
    """The comm of an optimizer whose workers average inside machines first: `OneBitLamb(..., comm=two_level())`.

    A collective. For one worker per machine it is the flat comm.

    Args:
        local_size: workers of each machine, consecutive ranks; None: what the launcher says, LOCAL_WORLD_SIZE.
        process_group, comm: the workers; neither: the default process group.
        mesh: instead of all that, a DeviceMesh of two dimensions, machines and the workers of one, over all processes.

    Raises:
        ConfigError: the workers are not so many machines of `local_size`; ranks of one machine are not consecutive; a
            mesh of other dimensions, or beside other arguments.
        MismatchError: local_size differs between workers.
    """
    if mesh is not None:
        if (local_size, process_group, comm) != (None, None, None):
            raise ConfigError("mesh was given beside local_size, process_group or comm; the mesh alone says it all")
        local_size = _from_mesh(mesh)
    if comm is not None and process_group is not None:
        raise ConfigError("both comm and process_group were given; pass one of them")
    whole = default_comm(process_group) if comm is None else comm
    if isinstance(getattr(whole, "inner", whole), TwoLevel) or isinstance(whole, TwoLevel):
        raise ConfigError("comm has two levels already; give two_level the comm of all workers, Checked or not")
    g = _size_of_machines(local_size, whole)
    if whole.size % g:
        raise ConfigError(
            f"local_size is {g} and there are {whole.size} workers; every machine must have as many; give local_size "
            "where the workers are some of the processes that a launcher counts"
        )
    _check_places(whole, g)
    if g == 1:
        if whole.rank == 0:
            log.info("two levels: one worker per machine, so there is one level")
        return whole
    inside = whole.split([range(first, first + g) for first in range(0, whole.size, g)])
    across = whole.split([range(place, whole.size, g) for place in range(g)])
    if whole.rank == 0:
        log.info("two levels: %d machines of %d workers", whole.size // g, g)
    return TwoLevel(whole, inside, across)


def _size_of_machines(local_size: int | None, whole: Comm) -> int:
    """What was given, else what the launcher says; the same on all workers."""
    alone = "1" if whole.size == 1 else ""
    said = os.environ.get("LOCAL_WORLD_SIZE", alone) if local_size is None else str(local_size)
    check_same(whole, "two levels", [("local_size", said or "not known")])
    if local_size is None and not said.isdecimal():
        raise ConfigError(
            f"local_size was not given and LOCAL_WORLD_SIZE, which a launcher sets, is {said or 'not set'!r}; pass the "
            "number of workers of each machine"
        )
    size = int(said) if local_size is None else local_size
    check_whole("local_size", size, 1)
    return size


def _from_mesh(mesh: DeviceMesh) -> int:
    """The workers of each machine, by a mesh."""
    shape, ranks = tuple(mesh.mesh.shape), mesh.mesh.flatten().tolist()
    world = default_comm().size
    if len(shape) != 2 or ranks != list(range(world)):
        raise ConfigError(
            f"mesh has the shape {shape} and the ranks {ranks}; two levels take (machines, workers of each) over all "
            f"{world} processes in order, as of init_device_mesh"
        )
    return int(shape[1])


def _check_places(whole: Comm, g: int) -> None:
    """Raise the same ConfigError on all workers if hosts say that ranks are laid otherwise."""
    if not isinstance(getattr(whole, "inner", whole), Distributed):
        return
    hosts = [name.decode() for name in whole.all_gather_bytes(socket.gethostname().encode())]
    for first in range(0, len(hosts), g):
        if len(set(hosts[first : first + g])) > 1:
            raise ConfigError(
                f"workers {first} to {first + g - 1} should share a machine (local_size {g}), and their hosts are "
                f"{', '.join(hosts[first : first + g])}; number the ranks machine by machine, as torchrun does"
            )


class PartCodec(ChunkCodec):
    """A bucket's codec, seen by the workers of one place: the chunks of their part of the bucket, h of them."""

    def __init__(self, whole: ChunkCodec, place: int, machines: int) -> None:
        size = whole.bucket.numel * machines // whole.bucket.workers
        start = whole.bucket.start * machines // whole.bucket.workers
        bucket = Bucket(whole.bucket.index, start, start + size, (), machines)
        super().__init__(bucket, whole.dtype, whole.device)
        self._whole, self._first, self._place = whole, place * machines, place
        self.message_bytes = whole.message_bytes

    @property
    def packed_alive(self) -> Tensor | None:  # type: ignore[override]
        alive = self._whole.packed_alive
        return None if alive is None else self.part(alive)

    def part(self, full: Tensor) -> Tensor:
        """Of values that lie as the bucket's elements do, those of this part."""
        parts = self._whole.bucket.workers // self.bucket.workers
        return full.view(parts, -1)[self._place]

    def set_alive(self, alive: Tensor | None) -> None:
        raise AssertionError("the mask is that of the whole bucket's codec")

    def encode_chunks(self, x: Tensor, chunks: range) -> Tensor:
        return self._whole.encode_chunks(x, self._chunks(chunks))

    def subtract_chunks(self, x: Tensor, messages: Tensor, chunks: range) -> Tensor:
        return self._whole.subtract_chunks(x, messages, self._chunks(chunks))

    def _chunks(self, chunks: range) -> range:
        return range(self._first + chunks.start, self._first + chunks.stop)

    def encode_chunk(self, x: Tensor, chunk: int) -> Tensor:
        return self._whole.encode_chunk(x, self._first + chunk)

    def decode_chunk(self, message: Tensor, chunk: int) -> Tensor:
        return self._whole.decode_chunk(message, self._first + chunk)

    def scales(self, message: Tensor, chunk: int) -> Tensor:
        return self._whole.scales(message, self._first + chunk)

    def header(self, messages: Tensor) -> Tensor:
        return self._whole.header(messages)

    def spread_layers(self, values: Tensor, padding: float) -> Tensor:
        return self.part(self._whole.spread_layers(values, padding))

    def serve(self, received: Tensor, chunk: int, error: Tensor, error_factor: Tensor | None) -> Tensor:
        return self._whole.serve(received, self._first + chunk, error, error_factor)

    def commit_served(
        self,
        received: Tensor,
        chunk: int,
        error: Tensor,
        error_factor: Tensor | None,
        reply: Tensor,
        keep: Tensor | None = None,
    ) -> None:
        self._whole.commit_served(received, self._first + chunk, error, error_factor, reply, keep)


class _Parts:
    """The layout of the parts, as far as an exchange looks at it."""

    def __init__(self, codecs: Sequence[PartCodec]) -> None:
        self.buckets = tuple(codec.bucket for codec in codecs)
        self.workers, self.numel = self.buckets[0].workers, self.buckets[-1].stop

    def zeros(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(self.numel, dtype=dtype, device=device)


class TwoLevelExchange(Exchange[C]):
    """`Exchange` with two levels; its worker errors are [layout.numel / inside.size]. Same arguments."""

    _total: Tensor | None

    def __init__(
        self,
        layout: FlatLayout,
        comm: TwoLevel,
        dtype: torch.dtype,
        device: torch.device,
        codecs: Sequence[C],
        compact: bool,
        feedback: bool,
    ) -> None:
        self.layout, self.comm, self.codecs, self.feedback = layout, comm, codecs, feedback
        self.wake_wanted = self.some_dead = False
        self._total = None
        self.parts = [PartCodec(codec, comm.inside.rank, comm.across.size) for codec in codecs]
        inner: Any = _Parts(self.parts)
        self.inner: Exchange[PartCodec] = Exchange(
            inner, None, comm.across, dtype, device, self.parts, compact, feedback
        )
        self.errors, self.server_error = self.inner.errors, self.inner.server_error

    @property
    def worker_error(self) -> Tensor:
        return self.inner.worker_error

    @property
    def own_codecs(self) -> Sequence[ChunkCodec]:
        return self.parts

    @property
    def served_chunk(self) -> int:
        assert isinstance(self.comm, TwoLevel)
        return self.comm.inside.rank * self.comm.across.size + self.comm.across.rank

    def own_part(self, full: Tensor) -> Tensor:
        return torch.cat([p.part(full[b.slice]) for b, p in zip(self.layout.buckets, self.parts, strict=True)])

    def placed_error(self) -> Tensor:
        part = self.worker_error
        full = self.layout.zeros(part.dtype, part.device)
        for bucket, codec in zip(self.layout.buckets, self.parts, strict=True):
            codec.part(full[bucket.slice]).copy_(part[codec.bucket.slice])
        return full

    def total_error(self) -> Tensor:
        part = self.inner.total_error()
        full = torch.empty(self.layout.numel, dtype=part.dtype, device=part.device)
        for bucket, codec in zip(self.layout.buckets, self.parts, strict=True):
            full[bucket.slice] = self._gathered(part[codec.bucket.slice])
        return full

    def fold(self) -> None:
        """As `Exchange.fold`; until the next step `state` has all of it, which a worker does not hold otherwise."""
        total = self.total_error()
        self.inner.fold()
        self._total = total

    def state(self) -> dict[str, Any]:
        """As `Exchange.state`, with the worker errors of this worker's part: [layout.numel / inside.size]."""
        state = self.inner.state()
        return state if self._total is None else {**state, "worker_error": self._folded(self._total)}

    def load(self, state: dict[str, Any]) -> None:
        """Put back what `state` gave, or the worker errors of whole buckets."""
        given = state["worker_error"]
        if isinstance(given, Tensor):
            given = self.own_part(given) if given.numel() == self.layout.numel else given
        else:
            pairs = zip(given, self.layout.buckets, strict=True)
            given = [self._own_pair(data, scales, bucket) for (data, scales), bucket in pairs]
        self.inner.load({**state, "worker_error": given})

    def _folded(self, total: Tensor) -> Tensor | list[tuple[Tensor, Tensor]]:
        """The errors of whole buckets, as the errors are held."""
        if isinstance(self.errors[0], Tensor):
            return total
        held = []
        for bucket, codec in zip(self.layout.buckets, self.codecs, strict=True):
            error = Int8.zeros(bucket, total.device)
            error.write(total[bucket.slice], None, codec.alive)
            held.append((error.data, error.scales))
        return held

    def _own_pair(self, data: Tensor, scales: Tensor, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """Of the `Int8` of a bucket, or of this part of it, this part."""
        if data.numel() != bucket.numel:
            return data, scales
        part = self.parts[bucket.index]
        return part.part(data), part.part(scales.flatten()).view(-1, scales.shape[1])

    def _begin(self, bucket: Bucket, source: Source, error_factor: Tensor | None, comm: Comm) -> BucketMean:
        assert isinstance(comm, TwoLevel)
        return _TwoLevelMean(self, bucket, source, error_factor, comm)

    def _any(self, flags: Tensor) -> Tensor:
        """Logical or of bool [part of a bucket] over the workers of this place; that of all places, bool [bucket]."""
        return self._gathered(self.inner._any(flags))

    def _gathered(self, part: Tensor) -> Tensor:
        """The parts of a bucket that the workers of this machine hold, put together."""
        assert isinstance(self.comm, TwoLevel)
        return self.comm.inside.all_gather(part.contiguous().view(torch.uint8)).wait().flatten().view(part.dtype)

    def _holding(self, alive: Tensor, bucket: Bucket) -> Tensor:
        dead = ~self.parts[bucket.index].part(alive[bucket.slice])
        return dead & read_error(self.errors[bucket.index]).ne(0)


class _TwoLevelMean(BucketMean):
    """One bucket's mean under way, through both levels."""

    def __init__(
        self,
        exchange: TwoLevelExchange[Any],
        bucket: Bucket,
        source: Source,
        error_factor: Tensor | None,
        comm: TwoLevel,
    ) -> None:
        self._owner, self._codec, self._levels = exchange, exchange.codecs[bucket.index], comm
        self.bucket = bucket
        part = exchange.parts[bucket.index]
        with comm.clock("encode"):
            own = source.values(self._codec)
        with comm.clock("wire"):
            x = _mean_of_part(own, comm.inside)
        self._inner = BucketMean(exchange.inner, part.bucket, TensorSource(x), error_factor, comm.across, comm.clock)

    def serve(self) -> None:
        self._inner.serve()

    def _all_messages(self) -> Tensor:
        mine = self._inner._all_messages()
        with self._levels.clock("wire"):
            gathered = self._levels.inside.all_gather(mine.flatten()).wait()
        return gathered.view(-1, mine.shape[1])

    def commit(self, keep: Tensor | None = None) -> None:
        self._owner._total = None
        self._inner.commit(keep)


def _mean_of_part(x: Tensor, inside: Comm) -> Tensor:
    """The mean over a machine's workers of this worker's part of [bucket], in the order of workers: a new tensor."""
    rows = x.view(inside.size, -1)
    total, done = torch.empty_like(rows[0]), 0
    for received in inside.all_to_all(rows.view(torch.uint8)).parts():
        part = received.view(x.dtype)
        here = total[done : done + part.shape[1]]
        torch.add(part[0], part[1], out=here)
        for row in part[2:]:
            here += row
        here.div_(inside.size)
        done += part.shape[1]
    return total


def build_exchange(
    layout: FlatLayout,
    comm: Comm,
    dtype: torch.dtype,
    device: torch.device,
    codecs: Sequence[C],
    compact: bool = False,
    feedback: bool = True,
) -> Exchange[C]:
    """The exchange of these workers: with two levels if their comm has them. Arguments as in `Exchange`."""
    if isinstance(comm, TwoLevel):
        return TwoLevelExchange(layout, comm, dtype, device, codecs, compact, feedback)
    return Exchange(layout, None, comm, dtype, device, codecs, compact, feedback)


__all__ = ["PartCodec", "TwoLevel", "TwoLevelExchange", "build_exchange", "two_level"]
