"""Comm moves bytes between workers, counts them, and knows nothing else.

`Comm` is the boundary: rank, size, three collectives on tensors, one for small control messages. `Solo` is one
worker, `Distributed` is torch.distributed (the only file of the library that names its collectives), and
`virtual.Virtual` is n threads of one process. Bytes are counted here, in `Comm`, for all of them alike.

Counting (bytes that one worker hands to the transport, n workers):
  all_to_all   (n - 1) * message      each message goes to one other worker
  all_gather   (n - 1) * message      the one message goes to every other worker
  all_reduce   2 (n - 1) / n * buffer as a ring sends it
Control messages (all_gather_bytes) are not payload and are not counted.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from onebit import errors
from onebit.clock import Clock
from onebit.errors import CommError, ConfigError, MismatchError, OnebitError

T = TypeVar("T")


PIECE_BYTES = 2**19
WHOLE_BYTES = 2 * PIECE_BYTES
"""Longer messages travel in pieces over Gloo, which does not fill a link with a single one (docs/performance.md)."""


POLL_S = 1e-4


class Pending:
    """A collective under way: `wait()` returns its result, or `parts()` its columns. One of them, once."""

    def __init__(self, result: Tensor, finish: Callable[[], object] | None = None) -> None:
        self._result = result
        self._finish = finish

    def wait(self) -> Tensor:
        if self._finish is not None:
            self._finish()
        return self._result

    def parts(self) -> Iterator[Tensor]:
        """The result's columns from first to last, uint8 [n, some bytes] each, as they arrive."""
        yield self.wait()


class _Pieces(Pending):
    """A long message as several that are under way at once."""

    def __init__(self, under_way: Sequence[Pending]) -> None:
        self._under_way = under_way

    def wait(self) -> Tensor:
        return torch.cat(list(self.parts()), 1)

    def parts(self) -> Iterator[Tensor]:
        for pending in self._under_way:
            yield pending.wait()


class Comm(ABC):
    """The workers of one data-parallel group, seen from one of them.

    Every method but the properties is a collective: all workers call it, in the same order.
    """

    payload_bytes: int = 0  # counted since construction, this worker

    @property
    def clock(self) -> Clock:
        """The time of exchanges that go through this comm, on this worker."""
        made: Clock = self.__dict__.setdefault("_clock", Clock())
        return made

    @property
    @abstractmethod
    def rank(self) -> int: ...

    @property
    @abstractmethod
    def size(self) -> int: ...

    def all_to_all(self, messages: Tensor) -> Pending:
        """Send row j of `messages`, uint8 [n, bytes], to worker j. The result's row i came from worker i."""
        self.payload_bytes += (self.size - 1) * messages[0].numel()
        return self._all_to_all(messages)

    def all_gather(self, message: Tensor) -> Pending:
        """Send `message`, uint8 [bytes], to every worker. The result is uint8 [n, bytes], in order of workers."""
        self.payload_bytes += (self.size - 1) * message.numel()
        return self._all_gather(message)

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace `tensor` by its sum over the workers, in place; equal bits on all workers."""
        self.payload_bytes += ring_all_reduce_bytes(tensor.numel() * tensor.element_size(), self.size)
        self._all_reduce(tensor)

    def beside(self) -> Comm:
        """The same workers in a group of its own, whose collectives wait for none of this one's. A collective.

        Raises:
            ConfigError: this kind of comm cannot make one.
        """
        raise ConfigError(
            f"a {type(self).__name__} cannot make a further group, which overlap needs; leave overlap off"
        )

    def split(self, groups: Sequence[Sequence[int]]) -> Comm:
        """The group that this worker is in, of several that share no worker, each a list of ranks. A collective.

        Raises:
            ConfigError: this kind of comm cannot make one.
        """
        raise ConfigError(f"a {type(self).__name__} cannot be split into groups, which two levels need")

    def control(self) -> Comm:
        """As `beside`, for tensors on the CPU: control messages that do not wait for an accelerator. A collective."""
        return self.beside()

    def gather_flag(self, flag: bool) -> Pending:
        """Every worker's flag, uint8 [n, 1] on the CPU, in order of workers, under way. A control message: not counted.

        For groups that work on the CPU.
        """
        return self._all_gather(torch.tensor([flag], dtype=torch.uint8))

    def __deepcopy__(self, memo: dict[int, Any]) -> Comm:
        return self  # the workers are who they are, however often an optimizer is copied

    @abstractmethod
    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Every worker's `data`, of any length, in order of workers. For control messages; not counted."""

    @abstractmethod
    def _all_to_all(self, messages: Tensor) -> Pending: ...

    @abstractmethod
    def _all_gather(self, message: Tensor) -> Pending: ...

    @abstractmethod
    def _all_reduce(self, tensor: Tensor) -> None: ...


