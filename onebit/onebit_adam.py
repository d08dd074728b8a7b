"""`OneBitAdam`: 1-bit Adam (arXiv 2102.02888)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from onebit import lamb
from onebit.averaging import Transport
from onebit.backend import BucketStep
from onebit.checks import check_in
from onebit.codec import OneBit
from onebit.comm import Comm
from onebit.compressed import Measure, OneBitOptimizer
from onebit.flat import DEFAULT_BUCKET_ELEMENTS
from onebit.freeze import FreezeStep
from onebit.guard import SwitchGuard
from onebit.layerwise_rate import AdamRate
from onebit.stages import Compression, DeadElements, StateKind

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class OneBitAdam(AdamRate, OneBitOptimizer):
    """1-bit Adam (arXiv 2102.02888, Algorithm 1): Adam whose workers exchange one bit per parameter.

    For `freeze_step` updates it is AdamW on averaged gradients (warm-up stage): x -= lr (m / (sqrt(v) + eps) +
    weight_decay x). Then the variance is frozen and each step sends the momentum as signs and scales with error
    feedback (compressed stage). The uncompressed baseline is `torch.optim.AdamW`.
    Gradients must not be averaged by anyone else: use it without DDP's averaging.

    `onebit.PAPER` holds the keyword arguments that turn it into the authors' release.

    Args:
        params, lr, betas, eps, weight_decay, process_group, comm: as in `onebit.Lamb`; weight decay is decoupled, as in
            AdamW. A group may hold `exp_avg_mask`, as in `OneBitLamb`.
        bias_correction: as in AdamW; off, as released. In the compressed stage the momentum's goes on, and the
            variance's stays what it was at the switch.
        freeze_step, total_steps, codec, variance_floor, dead_elements, state, warmup_transport, bucket_elements,
        guard, overlap: as in `OneBitLamb`.
            Compact state takes 3.2 instead of 8.1 bytes per parameter, and 4 / n more for the server error.
        momentum_scales: as in `OneBitLamb`; off, as released, also where layers share a scale.
        error_feedback: "unscaled"; or "none", which drops what compression leaves out of each step: for comparisons
            only, since training then stalls or diverges.

    Raises:
        ConfigError: a value outside what is listed above.
        MismatchError: as in `onebit.Lamb`.
    """

    takes_shards = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        freeze_step: FreezeStep = 1000,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias_correction: bool = False,
        process_group: ProcessGroup | None = None,
        comm: Comm | None = None,
        codec: OneBit | None = None,
        variance_floor: float = 0.01,
        dead_elements: DeadElements = "hold",
        momentum_scales: bool = False,
        state: StateKind = "full",
        warmup_transport: Transport = "fp32",
        bucket_elements: int | None = DEFAULT_BUCKET_ELEMENTS,
        total_steps: int | None = None,
        guard: SwitchGuard | None = None,
        error_feedback: Literal["unscaled", "none"] = "unscaled",
        overlap: bool = False,
    ) -> None:
        check_in("bias_correction", bias_correction, (True, False))
        codec = OneBit() if codec is None else codec
        feedback = check_in("error_feedback", error_feedback, ("unscaled", "none")) != "none"
        self._compression = Compression(
            freeze_step, total_steps, codec, variance_floor, dead_elements, momentum_scales, state, guard, feedback
        )
        self._bias_correction = bias_correction
        self._frozen_at = self._compressed_updates = 0  # updates at the last switch, and those that left v alone
        super().__init__(
            params, lr, betas, eps, weight_decay, warmup_transport, process_group, comm, bucket_elements, overlap
        )

    def _settings(self) -> list[tuple[str, str]]:
        return [*super()._settings(), ("bias_correction", str(self._bias_correction))]

    def _extra_state(self) -> dict[str, Any]:
        counts = {"frozen_at": self._frozen_at, "compressed_updates": self._compressed_updates}
        return {**super()._extra_state(), **counts}

    def _load_extra_state(self, extra: dict[str, Any]) -> None:
        super()._load_extra_state(extra)
        self._frozen_at, self._compressed_updates = extra["frozen_at"], extra["compressed_updates"]

    def _compressed_step_sizes(self, step: BucketStep, measured: Measure, rates: Tensor) -> Tensor:
        return torch.where(self._asleep[step.codec.bucket.layer_slice], 0.0, rates)

    def _end_warmup(self) -> None:
        self._frozen_at = self._steps

    def _leave_compressed(self) -> None:
        super()._leave_compressed()
        self._compressed_updates += self._steps - self._frozen_at

    def _hyper(self, group: dict[str, Any]) -> lamb.Hyper:
        hyper = super()._hyper(group)
        if not self._bias_correction:
            return hyper
        last = self._steps + 1 if self._exchange is None else self._frozen_at
        return lamb.bias_corrected(hyper, self._steps + 1, last - self._compressed_updates)
