"""One bit per parameter after a short warm-up: what `LocalVarianceLamb` and `LocalVarianceAdam` share.

Every worker keeps the moving average of its own squared gradients. Their mean over the workers, v, is exchanged at a
few steps only, 1, 2, 4, ... apart, as 8-bit logarithms; between them v is constant and equal on all workers. What is
compressed is the momentum over sqrt(v). So nothing is ever frozen for good, and after the warm-up, on gradients of 4
bits, nothing but those few means costs more than a bit. Ours; where the numbers come from: docs/log.md.

  symbol  name         shape      same on all workers  saved  meaning
  v_i     own          [numel]    no                   own    moving average of this worker's squared gradients
  d       denominator  [numel]    yes                  yes    sqrt(v) + eps, v the last mean, with floor
  z       momentum     [numel]    yes                  yes    momentum over d: signs and scales; numbers as d changes
  -       errors       [numel]    no                   own    of the exchange, over d too; times d_old / d at a change
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onebit import lamb
from onebit.averaging import Transport
from onebit.backend import BucketStep, Hypers, Momentum, chosen, decoded
from onebit.checks import as_updates, check_floor, check_kind, check_whole
from onebit.codec import OneBit
from onebit.comm import Comm
from onebit.errors import ConfigError
from onebit.exchange import BucketMean, OneBitExchange
from onebit.flat import Stage
from onebit.layout import Bucket, Run
from onebit.logarithms import mean_variance
from onebit.optim import FlatOptimizer, log
from onebit.overlap import Start
from onebit.resize import Extra, Resize
from onebit.two_level import build_exchange

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Schedule:
    """At which updates the variance is exchanged: the first, then `per_interval` times each after 1, 2, 4, ... updates.

    Args:
        per_interval: how often each interval is used before it doubles, >= 1.
        longest: the longest interval, in updates, >= 1.

    Raises:
        ConfigError: one of them is no whole number, at least 1.
    """

    per_interval: int = 4
    longest: int = 1000

    def __post_init__(self) -> None:
        check_whole("Schedule per_interval", self.per_interval, 1)
        check_whole("Schedule longest", self.longest, 1)

    def interval(self, done: int) -> int:
        """Updates from exchange number `done`, counted from 1, to the next one."""
        doublings = (done - 1) // self.per_interval
        return self.longest if doublings >= self.longest.bit_length() else min(2**doublings, self.longest)

    def count(self, warmup_steps: int, updates: int) -> int:
        """How many exchanges a run of so many updates makes: one at the end of its warm-up and those named after it."""
        found, done, at = 1, 0, 1
        while at <= updates:
            done, found = done + 1, found + (at > warmup_steps)
            at += self.interval(done)
        return found


LARGEST = 1e37
"""Of this worker's variances."""


class LocalSettings:
    """What both optimizers are told, checked; the defaults are in their docstrings."""

    def __init__(
        self,
        warmup_steps: int | float,
        total_steps: int | None,
        warmup_transport: Transport,
        codec: OneBit | None,
        schedule: Schedule | None,
        variance_floor: float,
        bias_correction: bool = False,
    ) -> None:
        found = as_updates("warmup_steps", warmup_steps, total_steps)
        self.warmup_steps, self.warmup_transport = found, warmup_transport
        if not isinstance(bias_correction, bool):
            raise ConfigError(f"bias_correction is {bias_correction!r}; it must be True or False")
        self.codec = check_kind("codec", OneBit(scale="bucket") if codec is None else codec, OneBit)
        self.schedule = check_kind("schedule", Schedule() if schedule is None else schedule, Schedule)
        self.variance_floor, self.bias_correction = check_floor(variance_floor), bias_correction


