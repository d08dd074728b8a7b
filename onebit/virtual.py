"""n workers as n threads of one process, for tests, simulation and a laptop.

The same optimizer, autograd and loop run here as in n processes; the compressed exchange gives the same bits.
torch's global random generator is shared by the threads, so draws differ from run to run: give every worker a
`torch.Generator` of its own, and leave dropout off.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from onebit.comm import Comm, Pending
from onebit.errors import CommError, ConfigError, MismatchError

T = TypeVar("T")
RETURNED = "has returned"


class _Meeting:
    """Where n threads lay down one value each and all see all of them. Fails for all as soon as one is gone."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._changed = threading.Condition()
        self._round = 0
        self._laid: dict[int, tuple[str, Any]] = {}
        self._seen: list[tuple[str, Any]] = []
        self._gone: str | None = None
        self._further: list[tuple[_Meeting, list[int]]] = []

    def further(self, rank: int, groups: Sequence[Sequence[int]]) -> _Meeting:
        """That of `rank`'s group of several; whoever leaves this one leaves the others that it is in."""
        if rank == 0:
            self._further += [(_Meeting(len(group)), list(group)) for group in groups]
        made: list[list[_Meeting]] = self.exchange(rank, "further", [m for m, _ in self._further[-len(groups) :]])
        return made[0][next(i for i, group in enumerate(groups) if rank in group)]

    def exchange(self, rank: int, kind: str, value: Any) -> list[Any]:
        """Every worker's value, in order. `kind` names the collective and must be the same on all."""
        with self._changed:
            mine = self._round
            self._laid[rank] = (kind, value)
            if len(self._laid) == self.size:
                self._seen = [self._laid[i] for i in range(self.size)]
                self._laid = {}
                self._round += 1
                self._changed.notify_all()
            while self._round == mine:
                if self._gone is not None:
                    raise CommError(f"worker {rank} waits in {kind}, but {self._gone}; see its error or its loop")
                self._changed.wait()
            seen = self._seen
        kinds = [item[0] for item in seen]
        if any(item != kinds[0] for item in kinds):
            raise MismatchError(f"workers called different collectives: {kinds}; all must call the same ones in order")
        return [item[1] for item in seen]

    def leave(self, rank: int, how: str) -> None:
        """Say that `rank` takes part no more; whoever waits for it, or comes later, gets an error."""
        with self._changed:
            self._gone = self._gone or f"{f'worker {rank}' if rank >= 0 else 'another worker'} {how}"
            self._changed.notify_all()
        for other, members in self._further:
            if rank in members or how != RETURNED:
                other.leave(members.index(rank) if rank in members else -1, how)


class Virtual(Comm):
    """One of n workers that are threads of this process. Made by `run_workers`."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self._rank = rank
        self._meeting = meeting

    def __reduce__(self) -> tuple[Any, ...]:
        raise ConfigError(
            "an optimizer on virtual workers cannot be pickled, since they are threads of this process; "
            "save its state_dict(), build the optimizer anew and load that"
        )

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._meeting.size

    def beside(self) -> Virtual:
        return Virtual(self._rank, self._meeting.further(self._rank, [range(self.size)]))

    def split(self, groups: Sequence[Sequence[int]]) -> Virtual:
        mine = next(group for group in groups if self._rank in group)
        return Virtual(list(mine).index(self._rank), self._meeting.further(self._rank, groups))

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return self._meeting.exchange(self.rank, "all_gather_bytes", data)

    def _all_to_all(self, messages: Tensor) -> Pending:
        everyone = self._meeting.exchange(self.rank, f"all_to_all of {tuple(messages.shape)}", messages.clone())
        return Pending(torch.stack([sent[self.rank] for sent in everyone]))

    def _all_gather(self, message: Tensor) -> Pending:
        everyone = self._meeting.exchange(self.rank, f"all_gather of {message.numel()} bytes", message.clone())
        return Pending(torch.stack(everyone))

    def _all_reduce(self, tensor: Tensor) -> None:
        """Worker k adds up the k-th part in order of workers; then all parts are put together."""
        kind = f"all_reduce of {tensor.numel()} x {tensor.dtype}"
        everyone = self._meeting.exchange(self.rank, kind, tensor.reshape(-1).clone())
        parts = [sent.tensor_split(self.size)[self.rank] for sent in everyone]
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        tensor.copy_(torch.cat(self._meeting.exchange(self.rank, kind, total)).view(tensor.shape))


def run_workers(n: int, fn: Callable[[Comm], T]) -> list[T]:
    """Call `fn(comm)` in n threads, one per virtual worker; return their results in order.

    torch's threads are divided among the workers while they run. When a worker raises, the others are released
    from whatever they wait in and the first error is raised here.

    Args:
        n: number of workers, at least 1.
        fn: the worker's program; it gets its own `Comm`.

    Raises:
        ConfigError: n < 1.
        CommError: a worker returned while another still waited for it.
    """
    if n < 1:
        raise ConfigError(f"run_workers got n = {n}; it needs at least 1 worker")
    meeting = _Meeting(n)
    results: list[Any] = [None] * n
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            results[rank] = fn(Virtual(rank, meeting))
            meeting.leave(rank, RETURNED)
        except BaseException as error:
            errors.append(error)  # in order of time: those released by leave() come after their cause
            meeting.leave(rank, "has failed")

    threads_before = torch.get_num_threads()
    torch.set_num_threads(max(1, threads_before // n))
    threads = [
        threading.Thread(target=work, args=(rank,), name=f"onebit-worker-{rank}", daemon=True) for rank in range(n)
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.2)  # short, so that Ctrl-C is heard
    except BaseException:
        meeting.leave(-1, "was interrupted")
        raise
    finally:
        torch.set_num_threads(threads_before)
    if errors:
        raise errors[0]
    return results
