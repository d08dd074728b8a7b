"""`LocalVarianceLamb`: LAMB at one bit per parameter after a short warm-up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onebit import lamb
from onebit.averaging import Transport
from onebit.backend import BucketStep, Momentum, chosen
from onebit.codec import OneBit
from onebit.comm import Comm
from onebit.errors import ConfigError
from onebit.flat import DEFAULT_BUCKET_ELEMENTS
from onebit.layerwise_rate import LayerwiseRate, coefficient_rule
from onebit.local_variance import LocalSettings, LocalVariance, Schedule

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class LocalVarianceLamb(LayerwiseRate, LocalVariance):
    """LAMB whose workers exchange one bit per parameter, with a variance that does not grow old.

    For `warmup_steps` updates it is `Lamb` on gradients that are averaged as 4-bit integers with error feedback
    (warm-up stage). Meanwhile and ever after each worker averages its own squared gradients; their mean over the
    workers, the variance, is exchanged at few steps (`Schedule`) in 8 bits per parameter. The momentum over the root of
    the variance is sent as signs and scales with error feedback (compressed stage), and the trust ratio is that of the
    compressed update. LAMB's learning rate can be kept.
    Gradients must not be averaged by anyone else: use it without DDP's averaging.

    Args:
        params, lr, betas, eps, weight_decay, min_coeff, max_coeff, process_group, comm, bucket_elements, overlap: as
            in `Lamb`.
        trust_gain: factor on the clipped trust ratio in the compressed stage, > 0. What one bit adds to the update
            makes it longer, hence the ratio smaller than LAMB's; 1.0 and 2.0 were worse (docs/log.md).
        warmup_steps: updates of the warm-up, >= 1; or a share of `total_steps`, in (0, 1).
        warmup_transport: how gradients are averaged in it, "fp32", "bf16", "int8" or "int4".
        total_steps: updates of the whole run, where a share of it is asked for.
        codec: how momentum is sent, `onebit.OneBit(...)`; None: one scale per bucket, since over sqrt(v) the layers
            have much the same size.
        schedule: when the variance is exchanged; None: `onebit.Schedule()`.
        variance_floor: as in `OneBitLamb`.

    Raises:
        ConfigError: a value outside what is listed above.
        MismatchError: as in `Lamb`.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        min_coeff: float = 0.01,
        max_coeff: float = 10.0,
        trust_gain: float = 1.5,
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
        if not 0 < trust_gain < float("inf"):
            raise ConfigError(f"trust_gain is {trust_gain}; it must be above 0 and finite")
        self._coeff_rule, self._gain = coefficient_rule(min_coeff, max_coeff, coeff_beta=0.9), trust_gain
        how = LocalSettings(warmup_steps, total_steps, warmup_transport, codec, schedule, variance_floor)
        LocalVariance.__init__(
            self, params, lr, betas, eps, weight_decay, process_group, comm, bucket_elements, how, overlap
        )

    def _settings(self) -> list[tuple[str, str]]:
        return [*super()._settings(), ("trust_gain", str(self._gain))]

    def _compressed_step_sizes(self, step: BucketStep, now: Momentum, rates: Tensor) -> Tensor:
        bucket, coeff = step.codec.bucket, self._layerwise["coeff"][step.codec.bucket.layer_slice]
        norms = self._norms(step, now)
        new, _ = lamb.trust_ratio(norms.x * self._weights(bucket.layer_slice), norms.update, self._coeff_rule)
        new = torch.where(norms.direction > 0, new * self._gain, 0.0).to(self._dtype)
        coeff.copy_(chosen(step.keep, new, coeff))
        return coeff * rates

    def _weights(self, layers: slice) -> Tensor:
        """By what the true direction of each layer is shorter than the one that is measured: float64 [layers]."""
        assert self._layout is not None
        groups = [self._weight(self._hyper(group), self._steps) for group in self.param_groups]
        here = [groups[layer.group] for layer in self._layout.layers[layers]]
        return torch.tensor(here, dtype=torch.float64, device=self._device)

    def _norms(self, step: BucketStep, now: Momentum) -> lamb.Norms:
        """Of each layer of a bucket: parameter, direction, and direction with weight decay."""
        assert self._layout is not None
        codec, params = step.codec, self._x
        direction = codec.layer_norms(now.messages, now.mask)
        x_norms, updates = [], []
        decays = any(step.hypers.of(run).weight_decay for run, _ in self._layout.runs_in(codec.bucket))
        spare = None if self._spare is None else self._spare[codec.bucket.slice]  # this bucket's errors are committed
        numbers = None
        if decays:
            numbers = codec.decode(now.messages) if spare is None else codec.decode_into(now.messages, spare)
        for run, here in self._layout.runs_in(codec.bucket):
            x = params[run.layer_slice]
            x_norms.append(self._backend.norms(x))
            hyper = step.hypers.of(run)
            if numbers is None or not hyper.weight_decay:
                updates.append(direction[run.layers_in(codec.bucket)])
                continue
            u = numbers[here]
            run.add_scaled(u, x, hyper.weight_decay)
            updates.append(self._backend.norms(run.views(u)))
        return lamb.Norms(torch.cat(x_norms), direction, torch.cat(updates))