def ring_all_reduce_bytes(buffer_bytes: int, workers: int) -> int:
    """Bytes one worker sends in a ring all-reduce: 2 (n - 1) / n of the buffer, rounded up."""
    return -(-2 * (workers - 1) * buffer_bytes // workers)


class Solo(Comm):
    """One worker. The same code path as n workers; nothing travels and 0 bytes are counted."""

    rank = 0
    size = 1

    def beside(self) -> Solo:
        return self

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]

    def _all_to_all(self, messages: Tensor) -> Pending:
        return Pending(messages)

    def _all_gather(self, message: Tensor) -> Pending:
        return Pending(message.unsqueeze(0))

    def _all_reduce(self, tensor: Tensor) -> None:
        pass


class Distributed(Comm):
    """The processes of a torch.distributed group: NCCL on GPUs, Gloo on CPUs.

    Args:
        process_group: the data-parallel group; None: the default group.

    Raises:
        ConfigError: torch.distributed is not initialised, or this process is not in the group.
    """

    _polls = False
    """Whether a thread waits with Python's sleep instead of in Gloo. One that still waits when the interpreter ends
    would wake up in C++, where it cannot be ended, and take the process with it."""

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ConfigError(
                "torch.distributed is not initialised; call init_process_group first, or pass comm=onebit.comm.Solo()"
            )
        self._group = process_group
        self._rank: int = dist.get_rank(process_group)
        self._size: int = dist.get_world_size(process_group)
        if self._rank < 0:
            raise ConfigError("this process is not a member of process_group; pass the group it belongs to")
        self._in_pieces = dist.get_backend(process_group) == "gloo"

    def __reduce__(self) -> tuple[Any, ...]:
        if self._group is not None:
            raise ConfigError(
                "an optimizer with a process_group cannot be pickled, since the group exists in this process only; "
                "save its state_dict(), build the optimizer anew and load that"
            )
        return default_comm, ()

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def beside(self) -> Distributed:
        made = Distributed(self._new_group(dist.get_backend(self._group)))
        made._polls = made.backend == "gloo"
        return made

    def control(self) -> Distributed:
        return Distributed(self._new_group("gloo"))

    def split(self, groups: Sequence[Sequence[int]]) -> Comm:
        ranks, mine = self.ranks, next(group for group in groups if self.rank in group)
        if len(mine) == 1:
            return Solo()
        return Distributed(self._new_group(dist.get_backend(self._group), [ranks[i] for i in mine]))

    def _new_group(self, backend: str, ranks: list[int] | None = None) -> dist.ProcessGroup:
        """A further group of these workers, or of those with these global ranks; others need not take part."""
        ranks = self.ranks if ranks is None else ranks
        whole = len(ranks) == dist.get_world_size()
        group: dist.ProcessGroup = self._run(
            lambda: dist.new_group(ranks, backend=backend, timeout=_timeout(), use_local_synchronization=not whole)
        )
        return group

    def all_reduce_later(self, tensor: Tensor) -> torch.futures.Future[Tensor]:
        """`all_reduce`, under way: the sum is in `tensor` when the future is done. For the hooks of DDP."""
        self.payload_bytes += ring_all_reduce_bytes(tensor.numel() * tensor.element_size(), self.size)
        work = self._run(lambda: dist.all_reduce(tensor, group=self._group, async_op=True))
        return work.get_future().then(lambda done: done.value()[0])  # type: ignore[no-any-return]

    @property
    def backend(self) -> str:
        """What moves the bytes: "gloo" or "nccl"."""
        return str(dist.get_backend(self._group))

    @property
    def ranks(self) -> list[int]:
        """The global ranks of the workers, in order."""
        ranks: list[int] = dist.get_process_group_ranks(self._group or dist.group.WORLD)
        return ranks

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        device = _control_device(self._group)
        length = torch.tensor([len(data)], dtype=torch.int64, device=device)
        lengths = [torch.empty_like(length) for _ in range(self.size)]
        self._run(lambda: dist.all_gather(lengths, length, group=self._group))
        sizes = [int(item) for item in lengths]
        mine = torch.zeros(max(1, max(sizes)), dtype=torch.uint8, device=device)
        if data:
            mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        theirs = [torch.empty_like(mine) for _ in range(self.size)]
        self._run(lambda: dist.all_gather(theirs, mine, group=self._group))
        return [bytes(item[:size].tolist()) for item, size in zip(theirs, sizes, strict=True)]

    def _all_to_all(self, messages: Tensor) -> Pending:
        if self._in_pieces and messages.shape[1] > WHOLE_BYTES:
            return _Pieces([self._all_to_all(part) for part in torch.split(messages, PIECE_BYTES, 1)])
        received, messages = torch.empty_like(messages), messages.contiguous()
        return self._start(
            received, lambda: dist.all_to_all_single(received, messages, group=self._group, async_op=True)
        )

    def _all_gather(self, message: Tensor) -> Pending:
        if self._in_pieces and message.numel() > WHOLE_BYTES:
            return _Pieces([self._all_gather(part) for part in torch.split(message, PIECE_BYTES)])
        received = message.new_empty(self.size, message.numel())
        return self._start(received, lambda: _gather_single(received.view(-1), message, self._group))

    def _all_reduce(self, tensor: Tensor) -> None:
        self._wait(self._run(lambda: dist.all_reduce(tensor, group=self._group, async_op=True)))

    def _start(self, received: Tensor, begin: Callable[[], Any]) -> Pending:
        work = self._run(begin)
        return Pending(received, lambda: self._wait(work))

    def _wait(self, work: Any) -> None:
        while self._polls and not work.is_completed():
            time.sleep(POLL_S)
        self._run(work.wait)

    def _run(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except (RuntimeError, ValueError) as error:  # what Gloo, NCCL and the store raise when a peer is gone
            raise CommError(
                f"worker {self.rank} of {self.size} lost contact with another worker: {str(error).splitlines()[0]}; "
                "see the log of the worker that ended first, then start all workers again"
            ) from error


def _gather_single(output: Tensor, message: Tensor, group: dist.ProcessGroup | None) -> Any:
    """all_gather into one tensor, under the name that this torch release gives it."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, message, group=group, async_op=True)


def _control_device(group: dist.ProcessGroup | None) -> torch.device:
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def default_comm(process_group: dist.ProcessGroup | None = None) -> Comm:
    """The process group if there is one, else one worker."""
    if process_group is not None or (dist.is_available() and dist.is_initialized()):
        return Distributed(process_group)
    return Solo()


_beside: dict[int, tuple[Comm, Any]] = {}  # by the identity of the default group


def beside_training() -> tuple[Comm, Any]:
    """All processes, in a group of their own that works on the CPU, and that group; None for it where they are one.

    Made once; a collective then.
    """
    comm = default_comm()
    if comm.size == 1:
        return comm, None
    world = id(dist.group.WORLD)
    if world not in _beside:
        group = dist.new_group(backend="gloo", timeout=_timeout())
        _beside[world] = (Distributed(group), group)
    return _beside[world]


def _timeout() -> Any:
    """That of the default group; None, torch's own, where it does not say."""
    for device in ("cuda", "cpu"):
        try:
            return dist.group.WORLD._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):
            continue
    return None


