"""Where the gradients of a step come from: own ones or their mean, averaged here, by DDP, or to clip by its norm."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onebit.averaging import BITS, FullMean, QuantisedMean, average_gradients
from onebit.backend import Gradient, flat_gradient
from onebit.checks import checksum
from onebit.clipping import NormEstimate, scale_gradients, sum_of_squares
from onebit.comm import Comm
from onebit.deferred import send
from onebit.errors import ConfigError
from onebit.exchange import GradientSource
from onebit.flat import Stage
from onebit.lane import Mean
from onebit.layout import Bucket
from onebit.overlap import OverlappedSteps, Start, Version, version
from onebit.sharding import lay_as_parameters, local
from onebit.weights import HALF

log = logging.getLogger("onebit")

Means = dict[int, Version | None]
"""By id of the parameter, gradients that are means over the workers; None: DDP puts them there."""


class StepGradients(OverlappedSteps):
    """The gradients of a step, and `clip_grad_norm_`. A parameter with requires_grad=False counts as without one."""

    needs_own_gradients = False
    """Whether its warm-up needs each worker's own gradients beside their mean, so that nobody else may average them."""
    _scaled = False  # whether a GradScaler calls `step`: the workers' scales may differ then
    _attached = 0  # DDP models that leave the averaging to us, and help in the warm-up
    _rewarmed = False  # whether there was a way back from the compressed stage
    _agree = False  # whether means were put in place to clip them, since when a worker may have changed its own
    _said_unknown = False

    def __init__(self, *args: Any, **settings: Any) -> None:
        self._means: Means = {}
        self._estimate = NormEstimate()
        super().__init__(*args, **settings)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._means = {}
        super().__setstate__(state)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's."""
        self._forget_means()
        self._spoil()
        super().zero_grad(set_to_none)

    def _forget_means(self) -> None:
        self._means.clear()
        self._agree = False
        self._estimate.forget()

    def _make_ready(self) -> None:
        """Before gradients are used: compare the workers where that is due, note what the device found out."""
        lay_as_parameters(self._params(), self._names())
        if not self._compared:
            self._prepare()
        self._settle()

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

    def _unscale(self) -> None:
        """Undo what a `torch.amp.GradScaler` multiplied the loss with, unless it has done so itself."""
        scale = getattr(self, "grad_scale", None)
        assert self._stepped is not None
        self._stepped.unscale = None if scale is None else 1 / scale
        if scale is not None:
            scale_gradients([p for p in self._params() if p.dtype not in HALF], 1 / scale)

    @property
    def stage(self) -> Stage:
        return Stage.WARMUP

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
        noted = self._means[id(p)]
        return noted is None or noted.same(version(p))

    def _without_mean(self, params: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        """Those whose gradients are not means, or no longer so on some worker that touched them since clipping."""
        lacking: list[float] = [not self._has_mean(p) for p in params]
        if self._agree and self.comm.size > 1:  # else DDP put them there a moment ago, or nobody did
            counts = send(torch.tensor(lacking, dtype=torch.float32), self._device)
            self.comm.all_reduce(counts)
            lacking = counts.tolist()
        return [p for p, some in zip(params, lacking, strict=True) if some]

    def _averaged_gradients(self, overwritten: bool = False) -> Gradient:
        """The mean of the workers' gradients; a missing gradient counts as zero.

        `overwritten`: own gradients will be, before the step counts.
        """
        assert self._layout is not None
        moving = [p for p in self._params() if p.requires_grad]
        rest = self._without_mean(moving)
        if len(rest) < len(moving):
            if rest:
                average_gradients(rest, self.comm, "fp32" if self._transport in BITS else self._transport)
            return self._gradients()
        grads = self._gradients()
        if self.comm.size == 1 and self._transport == "fp32":  # nothing to average: read where they are
            return grads
        if self._averaged is None:  # kept through the warm-up: fresh pages cost as much as filling them
            self._averaged = torch.empty(self._layout.numel, dtype=self._dtype, device=self._device)
        g = self._averaged
        if overwritten and self._transport in BITS:
            self._spoil()  # what has begun would look at the gradients once more
        means = self._means_of_buckets(self._averaging_start(overwritten))
        if self._quantised is not None:
            self._quantised.take(means, g)
        return g

    def _averaging_start(self, overwritten: bool = False) -> Start:
        """How the mean of a bucket's gradients begins."""
        transport, whole, backend, like = self._transport, self._averaged, self._backend, self._x[0]
        if transport == "int8" or transport == "int4":
            held = self._quantised = self._quantised or self._start_quantised()

            def start_integers(bucket: Bucket, grads: Sequence[Tensor | None], comm: Comm) -> Mean:
                if overwritten:
                    return held.exchange.start(bucket, flat_gradient(backend, bucket, grads, like), None, comm)
                assert whole is not None
                gather = partial(backend.gather, bucket, grads)
                return held.exchange.start(
                    bucket, GradientSource(bucket, grads, gather, whole[bucket.slice]), None, comm
                )

            return start_integers

        def start(bucket: Bucket, grads: Sequence[Tensor | None], comm: Comm) -> Mean:
            assert whole is not None
            flat = whole[bucket.slice]
            with comm.clock("encode"):
                backend.gather(bucket, grads, flat)
            return FullMean(flat, comm, transport)

        return start

    def _coming_start(self) -> Start | None:
        return None if self._averaged is None else self._averaging_start()

    def _carrier(self) -> Any:
        if self._exchange is not None:
            return self._exchange
        if self._transport in BITS:
            return None if self._quantised is None else self._quantised.exchange
        return self._transport

    def _can_overlap(self) -> bool:
        first = self.stage is Stage.WARMUP
        if self._scaled or (self._attached and self.wants_means) or not super()._can_overlap():
            return False
        clips_own = not first or self._transport in BITS or self.needs_own_gradients
        return not (clips_own and self._estimate.wanted)

    def _start_quantised(self) -> QuantisedMean:
        assert self._layout is not None
        bits = BITS[self._transport]
        codecs = [self._backend.quantised_codec(bucket, bits) for bucket in self._layout.buckets]
        return QuantisedMean(self._layout, codecs, self.comm)

    def _gathered(self, bucket: Bucket, grads: Sequence[Tensor | None]) -> Tensor:
        """The gradients of a bucket's layers as [bucket], a new tensor."""
        return flat_gradient(self._backend, bucket, grads, self._x[0])

    def _gradients(self, bucket: Bucket | None = None) -> list[Tensor | None]:
        """This worker's gradients, one per layer, of a bucket or of all."""
        assert self._stepped is not None
        which = slice(None) if bucket is None else bucket.layer_slice
        params = self._params()[which]
        for i, p in enumerate(params):
            if p.grad is not None and p.grad.layout is not torch.strided:
                name = self._names()[which][i]
                raise ConfigError(f"the gradient of {name} is {p.grad.layout}; only dense gradients are allowed")
        grads = self._stepped.gradients(which)
        return [g if p.requires_grad else None for p, g in zip(params, grads, strict=True)]

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
        self._estimate.wanted = True
        with self._counted():
            norm, factor, own = self._clipping(max_norm)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise ConfigError(f"the norm of the gradients is {float(norm)}, and error_if_nonfinite is set")
        scale_gradients(self._params(), factor)
        if own is not None and self.needs_own_gradients and self.comm.size > 1:
            self._estimate.clipped(own, factor)
        self._means = {id(p): version(p) for p in self._params() if id(p) in self._means}
        return norm

    def _clipping(self, max_norm: float) -> tuple[Tensor, Tensor, Tensor | None]:
        """The norm to clip by, the factor that does, and the mean of the own squared norms where that was asked for."""
        own: Tensor | None = None
        if self.stage is Stage.WARMUP and not self.needs_own_gradients:
            square = self._square_of_means()
        else:
            (own,) = self._shared(self._square(self._gradients()))
            if not self._estimate.known and not self.needs_own_gradients and self.comm.size > 1:
                self._say_unknown()
            square = own * self._estimate.kept
        norm = square.sqrt()
        return norm, torch.where(torch.isfinite(norm), (max_norm / (norm + 1e-6)).clamp(max=1.0), 1.0), own

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
            before, after = self._shared(*pair)
            self._estimate.note(float(after), float(before))
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
        self.note_means(p for p in self._params() if p.requires_grad)
        self._agree = True

    def _shared(self, *squares: Tensor) -> list[Tensor]:
        """The means of numbers over the workers, in one message; float64 [] each."""
        means = torch.stack(squares)
        if self.comm.size > 1:
            self.comm.all_reduce(means)
            means /= self.comm.size
        return list(means)

    def _calibrate(self, g: Gradient) -> None:
        """Where own gradients were clipped and their mean, flat or by layer, is known only now: note what it kept."""
        self._estimate.note_mean(lambda: sum_of_squares([g] if isinstance(g, Tensor) else g, self._device))
