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
from onebit.backend import Hypers
from onebit.deferred import Deferred, send
from onebit.errors import ConfigError, MismatchError
from onebit.gradients import StepGradients

log = logging.getLogger("onebit")


Measured = tuple[lamb.Norms, bool | Tensor]
"""Of a bucket: its layers' norms, and whether all is finite."""


class FlatOptimizer(StepGradients):
    """An optimizer whose state is flat and equal on all workers, and which averages the gradients itself.

    A subclass may say how far each layer goes (`_step_sizes`); a second stage is in `compressed.py`.
    """

    compresses = False
    """Whether steps may exchange compressed values, so that its stage is of interest."""
    sends_momentum = False
    """Whether the momentum is what the compressed stage exchanges, and the variance is frozen."""
    _step_supports_amp_scaling = True  # GradScaler then calls `step` on all workers, whoever had an overflow
    _skipped_steps = 0

    def _extra_state(self) -> dict[str, Any]:
        return {
            **super()._extra_state(),
            "stage": self.stage.value,
            "steps": self._steps,
            "skipped_steps": self._skipped_steps,
            "rewarmed": self._rewarmed,
            "scaled": self._scaled,
            "clipping": self._estimate.state(),
            "quantised": None if self._quantised is None else self._quantised.state(),
        }

    def _load_extra_state(self, extra: dict[str, Any]) -> None:
        self._steps, self._skipped_steps, self._rewarmed = extra["steps"], extra["skipped_steps"], extra["rewarmed"]
        self._scaled = extra["scaled"]
        self._estimate.load(extra["clipping"])
        self._quantised = None if extra["quantised"] is None else self._start_quantised()
        if self._quantised is not None:
            if extra["rank"] == self.comm.rank:
                self._quantised.load(extra["quantised"])
            else:
                self._warn_foreign_errors(extra["rank"])

    def _warn_foreign_errors(self, rank: int) -> None:
        log.warning(
            "worker %d loaded the state that worker %d saved: the errors in it belong to another worker and were "
            "set to zero; save and load on every worker to keep them",
            self.comm.rank,
            rank,
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step on all workers together. A collective: every worker calls it equally often."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._make_ready()
        assert self._stepped is not None
        before = self.comm.payload_bytes
        self._unscale()
        try:
            if self._scaled and self._skipped_steps:
                self._compare_rates()
            self._stepped.pull()
            self._x = self._stepped.tensors()
            self._step()
            self._stepped.push()
        finally:
            self._stepped.unscale = None
        self._forget_means()
        self.payload_bytes += self.comm.payload_bytes - before
        return loss

    def _compare_rates(self) -> None:
        """After an overflow a GradScaler's scale may be the worker's own, and so may be what a schedule makes of it.

        The host waits for the device here.

        Raises:
            MismatchError: on all workers, before anything is changed.
        """
        mine = torch.tensor([float(group["lr"]) for group in self.param_groups], dtype=torch.float64)
        rates = self.comm.all_gather(mine.view(torch.uint8).to(self._device)).wait().cpu().view(torch.float64)
        differing = (rates != rates[0]).nonzero().tolist()
        if differing:
            worker, group = differing[0]
            raise MismatchError(
                f"lr of group {group} is {float(rates[0, group])} on worker 0 and {float(rates[worker, group])} on "
                f"worker {worker}. After an overflow on one worker the scale of its GradScaler is its own: decide on "
                'scheduler.step() by optimizer.stats()["skipped_steps"], which is the same on all workers'
            )

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
            to the transport by this worker's steps).
        """
        self._settle()
        return {
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