def meeting_place(comm: Comm) -> Any:
    """The store that the processes of the default group met in; None where there is none."""
    real = isinstance(getattr(comm, "inner", comm), Distributed)
    return dist.distributed_c10d._get_default_store() if real and comm.size > 1 else None


def check_same(comm: Comm, what: str, mine: Sequence[tuple[str, str]]) -> None:
    """Raise the same MismatchError on all workers unless they hold equal (name, value) lists.

    Args:
        comm: the workers.
        what: the subject of the message, such as "optimizer settings".
        mine: this worker's values in a fixed order.

    Raises:
        MismatchError: names the first difference and the two workers that differ.
    """

    texts = comm.all_gather_bytes(json.dumps(mine).encode())
    for rank, text in enumerate(texts):
        if text == texts[0]:
            continue
        first, other = json.loads(texts[0]), json.loads(text)
        name, ours, theirs = next(
            (
                (a[0], a[1], b[1] if a[0] == b[0] else f"no such entry ({b[0]})")
                for a, b in zip(first, other, strict=False)
                if a != b
            ),
            ("number of entries", str(len(first)), str(len(other))),
        )
        raise MismatchError(
            f"{what} differ between workers: {name} is {ours} on worker 0 and {theirs} on worker {rank}; "
            "every worker must build the same model and optimizer; give all of them the same arguments and seed"
        )


def all_or_none(comm: Comm, action: Callable[[], T]) -> T:
    """Do `action` on every worker; if it fails on one, all raise the error of the first that failed.

    Raises:
        OnebitError: of the class and with the message that the failing worker had.
    """
    result: T | None = None
    failure: OnebitError | None = None
    try:
        result = action()
    except OnebitError as error:
        failure = error
    mine = [] if failure is None else [type(failure).__name__, str(failure)]
    for rank, report in enumerate(comm.all_gather_bytes(json.dumps(mine).encode())):
        if theirs := json.loads(report):
            kind: type[OnebitError] = getattr(errors, theirs[0], OnebitError)
            raise kind(theirs[1] if rank == 0 else f"worker {rank}: {theirs[1]}")
    return result  # type: ignore[return-value]


def agreed(comm: Comm, mine: bool) -> bool:
    """What worker 0 holds true. A collective."""
    return comm.all_gather_bytes(b"1" if mine else b"0")[0] == b"1"


def first_says(comm: Comm, action: Callable[[], str]) -> str:
    """What `action` gives on worker 0, on all workers; if it fails there, all raise its error. A collective."""
    said = all_or_none(comm, action if comm.rank == 0 else str)
    return comm.all_gather_bytes(said.encode())[0].decode()


__all__ = [
    "Comm",
    "Distributed",
    "Pending",
    "Solo",
    "agreed",
    "all_or_none",
    "check_same",
    "default_comm",
    "ring_all_reduce_bytes",
]
