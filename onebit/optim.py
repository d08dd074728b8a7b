"""The step that every optimizer here shares: an ordinary torch.optim.Optimizer without an engine.

What torch asks of it is in `flat.py`, the arithmetic in `lamb.py` and behind `backend.py`.

On an accelerator the host never waits for a step: whether it counted is decided on the device, and the host learns of
it at the next step (`_settle`).
"""

from __future__ import annotations

import enum
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from onebit import lamb
from onebit.averaging import BITS, QuantisedMean, average_gradients, mean_over_workers
from onebit.backend import Gradient, Hypers, flat_gradient
from onebit.checks import checksum
from onebit.clipping import NormEstimate, scale_gradients, sum_of_squares
from onebit.deferred import Deferred, send
from onebit.errors import ConfigError
from onebit.exchange import LateSource, TensorSource
from onebit.flat import FlatState
from onebit.layout import Bucket
from onebit.sharding import local
from onebit.weights import HALF

log = logging.getLogger("onebit")


Means = dict[int, tuple[Tensor, int] | None]
"""By id of the parameter, gradients that are means over the workers, with their version; None: DDP puts them there."""
Measured = tuple[lamb.Norms, bool | Tensor]
"""Of a bucket: its layers' norms, and whether all is finite."""


class Stage(enum.Enum):
    """Before and after the variance is frozen. Not the learning-rate warm-up."""

    WARMUP = "warmup"
    COMPRESSED = "compressed"


