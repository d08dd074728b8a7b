"""The exchange of a bucket begins during backward, as soon as its gradients are there.

A hook on each parameter's gradient counts how often it arrived since the last step. When all layers of a bucket have
theirs, as often as in recent steps (several times where gradients accumulate, or are dropped in between), the bucket
goes into the `Lane`: a thread with a group of workers of its own encodes it, sends it, and serves what comes, while
backward goes on. Buckets go from the last to the first, as backward does, in the same order on every worker; what is
not ready goes in `step`, which then waits for all of them.

What was begun counts only if nothing was touched in between: gradients (clipping, unscaling, one more backward, a
backward that broke off), settings, errors, stage. Every worker says in a control message whether that is so for it; if
not for all, the exchange is made again, as without overlap. Errors and weights change in `step` alone, so nothing of
what was thrown away remains. That is why results are the same bits with overlap and without.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from onebit.clock import PHASES
from onebit.comm import Comm
from onebit.errors import ConfigError
from onebit.layout import Bucket
from onebit.saved import SavedState

log = logging.getLogger("onebit")

RECENT = 4
"""Steps whose largest number of arrivals says how often a gradient must arrive before its bucket goes."""
GIVE_UP = 3
"""Exchanges in a row that were begun in vain, after which none is begun early any more."""


class Mean(Protocol):
    """A bucket's mean under way, as `exchange.BucketMean`: its second phase is to be done, and then waited for."""

    def serve(self) -> None: ...

    def arrive(self) -> None: ...


Versions = Sequence[tuple[Tensor | None, int]]
"""Gradients, with how often each had been written to."""
Start = Callable[[Bucket, Comm], Any]
"""Begins the mean of a bucket over the workers of a comm; returns a `Mean`."""


class Ticket:
    """A bucket that was given to a lane. Done when the lane was flushed."""

    def __init__(self, start: Callable[[], Mean], after: Any) -> None:
        self._start, self._after = start, after
        self._done = threading.Event()
        self._mean: Mean | None = None
        self._error: BaseException | None = None

    def wait(self) -> Any:
        """The mean, served.

        Raises:
            OnebitError: what went wrong in the lane.
        """
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._mean


class Lane:
    """A thread beside the main one, through which buckets go one after the other, with a group of workers of its own.

    What is done does not depend on time but for when: start 0, start 1, serve 0, start 2, serve 1, ... So all workers
    make the same collectives in the same order, and while one bucket is on the wire the next is encoded.
    On CUDA the thread has a stream of its own and does not wait for what it starts.

    Args:
        comm: of the main thread. Making a lane is a collective.
        device: where the tensors are.
    """

    def __init__(self, comm: Comm, device: torch.device) -> None:
        self.comm = comm.beside()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._waiting: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        thread = threading.Thread(
            target=_work, args=(self._waiting, self._stream), name="onebit-lane", daemon=True
        )  # a daemon: a worker that ends does not wait for the others
        thread.start()
        weakref.finalize(self, _end, self._waiting, thread)

    def submit(self, start: Callable[[Comm], Mean]) -> Ticket:
        """Begin a bucket's mean when those before have begun; it is served when the next one has, or at `flush`."""
        ticket = Ticket(partial(start, self.comm), self._now())
        self._waiting.put(ticket)
        return ticket

    def flush(self) -> None:
        """No bucket comes any more: the last one is served, all are waited for, and their tickets are done."""
        self._waiting.put(_Flush())

    def join(self) -> None:
        """What the lane has done comes before what the main thread does from now on, also on an accelerator."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def _now(self) -> Any:
        """What the device has been given so far, to be waited for before gradients are read; None on the CPU."""
        return None if self._stream is None else torch.cuda.current_stream(self._stream.device).record_event()


class _Flush(Ticket):
    """Says that no bucket comes any more."""

    def __init__(self) -> None:
        super().__init__(lambda: None, None)  # type: ignore[arg-type,return-value]


def _work(waiting: queue.SimpleQueue[Ticket | None], stream: Any) -> None:
    """What a lane's thread does until it is given None. After an error nothing else is begun."""
    under_way: list[Ticket] = []
    broken: BaseException | None = None
    while (ticket := waiting.get()) is not None:
        try:
            if broken is not None:
                raise broken
            with torch.no_grad(), nullcontext() if stream is None else torch.cuda.stream(stream):
                _advance(ticket, under_way, stream)
        except BaseException as error:  # it is raised where the mean is waited for
            broken = error
        if not isinstance(ticket, _Flush):
            under_way.append(ticket)
        if broken is not None or isinstance(ticket, _Flush):
            _hand_over(under_way, broken)
            under_way = []
        ticket = None


