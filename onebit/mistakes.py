"""Two other ways to compress Adam, for comparisons only: what 1-bit Adam avoids by freezing the variance.

Both use the exchange of `OneBitAdam`, with error feedback, after the same warm-up stage; only what they compress is
something else. 1-bit Adam (arXiv 2102.02888) argues against the first one. Both make the variance larger, hence the
steps shorter. Whether that costs anything depends on the problem and the learning rate: tests/test_mistakes.py has a
case where it does, and says where it ends.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onebit import lamb
from onebit.averaging import Transport
from onebit.backend import Hypers
from onebit.codec import OneBit
from onebit.comm import Comm
from onebit.compressed import OneBitOptimizer
from onebit.errors import ConfigError
from onebit.exchange import OneBitExchange
from onebit.flat import DEFAULT_BUCKET_ELEMENTS
from onebit.freeze import FreezeStep
from onebit.layout import Bucket, Run
from onebit.optim import log
from onebit.stages import Compression, DeadElements

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class _Mistake(OneBitOptimizer):
    """AdamW on averaged gradients for `freeze_step` updates, as `OneBitAdam` is; then a subclass errs.

    Args:
        params, lr, betas, eps, weight_decay, freeze_step, process_group, comm, codec, dead_elements, warmup_transport,
        bucket_elements, total_steps: as in `OneBitAdam`.

    Raises:
        ConfigError: a value outside what is listed there; or a state dict, or a return to the warm-up stage, is asked
            for: there is none.
        MismatchError: as in `onebit.Lamb`.
    """

    sends_momentum = False

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        freeze_step: FreezeStep = 1000,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        process_group: ProcessGroup | None = None,
        comm: Comm | None = None,
        codec: OneBit | None = None,
        dead_elements: DeadElements = "hold",
        warmup_transport: Transport = "fp32",
        bucket_elements: int | None = DEFAULT_BUCKET_ELEMENTS,
        total_steps: int | None = None,
    ) -> None:
        codec = OneBit() if codec is None else codec
        self._compression = Compression(freeze_step, total_steps, codec, 0.0, dead_elements, False, "full", None)
        super().__init__(params, lr, betas, eps, weight_decay, warmup_transport, process_group, comm, bucket_elements)

    def state_dict(self) -> dict[str, Any]:
        raise ConfigError(f"{type(self).__name__} is for comparisons and cannot be saved; save the model alone")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise ConfigError(f"{type(self).__name__} is for comparisons and cannot be loaded; start again")

    def _take_over_errors(self, exchange: OneBitExchange) -> None:
        if self._quantised is not None and self.comm.rank == 0:
            log.info("%s drops what its quantised warm-up did not send", type(self).__name__)
        self._quantised = None

    def _postponed(self) -> bool:
        return False  # the preview is of a compressed momentum

    def _leave_compressed(self) -> None:
        raise ConfigError(f"{type(self).__name__} has no way back to the warm-up stage; build another one")

    def _compressed_step(self, exchange: OneBitExchange) -> None:
        """Worker's part, exchange, everyone's part; skipped by all workers unless finite on all of them."""
        assert self._layout is not None
        exchange.wake()
        hypers, grads = self._hypers(), self._gradients()
        means = []
        for bucket in self._layout.buckets:
            g = self._gathered(bucket, grads[bucket.layer_slice])
            means.append(exchange.start(bucket, self._input(bucket, g, hypers)))
        for mean in means:
            mean.serve()
        decoded = [mean.wait() for mean in means]
        counts, _ = self._verdict([mean.usable for mean in means], defer=False)
        if not counts:
            return
        for mean, value in zip(means, decoded, strict=True):
            mean.commit()
            self._advance(mean.bucket, value, hypers)
        exchange.note_headers([mean.headers for mean in means])

    def _input(self, bucket: Bucket, g: Tensor, hypers: Hypers) -> Tensor:
        """What is compressed, [bucket], from this worker's gradient, [bucket], which is used up. Changes no state."""
        raise NotImplementedError

    def _advance(self, bucket: Bucket, mean: Tensor, hypers: Hypers) -> None:
        """Take the step, given the mean over the workers of what was compressed, [bucket]."""
        raise NotImplementedError


class CompressedGradientAdam(_Mistake):
    """Adam whose workers compress the gradient; momentum and variance both go on following what comes out.

    With d_t the error that is left after step t the decoded gradient is g_t + d_{t-1} - d_t. In a sum the errors
    cancel, so the momentum is hardly worse; squared they do not, so the variance holds the noise of the compression.
    """

    def _input(self, bucket: Bucket, g: Tensor, hypers: Hypers) -> Tensor:
        return g

    def _advance(self, bucket: Bucket, mean: Tensor, hypers: Hypers) -> None:
        x, rates = self._x[bucket.layer_slice], self._rates(hypers)[bucket.layer_slice]
        m, v = self._flat["momentum"][bucket.slice], self._flat["variance"][bucket.slice]
        self._backend.warmup_apply(bucket, x, mean, m, v, hypers, rates, None)


class CompressedUpdateAdam(_Mistake):
    """Adam whose workers keep momentum and variance of their own gradients and compress m_i / (sqrt(v_i) + eps).

    x -= lr * (the mean of these + weight_decay x). The variance of one worker's gradients is larger than that of their
    mean, and a mean of quotients is not a quotient of means.
    """

    _coming: dict[int, list[tuple[Run, Tensor, Tensor]]]
    """By bucket, the moments that this worker will have if the step counts."""

    def _allocate_compressed(self) -> OneBitExchange:
        self._coming = {}
        return super()._allocate_compressed()

    def _input(self, bucket: Bucket, g: Tensor, hypers: Hypers) -> Tensor:
        assert self._layout is not None
        update, coming = torch.zeros_like(g), []
        for run, here in self._layout.runs_in(bucket):
            m, v = self._flat["momentum"][run.slice], self._flat["variance"][run.slice]
            m, v = lamb.warmup_moments(g[here], m, v, hypers.of(run))
            quotient = m / (v.sqrt() + hypers.of(run).eps)
            # an infinite variance would make it zero: all workers must see that the step cannot be taken
            update[here] = torch.where(torch.isfinite(v), quotient, math.nan)
            coming.append((run, m, v))
        self._coming[bucket.index] = coming
        return update

    def _advance(self, bucket: Bucket, mean: Tensor, hypers: Hypers) -> None:
        rates = self._rates(hypers)
        for run, m, v in self._coming[bucket.index]:
            self._flat["momentum"][run.slice], self._flat["variance"][run.slice] = m, v
            step, x = mean[run.start - bucket.start : run.stop - bucket.start], self._x[run.layer_slice]
            run.add_scaled(step, x, hypers.of(run).weight_decay)
            lamb.update(x, step, rates[run.layer_slice], run)