class FlatOptimizer(FlatState):
    """An optimizer whose state is flat and equal on all workers, and which averages the gradients itself.

    A subclass may say how far each layer goes (`_step_sizes`); a second stage is in `compressed.py`.
    """

    compresses = False
    """Whether steps may exchange compressed values, so that its stage is of interest."""
    sends_momentum = False
    """Whether the momentum is what the compressed stage exchanges, and the variance is frozen."""
    needs_own_gradients = False
    """Whether its warm-up needs each worker's own gradients beside their mean, so that nobody else may average them."""
    _step_supports_amp_scaling = True  # GradScaler then calls `step` on all workers, whoever had an overflow
    _skipped_steps = 0
    _scaled = False  # whether a GradScaler calls `step`: the workers' scales may differ then
    _attached = False  # whether a DDP model leaves the averaging to us, and helps in the warm-up
    _rewarmed = False  # whether there was a way back from the compressed stage
    _said_unknown = False

    def __init__(self, *args: Any, **settings: Any) -> None:
        self._means: Means = {}
        self._estimate = NormEstimate()
        super().__init__(*args, **settings)

    def _extra_state(self) -> dict[str, Any]:
        return {
            "structure": self._structure(),
            "rank": self.comm.rank,
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
        self._unscale()
        self._stepped.pull()
        self._x = self._stepped.tensors()
        before = self.comm.payload_bytes
        self._step()
        self._stepped.push()
        self._means.clear()
        self._estimate.take_parts()
        self.payload_bytes += self.comm.payload_bytes - before
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's."""
        self._means.clear()
        self._estimate.take_parts()
        super().zero_grad(set_to_none)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._means = {}
        super().__setstate__(state)

    def _make_ready(self) -> None:
        """Compare the workers where that is due; then note what the device found out about the last step."""
        if not self._compared:
            self._prepare()
        self._settle()

    def _unscale(self) -> None:
        """Undo what a `torch.amp.GradScaler` multiplied the loss with, unless it has done so itself."""
        scale = getattr(self, "grad_scale", None)
        self._scaled |= getattr(self, "found_inf", None) is not None
        assert self._stepped is not None
        self._stepped.unscale = None if scale is None else 1 / scale
        if scale is not None:
            scale_gradients([p for p in self._params() if p.dtype not in HALF], 1 / scale)

    def _prepare(self) -> None:
        super()._prepare()
        if self.comm.size == 1 or self._attached or self._means:
            return
        grads = [g for g in self._gradients() if g is not None]
        sums = "".join(map(checksum, grads)) if any(bool(g.any()) for g in grads) else ""
        seen = set(self.comm.all_gather_bytes(sums.encode()))
        if self.comm.rank == 0 and len(seen) == 1 and seen != {b""}:
            log.warning(
                "all workers hold the same gradients: either they were given the same data, or something else averages "
                "gradients (DistributedDataParallel does), and no bytes are saved; call onebit.attach(model, optimizer)"
            )

    def _settings(self) -> list[tuple[str, str]]:
        return [*super()._settings(), ("stage", self.stage.value)]

    # -- what users read -----------------------------------------------------------------------------------

    @property
    def stage(self) -> Stage:
        return Stage.WARMUP

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

    @property
    def wants_means(self) -> bool:
        """Whether this step is to be given gradients that are means over the workers, or takes them itself.

        Not where integers are sent, or own gradients are needed; and not once overflows on one worker may have given
        the workers' `GradScaler`s different scales, which a mean over scaled gradients would mix.
        """
        usable = self._transport not in BITS and not self.needs_own_gradients
        return self.stage is Stage.WARMUP and usable and not (self._scaled and self._rewarmed)

    def note_means(self, params: Iterable[Tensor]) -> None:
        """Say that the gradients of these parameters are means over the workers. Until `step` or `zero_grad`."""
        self._means.update((id(p), None) for p in params)

    def _has_mean(self, p: Tensor) -> bool:
        """Whether a gradient still is the mean that it was noted to be: not after a new backward."""
        if id(p) not in self._means:
            return False
        noted, grad = self._means[id(p)], p.grad
        return noted is None or (grad is noted[0] and grad._version == noted[1])

    def _averaged_gradients(self, overwritten: bool = False) -> Gradient:
        """The mean of the workers' gradients; a missing gradient counts as zero.

        `overwritten`: own gradients will be, before the step counts.
        """
        assert self._layout is not None
        rest = [p for p in self._params() if not self._has_mean(p)]
        if len(rest) < len(self._params()):
            if rest:
                average_gradients(rest, self.comm, "fp32" if self._transport in BITS else self._transport)
            return self._gradients()
        grads = self._gradients()
        if self.comm.size == 1 and self._transport == "fp32":  # nothing to average: read where they are
            return grads
        if self._averaged is None:  # kept through the warm-up: fresh pages cost as much as filling them
            self._averaged = torch.empty(self._layout.numel, dtype=self._dtype, device=self._device)
        g = self._averaged
        if self._transport == "int8" or self._transport == "int4":
            if self._quantised is None:
                self._quantised = self._start_quantised()
            make = self._gathered_source if overwritten else self._late_gradient
            self._quantised.take([make(bucket, grads) for bucket in self._layout.buckets], g)
            return g
        for bucket in self._layout.buckets:
            self._backend.gather(bucket, grads[bucket.layer_slice], g[bucket.slice])
        mean_over_workers(g, self.comm, self._transport)
        return g

    def _start_quantised(self) -> QuantisedMean:
        assert self._layout is not None
        bits = BITS[self._transport]
        codecs = [self._backend.quantised_codec(bucket, bits) for bucket in self._layout.buckets]
        return QuantisedMean(self._layout, codecs, self.comm)

    def _late_gradient(self, bucket: Bucket, grads: Sequence[Tensor | None]) -> LateSource:
        return LateSource(lambda: self._gathered_source(bucket, grads))

    def _gathered_source(self, bucket: Bucket, grads: Sequence[Tensor | None]) -> TensorSource:
        return TensorSource(self._gathered(bucket, grads))

    def _gathered(self, bucket: Bucket, grads: Sequence[Tensor | None]) -> Tensor:
        """The gradients that lie in a bucket, given those of all layers: [bucket], a new tensor."""
        return flat_gradient(self._backend, bucket, grads[bucket.layer_slice], self._x[0])

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

    def _gradients(self) -> list[Tensor | None]:
        """This worker's gradients, one per layer."""
        assert self._stepped is not None
        for name, p in zip(self._names(), self._params(), strict=True):
            if p.grad is not None and p.grad.layout is not torch.strided:
                raise ConfigError(f"the gradient of {name} is {p.grad.layout}; only dense gradients are allowed")
        return self._stepped.gradients()

    # -- clipping ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, error_if_nonfinite: bool = False) -> Tensor:
        """Scale the gradients of all workers by one factor, so that the norm of their mean is at most `max_norm`.

        Call it where `torch.nn.utils.clip_grad_norm_` would be called: after backward, once per step. A collective.
        In the warm-up stage the gradients are averaged here instead of in `step`, and the norm is that of the mean. In
        the compressed stage every worker keeps its own gradient, and the norm of their mean is estimated: the mean of
        their squared norms, one number from each worker, times the share that averaging kept of it in the last warm-up
        steps with clipping (docs/clipping.md has the error of the estimate).

        Args:
            max_norm: above 0; inf clips nothing and measures.
            error_if_nonfinite: raise instead of leaving it to `step`, which skips such gradients on all workers.

        Returns:
            The norm before clipping, or its estimate: float64 [], equal on all workers.

        Raises:
            ConfigError: max_norm is not above 0; or the norm is not finite and `error_if_nonfinite` is set.
        """
        if not max_norm > 0:
            raise ConfigError(f"max_norm is {max_norm}; it must be above 0")
        self._make_ready()
        before, self._estimate.wanted = self.comm.payload_bytes, True
        own: Tensor | None = None
        if self.stage is Stage.WARMUP and not self.needs_own_gradients:
            square = self._square_of_means()
        else:
            own = self._shared(self._square(self._gradients()))
            if not self._estimate.known and not self.needs_own_gradients and self.comm.size > 1:
                self._say_unknown()
            square = own * self._estimate.kept
        norm = square.sqrt()
        self.payload_bytes += self.comm.payload_bytes - before
        if error_if_nonfinite and not torch.isfinite(norm):
            raise ConfigError(f"the norm of the gradients is {float(norm)}, and error_if_nonfinite is set")
        factor = torch.where(torch.isfinite(norm), (max_norm / (norm + 1e-6)).clamp(max=1.0), 1.0)
        scale_gradients(self._params(), factor)
        if own is not None and self.needs_own_gradients and self.comm.size > 1:
            self._estimate.clipped(own, factor)
        if self._means:
            self._means = {id(p): (p.grad, p.grad._version) for p in self._params() if p.grad is not None}
        return norm

    def _say_unknown(self) -> None:
        if self.comm.rank == 0 and not self._said_unknown:
            log.warning(
                "clip_grad_norm_ was not used in the warm-up, so how much shorter the mean of the gradients is than "
                "they are is not known: the norm of the workers' own is taken, and clipping is stronger than asked"
            )
        self._said_unknown = True

    def _square_of_means(self) -> Tensor:
        """Put the means of the gradients in their place; the square of their norm. What averaging kept is noted."""
        # DDP has averaged where means are noted, and noted both squares if it knew that they are wanted
        own = None if self._means or self.comm.size == 1 else self._square(self._gradients())
        self._put_means_in_place()
        square = self._square(self._gradients())
        parts = self._estimate.take_parts()
        pair = parts if own is None else (own, square)
        if pair is not None and self.comm.size > 1:
            self._estimate.note(float(pair[1]), float(self._shared(pair[0])))
        return square

    def _square(self, grads: Sequence[Tensor | None]) -> Tensor:
        """The squared norm of all gradients together, of whole layers: float64 []."""
        if self._shards is None:
            return sum_of_squares(grads, self._device)
        return self._shards.sum(torch.stack([sum_of_squares([g], self._device) for g in grads])).sum()

    def _put_means_in_place(self) -> None:
        assert self._layout is not None
        g = self._averaged_gradients(overwritten=True)
        if isinstance(g, Tensor):
            for p, mean in zip(self._params(), self._layout.views(g), strict=True):
                if p.grad is None and p.requires_grad:
                    p.grad = torch.zeros_like(p)
                if p.grad is not None:
                    local(p.grad).copy_(mean)
        self.note_means(self._params())

    def _shared(self, square: Tensor) -> Tensor:
        """The mean of a number over the workers; float64 []."""
        if self.comm.size > 1:
            square = square.reshape(1)
            self.comm.all_reduce(square)
            square = square[0] / self.comm.size
        return square

    def _calibrate(self, g: Gradient) -> None:
        """Where own gradients were clipped and their mean, flat or by layer, is known only now: note what it kept."""
        self._estimate.note_mean(lambda: sum_of_squares([g] if isinstance(g, Tensor) else g, self._device))