def _hand_over(under_way: Sequence[Ticket], error: BaseException | None) -> None:
    for ticket in under_way:
        ticket._error = error
        ticket._done.set()


def _end(waiting: queue.SimpleQueue[Ticket | None], thread: threading.Thread) -> None:
    """End a lane's thread. It is not waited for if a collective of it is never answered."""
    waiting.put(None)
    if thread is not threading.current_thread():
        thread.join(1.0)


def _advance(ticket: Ticket, under_way: list[Ticket], stream: Any) -> None:
    """Begin one more bucket and serve the one before it; after the last one wait for all."""
    if not isinstance(ticket, _Flush):
        if ticket._after is not None:
            stream.wait_event(ticket._after)
        ticket._mean = ticket._start()
    if under_way:
        under_way[-1]._mean.serve()  # type: ignore[union-attr]
    if isinstance(ticket, _Flush):
        for each in under_way:
            each._mean.arrive()  # type: ignore[union-attr]


class _Round:
    """The buckets of one step that were begun before it.

    Attributes:
        common: what must not change until the step, gradients apart.
        tickets: by bucket.
        gradients: by bucket, which gradients went into it.
        spoilt: whether something is known to have changed.
    """

    def __init__(self, start: Start, common: Any) -> None:
        self.start, self.common = start, common
        self.tickets: dict[int, Ticket] = {}
        self.gradients: dict[int, Versions] = {}
        self.spoilt = False


