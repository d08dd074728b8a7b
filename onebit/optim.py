"""The step that every optimizer here shares: an ordinary torch.optim.Optimizer without an engine.

What torch asks of it is in `flat.py`, the arithmetic in `lamb.py` and behind `backend.py`.

On an accelerator the host never waits for a step: whether it counted is decided on the device, and the host learns of
it at the next step (`_settle`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from onebit import lamb
from onebit.averaging import mean_over_workers
from onebit.backend import Hypers
from onebit.deferred import Deferred, send
from onebit.errors import ConfigError, MismatchError
from onebit.exchange import Exchange
from onebit.gradients import StepGradients

log = logging.getLogger("onebit")


Measured = tuple[lamb.Norms, bool | Tensor]
"""Of a bucket: its layers' norms, and whether all is finite."""


class FlatOptimizer(StepGradients):
    """An optimizer whose state is flat and equal on all workers, and which averages the gradients itself.

    A subclass may say how far each layer goes (`_step_sizes`); a second stage is in `compressed.py`.
    """

    sends_momentum = False
    """Whether the momentum is what the compressed stage exchanges, and the variance is frozen."""
    _step_supports_amp_scaling = True  # GradScaler then calls `step` on all workers, whoever had an overflow
    _skipped_steps = 0
    _apart: tuple[Deferred, Tensor] | None = None  # at the last comparison: which workers' rates differ; all rates
    _folded = False  # whether all workers hold the same errors since `fold_errors`

    def _extra_state(self) -> dict[str, Any]:
        return {
            **super()._extra_state(),
            "stage": self.stage.value,
            "steps": self._steps,
            "skipped_steps": self._skipped_steps,
            "rewarmed": self._rewarmed,
            "scaled": self._scaled,
            "clipping": self._estimate.state(),
            "quantised": None if self._quantised is None else self._quantised.exchange.state(),
            "errors": None if self._exchange is None else self._exchange.state(),
            "folded": self._folded or self.comm.size == 1,
        }

    def _load_extra_state(self, extra: dict[str, Any]) -> None:
        self._steps, self._skipped_steps, self._rewarmed = extra["steps"], extra["skipped_steps"], extra["rewarmed"]
        self._scaled, self._folded = extra["scaled"], False
        self._estimate.load(extra["clipping"])
        self._quantised = None if extra["quantised"] is None else self._start_quantised()
        if self._quantised is not None:
            self._load_errors(self._quantised.exchange, extra, "quantised")

    def _load_errors(self, exchange: Exchange[Any], extra: dict[str, Any], kind: str) -> None:
        """This worker's errors, where they are in what was saved."""
        if extra["rank"] == self.comm.rank or extra["folded"]:
            exchange.load(extra[kind])
            return
        log.warning(
            "worker %d loaded the state that worker %d saved: the errors in it belong to another worker and were "
            "set to zero; save and load on every worker to keep them, or call fold_errors() before one saves for all",
            self.comm.rank,
            extra["rank"],
        )

    @torch.no_grad()
    def fold_errors(self) -> None:
        """Put what was not sent yet, and what else is each worker's own, on all workers alike. A collective.

        Call it on all workers before one of them saves the state for all; until the next step that state is complete,
        and any number of workers can load it. Training goes on from the same mean of errors, on other bits than
        without it.

        Raises:
            ConfigError: the workers' parameters differ at the moment (`in_sync`).
        """
        self._make_ready()
        self._spoil()
        if not self.in_sync:
            raise ConfigError("fold_errors was called after a local step, when each worker has its own parameters")
        for exchange in (self._exchange, None if self._quantised is None else self._quantised.exchange):
            if exchange is not None:
                exchange.fold()
        for own in self._own_values():
            mean_over_workers(own, self.comm, "fp32")
        self._folded = True

    def _own_values(self) -> list[Tensor]:
        """What besides errors is each worker's own and counts by its mean, [layout.numel] each; to be written to."""
        return []

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step on all workers together. A collective: every worker calls it equally often."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        first = self._layout is None
        self._make_ready()
        assert self._stepped is not None
        if first and self._is_rehearsal():
            self._forget_means()
            return loss
        self._folded = False
        with self._counted():
            self._whole_step()
        return loss

    def _whole_step(self) -> None:
        """A step, when the gradients are there."""
        assert self._stepped is not None
        self._scaled |= getattr(self, "found_inf", None) is not None
        if self._scaled and self.comm.size > 1 and self._meets:
            self._compare_rates()
        self._unscale()
        try:
            self._stepped.pull()
            self._x = self._stepped.tensors()
            self._step()
            self._stepped.push()
        finally:
            self._stepped.unscale = None
        self._forget_means()
        self._prepare_next()

    def _is_rehearsal(self) -> bool:
        """Whether the first step is one that torch.distributed.checkpoint takes to see what state there will be.

        All rates and all gradients of all workers are zero then. Such a step lays out the state and does not count.
        """
        if any(float(group["lr"]) != 0 for group in self.param_groups):
            return False
        moved = bytes([any(g is not None and bool(g.any()) for g in self._gradients())])
        comms = [self.comm] if self._shards is None else [self._shards.comm, self.comm]
        for comm in comms:
            moved = max(comm.all_gather_bytes(moved))
        return moved == b"\0"

    def _compare_rates(self) -> None:
        """After an overflow a GradScaler's scale may be the worker's own, and so may be what a schedule makes of it.

        On an accelerator the host reads what came of it at the next comparison, and does not wait.

        Raises:
            MismatchError: on all workers, before anything is changed.
        """
        mine = send(torch.tensor(self._rates_so_far(), dtype=torch.float64), self._device)
        rates = self.comm.all_gather(mine.view(torch.uint8)).wait().view(torch.float64)
        last, self._apart = self._apart, (Deferred((rates != rates[0]).any(1)), rates)
        due = self._apart if self._device.type == "cpu" else last
        apart = [] if due is None else due[0].read()
        if due is not None and any(apart):
            worker, rates = apart.index(True), due[1]
            for name in ("grad_scale", "found_inf"):  # the scaler multiplies with what it finds at a second try
                self.__dict__.pop(name, None)
            raise MismatchError(
                f"learning rates differ between workers: {rates[0].tolist()} on worker 0, {rates[worker].tolist()} on "
                f"worker {worker}. After an overflow on one worker the scale of its GradScaler is its own: decide on "
                'scheduler.step() by optimizer.stats()["skipped_steps"], which is the same on all workers'
            )

    @property
    def _meets(self) -> bool:
        """Whether the coming step exchanges something."""
        return True

    def _rates_so_far(self) -> list[float]:
        """What must be the same on all workers when they exchange something."""
        return [float(group["lr"]) for group in self.param_groups]

    def _settings(self) -> list[tuple[str, str]]:
        return [*super()._settings(), ("stage", self.stage.value)]

    # -- what users read -----------------------------------------------------------------------------------

    @property
    def in_sync(self) -> bool:
        """Whether all workers hold the same parameters now."""
        return True

    def stats(self) -> dict[str, Any]:
        """Where the run stands. Reads values from the device, so not for every step on a GPU.

        Returns:
            stage, step (updates made), skipped_steps (all workers skipped them: not finite), payload_bytes (handed
            to the transport by this worker's steps); seconds, what steps took so far on this worker's host: compute
            (between steps: forward, backward, data), encode, wire and server (of exchanges, in a thread of their own
            with overlap), waiting (for that thread), update (the rest of a step); hidden: of encode, wire and server,
            what ran beside compute.
        """
        self._settle()
        return {
            **super().stats(),
            "stage": self.stage.value,
            "step": self._steps,
            "skipped_steps": self._skipped_steps,
            "payload_bytes": self.payload_bytes,
        }

    # -- the step --------------------------------------------------------------------------------------------

    def _step(self) -> None:
        self._warmup_step()

    def _warmup_step(self) -> None:
        """Average the gradients, update if the average is finite."""
        assert self._layout is not None
        g = self._averaged_gradients()
        self._calibrate(g)
        hypers, params = self._hypers(), self._x
        m, v = self._flat["momentum"], self._flat["variance"]
        measured, own = [], []
        for bucket in self._layout.buckets:
            here, x = bucket.slice, params[bucket.layer_slice]
            own.append(g[here] if isinstance(g, Tensor) else g[bucket.layer_slice])
            measured.append(self._backend.warmup_measure(bucket, x, own[-1], m[here], v[here], hypers))
        measured = self._of_whole_layers(measured)
        counts, keep = self._verdict([finite for _, finite in measured], self._may_defer())  # equal on all workers
        if not counts:
            return
        rates = self._rates(hypers)
        if self._quantised is not None:
            self._quantised.commit(keep)
        for bucket, gradient, (norms, _) in zip(self._layout.buckets, own, measured, strict=True):
            here, layers = bucket.slice, bucket.layer_slice
            step_size = self._step_sizes(layers, norms, rates[layers], keep)
            self._backend.warmup_apply(bucket, params[layers], gradient, m[here], v[here], hypers, step_size, keep)

    def _of_whole_layers(self, measured: list[Measured]) -> list[Measured]:
        """Norms, and whether all was finite, of the layers, from those of the shards that this process holds."""
        if self._shards is None:
            return measured
        assert self._layout is not None
        norms = torch.cat([n.stacked() for n, _ in measured], dim=1)
        bad = [torch.as_tensor(finite).logical_not().to(norms) for _, finite in measured]
        flags = torch.stack(bad).sum().expand(1, norms.shape[1])
        squares = self._shards.sum(torch.cat([norms.square(), flags]))
        norms, finite = squares[:3].sqrt(), (squares[3] == 0).all()
        return [(lamb.Norms(*norms[:, bucket.layer_slice]), finite) for bucket in self._layout.buckets]

    def _step_sizes(self, layers: slice, norms: lamb.Norms, rates: Tensor, keep: Tensor | None) -> Tensor:
        """What the directions of a bucket's layers are multiplied by in a warm-up step, [layers of the bucket].

        `rates`: the learning rate of each.
        """
        return rates

    def _may_defer(self) -> bool:
        """Whether the host may learn later whether the step counted: on the CPU it sees it at no cost."""
        return self._device.type != "cpu"

    def _verdict(self, finite: Sequence[bool | Tensor], defer: bool) -> tuple[bool, Tensor | None]:
        """Whether this step counts, given one flag per bucket: it is counted, or reported as skipped.

        Returns:
            Whether the host goes on; and the verdict on the device, bool [], where it goes on without knowing.
        """
        if defer and all(isinstance(flag, Tensor) for flag in finite):
            keep = torch.stack([flag for flag in finite if isinstance(flag, Tensor)]).all()
            self._pending = Deferred(keep.view(1))
            self._steps += 1
            return True, keep
        if not all(bool(flag) for flag in finite):
            self._skip()
            return False, None
        self._steps += 1
        return True, None

    def _settle(self) -> None:
        """Take note of the verdict on the last step, if the host has not seen it."""
        if self._pending is not None:
            (kept, *_), self._pending = self._pending.read(), None
            if not kept:
                self._steps -= 1
                self._skip()

    def _skip(self) -> None:
        self._skipped_steps += 1
        if self.comm.rank == 0:
            log.warning(
                "step skipped on all workers: a gradient was not finite on at least one of them (%d skipped so far)",
                self._skipped_steps,
            )

    def _hypers(self) -> Hypers:
        assert self._layout is not None
        return Hypers(self._layout, [self._hyper(group) for group in self.param_groups])

    def _hyper(self, group: dict[str, Any]) -> lamb.Hyper:
        beta1, beta2 = map(float, group["betas"])
        lr = float(group["lr"])
        if not (math.isfinite(lr) and lr >= 0):
            raise ConfigError(f"lr is {lr} after {self._steps} updates; it must be finite and at least 0")
        return lamb.Hyper(lr, beta1, beta2, float(group["eps"]), float(group["weight_decay"]))

    def _rates(self, hypers: Hypers) -> Tensor:
        """The learning rate of each layer, float64 [layers]; 0 where a parameter asks for no gradient now."""
        rates, moves = hypers.rates(self._device), [p.requires_grad for p in self._params()]
        return rates if all(moves) else rates * send(torch.tensor(moves, dtype=torch.float64), self._device)


def innermost(optimizer: Any) -> Any:
    """What wrappers such as Accelerate's hold as their `optimizer`: one of ours, or the last there is."""
    while not isinstance(optimizer, FlatOptimizer) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer
