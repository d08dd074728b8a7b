"""`Lamb`, and the layerwise rate that it shares with `OneBitLamb`'s warm-up stage. The arithmetic is in `lamb.py`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onebit import lamb
from onebit.averaging import Transport
from onebit.backend import chosen
from onebit.comm import Comm
from onebit.errors import ConfigError
from onebit.flat import DEFAULT_BUCKET_ELEMENTS
from onebit.optim import FlatOptimizer

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class LayerwiseRate(FlatOptimizer):
    """The warm-up step of LAMB: a coefficient for each layer, and its moving average."""

    _coeff_rule: lamb.CoeffRule

    def _allocate(self) -> None:
        super()._allocate()
        for name in ("coeff", "coeff_avg", "coeff_weight"):
            self._add_layerwise(name, 0.0)

    def _step_sizes(self, layers: slice, norms: lamb.Norms, rates: Tensor, keep: Tensor | None) -> Tensor:
        coeff, average, weight = (self._layerwise[name][layers] for name in ("coeff", "coeff_avg", "coeff_weight"))
        before = (average.clone(), weight.clone())
        new = lamb.warmup_coefficients(norms, average, weight, self._coeff_rule).to(self._dtype)
        if keep is not None:
            average.copy_(chosen(keep, average, before[0]))
            weight.copy_(chosen(keep, weight, before[1]))
        coeff.copy_(chosen(keep, new, coeff))
        return coeff * rates

    def _settings(self) -> list[tuple[str, str]]:
        return [*super()._settings(), ("coefficient rule", repr(self._coeff_rule))]

    def stats(self) -> dict[str, Any]:
        """As of every optimizer here, and coefficients, {layer name: last coefficient}."""
        return {**super().stats(), "coefficients": self._by_layer("coeff")}


class AdamRate(FlatOptimizer):
    """The warm-up step of Adam: the learning rate, but 0 for layers that never had a gradient: AdamW skips them."""

    def _allocate(self) -> None:
        super()._allocate()
        self._add_layerwise("touched", 0.0)

    def _step_sizes(self, layers: slice, norms: lamb.Norms, rates: Tensor, keep: Tensor | None) -> Tensor:
        touched = self._layerwise["touched"][layers]
        now = torch.where(norms.direction > 0, 1.0, touched)
        touched.copy_(chosen(keep, now, touched))
        return torch.where(now > 0, rates, 0.0)


class Lamb(LayerwiseRate):
    """LAMB (arXiv 1904.00962) with gradients averaged over the workers: the uncompressed baseline.

    For each layer: m = b1 m + (1-b1) g; v = b2 v + (1-b2) g^2; u = m / (sqrt(v) + eps) + weight_decay x;
    c = clip(||x|| / ||u||, min_coeff, max_coeff), 1 where a norm is zero; x -= lr c u.

    How it differs from the LAMBs people know:

    =====================  ==================  ====================  ==================  =====================
    .                      this one            DeepSpeed FusedLamb   torch_optimizer     pytorch_optimizer
    =====================  ==================  ====================  ==================  =====================
    trust ratio clipped    ratio to            ratio to [.01, 10]    ||x|| to [0, 10]    ||x|| to [0, 10]
                           [.01, 10]
    bias correction        off; on: in the     on, in the step size  off; on: in the     first moment only,
                           step size, both                           step size, both     in the step size
    weight decay           in u, so scaled by  same                  same                decoupled (x shrinks
                           the coefficient                                               first) by default
    eps in the ratio       no                  no                    no                  ||u|| + eps
    gradient               none                optional global clip  none                optional (pre_norm)
    pre-normalisation
    layer without a        not moved           skipped               skipped             skipped
    gradient
    =====================  ==================  ====================  ==================  =====================

    Args:
        params: parameters, groups, or named parameters; float32 or float64, dense, one device.
        lr: step size, >= 0; a scheduler may change it, per group.
        betas: decay of momentum and variance, each in [0, 1).
        eps: added to sqrt(v), >= 0.
        weight_decay: >= 0.
        min_coeff, max_coeff: clip of the coefficient, 0 <= min <= max; (0, inf) clips nothing.
        bias_correction: multiply lr by sqrt(1 - b2^t) / (1 - b1^t).
        transport: how gradients are averaged, "fp32", "bf16", or as integers with error feedback, "int8" or "int4"
            (blocks of 128 with a scale each; eps must be above 0).
        process_group, comm: who the workers are. Neither: the default process group, or one worker without one.
        bucket_elements: layers are handled in buckets of about this many elements; None: one bucket.
        overlap: begin to average a bucket during backward, as soon as its gradients are there. The results are the same
            bits. With it the default of bucket_elements is a twelfth of the model at most (docs/overlap.md).

    Raises:
        ConfigError: a value outside what is listed above.
        MismatchError: at the first step, when workers differ in settings, parameters or initial values.
    """

    takes_shards = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        min_coeff: float = 0.01,
        max_coeff: float = 10.0,
        bias_correction: bool = False,
        transport: Transport = "fp32",
        process_group: ProcessGroup | None = None,
        comm: Comm | None = None,
        bucket_elements: int | None = DEFAULT_BUCKET_ELEMENTS,
        overlap: bool = False,
    ) -> None:
        self._coeff_rule = coefficient_rule(min_coeff, max_coeff, coeff_beta=0.9)
        self._bias_correction = bias_correction
        super().__init__(params, lr, betas, eps, weight_decay, transport, process_group, comm, bucket_elements, overlap)

    def _settings(self) -> list[tuple[str, str]]:
        return [*super()._settings(), ("bias_correction", str(self._bias_correction))]

    def _hyper(self, group: dict[str, Any]) -> lamb.Hyper:
        hyper = super()._hyper(group)
        if not self._bias_correction:
            return hyper
        step = self._steps + 1
        return replace(hyper, lr=hyper.lr * math.sqrt(1 - hyper.beta2**step) / (1 - hyper.beta1**step))


def coefficient_rule(min_coeff: float, max_coeff: float, coeff_beta: float) -> lamb.CoeffRule:
    """The rule, checked.

    Raises:
        ConfigError: not 0 <= min_coeff <= max_coeff, or coeff_beta outside [0, 1).
    """
    if not 0 <= min_coeff <= max_coeff:
        raise ConfigError(f"min_coeff, max_coeff are {min_coeff}, {max_coeff}; allowed is 0 <= min <= max")
    if not 0 <= coeff_beta < 1:
        raise ConfigError(f"coeff_beta is {coeff_beta}; it must lie in [0, 1)")
    return lamb.CoeffRule(min_coeff, max_coeff, coeff_beta)