class OverlappedSteps(SavedState):
    """Begins the exchange of buckets during backward. A subclass says how one begins (`_coming_start`)."""

    _overlap = False  # what the user asked for
    _lane: Lane | None = None
    _arrived: list[int]
    _control: Comm | None = None
    _round: _Round | None = None
    _may_begin = False  # whether the step to come may begin early; equal on all workers, decided at the end of a step
    _vain = 0  # exchanges in a row that were begun in vain
    _buckets_early = 0
    _lane_counted = 0
    _ended: float | None = None  # when the last step or clipping did
    _ddp_noted = False  # during a backward: whether DDP is known to write the gradients again at its end

    def stats(self) -> dict[str, Any]:
        """`seconds`, see `FlatOptimizer.stats`; with overlap, overlapped: how many buckets were begun during backward
        so far, on this worker."""
        beside = dict.fromkeys(PHASES, 0.0) if self._lane is None else self._lane.comm.clock.seconds
        phases = {name: self._seconds[name] + beside[name] for name in PHASES}
        seconds = {**self._seconds, **phases, "hidden": max(0.0, sum(beside.values()) - self._seconds["waiting"])}
        return {"seconds": seconds, **({"overlapped": self._buckets_early} if self._overlap else {})}

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count what is sent, and the time, of a step or of clipping; what is between two of these is compute."""
        before, phases, began = self.comm.payload_bytes, dict(self.comm.clock.seconds), time.perf_counter()
        waited = self._seconds["waiting"]
        if self._ended is not None:
            self._seconds["compute"] += began - self._ended
        try:
            yield
        finally:
            self.payload_bytes += self.comm.payload_bytes - before + self._payload_of_lane()
            self._ended = time.perf_counter()
            spent = {name: self.comm.clock.seconds[name] - phases[name] for name in PHASES}
            for name, seconds in spent.items():
                self._seconds[name] += seconds
            waited = self._seconds["waiting"] - waited
            self._seconds["update"] += self._ended - began - sum(spent.values()) - waited

    def __init__(self, *args: Any, **settings: Any) -> None:
        self._seconds = dict.fromkeys(("compute", *PHASES, "waiting", "update"), 0.0)
        super().__init__(*args, **settings)

    # -- before a step ---------------------------------------------------------------------------------------------

    def _coming_start(self) -> Start | None:
        """How the means of the coming step begin, as things are now; None if they cannot begin before it.

        Called on the main thread; what it returns is called on the lane's, with the same result as in `step`.
        """
        return None

    def _premises(self) -> Any:
        """What must be as it was for what has begun to count, apart from gradients."""
        asked, scaled = [p.requires_grad for p in self._params()], hasattr(self, "grad_scale")
        return [group["betas"] for group in self.param_groups], self._exchange is None, scaled, asked

    def _versions(self, bucket: Bucket) -> Versions:
        return [version(p) for p in self._params()[bucket.layer_slice]]

    def _spoil(self) -> None:
        """Say that what has begun, if anything, is not to be used: something else than a step has changed state."""
        if self._round is not None:
            self._round.spoilt = True

    def _gradient_arrived(self, index: int) -> None:
        """The hook of a parameter: its gradient was added to."""
        self._arrived[index] += 1
        if not self._may_begin or not self._compared:
            return
        number = self._bucket_of[index]
        if self._round is not None and (self._round.spoilt or number in self._round.tickets):
            self._round.spoilt = True
            return
        if self._arrived[index] <= self._expected[index]:
            self._missing[number] -= 1
        self._begin_ready()

    def _begin_ready(self) -> None:
        """Begin the buckets whose turn it is and whose gradients are there."""
        assert self._layout is not None
        begun = 0 if self._round is None else len(self._round.tickets)
        while begun < len(self._layout.buckets):
            bucket = self._layout.buckets[-1 - begun]
            if self._missing[bucket.index] > 0:
                return
            if self._round is None:
                start = self._coming_start()
                if start is None:
                    return
                self._round = _Round(start, self._premises())
            self._submit(self._round, bucket)
            self._buckets_early += 1
            begun += 1

    def _ddp_rewrites(self) -> None:
        """At the end of the backward under way DDP writes the gradients once more, with the values that they have."""
        if self._may_begin and not self._ddp_noted:
            self._ddp_noted = True
            _at_end_of_backward(self._before_ddp)

    def _before_ddp(self) -> None:
        untouched = self._round is None or self._untouched(self._round)
        _at_end_of_backward(lambda: self._after_ddp(untouched))  # DDP's own is waiting already

    def _after_ddp(self, untouched: bool) -> None:
        self._ddp_noted = False
        if self._round is not None and untouched:
            self._note_gradients(self._round)

    def _untouched(self, coming: _Round) -> bool:
        """Whether the gradients of the buckets that have begun are as they were then."""
        assert self._layout is not None
        return all(_unchanged(held, self._versions(self._layout.buckets[i])) for i, held in coming.gradients.items())

    def _note_gradients(self, coming: _Round) -> None:
        assert self._layout is not None
        coming.gradients = {i: self._versions(self._layout.buckets[i]) for i in coming.tickets}

    def _submit(self, coming: _Round, bucket: Bucket) -> None:
        assert self._lane is not None
        coming.gradients[bucket.index] = self._versions(bucket)
        coming.tickets[bucket.index] = self._lane.submit(partial(coming.start, bucket))

    # -- in a step -------------------------------------------------------------------------------------------------

    def _means_of_buckets(self, start: Start) -> list[Any]:
        """The means of all buckets, served, in order; those that have begun are waited for, others begin now."""
        assert self._layout is not None
        buckets = self._layout.buckets
        if self._may_begin:
            coming, self._round = self._round or _Round(start, self._premises()), None
            means = self._finished(coming)
            self._may_begin = False  # until the end of this step
            if means is not None:
                self._vain = 0
                return means
        means = [start(bucket, self.comm) for bucket in buckets]
        for mean in means:
            mean.serve()
        return means

    def _finished(self, coming: _Round) -> list[Any] | None:
        """What was begun, once all of it is there; None if it may not be used, as all workers agree."""
        assert self._layout is not None
        assert self._lane is not None
        buckets = self._layout.buckets
        same = coming.common == self._premises() and not coming.spoilt and self._untouched(coming)
        for bucket in reversed(buckets):
            if bucket.index not in coming.tickets:
                self._submit(coming, bucket)
        self._lane.flush()
        began = time.perf_counter()
        said = (self._control or self.comm).gather_flag(same)
        means = [coming.tickets[bucket.index].wait() for bucket in buckets]
        self._lane.join()
        agreed = bool(said.wait().all())
        self._seconds["waiting"] += time.perf_counter() - began
        if agreed:
            return means
        self._vain += 1
        if self._vain == GIVE_UP and self.comm.rank == 0:
            log.warning(
                "overlap is off from now on: in %d steps in a row gradients or settings were changed after backward "
                "had begun to exchange them, so it was done again; what is clipped or accumulated between backward and "
                "step? optimizer.clip_grad_norm_ and a fixed number of backwards per step are understood",
                GIVE_UP,
            )
        return None

    def _prepare_next(self) -> None:
        """At the end of a step: look at what arrived, and decide whether the next step may begin early."""
        if not self._overlap or self.comm.size == 1:
            return
        if self._lane is None:
            self._make_lane()
            self._watch_parameters()
            return  # nothing is known yet of how often gradients arrive
        if self._may_begin:  # this step took its means from elsewhere, as all workers did
            start = self._coming_start()
            assert start is not None
            self._finished(self._round or _Round(start, self._premises()))
        self._watch_parameters()
        self._recent.append(self._arrived)
        self._arrived = [0] * len(self._arrived)
        self._expected = [max(counts) for counts in zip(*self._recent, strict=True)]
        self._count_missing()
        self._round = None
        self._may_begin = self._vain < GIVE_UP and self._can_overlap()

    def _payload_of_lane(self) -> int:
        """What went through the lane since this was asked last, in payload bytes."""
        if self._lane is None:
            return 0
        before, self._lane_counted = self._lane_counted, self._lane.comm.payload_bytes
        return self._lane_counted - before

    def _can_overlap(self) -> bool:
        """Whether the next step may begin early, by what is equal on all workers."""
        return True

    def _count_missing(self) -> None:
        assert self._layout is not None
        self._missing = [sum(self._expected[bucket.layer_slice]) for bucket in self._layout.buckets]

    def _make_lane(self) -> None:
        assert self._layout is not None
        if self._device.type not in ("cpu", "cuda"):
            raise ConfigError(
                f"overlap is True and the parameters are on {self._device.type}; it works on cpu and cuda"
            )
        if self.comm.rank == 0:
            log.info(
                "overlap: %d buckets, from the last layers to the first, are exchanged during backward",
                len(self._layout.buckets),
            )
        self._lane = Lane(self.comm, self._device)
        self._control = None if self._device.type == "cpu" else self.comm.control()
        self._bucket_of = [bucket.index for bucket in self._layout.buckets for _ in bucket.layers]
        self._arrived = [0] * len(self._params())
        self._recent: deque[list[int]] = deque(maxlen=RECENT)
        self._watched: set[int] = set()
        self._expected, self._missing = [0] * len(self._params()), [0] * len(self._layout.buckets)

    def _watch_parameters(self) -> None:
        """Put a hook on every parameter that asks for a gradient and has none yet."""
        this = weakref.ref(self)
        for index, p in enumerate(self._params()):
            if p.requires_grad and index not in self._watched:
                self._watched.add(index)
                weakref.finalize(self, _hooked(p, partial(_arrived, this, index)).remove)


def _hooked(p: Tensor, hook: Callable[[Tensor], None]) -> Any:
    return p.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def _arrived(this: weakref.ref[OverlappedSteps], index: int, _: Tensor) -> None:
    optimizer = this()
    if optimizer is not None:
        optimizer._gradient_arrived(index)


def _at_end_of_backward(action: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(action)


def version(p: Tensor) -> tuple[Tensor | None, int]:
    """Which gradient a parameter has, to be told from another or a changed one."""
    return p.grad, 0 if p.grad is None else p.grad._version


def _unchanged(before: Versions, now: Versions) -> bool:
    return all(a is b and i == j for (a, i), (b, j) in zip(before, now, strict=True))
