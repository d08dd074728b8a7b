"""`OneBitLamb`: the layerwise rate of 1-bit LAMB in both stages. The arithmetic is in `lamb.py`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from onebit import lamb
from onebit.averaging import Transport
from onebit.backend import BucketStep, Momentum, chosen
from onebit.checks import check_in, check_kind
from onebit.codec import OneBit
from onebit.comm import Comm
from onebit.compressed import Measure, OneBitOptimizer
from onebit.errors import ConfigError
from onebit.exchange import OneBitExchange
from onebit.flat import DEFAULT_BUCKET_ELEMENTS
from onebit.freeze import FreezeStep
from onebit.guard import SwitchGuard
from onebit.layerwise_rate import LayerwiseRate, coefficient_rule
from onebit.layout import Run
from onebit.optim import log
from onebit.stages import Compression, DeadElements, StateKind

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


Ratio = Literal["sqrt", "variance", "momentum", "fixed"]


class OneBitLamb(LayerwiseRate, OneBitOptimizer):
    """1-bit LAMB (arXiv 2104.06069, Algorithm 1): LAMB whose workers exchange one bit per parameter.

    For `freeze_step` updates it is `Lamb` on averaged gradients, bit for bit (warm-up stage). Then the variance is
    frozen and each step sends the momentum as signs and scales with error feedback (compressed stage); the layerwise
    rate stays adaptive: c = c_avg * ratio, the ratio coming from a gradient rebuilt of consecutive momenta.
    Gradients must not be averaged by anyone else: use it without DDP's averaging.

    `onebit.PAPER` holds the keyword arguments that turn it into the authors' release.

    Args:
        params, lr, betas, eps, weight_decay, min_coeff, max_coeff, process_group, comm: as in `Lamb`. A group may
            hold `exp_avg_mask`, 0 where its single parameter's momentum must stay zero in the compressed stage.
        freeze_step: real updates before the switch, >= 1 (DEV-11); or a share of `total_steps`, in (0, 1); or
            `onebit.AutoFreeze(...)`.
        total_steps: updates of the whole run, where it is known.
        guard: `onebit.SwitchGuard(...)` may postpone the switch, or go back to the warm-up stage after it; None: never.
        coeff_beta: decay of the average of c in the warm-up, [0, 1).
        factor_min, factor_max: hard bounds of the ratio, 0 < min <= max. factor_max=None: 2.0, which bears higher
            learning rates (DEV-22); with the authors' codec, scale="bucket", 4.0, as released.
        factor_threshold: soft bound, the largest relative change of the ratio in a step, > 0; inf: none.
        growth_max: how many times as long as after the switch, or as LAMB's where that is longer, a layer's update may
            become at the same lr, >= 1 (DEV-24); inf: no bound, as released. None: 3.0; with the authors' codec, inf.
            It has no effect with ratio="fixed", the basic form.
        lr_gain: factor on every learning rate, > 0, in both stages. The best rate may be lower than LAMB's:
            `onebit.TENFOLD` takes 0.7 of it.
        codec: how momentum is sent, `onebit.OneBit(...)`.
        ratio: "sqrt" (of variances, plus eps: as released), "variance" (as printed), "momentum" (its norm at the
            switch over its norm now, DEV-18: no fresh variance, so 4 bytes per parameter less), or "fixed" (stays 1:
            the basic 1-bit LAMB the paper compares with).
        error_feedback: "unscaled" (as released), or "scaled" by the ratio of the step sizes (as analysed), which
            applies each step's coefficient in the next step (DEV-4). "none" drops what compression leaves out of each
            step: for comparisons only, since training then stalls or diverges.
        variance_floor: the frozen variance is at least this times its layer's mean, in [0, 1); 0: no floor.
        dead_elements: elements that never had a gradient are held ("hold") until a worker sees one, or take part in
            the exchange unless their whole layer is dead ("exchange", as released).
        coeff_bias_correction: divide the average of c at the switch by its weight (DEV-5). None: yes, but for the
            authors' codec, scale="bucket".
        momentum_scales: bring all layers to the same momentum before they share a 1-bit scale. None: only with
            scale="bucket", where they do share one.
        state: "full": errors and variances in the parameters' dtype; "compact": worker errors in 8 bits, variances in
            bfloat16, 5.2 instead of 12.1 bytes per parameter, and 4 / n more for the server error; float32 parameters.
        warmup_transport: how gradients are averaged in the warm-up, "fp32", "bf16", "int8" or "int4", as in `Lamb`.
            What integers left unsent goes out with the momentum (DEV-19).
        bucket_elements: layers are exchanged in buckets of about this many elements; None: one bucket.
        overlap: as in `Lamb`, in both stages.

    Raises:
        ConfigError: a value outside what is listed above.
        MismatchError: as in `Lamb`.
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
        min_coeff: float = 0.01,
        max_coeff: float = 10.0,
        coeff_beta: float = 0.9,
        factor_min: float = 0.5,
        factor_max: float | None = None,
        factor_threshold: float = 0.1,
        growth_max: float | None = None,
        lr_gain: float = 1.0,
        process_group: ProcessGroup | None = None,
        comm: Comm | None = None,
        codec: OneBit | None = None,
        ratio: Ratio = "sqrt",
        error_feedback: Literal["unscaled", "scaled", "none"] = "unscaled",
        variance_floor: float = 0.01,
        dead_elements: DeadElements = "hold",
        coeff_bias_correction: bool | None = None,
        momentum_scales: bool | None = None,
        state: StateKind = "full",
        warmup_transport: Transport = "fp32",
        bucket_elements: int | None = DEFAULT_BUCKET_ELEMENTS,
        total_steps: int | None = None,
        guard: SwitchGuard | None = None,
        overlap: bool = False,
    ) -> None:
        if not factor_threshold > 0:
            raise ConfigError(f"factor_threshold is {factor_threshold}; it must be above 0 (inf: no soft bound)")
        if growth_max is not None and not growth_max >= 1:
            raise ConfigError(f"growth_max is {growth_max}; it must be at least 1 (inf: no bound)")
        if not 0 < lr_gain < math.inf:
            raise ConfigError(f"lr_gain is {lr_gain}; it must be above 0 and finite")
        self._lr_gain = float(lr_gain)
        check_in("coeff_bias_correction", coeff_bias_correction, (None, True, False))
        codec = OneBit() if codec is None else codec
        shared = check_kind("codec", codec, OneBit).scale == "bucket"
        self._growth_max = (math.inf if shared else lamb.GROWTH_MAX) if growth_max is None else growth_max
        left_out = factor_max is None
        factor_max = (lamb.PAPER_FACTOR_MAX if shared else lamb.FACTOR_MAX) if factor_max is None else factor_max
        if not 0 < factor_min <= factor_max:
            why = "; factor_max was left out: give it too" if left_out else ""
            raise ConfigError(f"factor_min, factor_max are {factor_min}, {factor_max}; allowed is 0 < min <= max{why}")
        self._coeff_rule = coefficient_rule(min_coeff, max_coeff, coeff_beta)
        scaled = shared if momentum_scales is None else momentum_scales
        check_in("error_feedback", error_feedback, ("unscaled", "scaled", "none"))
        feedback = error_feedback != "none"
        self._compression = Compression(
            freeze_step, total_steps, codec, variance_floor, dead_elements, scaled, state, guard, feedback
        )
        self._ratio_form = check_in("ratio", ratio, get_args(Ratio))
        form: lamb.RatioForm = "variance" if ratio == "variance" else "sqrt"
        self._ratio_rule = lamb.RatioRule(form, factor_min, factor_max, factor_threshold)
        self._scaled_error = error_feedback == "scaled"
        self._coeff_bias_correction = not shared if coeff_bias_correction is None else coeff_bias_correction
        super().__init__(
            params, lr, betas, eps, weight_decay, warmup_transport, process_group, comm, bucket_elements, overlap
        )

    def stats(self) -> dict[str, Any]:
        """As of every optimizer here; coefficients, {layer name: last coefficient}; and in the compressed stage the
        norms of momentum and errors, ratios, {layer name: ratio}, and by what part of itself growth_max shortened the
        last update of a layer, {layer name: 0 for not at all}."""
        stats = super().stats()
        if self._exchange is None:
            return stats
        whole = self._layerwise["ratio"] * self._layerwise["coeff_avg"]
        part = (1 - self._layerwise["coeff"] / torch.where(whole > 0, whole, 1.0)).clamp(min=0.0)
        shortened = dict(zip(self._names(), torch.where(whole > 0, part, 0.0).tolist(), strict=True))
        return {**stats, "ratios": self._by_layer("ratio"), "shortened": shortened}

    def _check_shards(self) -> None:
        super()._check_shards()
        if self._ratio_form == "momentum":
            raise ConfigError("ratio is 'momentum' and parameters are sharded (DTensor); choose 'sqrt' or 'variance'")

    def _restore(self, by_layer: list[dict[str, Any]], extra: dict[str, Any]) -> None:
        super()._restore(by_layer, extra)
        self._say_what_falls()

    def _say_what_falls(self) -> None:
        """Warn of ratios that were allowed where this state was saved and are not here."""
        if self._exchange is None or self.comm.rank != 0:
            return
        ratio, most = self._layerwise["ratio"], self._ratio_rule.factor_max
        if beyond := int((ratio > most).sum()):
            log.warning(
                "%d of %d layers have a ratio above factor_max, %g, and fall to it at the next step, one from %.3g; "
                "give the factor_max that they had (%g by default in DeepSpeed) to go on as before",
                *(beyond, len(ratio), most, float(ratio.max()), lamb.PAPER_FACTOR_MAX),
            )

    def _settings(self) -> list[tuple[str, str]]:
        named = [("ratio", self._ratio_form), ("ratio rule", repr(self._ratio_rule))]
        named += [("growth_max", str(self._growth_max)), ("lr_gain", str(self._lr_gain))]
        return [*super()._settings(), *named, ("coeff_bias_correction", str(self._coeff_bias_correction))]

    def _structure(self) -> list[tuple[str, str]]:
        named = [("error_feedback scaled", str(self._scaled_error))]
        return [
            *super()._structure(),
            *named,
            ("ratio's state", "fresh variance" if self._refreshes else self._ratio_form),
        ]

    def _hyper(self, group: dict[str, Any]) -> lamb.Hyper:
        hyper = super()._hyper(group)
        return replace(hyper, lr=hyper.lr * self._lr_gain)

    def _end_warmup(self) -> None:
        if self._coeff_bias_correction:
            weight = self._layerwise["coeff_weight"]
            self._layerwise["coeff_avg"] /= torch.where(weight > 0, weight, 1.0)
            weight.copy_(weight > 0)  # of the average as it is now: `refreeze` may go on from here
        if self._scaled_error:
            self._layerwise["coeff"].copy_(self._layerwise["coeff_avg"])

    def _allocate_compressed(self) -> OneBitExchange:
        exchange = super()._allocate_compressed()
        assert self._layout is not None
        if self._refreshes:
            self._add_flat("fresh_variance", self._flat["variance"].clone())
        if self._ratio_form == "momentum":
            norms = [run.norms(self._flat["momentum"][run.slice]) for run in self._layout.runs]
            self._add_layerwise("switch_norm", 0.0).copy_(torch.cat(norms))
        self._add_layerwise("ratio", 1.0)
        if self._ratio_form != "fixed":
            self._add_layerwise("start_norm", 0.0)
        if self._scaled_error:
            self._add_layerwise("step_size", 0.0)
        return exchange

    def _measure(self, step: BucketStep, now: Momentum) -> Measure:
        if self._ratio_form == "fixed":
            return None
        bucket = step.codec.bucket
        return self._raw_ratio(step, now, {name: v[bucket.layer_slice] for name, v in self._layerwise.items()})

    def _compressed_step_sizes(self, step: BucketStep, measured: Measure, rates: Tensor) -> Tensor:
        bucket, keep = step.codec.bucket, step.keep
        layers = {name: values[bucket.layer_slice] for name, values in self._layerwise.items()}
        if measured is not None:
            quotient, norms = measured
            ratio = lamb.next_ratio(quotient, layers["ratio"], norms, self._ratio_rule)
            layers["ratio"].copy_(chosen(keep, ratio, layers["ratio"]))
        ratio = layers["ratio"]
        if measured is not None and self._growth_max < math.inf:
            ratio = lamb.bounded_ratio(ratio, norms.x, layers["start_norm"], self._growth_max)
        coeff = ratio * layers["coeff_avg"]  # [A1:15-21 coefficient] (DEV-6)
        step_size = rates * (layers["coeff"] if self._scaled_error else coeff)
        if self._scaled_error:  # it must be known before compression: last step's coefficient (DEV-4)
            layers["step_size"].copy_(chosen(keep, step_size, layers["step_size"]))
        layers["coeff"].copy_(chosen(keep, coeff, layers["coeff"]))
        return step_size

    @property
    def _refreshes(self) -> bool:
        """Whether a variance is kept up in the compressed stage."""
        return self._ratio_form in ("sqrt", "variance")

    def _raw_ratio(self, step: BucketStep, now: Momentum, layers: dict[str, Tensor]) -> tuple[Tensor, lamb.Norms]:
        """What the ratio of each layer of a bucket moves to, before clipping, and the norms that blend it."""
        bucket = step.codec.bucket
        if self._refreshes:
            quotient, found = self._backend.measure(
                step,
                self._x[bucket.layer_slice],
                now,
                self._momentum[bucket.index],
                self._flat["variance"][bucket.slice],
                self._flat["fresh_variance"][bucket.slice],
                self._ratio_rule.form,
            )
            bounded = self._growth_max < math.inf
            return quotient, replace(found, x=_momentum_norms(step, now)) if bounded else found
        norms = _momentum_norms(step, now)
        quotient = torch.where(norms > 0, layers["switch_norm"] / norms.clamp(min=torch.finfo(torch.float64).tiny), 0.0)
        return quotient, lamb.Norms(norms, norms, norms)

    def _prepare_late_run(self, run: Run, m: Tensor, hyper: lamb.Hyper) -> bool:
        average, weight = (self._layerwise[name][run.layer_slice] for name in ("coeff_avg", "coeff_weight"))
        v = self._flat["variance"][run.slice].to(self._dtype)
        lamb.late_coefficients(self._x[run.layer_slice], m, v, average, weight, run, hyper, self._coeff_rule)
        again = bool(((weight == 0) & (run.norms(m) > 0)).any())
        return again | (self._ratio_form != "fixed" and self._start_of_growth(run, m, v, hyper))

    def _start_of_growth(self, run: Run, m: Tensor, v: Tensor, hyper: lamb.Hyper) -> bool:
        """Note what the growth of layers' updates counts from; whether one had nothing yet."""
        starts, x = self._layerwise["start_norm"][run.layer_slice], self._x[run.layer_slice]
        u, _ = lamb.direction(x, m, v, run, hyper)
        average = self._layerwise["coeff_avg"][run.layer_slice]
        found = lamb.start_norms(run.norms(m), run.norms(x), run.norms(u), average)
        new = (starts == 0) & (found > 0) & found.isfinite()
        starts.copy_(torch.where(new, found.to(starts.dtype), starts))
        return bool(new.any())

    def _premises(self) -> Any:
        rates = [float(group["lr"]) for group in self.param_groups] if self._scaled_error else []
        return super()._premises(), rates

    def _error_factor(self, rates: Tensor) -> Tensor | None:
        """How the step sizes shrank or grew, the factor on both errors: [layers], or None for 1. (DEV-4, DEV-16)"""
        if not self._scaled_error:
            return None
        before = self._layerwise["step_size"]
        now = (rates * self._layerwise["coeff"]).to(self._dtype)
        both = (before > 0) & (now > 0)
        return torch.where(both, before / torch.where(both, now, 1.0), 1.0)


def _momentum_norms(step: BucketStep, now: Momentum) -> Tensor:
    """The 2-norm of each layer's momentum, float64 [layers of the bucket]."""
    norms = step.codec.layer_norms(now.messages, now.mask)
    return norms if step.scale is None else norms / step.scale
