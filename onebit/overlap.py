"""The exchange of a bucket begins during backward, as soon as its gradients are there.

A hook on each parameter's gradient counts how often it arrived since the last step. When all layers of a bucket have
theirs, as often as in recent steps (several times where gradients accumulate, or are dropped in between), the bucket
goes into the `Lane`: a thread with a group of workers of its own encodes it, sends it, and serves what comes, while
backward goes on. Buckets go from the last to the first, as backward does, in the same order on every worker; what is
not ready goes in `step`, which then waits for all of them.

What was begun counts only if nothing was touched in between: gradients (clipping, unscaling, one more backward, a
backward that broke off), settings, errors, stage. Every worker says in a control message whether that is so for it; if
not for all, the exchange is made again, as without overlap. Errors and weights change in `step` alone, so nothing of
what was thrown away remains. That is why results are the same bits with overlap and without. (A gradient is known to
have changed by its identity, its address, torch's count of writes to it and, on the CPU, by some of its values.)

Which collectives the lane makes is fixed at the end of the step before (`_carrier`): whatever a loop changes then, a
worker sends zeros in their place rather than others, and says so.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onebit.averaging import FullMean
from onebit.clock import PHASES
from onebit.comm import Comm
from onebit.errors import ConfigError
from onebit.exchange import Exchange
from onebit.lane import Lane, Mean, Ticket
from onebit.layout import Bucket
from onebit.saved import SavedState
from onebit.sharding import is_sharded, local

log = logging.getLogger("onebit")

RECENT = 4
"""Steps whose largest number of arrivals says how often a gradient must arrive before its bucket goes."""
GIVE_UP = 3
"""Exchanges in a row that were begun in vain, after which none is begun early any more."""


Start = Callable[[Bucket, Sequence[Tensor | None], Comm], Mean]
"""Begins the mean of a bucket, given the gradients of its layers, over the workers of a comm. It holds all that it
needs, and not the optimizer: it may be called on another thread while that is changed, and the result thrown away."""
SAMPLE = 64
"""Values of a gradient that are compared, at most."""


class Version(NamedTuple):
    """Which gradient a parameter has, to be told from another or a changed one: the tensor, where it is, its writes."""

    grad: Tensor | None
    address: int
    writes: int

    def same(self, other: Version) -> bool:
        return self.grad is other.grad and self[1:] == other[1:]


def version(p: Tensor) -> Version:
    if p.grad is None:
        return Version(None, 0, 0)
    held = local(p.grad)
    return Version(p.grad, held.data_ptr(), held._version)


class _Noted:
    """A gradient as it was when its bucket began."""

    def __init__(self, p: Tensor) -> None:
        self.version, self.sample = version(p), _sample(p.grad)

    def holds(self, p: Tensor) -> bool:
        """Whether it still is."""
        return self.version.same(version(p)) and self.same_values(p)

    def same_values(self, p: Tensor) -> bool:
        """Writes through `.data`, numpy or a collective are not counted; they seldom spare all values of a sample."""
        if self.sample is None or p.grad is None:
            return self.sample is None and (p.grad is None or p.grad.device.type != "cpu")
        now = _sample(p.grad)
        return now is not None and torch.equal(self.sample, now)


def _sample(grad: Tensor | None) -> Tensor | None:
    """Some values of a gradient on the CPU, a new tensor; None elsewhere, where looking would make the host wait."""
    if grad is None or grad.device.type != "cpu" or grad.layout is not torch.strided:
        return None
    flat = grad.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLE)].clone()


class _Round:
    """The buckets of one step that were begun before it.

    Attributes:
        premises: what must not change until the step, gradients apart.
        tickets: by bucket.
        noted: by layer, the gradients that went in.
        spoilt: whether something is known to have changed.
    """

    def __init__(self, start: Start, premises: Any) -> None:
        self.start, self.premises = start, premises
        self.tickets: dict[int, Ticket] = {}
        self.noted: dict[int, _Noted] = {}
        self.spoilt = False


class OverlappedSteps(SavedState):
    """Begins the exchange of buckets during backward. A subclass says how one begins (`_coming_start`)."""

    _lane: Lane | None = None
    _control: Comm | None = None
    _round: _Round | None = None
    _may_begin = False  # whether the step to come may begin early; equal on all workers, decided at the end of a step
    _fixed: tuple[Any, tuple[Bucket, ...]] | None = None  # the carrier and the buckets of the step to come
    _vain = 0  # exchanges in a row that were begun in vain
    _buckets_early = 0
    _lane_counted = 0
    _ended: float | None = None  # when the last step or clipping did
    _ddp_noted = False  # during a backward: whether DDP is known to write the gradients again at its end
    _arrived: list[int]
    _watching = False  # whether hooks have seen all gradients since the last step

    def __init__(self, *args: Any, **settings: Any) -> None:
        self._seconds = dict.fromkeys(("compute", *PHASES, "waiting", "update"), 0.0)
        super().__init__(*args, **settings)

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

    # -- before a step ---------------------------------------------------------------------------------------------

    def _coming_start(self) -> Start | None:
        """How the means of the coming step begin, as things are now; None if they cannot begin before it."""
        return None

    def _carrier(self) -> Any:
        """What the means of the coming step go through, as things are now: an `Exchange`, or a `FullTransport`."""
        raise NotImplementedError

    def _premises(self) -> Any:
        """What must be as it was for what has begun to count, apart from gradients."""
        asked, scaled = [p.requires_grad for p in self._params()], hasattr(self, "grad_scale")
        return [tuple(map(float, group["betas"])) for group in self.param_groups], scaled, asked

    def _spoil(self) -> None:
        """Say that what has begun, if anything, is not to be used: something else than a step has changed state."""
        self._ddp_noted = False
        if self._round is not None:
            self._round.spoilt = True
            self._round.noted.clear()

    def _restore(self, by_layer: list[dict[str, Any]], extra: dict[str, Any]) -> None:
        self._spoil()
        super()._restore(by_layer, extra)

    def _gradient_arrived(self, index: int) -> None:
        """The hook of a parameter: its gradient was added to."""
        self._arrived[index] += 1
        if not self._may_begin or not self._compared:
            return
        number = self._bucket_of[index]
        if self._round is not None and (self._round.spoilt or number in self._round.tickets):
            self._spoil()
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
                start = self._coming_start() if self._carrier_stays() else None
                if start is None:
                    return
                self._round = _Round(start, self._premises())
            self._submit(self._round, bucket)
            self._buckets_early += 1
            begun += 1

    def _submit(self, coming: _Round, bucket: Bucket) -> None:
        assert self._lane is not None
        params, first = self._params(), bucket.layer_slice.start
        for i, p in enumerate(params[bucket.layer_slice], first):
            coming.noted[i] = _Noted(p)
        grads = self._gradients(bucket)
        coming.tickets[bucket.index] = self._lane.submit(partial(coming.start, bucket, grads))

    def _gradients(self, bucket: Bucket | None = None) -> list[Tensor | None]:
        raise NotImplementedError

    def _carrier_stays(self) -> bool:
        """Whether the means of this step go through what they were to go through at the end of the last one."""
        return self._fixed is not None and self._fixed[0] is self._carrier()

    def _untouched(self, coming: _Round) -> bool:
        """Whether the gradients of the buckets that have begun are as they were then."""
        params = self._params()
        return all(noted.holds(params[i]) for i, noted in coming.noted.items())

    def _ddp_rewrites(self, params: Iterable[Tensor]) -> None:
        """DDP may have put its own tensors in the place of these gradients, and at the end of the backward under way it
        writes all of them once more: with the values that they have."""
        if not self._may_begin:
            return
        self._note_again([self._index_of[id(p)] for p in params if id(p) in self._index_of])
        if not self._ddp_noted:
            self._ddp_noted = True
            _at_end_of_backward(lambda: _at_end_of_backward(self._after_ddp))  # behind DDP's own, which waits already

    def _after_ddp(self) -> None:
        self._ddp_noted = False
        self._note_again(range(len(self._params())))

    def _note_again(self, indices: Iterable[int]) -> None:
        coming, params = self._round, self._params()
        for i in indices if coming is not None else ():
            assert coming is not None
            if i in coming.noted:
                if not coming.noted[i].same_values(params[i]):
                    self._spoil()
                    return
                coming.noted[i] = _Noted(params[i])

    # -- in a step -------------------------------------------------------------------------------------------------

    def _means_of_buckets(self, start: Start) -> list[Any]:
        """The means of all buckets, served, in order; those that have begun are waited for, others begin now."""
        assert self._layout is not None
        if self._may_begin:
            coming = self._round or _Round(start, self._premises())
            means = self._finished(coming)
            if means is not None:
                self._vain = 0
                return means
        means = [start(bucket, self._gradients(bucket), self.comm) for bucket in self._layout.buckets]
        for mean in means:
            mean.serve()
        return means

    def _finished(self, coming: _Round) -> list[Any] | None:
        """What was begun, once all of it is there; None if it may not be used, as all workers agree."""
        assert self._lane is not None
        assert self._fixed is not None
        carrier, buckets = self._fixed
        self._round, self._may_begin = None, False  # until the end of this step
        same = self._carrier_stays() and not coming.spoilt and coming.premises == self._premises()
        same = same and self._untouched(coming)
        zeros = _zeros(carrier, self._dtype, self._device)
        for bucket in reversed(buckets):
            if bucket.index in coming.tickets:
                continue
            if same:
                self._submit(coming, bucket)
            else:
                coming.tickets[bucket.index] = self._lane.submit(partial(zeros, bucket, ()))
        self._lane.flush()
        began = time.perf_counter()
        said = (self._control or self.comm).gather_flag(same)
        try:
            means = [coming.tickets[bucket.index].wait() for bucket in buckets]
        except BaseException as error:
            self._vain = GIVE_UP
            log.warning("overlap is off from now on, on worker %d, after an error in it: %s", self.comm.rank, error)
            raise
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
        if self._lane is None:
            return
        assert self._layout is not None
        if not self._watching:  # this step's gradients were there before the hooks
            self._watching, self._arrived = True, [0] * len(self._arrived)
            return
        if self._may_begin:  # this step took its means from elsewhere, as all workers did
            self._finished(self._round or _Round(_zeros(None, self._dtype, self._device), "not asked for"))
        self._watch_parameters()
        self._recent.append(self._arrived)
        self._arrived = [0] * len(self._arrived)
        self._expected = [max(counts) for counts in zip(*self._recent, strict=True)]
        self._missing = [sum(self._expected[bucket.layer_slice]) for bucket in self._layout.buckets]
        self._round, self._ddp_noted = None, False
        self._fixed = (self._carrier(), self._layout.buckets)
        self._may_begin = self._vain < GIVE_UP and self._fixed[0] is not None and self._can_overlap()

    def _can_overlap(self) -> bool:
        """Whether the next step may begin early, by what is equal on all workers."""
        return True

    def _payload_of_lane(self) -> int:
        """What went through the lane since this was asked last, in payload bytes."""
        if self._lane is None:
            return 0
        before, self._lane_counted = self._lane_counted, self._lane.comm.payload_bytes
        return self._lane_counted - before

    # -- set-up ----------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        for name, p in zip(self._names(), self._params(), strict=True) if self._overlap else ():
            if is_sharded(p):
                raise ConfigError(f"overlap is True and {name} is sharded (DTensor); leave overlap off")
            if p.device.type not in ("cpu", "cuda"):
                raise ConfigError(f"overlap is True and {name} is on {p.device}; it works on cpu and cuda")
        super()._prepare()
        if self._overlap and self.comm.size > 1 and self._lane is None:
            self._make_lane()
            self._watch_parameters()

    def _make_lane(self) -> None:
        assert self._layout is not None
        self._lane = Lane(self.comm, self._device)
        self._control = None if self._device.type == "cpu" else self.comm.control()
        self._bucket_of = [bucket.index for bucket in self._layout.buckets for _ in bucket.layers]
        self._index_of = {id(p): i for i, p in enumerate(self._params())}
        self._arrived = [0] * len(self._params())
        self._recent: deque[list[int]] = deque(maxlen=RECENT)
        self._watched: set[int] = set()
        self._watching = False
        self._expected, self._missing = [0] * len(self._params()), [0] * len(self._layout.buckets)
        if self.comm.rank == 0:
            log.info(
                "overlap: %d buckets, from the last layers to the first, are exchanged during backward",
                len(self._layout.buckets),
            )

    def _watch_parameters(self) -> None:
        """Put a hook on every parameter that asks for a gradient and has none yet."""
        this = weakref.ref(self)
        for index, p in enumerate(self._params()):
            if p.requires_grad and index not in self._watched:
                self._watched.add(index)
                weakref.finalize(self, _hooked(p, partial(_arrived, this, index)).remove)


def _zeros(carrier: Any, dtype: torch.dtype, device: torch.device) -> Start:
    """A start that makes the collectives of a carrier on zeros, whatever the gradients are."""

    def start(bucket: Bucket, _: Sequence[Tensor | None], comm: Comm) -> Mean:
        flat = torch.zeros(bucket.numel, dtype=dtype, device=device)
        if isinstance(carrier, Exchange):
            return carrier.start(bucket, flat, None, comm)
        return FullMean(flat, comm, carrier)

    return start


def _hooked(p: Tensor, hook: Callable[[Tensor], None]) -> Any:
    return p.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def _arrived(this: weakref.ref[OverlappedSteps], index: int, _: Tensor) -> None:
    optimizer = this()
    if optimizer is not None:
        optimizer._gradient_arrived(index)


def _at_end_of_backward(action: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(action)
