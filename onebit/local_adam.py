"""`LocalVarianceAdam`: Adam at one bit per parameter after a short warm-up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onebit import lamb
from onebit.averaging import Transport
from onebit.codec import OneBit
from onebit.comm import Comm
from onebit.flat import DEFAULT_BUCKET_ELEMENTS
from onebit.layerwise_rate import AdamRate
from onebit.local_variance import LocalSettings, LocalVariance, Schedule

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class LocalVarianceAdam(AdamRate, LocalVariance):
    """Adam whose workers exchange one bit per parameter, with a variance that does not grow old.

    As `LocalVarianceLamb`, without its trust ratio: x -= lr (m / (sqrt(v) + eps) + weight_decay x), as AdamW. Adam's
    step has the length that the variance gives it, and the squares of one worker's gradients are larger than those of
    their mean. So each worker first averages its gradients over about n steps, which makes their squares as large as
    those of the mean of n workers: 4 bytes per parameter more.

    Args:
        params, lr, betas, eps, weight_decay, warmup_steps, warmup_transport, total_steps, codec, schedule,
        variance_floor, process_group, comm, bucket_elements, overlap: as in `LocalVarianceLamb`.
        bias_correction: as in AdamW; off, as in `OneBitAdam`.

    Raises:
        ConfigError: a value outside what is listed there.
        MismatchError: as in `onebit.Lamb`.
    """

    _smooth = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias_correction: bool = False,
        warmup_steps: int | float = 100,
        warmup_transport: Transport = "int4",
        total_steps: int | None = None,
        process_group: ProcessGroup | None = None,
        comm: Comm | None = None,
        codec: OneBit | None = None,
        schedule: Schedule | None = None,
        variance_floor: float = 0.01,
        bucket_elements: int | None = DEFAULT_BUCKET_ELEMENTS,
        overlap: bool = False,
    ) -> None:
        how = LocalSettings(
            warmup_steps, total_steps, warmup_transport, codec, schedule, variance_floor, bias_correction
        )
        LocalVariance.__init__(
            self, params, lr, betas, eps, weight_decay, process_group, comm, bucket_elements, how, overlap
        )

    def _hyper(self, group: dict[str, Any]) -> lamb.Hyper:
        hyper = super()._hyper(group)
        if self._how.bias_correction and self._exchange is None:
            return lamb.bias_corrected(hyper, self._steps + 1, self._steps + 1)
        return hyper  # the compressed stage has its own
