"""`ZeroOneAdam`: 0/1 Adam (arXiv 2202.06009), where workers exchange one bit per parameter, or nothing at all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from onebit import lamb
from onebit.averaging import mean_over_workers
from onebit.checks import check_floor, check_in, check_kind, check_whole, fingerprints
from onebit.codec import OneBit
from onebit.comm import Comm, check_same
from onebit.deferred import send
from onebit.errors import ConfigError
from onebit.exchange import ROOM, OneBitExchange
from onebit.flat import DEFAULT_BUCKET_ELEMENTS, Stage
from onebit.layout import FlatLayout, Run
from onebit.optim import FlatOptimizer
from onebit.resize import Extra, Resize
from onebit.two_level import build_exchange

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ERRORS = ("worker_error", "server_error")
Work = Sequence[tuple[Run, lamb.Hyper]]  # the runs, with what their groups set at this step


@dataclass(frozen=True)
class UpdateKinds:
    """What each update does, by its number alone, counted from 1; the fields are arguments of `ZeroOneAdam`."""

    var_freeze_step: int
    var_update_scaler: int
    local_step_scaler: int
    local_step_clipper: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_whole(name, value, 1)

    def is_variance_step(self, number: int) -> bool:
        """[T_v] k_0 = 1, k_{j+1} - k_j = 2^floor(j / kappa), none after `var_freeze_step`."""
        since, kappa = number - 1, self.var_update_scaler
        doublings = (since // kappa + 1).bit_length() - 1
        return number <= self.var_freeze_step and (since - kappa * ((1 << doublings) - 1)) % (1 << doublings) == 0

    def is_sync_step(self, number: int) -> bool:
        """[T_u] All up to `var_freeze_step`; then the ends of intervals of min(2^floor(j / alpha), clipper) updates."""
        since, alpha = number - self.var_freeze_step, self.local_step_scaler
        if since <= 0:
            return True
        doublings = min((since // alpha + 1).bit_length(), (self.local_step_clipper - 1).bit_length() + 1) - 1
        return (since - alpha * ((1 << doublings) - 1)) % min((1 << doublings), self.local_step_clipper) == 0


class ZeroOneAdam(FlatOptimizer):
    """0/1 Adam (arXiv 2202.06009, Algorithm 1): a variance refreshed ever more rarely, then ever fewer exchanges.

    Each update is one of three. "x moves by d" is x -= d / (sqrt(v) + eps) + (sum of lr) * weight_decay * x.
      variance step   g = full-precision mean; m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g^2; x moves by
                      lr m. With g known there is nothing to compress, and the errors wait; as released.
      sync step       u_i += lr m_i; ubar = one-bit mean of u_i with error feedback; x moves by ubar from where it was
                      at the last exchange; m = ubar / (sum of lr since then).
      local step      u_i += lr m_i; x moves by lr m_i on this worker. Nothing is sent, and until the next sync step
                      the workers' parameters differ (`in_sync`). A state dict is then each worker's own, and so is x.

    The paper refreshes v after x moved and starts from zero; here v comes first (DEV-20), so update 1 has one. Errors
    are in units of u, so a change of lr needs no repair. Where lr was 0 since the last exchange nothing moves: the
    errors keep what they owe, and m becomes 0. There is no bias correction, as released.
    Elements with v = 0 had no gradient in any variance step and are held, weight decay apart, which leaves alone only
    layers that consist of nothing else. What sync steps have for them waits in the errors. The next variance step with
    a gradient frees them; after the last one they get the mean variance of their layer as soon as a worker has
    something for them.
    A gradient that is not finite, or too large to square: all workers skip that variance or sync step, with no change.
    In a local step nobody else can know: that worker takes its gradient as zero, m_i = beta1 m_i, and all count it.

    Args:
        params, lr, betas, eps, weight_decay, process_group, comm: as in `OneBitAdam`.
        var_freeze_step: last update that may refresh v; local steps come after it. Commonly where lr is at its peak.
        var_update_scaler: kappa; the distance between variance steps doubles after each kappa of them.
        local_step_scaler: alpha; the interval between exchanges doubles after each alpha intervals.
        local_step_clipper: H, the longest interval, in updates; 1: no local steps, and two buffers less.
        codec, variance_floor, bucket_elements: as in `OneBitLamb`; the floor is in what is divided by, not in v.
        warmup_transport: "fp32" or "bf16", how gradients travel in variance steps.

    Raises:
        ConfigError: a value outside what is listed (whole numbers of at least 1 for the schedule), or `exp_avg_mask`.
        MismatchError: as in `onebit.Lamb`.
    """

    compresses = True
    takes_masks = False
    needs_own_gradients = True
    _local_steps = 0  # since the last exchange

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        var_freeze_step: int = 100_000,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32678,
        local_step_clipper: int = 16,
        process_group: ProcessGroup | None = None,
        comm: Comm | None = None,
        codec: OneBit | None = None,
        variance_floor: float = 0.01,
        warmup_transport: Literal["fp32", "bf16"] = "fp32",
        bucket_elements: int | None = DEFAULT_BUCKET_ELEMENTS,
    ) -> None:
        self._schedule = UpdateKinds(var_freeze_step, var_update_scaler, local_step_scaler, local_step_clipper)
        self._codec = OneBit() if codec is None else codec
        check_kind("codec", self._codec, OneBit)
        self._floor, self._mean_transport = check_floor(variance_floor), warmup_transport
        check_in("warmup_transport", warmup_transport, ("fp32", "bf16"))
        super().__init__(params, lr, betas, eps, weight_decay, warmup_transport, process_group, comm, bucket_elements)

    @property
    def stage(self) -> Stage:
        """`WARMUP` while the variance may still be refreshed, then `COMPRESSED`."""
        return Stage.WARMUP if self._steps < self._schedule.var_freeze_step else Stage.COMPRESSED

    @property
    def in_sync(self) -> bool:
        """Whether all workers hold the same parameters: not after a local step."""
        return self._local_steps == 0

    def stats(self) -> dict[str, Any]:
        """Also local_steps since the last exchange, this worker's left_out_gradients, and the norms of its errors."""
        stats = {**super().stats(), "local_steps": self._local_steps}
        if self._exchange is not None:
            stats |= {f"{name}_norm": float(getattr(self._exchange, name).norm()) for name in ERRORS}
        return {**stats, "left_out_gradients": 0 if self._exchange is None else int(self._left_out)}

    def _settings(self) -> list[tuple[str, str]]:
        return [*super()._settings(), ("schedule", str(self._schedule)), ("variance_floor", str(self._floor))]

    def _structure(self) -> list[tuple[str, str]]:
        local = str(self._schedule.local_step_clipper > 1)
        return [*super()._structure(), ("codec", repr(self._codec)), ("local steps", local)]

    def _extra_state(self) -> dict[str, Any]:
        extra = {**super()._extra_state(), "local_steps": self._local_steps}
        if self._exchange is not None:
            extra |= {"lr_sums": list(self._lr_sums), "left_out": int(self._left_out), "alive": self._exchange.alive}
            extra["wake_wanted"] = self._exchange.wake_wanted
        return extra

    def _load_extra_state(self, extra: dict[str, Any]) -> None:
        super()._load_extra_state(extra)
        self._local_steps = extra["local_steps"]
        if self._layout is None:
            self._exchange = None
        if self._exchange is None:
            return
        self._lr_sums, self._exchange.wake_wanted = list(extra["lr_sums"]), extra["wake_wanted"]
        self._left_out.fill_(extra["left_out"])
        self._exchange.set_alive(None if extra["alive"] is None else extra["alive"].to(self._device))
        self._load_errors(self._exchange, extra, "errors")

    def _resized_extra(self, saved: dict[str, Any], resize: Resize, extras: Iterable[Extra]) -> Extra:
        extra = super()._resized_extra(saved, resize, extras)
        if extra["local_steps"]:
            raise ConfigError(
                f"the state was saved {extra['local_steps']} local steps after the last exchange, when each worker has "
                "its own parameters; another number of workers can only load what was saved after a sync step (in_sync)"
            )
        return extra

    @property
    def _meets(self) -> bool:
        number = self._steps + 1
        return self._schedule.is_variance_step(number) or self._schedule.is_sync_step(number)

    def _rates_so_far(self) -> list[float]:
        return [*super()._rates_so_far(), *self._lr_sums]

    def _prepare(self) -> None:
        if self.in_sync:
            super()._prepare()
        else:  # loaded after a local step: what is equal on all workers then
            shared = ("anchor", "variance")
            check_same(self.comm, "optimizer settings", self._settings())
            check_same(self.comm, "loaded states", fingerprints([self._flat[name] for name in shared], shared))
            self._compared = True

    def _allocate(self) -> None:
        super()._allocate()
        assert self._layout is not None
        for name in ("update", "anchor") if self._schedule.local_step_clipper > 1 else ():
            self._add_flat(name)  # u; the parameters at the last exchange, of use after a local step only
        codecs = [self._backend.codec(bucket, self._codec) for bucket in self._layout.buckets]
        self._exchange = build_exchange(self._layout, self.comm, self._dtype, self._device, codecs)
        self._lr_sums = [0.0] * len(self.param_groups)  # since the last exchange
        self._left_out = torch.zeros((), dtype=torch.int64, device=self._device)
        self._roots: dict[int, tuple[Tensor, Tensor]] = {}  # by the first layer of a run, see `_root`
        self._late = True  # whether an element that takes part may lack a variance

    def _step(self) -> None:
        exchange, number, hypers = self._exchange, self._steps + 1, self._hypers()
        assert exchange is not None
        work = [(run, hypers.of(run)) for run in exchange.layout.runs]
        g = exchange.layout.gather(self._gradients(), self._dtype, self._device)
        refreshes = self._schedule.is_variance_step(number)
        if refreshes and self.in_sync:
            self._variance_step(exchange, work, g)
        elif refreshes or self._schedule.is_sync_step(number):  # both apart: loaded with a later var_freeze_step
            if number > self._schedule.var_freeze_step and exchange.wake() is not None:  # no variance step frees them
                self._late = True
            self._sync_step(exchange, work, g)
        else:
            self._local_step(exchange.layout, work, g)

    def _variance_step(self, exchange: OneBitExchange, work: Work, g: Tensor) -> None:
        """[T_v] Adam on averaged gradients. No local step comes before any of these, so m is everyone's."""
        mean_over_workers(g, self.comm, self._mean_transport)
        self._calibrate(g)
        if not self._verdict([self._sound(g[run.slice], hyper) for run, hyper in work], defer=False)[0]:
            return
        m, v = self._flat["momentum"], self._flat["variance"]
        alive = torch.ones_like(v, dtype=torch.bool)  # the padding too
        self._roots.clear()
        for run, hyper in work:
            here = run.slice
            m[here], v[here] = lamb.warmup_moments(g[here], m[here], v[here], hyper)
            alive[here] = v[here] > 0
        exchange.set_alive(alive)
        for run, hyper in work:
            self._move(run, m[run.slice] * hyper.lr, hyper.lr, hyper)

    def _sync_step(self, exchange: OneBitExchange, work: Work, u: Tensor) -> None:
        """[T_u] Worker's part, exchange, everyone's part. u: this worker's gradient, [layout.numel], used up."""
        for run, hyper in work:
            here = u[run.slice]
            lamb.local_momentum(self._flat["momentum"][run.slice], here, hyper.beta1, None).mul_(hyper.lr)
            if self._local_steps:
                here += self._flat["update"][run.slice]
        means = [exchange.start(bucket, u[bucket.slice]) for bucket in exchange.layout.buckets]
        for mean in means:
            mean.serve()
        ubar = torch.cat([mean.wait() for mean in means])
        if not self._verdict([mean.usable for mean in means], defer=False)[0]:
            return
        for mean in means:
            mean.commit()
        exchange.note_headers([mean.headers for mean in means])
        if self._local_steps:
            self._flat["update"].zero_()
            for x, view in zip(self._x, exchange.layout.views(self._flat["anchor"]), strict=True):
                x.copy_(view)
        self._late = any([self._level(exchange, run, ubar[run.slice], hyper) for run, hyper in work])  # not a generator
        self._lr_sums, self._local_steps = [0.0] * len(self._lr_sums), 0

    def _level(self, exchange: OneBitExchange, run: Run, ubar: Tensor, hyper: lamb.Hyper) -> bool:
        """Everyone's part on one run, ubar: [numel]. Returns whether elements that take part still lack a variance."""
        m, v = self._flat["momentum"][run.slice], self._flat["variance"][run.slice]
        lr_sum, lacking = self._lr_sums[run.group] + hyper.lr, self._late
        if lr_sum == 0:
            kept = exchange.layout.zeros(self._dtype, self._device)
            kept[run.slice] = ubar
            exchange.worker_error.add_(exchange.own_part(kept))  # on every worker, so their mean too
            m.zero_()
            return lacking
        m.copy_(ubar / lr_sum)
        if lacking:  # they get the mean of their layer or, if it has none, what its first momentum implies
            filled, live = v.clone(), exchange.alive
            alive = torch.ones_like(v, dtype=torch.bool) if live is None else live[run.slice]
            lamb.freeze_variance(filled, v == 0, run, 0.0)
            filled += lamb.implied_variance(m, filled, run, hyper)
            v.copy_(torch.where(alive, filled, v))
            self._roots.pop(run.first, None)
            lacking = bool((alive & (v == 0)).any())
        self._move(run, ubar, lr_sum, hyper)
        return lacking

    def _local_step(self, layout: FlatLayout, work: Work, g: Tensor) -> None:
        """This worker alone, and the host does not wait for the device."""
        if self.in_sync:
            self._flat["anchor"].copy_(layout.gather(self._x, self._dtype, self._device))
        sound = torch.stack([self._sound(g[run.slice], hyper) for run, hyper in work]).all()
        self._left_out += ~sound
        for run, hyper in work:
            m, u = self._flat["momentum"][run.slice], self._flat["update"][run.slice]
            m.copy_(lamb.local_momentum(m, torch.where(sound, g[run.slice], 0), hyper.beta1, None))
            u += m * hyper.lr
            self._move(run, m * hyper.lr, hyper.lr, hyper)
        self._lr_sums = [a + float(group["lr"]) for a, group in zip(self._lr_sums, self.param_groups, strict=True)]
        self._steps, self._local_steps = self._steps + 1, self._local_steps + 1

    def _sound(self, g: Tensor, hyper: lamb.Hyper) -> Tensor:
        """Whether g, [numel], is finite, and no update with it in it can be too large to send: bool []."""
        most = 2 * ROOM * self._schedule.local_step_clipper * max(1.0, hyper.lr)
        return torch.isfinite((g * most).square()).all()

    def _move(self, run: Run, d: Tensor, lr_sum: float, hyper: lamb.Hyper) -> None:
        """x -= d / (sqrt(v) + eps) + lr_sum * weight_decay * x, in place; d: [numel]."""
        root, awake = self._root(run)
        x, step = self._x[run.layer_slice], d / (root + hyper.eps)
        if hyper.weight_decay:
            run.add_scaled(step, x, lr_sum * hyper.weight_decay)
        asked = [p.requires_grad for p in self._params()[run.layer_slice]]
        if hyper.weight_decay or not all(asked):
            step *= run.spread((awake & send(torch.tensor(asked), self._device)).to(step))
        run.subtract(x, step)

    def _root(self, run: Run) -> tuple[Tensor, Tensor]:
        """sqrt(v) with the floor, [numel], infinite where v is 0, which holds what is divided by it; and which layers
        have elements that move, bool [layers]: AdamW leaves others alone, weight decay included."""
        if run.first not in self._roots:
            v, raised = self._flat["variance"][run.slice], self._flat["variance"][run.slice].clone()
            lamb.freeze_variance(raised, None, run, self._floor)
            awake = torch.stack([view.any() for view in run.views(v > 0)])
            self._roots[run.first] = (torch.where(v > 0, raised.sqrt(), torch.inf), awake)
        return self._roots[run.first]