class LocalVariance(FlatOptimizer):
    """What both share. A subclass says how far each layer goes (`_compressed_step_sizes`).

    Elements without a gradient so far take no part in the exchange. Those that get one keep it in their error and join
    at the next exchange of the variance.
    """

    compresses = True
    takes_masks = False
    needs_own_gradients = True

    _spare: Tensor | None = None  # [layout.numel], the worker's input over d, then what else a step needs
    _awake: Tensor | None = None  # which layers have elements that take part, bool [layers]; None: all
    _smooth = False
    """Whether v_i is of gradients averaged over about n steps, whose squares are as large as those of the mean."""

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        process_group: ProcessGroup | None,
        comm: Comm | None,
        bucket_elements: int | None,
        how: LocalSettings,
        overlap: bool,
    ) -> None:
        self._how = how
        self._momentum: list[Momentum | Tensor] = []  # per bucket, over d, in the compressed stage
        self._syncs = 0  # exchanges of the variance that the schedule names, since the start or since `resync`
        self._next_sync = 1  # the update that the next one belongs to
        transport = how.warmup_transport
        super().__init__(params, lr, betas, eps, weight_decay, transport, process_group, comm, bucket_elements, overlap)

    # -- what users read and do ------------------------------------------------------------------------------

    @property
    def stage(self) -> Stage:
        return Stage.WARMUP if self._exchange is None else Stage.COMPRESSED

    def stats(self) -> dict[str, Any]:
        """As of every optimizer here; and in the compressed stage next_sync, the update after which the variance is
        exchanged next, and the norms of momentum / sqrt(v), of this worker's error and of its server error."""
        stats = super().stats()
        if self._exchange is not None:
            stats["next_sync"] = self._next_sync
            momentum = torch.cat([self._numbers(bucket) for bucket in self._exchange.layout.buckets])
            for name, flat in [
                ("momentum_norm", momentum),
                ("worker_error_norm", self._exchange.worker_error),
                ("server_error_norm", self._exchange.server_error),
            ]:
                stats[name] = float(torch.linalg.vector_norm(flat, dtype=torch.float64))
        return stats

    def resync(self) -> None:
        """Exchange the variance after the next update and begin again with short intervals: for a new batch size,
        sequence length or data. Every worker must call it at the same step. Without effect in the warm-up."""
        self._settle()
        if self._exchange is not None:
            self._next_sync, self._syncs = self._steps + 1, 0

    # -- the step --------------------------------------------------------------------------------------------

    def _step(self) -> None:
        if self._exchange is None:
            self._first_stage()
        else:
            self._compressed_step(self._exchange)

    def _first_stage(self) -> None:
        """A step of the warm-up; after the last one the compressed stage is made ready."""
        assert self._layout is not None
        before, hypers = self._steps, self._hypers()
        self._warmup_step()
        if self._steps == before:
            return
        for bucket in self._layout.buckets:
            self._follow(bucket, self._gradients(bucket), hypers, None)
        if self._steps >= self._how.warmup_steps:
            self._begin()

    def _may_defer(self) -> bool:
        """The host waits where it decides something: in the warm-up, and while the momentum is numbers."""
        if self._exchange is None or any(isinstance(m, Tensor) for m in self._momentum):
            return False
        return super()._may_defer()

    def _compressed_step(self, exchange: OneBitExchange) -> None:
        hypers, corrected = self._hypers(), self._corrected()
        steps = self._bucket_steps(exchange, corrected)
        means = self._means_of_buckets(self._compressed_start(exchange, steps))
        gathered = [mean.gather() for mean in means]
        counts, keep = self._verdict([mean.usable for mean in means], self._may_defer())
        if not counts:
            return
        rates = self._rates(corrected)
        for step, mean, messages in zip(steps, means, gathered, strict=True):
            mean.commit(keep)
            self._follow(mean.bucket, self._gradients(mean.bucket), hypers, keep)
            self._update(step.keeping(keep), messages, rates)
        if self._steps >= self._next_sync:
            self._settle()
            if self._steps >= self._next_sync:
                self._sync()

    def _update(self, step: BucketStep, messages: Tensor, rates: Tensor) -> None:
        """Everyone's part on one bucket."""
        codec = step.codec
        bucket, before = codec.bucket, self._momentum[codec.bucket.index]
        now = Momentum(messages, codec.packed_alive)
        layers = self._x[bucket.layer_slice]
        size = self._compressed_step_sizes(step, now, rates[bucket.layer_slice])
        self._backend.apply(step, layers, now, self._ones[: bucket.numel], size)
        if step.keep is not None and isinstance(before, Momentum):
            now = Momentum(chosen(step.keep, messages, before.messages), now.mask)
        self._momentum[bucket.index] = now

    def _compressed_step_sizes(self, step: BucketStep, now: Momentum, rates: Tensor) -> Tensor:
        """What the directions of a bucket's layers are multiplied by, [layers of the bucket]; `rates`: lr of each."""
        return rates if self._awake is None else torch.where(self._awake[step.codec.bucket.layer_slice], rates, 0.0)

    def _bucket_steps(self, exchange: OneBitExchange, corrected: Hypers) -> list[BucketStep]:
        return [BucketStep(codec, corrected, None, self._steps + 1) for codec in exchange.codecs]

    def _compressed_start(self, exchange: OneBitExchange, steps: Sequence[BucketStep]) -> Start:
        """The worker's part, (1 - beta1) g / d + beta1 z: how the mean of a bucket begins."""
        backend, momentum, like, d = self._backend, list(self._momentum), self._x[0], self._flat["denominator"]
        spare = self._spare

        def start(bucket: Bucket, grads: Sequence[Tensor | None], comm: Comm) -> BucketMean:
            g = like.new_empty(bucket.numel) if spare is None else spare[bucket.slice]
            backend.gather(bucket, grads, g)
            g.div_(d[bucket.slice])
            views = Run(bucket.layers).views(g)
            return exchange.start(
                bucket, backend.source(steps[bucket.index], views, momentum[bucket.index], None), None, comm
            )

        return start

    def _coming_start(self) -> Start | None:
        if self._exchange is None:
            return super()._coming_start()
        self._settle()
        return self._compressed_start(self._exchange, self._bucket_steps(self._exchange, self._corrected()))

    def _corrected(self) -> Hypers:
        """The same for a direction z: (z / w + weight_decay x) lr is (z + weight_decay w x) lr / w.

        w is what is missing in the first updates: with bias correction the momentum's weight, else the root of the
        variance's, since v has that correction and AdamW and LAMB without it do not.
        """
        assert self._layout is not None
        groups = []
        for hyper in (self._hyper(group) for group in self.param_groups):
            weight = self._weight(hyper, self._steps + 1)
            decay = hyper.weight_decay * weight
            groups.append(replace(hyper, lr=hyper.lr / weight, eps=0.0, weight_decay=decay))
        return Hypers(self._layout, groups)

    def _weight(self, hyper: lamb.Hyper, step: int) -> float:
        return 1 - hyper.beta1**step if self._how.bias_correction else math.sqrt(1 - hyper.beta2**step)

    # -- the variance ----------------------------------------------------------------------------------------

    def _follow(self, bucket: Bucket, grads: Sequence[Tensor | None], hypers: Hypers, keep: Tensor | None) -> None:
        """Let this worker's own variance follow its gradients."""
        assert self._layout is not None
        own = self._own[bucket.slice]
        if keep is None and self._smoothed is None:  # where they lie, without large new tensors
            views = Run(bucket.layers).views(own)
            for run, _ in self._layout.runs_in(bucket):
                here, beta2 = run.layers_in(bucket), hypers.of(run).beta2
                torch._foreach_mul_(views[here], beta2)
                given = [(v, g.to(v.dtype)) for v, g in zip(views[here], grads[here], strict=True) if g is not None]
                if given:
                    squares, gs = [v for v, _ in given], [g for _, g in given]
                    torch._foreach_addcmul_(squares, gs, gs, value=1 - beta2)
                    torch._foreach_clamp_max_(squares, LARGEST)
            return
        g = self._gathered(bucket, grads)
        if self._smoothed is not None:
            smooth, beta = self._smoothed[bucket.slice], (self.comm.size - 1) / (self.comm.size + 1)
            new = smooth * beta + g * (1 - beta)
            smooth.copy_(chosen(keep, new, smooth))
            g = new / (1 - beta ** max(1, self._steps))
        for run, here in self._layout.runs_in(bucket):
            beta2 = hypers.of(run).beta2
            new = (own[here] * beta2).addcmul_(g[here], g[here], value=1 - beta2)
            new.clamp_(max=LARGEST)  # the step counted, so the gradient is finite; its square may not be
            own[here] = chosen(keep, new, own[here])

    def _begin(self) -> None:
        """End the warm-up: the first variance, and momentum and errors over its root."""
        assert self._layout is not None
        momentum, hypers, left = self._flat["momentum"], self._hypers(), self._quantised
        self._averaged = self._quantised = None
        exchange = self._allocate_compressed()
        self._renew()
        d = self._flat["denominator"]
        self._momentum = list(torch.split(momentum / d, [bucket.numel for bucket in self._layout.buckets]))
        if left is not None:
            factor = 1 / d
            for run in self._layout.runs:
                factor[run.slice] *= 1 - hypers.of(run).beta1
            left.hand_over(exchange, factor)
        if self.comm.rank == 0:
            log.info("compressed stage from update %d on; variances after update %d", self._steps + 1, self._next_sync)

    def _sync(self) -> None:
        """After an update that the schedule names: exchange the variance, and bring momentum and errors to it."""
        assert self._exchange is not None
        before = self._flat["denominator"].clone()
        numbers = [self._numbers(bucket) for bucket in self._exchange.layout.buckets]
        self._renew()
        factor = before / self._flat["denominator"]
        self._exchange.worker_error.mul_(self._exchange.own_part(factor))
        self._exchange.server_error.mul_(self._exchange.served_part(factor))
        for bucket, z in zip(self._exchange.layout.buckets, numbers, strict=True):
            self._momentum[bucket.index] = z.mul_(factor[bucket.slice])

    def _renew(self) -> None:
        """The mean of the workers' variances becomes v."""
        assert self._layout is not None
        assert self._exchange is not None
        own = self._own.clone()
        for run in self._layout.runs:
            own[run.slice] /= 1 - float(self.param_groups[run.group]["betas"][1]) ** self._steps
        own.clamp_(max=LARGEST)
        mean = mean_variance(own, self._layout, self.comm)
        if mean is None:
            raise AssertionError("the workers' variances are not finite, though every gradient's square was")
        alive = mean > 0
        for run, group in ((run, self.param_groups[run.group]) for run in self._layout.runs):
            v = mean[run.slice]
            lamb.freeze_variance(v, ~alive[run.slice], run, self._how.variance_floor)
            d = v.sqrt().add_(float(group["eps"]))
            self._flat["denominator"][run.slice] = torch.where(d > 0, d, 1.0)
        taking_part = torch.ones_like(alive)  # the padding too
        for view, out in zip(self._layout.views(alive), self._layout.views(taking_part), strict=True):
            out.copy_(view)
        self._set_alive(taking_part)
        while self._next_sync <= self._steps:
            self._syncs += 1
            self._next_sync += self._how.schedule.interval(self._syncs)

    def _set_alive(self, alive: Tensor | None) -> None:
        """Which elements take part in the exchange from now on, bool [layout.numel]; None: all."""
        assert self._layout is not None
        assert self._exchange is not None
        self._exchange.set_alive(alive)
        views = [] if alive is None else self._layout.views(alive)
        self._awake = torch.stack([view.any() for view in views]) if views else None

    def _numbers(self, bucket: Bucket) -> Tensor:
        """A bucket's momentum over d as numbers, [bucket]; not to be written to."""
        assert self._exchange is not None
        return decoded(self._exchange.codecs[bucket.index], self._momentum[bucket.index], None)

    # -- set-up, comparing, saving ---------------------------------------------------------------------------

    def _allocate(self) -> None:
        super()._allocate()
        assert self._layout is not None
        self._exchange = self._spare = None
        self._own = self._layout.zeros(self._dtype, self._device)
        self._smoothed = torch.zeros_like(self._own) if self._smooth else None

    def _allocate_compressed(self) -> OneBitExchange:
        """Replace the state of the warm-up by that of the compressed stage, at its neutral values."""
        assert self._layout is not None
        for kind in [self._flat, *(self.state[p] for p in self._params())]:
            del kind["momentum"], kind["variance"]
        self._add_flat("denominator").fill_(1.0)
        codecs = [self._backend.codec(bucket, self._how.codec) for bucket in self._layout.buckets]
        self._exchange = build_exchange(self._layout, self.comm, self._dtype, self._device, codecs)
        kept = torch.bfloat16 if self._dtype is torch.float32 else self._dtype
        if self._device.type == "cpu":  # kept: fresh pages cost as much as filling them
            self._spare = torch.empty(self._layout.numel, dtype=self._dtype)
        self._ones = torch.ones(max(b.numel for b in self._layout.buckets), dtype=kept, device=self._device)
        self._momentum = []
        return self._exchange

    def _settings(self) -> list[tuple[str, str]]:
        named = [("warmup_steps", str(self._how.warmup_steps)), ("schedule", repr(self._how.schedule))]
        named += [("variance_floor", str(self._how.variance_floor)), ("next variance", str(self._next_sync))]
        named += [("bias_correction", str(self._how.bias_correction))]
        return [*super()._settings(), *named]

    def _structure(self) -> list[tuple[str, str]]:
        return [*super()._structure(), ("codec", repr(self._how.codec)), ("smoothed gradients", str(self._smooth))]

    def _extra_state(self) -> dict[str, Any]:
        extra = {**super()._extra_state(), "syncs": self._syncs, "next_sync": self._next_sync}
        if self._layout is not None:
            extra |= {"own": self._own, "smoothed": self._smoothed}
        if self._exchange is None:
            return extra
        extra["alive"] = self._exchange.alive
        extra["momentum"] = [m if isinstance(m, Tensor) else (m.messages, m.mask) for m in self._momentum]
        return extra

    def _load_extra_state(self, extra: dict[str, Any]) -> None:
        super()._load_extra_state(extra)
        self._syncs, self._next_sync = extra["syncs"], extra["next_sync"]
        self._exchange = None
        if self._layout is None:
            return
        pairs = [(self._own, extra["own"]), (self._smoothed, extra["smoothed"])]
        if extra["stage"] == Stage.COMPRESSED.value:
            exchange = self._allocate_compressed()
            self._set_alive(None if extra["alive"] is None else extra["alive"].to(self._device))
            self._momentum = [self._loaded(m) for m in extra["momentum"]]
            self._load_errors(exchange, extra, "errors")
        for mine, saved in pairs:
            if mine is not None:
                mine.copy_(saved)

    def _own_values(self) -> list[Tensor]:
        return [] if self._layout is None else [v for v in (self._own, self._smoothed) if v is not None]

    def _resized_extra(self, saved: dict[str, Any], resize: Resize, extras: Iterable[Extra]) -> Extra:
        extra = super()._resized_extra(saved, resize, extras)
        if "momentum" not in extra:
            return extra
        codecs = [self._old_codec(bucket, self._how.codec) for bucket in resize.old.buckets]
        held = [decoded(c, self._loaded(m), None) for c, m in zip(codecs, extra["momentum"], strict=True)]
        flat = resize.flat(torch.cat(held))
        extra["momentum"] = [flat[bucket.slice] for bucket in resize.new.buckets]
        return extra

    def _loaded(self, saved: Tensor | tuple[Tensor, Tensor | None]) -> Momentum | Tensor:
        if isinstance(saved, Tensor):
            return saved.to(self._device).clone()
        messages, mask = saved
        return Momentum(messages.to(self._device).clone(), None if mask is None else mask.to(self._device).clone())
