"""`Lane`: a thread beside the main one, with a group of workers of its own, through which buckets go one by one."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol

import torch

from onebit.comm import Comm


class Mean(Protocol):
    """A bucket's mean under way, as `exchange.BucketMean`: its second phase is to be done, and then waited for."""

    def serve(self) -> None: ...

    def arrive(self) -> None: ...


class Ticket:
    """A bucket that was given to a lane. Done when the lane was flushed."""

    def __init__(self, start: Callable[[], Mean], after: Any) -> None:
        self.start: Callable[[], Mean] | None = start
        self.after = after
        self.done = threading.Event()
        self.mean: Mean | None = None
        self.error: BaseException | None = None

    def wait(self) -> Any:
        """The mean, served and arrived.

        Raises:
            OnebitError: what went wrong in the lane; or any error of a start.
        """
        self.done.wait()
        if self.error is not None:
            raise self.error
        return self.mean


Item = Ticket | str | None
"""A bucket; `FLUSH`; or the end of the lane."""
FLUSH = "flush"


class Lane:
    """What is done in it does not depend on time, but for when: start 0, start 1, serve 0, start 2, serve 1, ...

    So all workers make the same collectives in the same order, and while one bucket is on the wire the next is encoded.
    On CUDA the thread has a stream of its own and does not wait for what it starts. After an error nothing else begins.

    Args:
        comm: of the main thread. Making a lane is a collective.
        device: where the tensors are.
    """

    def __init__(self, comm: Comm, device: torch.device) -> None:
        self.comm = comm.beside()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._waiting: queue.SimpleQueue[Item] = queue.SimpleQueue()
        # a daemon: a worker that ends does not wait for the others
        thread = threading.Thread(target=_work, args=(self._waiting, self._stream), name="onebit-lane", daemon=True)
        thread.start()
        weakref.finalize(self, _end, self._waiting, thread)

    def submit(self, start: Callable[[Comm], Mean]) -> Ticket:
        """Begin a bucket's mean when those before have begun; it is served when the next one has, or at `flush`.

        `start` should not hold who owns the lane: the lane ends with its owner.
        """
        ticket = Ticket(partial(start, self.comm), self._now())
        self._waiting.put(ticket)
        return ticket

    def flush(self) -> None:
        """No bucket comes any more: the last one is served, all are waited for, and their tickets are done."""
        self._waiting.put(FLUSH)

    def join(self) -> None:
        """What the lane has done comes before what the main thread does from now on, also on an accelerator."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def _now(self) -> Any:
        """What the device has been given so far, to be waited for before gradients are read; None on the CPU."""
        return None if self._stream is None else torch.cuda.current_stream(self._stream.device).record_event()


def _work(waiting: queue.SimpleQueue[Item], stream: Any) -> None:
    """What a lane's thread does until it is given None."""
    under_way: list[Ticket] = []
    broken: BaseException | None = None
    while (item := waiting.get()) is not None:
        if isinstance(item, Ticket):
            under_way.append(item)
        if broken is None:
            broken = _advance(item, under_way, stream)
        if broken is not None or item == FLUSH:
            for ticket in under_way:
                ticket.error = broken
                ticket.done.set()
            under_way, ticket = [], None  # type: ignore[assignment]
        item = None


def _advance(item: Item, under_way: Sequence[Ticket], stream: Any) -> BaseException | None:
    """Begin one more bucket and serve the one before it; after the last one wait for all. What went wrong, or None."""
    try:
        with torch.no_grad(), nullcontext() if stream is None else torch.cuda.stream(stream):
            if isinstance(item, Ticket):
                if item.after is not None:
                    stream.wait_event(item.after)
                assert item.start is not None
                item.mean, item.start = item.start(), None
                served = under_way[-2:-1]
            else:
                served = under_way[-1:]
            for ticket in served:
                assert ticket.mean is not None
                ticket.mean.serve()
            for ticket in under_way if item == FLUSH else ():
                assert ticket.mean is not None
                ticket.mean.arrive()
    except BaseException as error:  # it is raised where the mean is waited for
        return error.with_traceback(None)
    return None


def _end(waiting: queue.SimpleQueue[Item], thread: threading.Thread) -> None:
    """End a lane's thread. It is not waited for if a collective of it is never answered."""
    waiting.put(None)
    if thread is not threading.current_thread():
        thread.join(1.0)
